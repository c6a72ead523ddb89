"""Files that are written completely or not at all. A write that fails is retried once, then it is a
ValueError."""

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"  # the prepared datasets


def write_file(path: Path, write) -> None:
    """`path` is the old file or the complete new one, which `write(f)` writes. ValueError if it
    fails twice."""

    def write_and_rename(tmp):
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)

    replace_file(path, write_and_rename)


def link_file(source: Path, target: Path) -> None:
    """Make `target` a hard link of `source`, or a copy where there are none. ValueError if it fails
    twice."""

    def link_and_rename(tmp):
        try:
            os.link(source, tmp)
        except OSError:
            shutil.copyfile(source, tmp)
        os.replace(tmp, target)

    replace_file(target, link_and_rename)


def replace_file(path: Path, change) -> None:
    """Call `change(tmp)`, which creates the file `tmp` and renames it to `path`, then sync the
    folder. Each is retried once; if it fails again, `path` is unchanged, `tmp` is removed, and
    ValueError is raised."""
    tmp = path.with_name(path.name + ".tmp")

    def begin_anew():
        tmp.unlink(missing_ok=True)
        change(tmp)

    try:
        retry_once(path, begin_anew)
    finally:
        with suppress(OSError):
            tmp.unlink(missing_ok=True)
    retry_once(path, lambda: sync_folder(path.parent))


def retry_once(path: Path, action) -> None:
    """Call `action()`, a second time if it fails. ValueError, which names `path`, if that fails
    too."""
    for attempt in (1, 2):
        try:
            return action()
        except (OSError, RuntimeError) as e:  # torch.save turns some I/O errors into RuntimeError
            if attempt == 2:
                raise ValueError(
                    f"cannot write {path} ({reason_of(e)}); earlier files are intact"
                ) from e
            time.sleep(1)


# of requirements-extra.txt: module, package
EXTRA = {"PIL": "pillow", "sklearn": "scikit-learn", "scipy": "scipy"}


def missing_package(module: str) -> str:
    """What to say where `module` cannot be imported because its package is not installed, or
    interop/ was removed."""
    if module == "interop":
        return "this needs the folder interop/ (Hugging Face, evaluation, conversations), which is not here"
    package = EXTRA.get(module, module)
    if module in EXTRA:
        return f"the package {package} is missing: make install-extra, or pip install {package}"
    return f"the package {package} is missing: make install, or pip install -r requirements.txt"


def check_folder(folder: Path, flag: str) -> None:
    """ValueError, which names what is in the way and the `flag` to change, unless files can be
    written to `folder`, or where it is not there yet, to the nearest folder above it. Nothing is
    made. The target of a link must be there: it may be on a disk that is not mounted."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    writable = os.access(
        place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
    )
    if not (writable and place.is_dir()):
        raise ValueError(
            f"cannot write to {folder} ({place} is no folder to write to): choose another {flag}"
        )


def make_folder(folder: Path, flag: str) -> None:
    """Make `folder`, and those above it, if it is not there. ValueError as in `check_folder`."""
    check_folder(folder, flag)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(
            f"cannot write to {folder} ({e.strerror}): choose another {flag}"
        ) from None


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, or else the name of its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def make_printable(text: str) -> str:
    """`text` with "?" for line breaks, other control characters, and bytes of a file's name that
    are no text."""
    return "".join(c if c.isprintable() else "?" for c in text)


def sync_folder(folder: Path) -> None:
    """fsync `folder`, so that renames in it reach the disk. Some network disks cannot do this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)
