"""Files that are written completely or not at all. A write that fails is retried once, then it is a
ValueError."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

DATA = Path(__file__).resolve().parents[1] / "data"  # the prepared datasets

# {module: package} of requirements-extra.txt
EXTRA = {"PIL": "pillow", "sklearn": "scikit-learn", "scipy": "scipy"}


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file with `write(f)`. Until it is complete, `path` is the old file. ValueError if it
    fails twice."""

    def write_and_rename(tmp: Path) -> None:
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)

    replace_file(path, write_and_rename)


def link_file(source: Path, target: Path) -> None:
    """Make `target` a hard link of `source`, or a copy on a file system without links. ValueError
    if it fails twice."""

    def link_and_rename(tmp: Path) -> None:
        try:
            os.link(source, tmp)
        except OSError:
            shutil.copyfile(source, tmp)
        os.replace(tmp, target)

    replace_file(target, link_and_rename)


def replace_file(path: Path, change: Callable[[Path], None]) -> None:
    """Call `change(tmp)`, which creates the file `tmp` and renames it to `path`, then sync the
    folder. Each is retried once; if it fails again, `path` is unchanged, `tmp` is removed, and
    ValueError is raised."""
    tmp = path.with_name(path.name + ".tmp")

    def start_over() -> None:
        tmp.unlink(missing_ok=True)
        change(tmp)

    try:
        retry_once(path, start_over)
    finally:
        with suppress(OSError):
            tmp.unlink(missing_ok=True)
    retry_once(path, lambda: sync_folder(path.parent))


def retry_once(path: Path, action: Callable[[], object]) -> None:
    """Call `action()`, a second time if it fails. ValueError, which names `path`, if that fails
    too."""
    for attempt in (1, 2):
        try:
            action()
            return
        except (OSError, RuntimeError) as e:  # torch.save turns some I/O errors into RuntimeError
            if attempt == 2:
                raise ValueError(
                    f"cannot write {path} ({reason_of(e)}); earlier files are intact"
                ) from e
            time.sleep(1)


def missing_package(module: str) -> str:
    """The error message for an import of `module` that fails because its package is not installed,
    or because interop/ was deleted."""
    if module == "interop":
        return (
            "this needs the folder interop/ (Hugging Face, nanoGPT, evaluation, conversations), "
            "which is not here"
        )
    if module in EXTRA:
        package = EXTRA[module]
        return f"the package {package} is missing: make install-extra, or pip install {package}"
    return f"the package {module} is missing: make install, or pip install -r requirements.txt"


def check_folder(folder: Path, flag: str) -> None:
    """Raise ValueError, with the `flag` to change, unless files can be written to `folder`, or to
    the nearest folder above it if it does not exist. Nothing is made. The target of a link must
    exist: it may be on a disk that is not mounted."""
    nearest = folder.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    effective = os.access in os.supports_effective_ids
    is_writable = os.access(nearest, os.W_OK | os.X_OK, effective_ids=effective)
    if not (is_writable and nearest.is_dir()):
        raise ValueError(
            f"cannot write to {folder} ({nearest} is no folder to write to): choose another {flag}"
        )


def make_folder(folder: Path, flag: str) -> None:
    """Make `folder`, and the folders above it. ValueError as in `check_folder`."""
    check_folder(folder, flag)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(
            f"cannot write to {folder} ({e.strerror}): choose another {flag}"
        ) from None


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if that is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def make_printable(text: str) -> str:
    """`text` with "?" for line breaks, other control characters, and bytes of a file name that are
    no text."""
    return "".join(char if char.isprintable() else "?" for char in text)


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
