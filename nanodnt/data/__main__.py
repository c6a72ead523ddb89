"""Check a prepared dataset against its checksums and print its meta.json: python -m nanodnt.data
pystdlib"""

import json
import math
import sys

from configurator import read_path
from nanodnt.data.meta import load_meta
from nanodnt.script import run


def main(argv: list) -> None:
    """Print what the one dataset in `argv` is. SystemExit if it is not one. ValueError as of
    `load_meta`."""
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.exit(
            "usage: python -m nanodnt.data DATASET     (a folder under data/, or the path of a prepared folder)"
        )
    meta = load_meta(read_path(argv[0]), max_hashed_bytes=math.inf)
    long = ("chars", "json", *["classes"] * (len(meta.get("classes", ())) > 100))
    print(json.dumps({key: value for key, value in meta.items() if key not in long}, indent=2))
    print("all checksums match")


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
