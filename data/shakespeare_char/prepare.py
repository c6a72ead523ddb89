"""Tiny Shakespeare as characters, split as in nanoGPT: the first 90 % (1,003,854) to train on, the
rest held out.

Downloads 1.1 MB and checks its sha256. The file stays in data/shakespeare_char/parts: a second run
needs no network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.prepare import hub, script, text

COMMIT = "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
URL = f"https://raw.githubusercontent.com/karpathy/char-rnn/{COMMIT}/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@script.command
def main(argv: list[str] | None = None) -> None:
    out = script.parser(__doc__, "shakespeare_char").parse_args(argv).out_dir
    play = hub.download(URL, out / "parts" / "input.txt", SHA256).read_bytes().decode("utf-8")
    end = int(len(play) * 0.9)
    splits = {"train": [[play[:end]]], "val": [[play[end:]]]}
    tokenizer = Tokenizer.meta_for("chars", sorted(set(play)))
    text.build(out, URL, tokenizer, splits, name="shakespeare_char")
