"""OpenWebText in GPT-2 BPE, split as in nanoGPT (which reports 9,035,582,198 training and 4,434,897
validation tokens).

8,013,769 documents in 80 parquet files. Needs 24.5 GB of disk for the download (to the Hugging Face
cache, which HF_HOME moves) and 18 GB in data/openwebtext. Both are checked first. Run it again
after a kill: finished downloads are kept. Tokenising takes one to two core-hours.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.prepare import hub, script, text

import numpy as np  # isort: skip, after nanodnt, which says it where numpy is missing

REPO = "Skylion007/openwebtext"
# the commit with parquet files instead of a script
REVISION = "b4325f019c648b1641a1784748667e8b74e5e064"


@script.command
def main(argv: list[str] | None = None) -> None:
    args = script.parser(__doc__, "openwebtext", REVISION).parse_args(argv)
    commit, (files,) = hub.files(args, REPO, ["plain_text/train-*.parquet"], 24.5, 18.5)
    from pyarrow.parquet import read_metadata

    counts = [read_metadata(file).num_rows for file in files]
    total = sum(counts)
    firsts = np.cumsum([0, *counts]).tolist()  # number of the first document of each file
    # As datasets.train_test_split(test_size=0.0005, seed=2357) chooses them, in this order.
    order = np.random.default_rng(2357).permutation(total)
    chosen = order[: math.ceil(0.0005 * total)].tolist()
    held_out = set(chosen)

    def train(file: Path, first: int) -> Iterator[str]:
        """In the order of the file: batches are drawn at random anyway."""
        for number, document in enumerate(hub.texts(file), first):
            if number not in held_out:
                yield document

    def val() -> Iterator[str]:
        documents = {}
        for file, first in zip(files, firsts, strict=False):
            for number, document in enumerate(hub.texts(file), first):
                if number in held_out:
                    documents[number] = document
        for number in chosen:
            yield documents[number]

    source = f"{REPO} at {commit}, {total:,} documents"
    text.build_from_hub(args, "openwebtext", source, [*map(train, files, firsts)], [val()])
