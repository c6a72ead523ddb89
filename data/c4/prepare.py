"""C4 (English) in GPT-2 BPE: the first --shards of its 1024 training files, and its own validation
split.

A shard is 356,317 documents or about 0.17 billion tokens, so the default of 16 makes about 2.7
billion. Each shard takes 0.33 GB to download (to the Hugging Face cache, which HF_HOME moves) and
0.35 GB in data/c4. Validation takes as much as one shard. So 16 shards need 5.6 GB and 6 GB of
disk, which is checked first. Run it again after a kill: finished downloads are kept.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.prepare import hub, script, text

REPO = "allenai/c4"
REVISION = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"


@script.command
def main(argv: list[str] | None = None) -> None:
    parser = script.parser(__doc__, "c4", REVISION)
    help = "training files, 1 to 1024 (default: %(default)s)"
    parser.add_argument("--shards", type=int, default=16, help=help)
    args = parser.parse_args(argv)
    if not 1 <= args.shards <= 1024:
        raise ValueError(f"--shards={args.shards}: C4 has 1 to 1024 training files")
    patterns = [f"en/c4-train.{i:05d}-of-01024.json.gz" for i in range(args.shards)]
    patterns.append("en/c4-validation.*-of-00008.json.gz")
    units = args.shards + 1
    commit, (*train, val) = hub.files(args, REPO, patterns, 0.33 * units, 0.35 * units)
    source = f"{REPO} (en) at {commit}, {args.shards} of 1024 training files"
    train_texts = [hub.texts(file) for (file,) in train]
    val_texts = [hub.texts(file) for file in val]
    text.build_from_hub(args, "c4", source, train_texts, val_texts)
