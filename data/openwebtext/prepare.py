"""OpenWebText in GPT-2 BPE, split as in nanoGPT (which reports 9,035,582,198 training and 4,434,897 validation tokens).

8,013,769 documents in 80 parquet files. Needs 24.5 GB of disk for the download (to the Hugging Face cache, which
HF_HOME moves) and 38 GB in data/openwebtext while it runs; 18 GB of these stay. Both are checked first. Run it again
after a kill: it continues with the finished downloads and parts. Tokenising takes one to two core-hours.

    python data/openwebtext/prepare.py
"""

import functools
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.prepare import script
from nanodnt.prepare.hub import hub_files, hub_texts, parquet_rows
from nanodnt.prepare.text import build_from_hub

REPO = "Skylion007/openwebtext"
REVISION = "b4325f019c648b1641a1784748667e8b74e5e064"  # the commit with parquet files instead of a script


def nanogpt_split(files: list, counts: list, fraction: float = 0.0005, seed: int = 2357) -> tuple:
    """Training and validation texts as `datasets.train_test_split(test_size=fraction, seed=seed)` chooses them.

    `files` are iterated over twice: each is what makes the texts of a file, `counts` says how many. Returns the
    training texts of each file, in its order (batches are drawn at random anyway), and the validation texts in
    nanoGPT's order.
    """
    total = sum(counts)
    chosen = np.random.default_rng(seed).permutation(total)[: math.ceil(fraction * total)]
    place = {int(number): i for i, number in enumerate(chosen)}
    firsts = [sum(counts[:i]) for i in range(len(counts))]

    def train(texts, first):
        return (text for number, text in enumerate(texts(), first) if number not in place)

    def val():
        held_out = [""] * len(place)
        for texts, first in zip(files, firsts, strict=True):
            for number, text in enumerate(texts(), first):
                if number in place:
                    held_out[place[number]] = text
        yield from held_out

    return [train(texts, first) for texts, first in zip(files, firsts, strict=True)], val()


def main(argv=None):
    args = script.parser(__doc__, "openwebtext", REVISION).parse_args(argv)
    commit, (files,) = hub_files(REPO, args.revision, ["plain_text/train-*.parquet"], args.out_dir, 24.5, 38)
    counts = [parquet_rows(file) for file in files]
    train, val = nanogpt_split([functools.partial(hub_texts, file) for file in files], counts)
    build_from_hub(args, "openwebtext", f"{REPO} at {commit}, {sum(counts):,} documents", train, [val])


if __name__ == "__main__":
    script.run(main)
