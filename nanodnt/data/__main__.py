"""Check a prepared dataset against its checksums and print its meta.json: python -m nanodnt.data
pystdlib"""

import json
import math
import sys

from configurator import read_path
from nanodnt.data.meta import load_meta
from nanodnt.script import run

USAGE = (
    "usage: python -m nanodnt.data DATASET     "
    "(a folder under data/, or the path of a prepared folder)"
)
MAX_CLASSES = 100  # longer lists of classes are not printed


def main(argv: list[str]) -> None:
    """Print the meta.json of the one dataset in `argv`, without its long entries. SystemExit for
    other arguments, ValueError as in `load_meta`."""
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.exit(USAGE)
    meta = load_meta(read_path(argv[0]), max_hashed_bytes=math.inf)
    hidden = ["chars", "json"]
    if len(meta.get("classes", ())) > MAX_CLASSES:
        hidden.append("classes")
    print(json.dumps({key: value for key, value in meta.items() if key not in hidden}, indent=2))
    print("all checksums match")


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
