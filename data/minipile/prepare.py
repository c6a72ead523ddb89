"""MiniPile in GPT-2 BPE, with its own splits: 1,000,000 training and 500 validation documents.

Needs 3.2 GB of disk for the download (to the Hugging Face cache, which HF_HOME moves) and 3.5 GB in
data/minipile. Both are checked first. Run it again after a kill: finished downloads are kept.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.prepare import hub, script, text

REPO = "JeanKaddour/minipile"
REVISION = "18ad1b0c701eaa0de03d3cecfdd769cbc70ffbd0"


@script.command
def main(argv: list[str] | None = None) -> None:
    args = script.parser(__doc__, "minipile", REVISION).parse_args(argv)
    patterns = ["data/train-*.parquet", "data/validation-*.parquet"]
    commit, (train, val) = hub.files(args, REPO, patterns, 3.2, 3.5)
    source = f"{REPO} at {commit}"
    train_texts = [hub.texts(file) for file in train]
    val_texts = [hub.texts(file) for file in val]
    text.build_from_hub(args, "minipile", source, train_texts, val_texts)
