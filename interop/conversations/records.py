"""Files of records → conversations. A record's form is recognised by its keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from interop.conversations.template import Message, check_messages
from nanodnt.data.inputs import RECORDS, Notes, find_files, place, records

ROLES = {"human": "user", "gpt": "assistant"}  # other names of roles


class Conversation(NamedTuple):
    name: str  # "FILE, NUMBER", different from all others of the same input
    place: str  # "PATH, line NUMBER", for messages to the user
    messages: list[Message]


def conversations(
    path: Path,
    prompt_key: str = "prompt",
    response_key: str = "response",
    notes: Notes | None = None,
) -> Iterator[Conversation]:
    """The conversation of every record in `path`, a file or a folder, always in the same order.

    `notes` gets the names of files of other kinds in a folder and, if it skips them, of bad
    records. ValueError, one line, for a file or record that cannot be read, and for messages that
    are no conversation."""
    notes = notes or Notes()
    if prompt_key == response_key:
        raise ValueError(f"the prompt and the response have the same key, {prompt_key!r}: name two")
    for name, file in find_files(path, notes):
        if file.suffix.lower() in RECORDS:
            for number, record in records(file, notes):
                where = place(file, number)
                try:
                    messages = messages_of(record, where, prompt_key, response_key)
                except ValueError as e:
                    notes.leave_out_bad(e)
                else:
                    yield Conversation(f"{name}, {number}", where, messages)
        elif path.is_dir():
            notes.leave_out("of other kinds", str(file))
        else:
            raise ValueError(
                f"{file} is none of {', '.join(RECORDS)}: convert it, or rename it to what it is"
            )


def messages_of(
    record: dict[str, Any],
    where: str,
    prompt_key: str = "prompt",
    response_key: str = "response",
) -> list[Message]:
    """The messages of a record, checked: they end with an assistant's. An empty system message is
    left out. ValueError, one line that begins with `where`, for a record of no known form and for
    messages that do not fit."""
    forms = [
        (prompt_key, response_key),
        ("messages",),
        ("conversations",),
        ("instruction", "output"),
    ]
    start = f"in {repr(record)[:60]}..."
    try:
        keys = next(keys for keys in forms if all(record.get(key) is not None for key in keys))
        if len(keys) == 1:
            messages = [read_message(message) for message in record[keys[0]]]
        else:
            prompt = record[keys[0]]
            more = record.get("input")
            if keys == ("instruction", "output") and more and more.strip():
                prompt = prompt + "\n\n" + more
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": record[keys[1]]},
            ]
        system = record.get("system")
        if system and system.strip():
            messages = [{"role": "system", "content": system}, *messages]
        if messages[:1] == [{"role": "system", "content": ""}]:
            messages = messages[1:]
        check_messages(messages, last="assistant")
    except StopIteration:
        wanted = ", or ".join(" and ".join(map(repr, keys)) for keys in forms)
        raise ValueError(
            f"{where}: needs the keys {wanted} (see --prompt_key, --response_key) {start}"
        ) from None
    except ValueError as e:
        raise ValueError(f"{where}: {e} {start}") from None
    except (TypeError, AttributeError):
        raise ValueError(f"{where}: cannot be read {start}") from None
    return messages


def read_message(message: dict[str, str]) -> Message:
    """A message of a record, with our names of keys and roles."""
    role = message.get("role", message.get("from"))
    return {"role": ROLES.get(role, role), "content": message.get("content", message.get("value"))}
