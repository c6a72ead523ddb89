"""Check a prepared dataset against its checksums and print its meta.json: python -m nanodnt.data pystdlib"""

import json
import math
import sys

from configurator import discard_output, flush_output, prepare_streams, read_path
from nanodnt.data.meta import load_meta


def main(argv: list) -> None:
    prepare_streams()
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.exit("usage: python -m nanodnt.data DATASET     (a folder under data/, or the path of a prepared folder)")
    try:
        meta = load_meta(read_path(argv[0]), max_hashed_bytes=math.inf)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    long = ("chars", "json", *["classes"] * (len(meta.get("classes", ())) > 100))
    print(json.dumps({key: value for key, value in meta.items() if key not in long}, indent=2))
    print("all checksums match")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BrokenPipeError:  # the reader of the output has gone
        sys.exit(discard_output())
    except OSError as e:
        discard_output()
        sys.exit(f"error: the output cannot be written ({e.strerror})")
    sys.exit(flush_output())
