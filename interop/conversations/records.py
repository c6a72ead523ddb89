"""Files of records → conversations. A record's form is recognised by its keys."""

from pathlib import Path

from interop.conversations.template import check_messages
from nanodnt.data.inputs import place, records, visible_files

SUFFIXES = (".jsonl", ".json", ".parquet")
ROLES = {"human": "user", "gpt": "assistant"}  # other names of roles


def conversations(path: Path, prompt_key: str = "prompt", response_key: str = "response", skipped: list | None = None):
    """Yield (name, place, messages) of every record in `path`, a file or a folder, always in the same order.

    The name, "FILE, NUMBER", tells the record apart from others below `path`; the place, "PATH, line NUMBER", is for
    messages to the user. In a folder, files of other kinds are passed over; their names are added to the list
    `skipped`. ValueError, one line, for a file or record that cannot be read, and a conversation that is none."""
    if prompt_key == response_key:
        raise ValueError(f"the prompt and the response have the same key, {prompt_key!r}: name two")
    for name, file in visible_files(path):
        if file.suffix.lower() not in SUFFIXES:
            if not path.is_dir():
                raise ValueError(f"{file} is none of {', '.join(SUFFIXES)}: convert it, or rename it to what it is")
            if skipped is not None:
                skipped.append(name)
            continue
        for number, record in records(file):
            where = place(file, number)
            yield f"{name}, {number}", where, messages_of(record, where, prompt_key, response_key)


def messages_of(record: dict, where: str, prompt_key: str = "prompt", response_key: str = "response") -> list:
    """The messages of a record, checked: they end with an assistant's. An empty system message is left out.
    ValueError, one line that begins with `where`, for a record of no known form and for messages that do not fit."""
    forms = {
        (prompt_key, response_key): _from_pair,
        ("messages",): _from_list,
        ("conversations",): _from_list,
        ("instruction", "output"): lambda task, output: _from_pair(task, output, record.get("input")),
    }
    start = f"in {repr(record)[:60]}..."
    found = record if isinstance(record, dict) else {}
    for keys, read in forms.items():  # in a .parquet file a key without a value is None
        if found.keys() >= set(keys) and any(found[key] is not None for key in keys):
            try:
                messages = [{"role": role, "content": content} for role, content in read(*(found[key] for key in keys))]
                if messages and messages[0] == {"role": "system", "content": ""}:
                    messages = messages[1:]
                check_messages(messages, last="assistant")
            except ValueError as e:
                raise ValueError(f"{where}: {e} {start}") from None
            except (TypeError, AttributeError):
                raise ValueError(f"{where}: {' and '.join(keys)} cannot be read {start}") from None
            return messages
    wanted = ", or ".join(" and ".join(map(repr, keys)) for keys in forms)
    raise ValueError(f"{where}: needs the keys {wanted} (see --prompt_key, --response_key), but found {start[3:]}")


def _from_pair(prompt, response, more=None):
    if prompt and more and more.strip() and isinstance(prompt, str):
        prompt = f"{prompt}\n\n{more}"
    return ("user", prompt), ("assistant", response)


def _from_list(messages):
    for message in messages:
        role = message.get("role", message.get("from"))
        yield ROLES.get(role, role), message.get("content", message.get("value"))
