"""Files of records → conversations. A record's form is recognised by its keys."""

from collections import Counter
from pathlib import Path

from interop.conversations.template import check_messages
from nanodnt.data.inputs import RECORDS, Notes, find_files, place, records

ROLES = {"human": "user", "gpt": "assistant"}  # other names of roles
READ = {"role", "from", "content", "value"}  # the keys of a message that are read


def conversations(path: Path, prompt_key: str = "prompt", response_key: str = "response", notes: Notes | None = None):
    """Yield (name, place, messages) of every record in `path`, a file or a folder, always in the same order.

    The name, "FILE, NUMBER", tells the record apart from others below `path`; the place, "PATH, line NUMBER", is for
    messages to the user. `notes` gets what is not read: files of other kinds in a folder, further keys, and, if it
    skips them, bad records. ValueError, one line, for a file or record that cannot be read, and a conversation that is
    none."""
    notes = notes or Notes()
    if prompt_key == response_key:
        raise ValueError(f"the prompt and the response have the same key, {prompt_key!r}: name two")
    unread = Counter()
    for name, file in find_files(path, notes):
        if file.suffix.lower() not in RECORDS:
            if not path.is_dir():
                raise ValueError(f"{file} is none of {', '.join(RECORDS)}: convert it, or rename it to what it is")
            notes.leave_out("of other kinds", str(file))
            continue
        empty = True
        for number, record in records(file, notes):
            where, empty = place(file, number), False
            try:
                messages = messages_of(record, where, prompt_key, response_key)
            except ValueError as e:
                notes.leave_out_bad(e)
                continue
            unread.update(unread_keys(record, prompt_key, response_key))
            yield f"{name}, {number}", where, messages
        if empty:
            notes.leave_out("without records", str(file))
    for key, count in sorted(unread.items()):
        notes.add("keys that are not read, and in how many records", f"{key} {count:,}")


def messages_of(record: dict, where: str, prompt_key: str = "prompt", response_key: str = "response") -> list:
    """The messages of a record, checked: they end with an assistant's. An empty system message is left out.
    ValueError, one line that begins with `where`, for a record of no known form and for messages that do not fit."""
    start = f"in {repr(record)[:60]}..."
    keys = find_form(record, prompt_key, response_key)
    if keys is None:
        forms = ", or ".join(" and ".join(map(repr, keys)) for keys in forms_of(prompt_key, response_key))
        raise ValueError(f"{where}: needs the keys {forms} (see --prompt_key, --response_key), but found {start[3:]}")
    try:
        if len(keys) == 1:
            found = _from_list(record[keys[0]])
        else:
            more = record.get("input") if "output" in keys and "instruction" in keys else None
            found = _from_pair(record[keys[0]], record[keys[1]], more)
        messages = [{"role": role, "content": content} for role, content in found]
        if messages and messages[0] == {"role": "system", "content": ""}:
            messages = messages[1:]
        messages = _with_system(messages, record.get("system"))
        check_messages(messages, last="assistant")
    except ValueError as e:
        raise ValueError(f"{where}: {e} {start}") from None
    except (TypeError, AttributeError):
        raise ValueError(f"{where}: {' and '.join(keys)} cannot be read {start}") from None
    return messages


def forms_of(prompt_key: str, response_key: str) -> tuple:
    """The keys of each form that a record can have."""
    return (prompt_key, response_key), ("messages",), ("conversations",), ("instruction", "output")


def find_form(record, prompt_key: str, response_key: str) -> tuple | None:
    """The keys of the form that a record has, or None. In a .parquet file a key without a value is None."""
    for keys in forms_of(prompt_key, response_key) if isinstance(record, dict) else ():
        if record.keys() >= set(keys) and any(record[key] is not None for key in keys):
            return keys
    return None


def unread_keys(record: dict, prompt_key: str, response_key: str) -> set:
    """Words for the keys with a value, of a record and of its messages, that `messages_of` does not read."""
    keys = find_form(record, prompt_key, response_key)
    read = {*keys, "input"} if keys == ("instruction", "output") else {*keys}
    if isinstance(record.get("system"), str):
        read.add("system")
    found = {repr(key) for key, value in record.items() if key not in read and value not in (None, "", [], {})}
    for message in record[keys[0]] if len(keys) == 1 else ():
        found |= {f"{key!r} of a message" for key, value in message.items() if key not in READ and value is not None}
    return found


def _with_system(messages, system):
    """The messages with `system`, which stands beside them in the record, as the system message."""
    if not isinstance(system, str) or not system.strip():
        return messages
    own = {"role": "system", "content": system}
    if messages and messages[0]["role"] == "system":
        if messages[0] != own:
            raise ValueError("there are two system messages, one of them beside the messages")
        return messages
    return [own, *messages]


def _from_pair(prompt, response, more=None):
    if prompt and more and more.strip() and isinstance(prompt, str):
        prompt = f"{prompt}\n\n{more}"
    return ("user", prompt), ("assistant", response)


def _from_list(messages):
    for message in messages:
        role = message.get("role", message.get("from"))
        yield ROLES.get(role, role), message.get("content", message.get("value"))
