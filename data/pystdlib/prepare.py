"""The embedded default: source code of the Python standard library that runs this script, as bytes.

Needs no network and no package but numpy, and takes seconds: about 10 million tokens of code and prose. Every file ends
with end of text; whole files, chosen by a hash of their path, are held out for validation. The result depends on the
library's own files, not on where Python is installed.

    python data/pystdlib/prepare.py
"""

import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import common
from loader import Tokenizer

VAL_FRACTION = 0.08  # of the files
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Written when Python is built, installed or packaged, so not the same everywhere.
SKIPPED_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize", "config-")


def source_files(root: Path) -> dict:
    """The library's modules under `root`: path relative to it, with slashes → text with \\n line ends, sorted by path.

    Left out: installed packages, tests, files of the installation, and files that are not UTF-8.
    """
    texts = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts) and not any(part.startswith(SKIPPED_FILES) for part in name.parts):
            try:
                texts[name.as_posix()] = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
    return dict(sorted(texts.items()))


def main(argv=None):
    args = common.parser(__doc__, "pystdlib").parse_args(argv)
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = source_files(root)
    if len(texts) < 100:
        raise ValueError(
            f"only {len(texts)} source files of the standard library are in {root}: use a Python with its full library "
            "(not the embeddable zip), or prepare your own text with data/local/prepare.py"
        )
    held_out = {name for name in texts if common.score(f"pystdlib/{name}") < VAL_FRACTION}
    common.build(
        args.out_dir,
        f"source of the standard library of Python {platform.python_version()} ({len(texts)} files)",
        Tokenizer.meta_for("bytes"),
        {
            "train": [text for name, text in texts.items() if name not in held_out],
            "val": [text for name, text in texts.items() if name in held_out],
        },
        name="pystdlib",
        train="python train.py config/quickstart.py",
    )


if __name__ == "__main__":
    common.run(main)
