"""The default dataset: source code of the standard library of the Python that runs this script, as bytes.

Needs no network, no package but numpy, and only seconds: about 10 million tokens of code and prose. With
--tokenizer=gpt2_4096, which needs tiktoken, it is 7 million tokens in data/pystdlib_gpt2_4096. End of text follows
every file. Whole files, chosen by a hash of their path, are held out for validation. The result depends on the
library's own files, not on where Python is installed.

    python data/pystdlib/prepare.py
    python data/pystdlib/prepare.py --tokenizer=gpt2_4096
"""

import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.data.tokenizer import DATA, Tokenizer
from nanodnt.prepare import script
from nanodnt.prepare.text import build

VAL_FRACTION = 0.08  # of the files
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Generated when Python is built, installed or packaged, so they differ between machines.
SKIPPED_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize", "config-")


def source_files(root: Path) -> dict:
    """{path relative to `root`, with slashes: text with \\n line ends} of the library's modules, sorted by path.

    Without installed packages, tests, files of the installation, and files that are not UTF-8.
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
    parser = script.parser(__doc__, "pystdlib")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2_4096"), default="bytes", help="default: %(default)s")
    args = parser.parse_args(argv)
    name = "pystdlib" if args.tokenizer == "bytes" else f"pystdlib_{args.tokenizer}"
    out_dir = DATA / name if args.out_dir == DATA / "pystdlib" else args.out_dir
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = source_files(root)
    if len(texts) < 100:
        raise ValueError(
            f"only {len(texts)} source files of the standard library are in {root}: use a Python with its full library "
            "(not the embeddable zip), or prepare your own text with data/local/prepare.py"
        )
    train, val = [], []
    for path, text in texts.items():
        (val if script.score(f"pystdlib/{path}") < VAL_FRACTION else train).append(text)
    source = f"source of the standard library of Python {platform.python_version()} ({len(texts)} files)"
    command = f"python train.py config/quickstart.py --dataset={name}"
    build(
        out_dir, source, Tokenizer.meta_for(args.tokenizer), {"train": [train], "val": [val]}, name=name, train=command
    )


if __name__ == "__main__":
    script.run(main)
