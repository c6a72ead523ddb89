"""FineWeb, or FineWeb-Edu, as ready-made token ids of GPT-2's BPE: the data of GPT-2 speed-runs.

--shards is the number of training shards, of 100 million tokens each, at most 103 (FineWeb) or 99
(--edu); a validation shard comes with them. Nothing is tokenised, so the script takes as long as
the download. A shard takes 0.2 GB to download (to the Hugging Face cache, which HF_HOME moves) and
0.2 GB in data/fineweb; so the default of 10 needs 2.2 GB twice, all shards 20.8 GB twice, which is
checked first. Run it again after a kill: finished downloads stay. The texts are under the licence
ODC-By 1.0, and Common Crawl's terms of use. To have FineWeb's texts with another tokenizer,
download its parquet files and use data/local/prepare.py --input=FOLDER.

    python data/fineweb/prepare.py --shards=10
    python data/fineweb/prepare.py --shards=10 --edu                    # data/fineweb_edu
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.files import DATA
from nanodnt.prepare import hub, script, shards, text

REVISION = "main"  # not pinned: name a commit with --revision, for data that never changes
# By --edu: repository, name of its files, number of shards.
SETS = {
    False: ("kjj0/fineweb10B-gpt2", "fineweb", 103),
    True: ("kjj0/finewebedu10B-gpt2", "finewebedu", 99),
}


@script.command
def main(argv: list[str] | None = None) -> None:
    parser = script.parser(__doc__, "fineweb", REVISION, workers=False)
    help = "shards of 100 million tokens (default: %(default)s)"
    parser.add_argument("--shards", type=int, default=10, help=help)
    parser.add_argument("--edu", action="store_true", help="FineWeb-Edu instead of FineWeb")
    args = parser.parse_args(argv)
    repo, name, most = SETS[args.edu]
    if not 1 <= args.shards <= most:
        raise ValueError(f"--shards={args.shards}: {repo} has 1 to {most} of them")
    if args.edu and args.out_dir == DATA / "fineweb":
        args.out_dir = DATA / "fineweb_edu"
    patterns = [f"{name}_train_{i:06d}.bin" for i in range(1, args.shards + 1)]
    patterns.append(f"{name}_val_000000.bin")
    size = 0.2 * len(patterns)
    commit, groups = hub.files(args, repo, patterns, size, size)
    tokenizer = Tokenizer.meta_for("gpt2")
    splits = shards.split([file for (file,) in groups], 0.1, tokenizer["vocab_size"])
    source = f"{repo} at {commit}, {args.shards} of {most} shards"
    text.build(args.out_dir, source, tokenizer, splits)
