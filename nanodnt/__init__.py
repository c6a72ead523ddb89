"""The machinery: everything of a training run that is not the network.

Every command imports this before what could fail in a way that says less.
"""

import sys

OLDEST = (3, 11)  # Python

# Functions that read other people's weights: `Reader`s of nanodnt/weights.py. interop/ adds its own
# when it is imported; this list is here so that it can do so without torch.
READERS = []


def require(package: str) -> None:
    """End the program, with what to do, if this Python does not have `package`."""
    # an old Python has none, and is named first
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(package)
    except PackageNotFoundError:
        how = "run `make install`, then `. .venv/bin/activate`"
        sys.exit(f"error: {package} is not installed for {sys.executable}: {how}")


if sys.platform == "win32":  # which lacks fcntl, and signals
    systems = "nanoDNT runs on Linux and macOS; on Windows use WSL2"
    fix = "`wsl --install`, then clone and start it in the Linux that this gives you"
    sys.exit(f"error: {systems}: {fix}")
if sys.version_info < OLDEST:
    needed = f"nanoDNT needs Python {OLDEST[0]}.{OLDEST[1]} or newer"
    fix = "activate an environment of a newer one, or make it by `make PYTHON=python3.12`"
    sys.exit(f"error: {needed}, and this is {sys.version.split()[0]}: {fix}")
require("numpy")
