"""The default dataset: source code of the standard library of the Python that runs this script, as
bytes.

Needs no network, no package but numpy, and only seconds: about 10 million tokens of code and prose.
With --tokenizer=gpt2_4096, which needs tiktoken, it is 7 million tokens in data/pystdlib_gpt2_4096.
End of text follows every file. Whole files, chosen by a hash of their path, are held out for
validation. The result depends on the library's own files, not on where Python is installed.
"""

import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.data.inputs import Notes
from nanodnt.data.tokenizer import DATA, Tokenizer
from nanodnt.prepare import script, text

COMMAND = "python train.py config/quickstart.py"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Generated when Python is built, installed or packaged, so they differ between machines.
SKIPPED_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize", "config-")


def read_sources(root: Path) -> dict[str, str]:
    """The code of the library's files, by path."""
    notes = Notes()
    texts = {}
    for path in root.rglob("*.py"):
        place = path.relative_to(root)
        if not SKIPPED_FOLDERS.isdisjoint(place.parts):
            continue
        if any(part.startswith(SKIPPED_FILES) for part in place.parts):
            continue
        try:
            texts[place.as_posix()] = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            notes.leave_out("cannot be read as UTF-8", str(path))
    notes.print()
    return texts


@script.command
def main(argv: list[str] | None = None) -> None:
    parser = script.parser(__doc__, "pystdlib")
    parser.set_defaults(out_dir=None)
    help = "default: %(default)s"
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2_4096"), default="bytes", help=help)
    args = parser.parse_args(argv)
    name = "pystdlib"
    if args.tokenizer != "bytes":
        name = f"pystdlib_{args.tokenizer}"
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = read_sources(root)
    if len(texts) < 100:
        raise ValueError(
            f"only {len(texts)} source files of this Python's library are in {root}: use one with "
            "its full library (not the embeddable zip), or your own text: data/local/prepare.py"
        )
    train = []
    val = []
    for path, code in sorted(texts.items()):
        split = val if script.score(f"pystdlib/{path}") < 0.08 else train
        split.append(code)
    python = f"Python {platform.python_version()}"
    source = f"source of the standard library of {python} ({len(texts)} files)"
    tokenizer = Tokenizer.meta_for(args.tokenizer)
    splits = {"train": [train], "val": [val]}
    text.build(args.out_dir or DATA / name, source, tokenizer, splits, name=name, command=COMMAND)
