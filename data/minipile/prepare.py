"""MiniPile in GPT-2 BPE, with its own splits: 1,000,000 training and 500 validation documents.

Needs 3.2 GB of disk for the download (to the Hugging Face cache, which HF_HOME moves) and 7 GB in data/minipile while
it runs; about half of these stay. Both are checked first. Run it again after a kill: it continues with the finished
downloads and parts.

    python data/minipile/prepare.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt import prepare
from nanodnt.data.tokenizer import Tokenizer

REPO = "JeanKaddour/minipile"
REVISION = "18ad1b0c701eaa0de03d3cecfdd769cbc70ffbd0"
PATTERNS = ["data/train-*.parquet", "data/validation-*.parquet"]


def main(argv=None):
    args = prepare.parser(__doc__, "minipile", REVISION).parse_args(argv)
    commit, (train, val) = prepare.hub_files(REPO, args.revision, PATTERNS, args.out_dir, 3.2, 7)
    prepare.build(
        args.out_dir,
        f"{REPO} at {commit}",
        Tokenizer.meta_for("gpt2"),
        {"train": prepare.hub_texts("parquet", train), "val": prepare.hub_texts("parquet", val)},
        name="minipile",
        workers=args.workers,
        resume=True,
        totals={"train": prepare.parquet_rows(train), "val": prepare.parquet_rows(val)},
    )


if __name__ == "__main__":
    prepare.run(main)
