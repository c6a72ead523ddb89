"""Start and end of scripts without torch: data/*/prepare.py, python -m nanodnt.data."""

import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool

from configurator import discard_output, flush_output, prepare_streams
from nanodnt.files import missing_package


def command(main: Callable[[], None]) -> Callable[[], None]:
    """A decorator: run `main` if its file is the script that was started."""
    if main.__module__ == "__main__":
        run(main)
    return main


def run(main: Callable[[], None]) -> None:
    """Call `main()`. An error that the user can do something about ends with one line on stderr and
    exit code 1, Ctrl-C with exit code 130."""
    prepare_streams()
    code = None
    try:
        main()
    except SystemExit as e:  # from --help, or from a mistake in the flags
        code = e.code
    except KeyboardInterrupt:
        print("stopped: run the same command again", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of the output has gone, as in `… | head`
        code = discard_output()
    except BrokenProcessPool:
        code = "error: a worker was killed (out of memory?): "
        code += "run the same command again with fewer --workers"
    except ImportError as e:
        module = (e.name or "").split(".")[0]
        code = f"error: {missing_package(module)}"
    except (ValueError, OSError) as e:
        line = " ".join(str(e).split())
        code = f"error: {line}"
    flushed = flush_output()
    if code or flushed:
        sys.exit(code or flushed)
