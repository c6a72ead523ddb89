"""Everything in a training run except the network.

Every command imports this first, so that a missing package or an old Python ends it with one line.
"""

import sys

OLDEST = (3, 11)  # oldest Python that is supported

# Functions that read other people's weights: `Reader`s of nanodnt/weights.py. interop/ adds its own
# when it is imported; this list is here so that it can do so without torch.
READERS = []


def require(package: str) -> None:
    """End the program, with what to do, if this Python does not have `package`."""
    # imported here: an old Python lacks it, and is reported first
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(package)
    except PackageNotFoundError:
        advice = "run `make install`, then `. .venv/bin/activate`"
        sys.exit(f"error: {package} is not installed for {sys.executable}: {advice}")


if sys.platform == "win32":  # Windows lacks fcntl, and signals
    systems = "nanoDNT runs on Linux and macOS; on Windows use WSL2"
    fix = "`wsl --install`, then clone and start it in the Linux that this gives you"
    sys.exit(f"error: {systems}: {fix}")
if sys.version_info < OLDEST:
    needed = f"nanoDNT needs Python {OLDEST[0]}.{OLDEST[1]} or newer"
    fix = "activate an environment of a newer one, or make it by `make PYTHON=python3.12`"
    sys.exit(f"error: {needed}, and this is {sys.version.split()[0]}: {fix}")
require("numpy")
