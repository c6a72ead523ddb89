"""OpenWebText in GPT-2 BPE, split as in nanoGPT (which reports 9,035,582,198 training and 4,434,897 validation tokens).

8,013,769 documents in 80 parquet files. Needs 24.5 GB of disk for the download (to the Hugging Face cache, which
HF_HOME moves) and 38 GB in data/openwebtext while it runs; 18 GB of these stay. Both are checked first. Run it again
after a kill: it continues with the finished downloads and parts. Tokenising takes one to two core-hours.

    python data/openwebtext/prepare.py
"""

import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt import prepare
from nanodnt.data.tokenizer import Tokenizer

REPO = "Skylion007/openwebtext"
REVISION = "b4325f019c648b1641a1784748667e8b74e5e064"  # the commit with parquet files instead of a script


def nanogpt_split(texts, count: int, fraction: float = 0.0005, seed: int = 2357) -> tuple:
    """Training and validation texts as `datasets.train_test_split(test_size=fraction, seed=seed)` chooses them.

    `texts` is any iterable of `count` texts and is read once: the list of validation texts is complete only after all
    training texts have been read. Validation texts are in nanoGPT's order, training texts in the order of `texts`
    (batches are drawn at random anyway).
    """
    chosen = np.random.default_rng(seed).permutation(count)[: math.ceil(fraction * count)]
    place = {int(index): i for i, index in enumerate(chosen)}
    held_out = [""] * len(place)

    def train():
        for index, text in enumerate(texts):
            if index in place:
                held_out[place[index]] = text
            else:
                yield text

    return train(), held_out


def main(argv=None):
    args = prepare.parser(__doc__, "openwebtext", REVISION).parse_args(argv)
    commit, (files,) = prepare.hub_files(REPO, args.revision, ["plain_text/train-*.parquet"], args.out_dir, 24.5, 38)
    count = prepare.parquet_rows(files)
    train, val = nanogpt_split(prepare.rows(prepare.hub_texts("parquet", files)), count)
    prepare.build(
        args.out_dir,
        f"{REPO} at {commit}, {count:,} documents",
        Tokenizer.meta_for("gpt2"),
        {"train": train, "val": val},
        name="openwebtext",
        workers=args.workers,
        resume=True,
        totals={"train": count - len(val)},
    )


if __name__ == "__main__":
    prepare.run(main)
