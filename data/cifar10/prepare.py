"""CIFAR-10: 10 classes, 50,000 images to train on and the 10,000 of its test set for validation.

Colour images of 32 × 32 pixels from the Hugging Face Hub (uoft-cs/cifar10), 0.15 GB. They go to the
Hugging Face cache, which HF_HOME moves, where they are found again, and as much to data/cifar10.
The authors state no licence; they ask for a citation: Krizhevsky, "Learning Multiple Layers of
Features from Tiny Images", 2009.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.prepare import images, script

REPO = "uoft-cs/cifar10"
REVISION = "0b2714987fa478483af9968de7c934580d0bb9a2"


@script.command
def main(argv: list[str] | None = None) -> None:
    args = script.parser(__doc__, "cifar10", REVISION, workers=False).parse_args(argv)
    files = ["plain_text/train-*.parquet", "plain_text/test-*.parquet"]
    about = dict(dataset="cifar10", licence="none stated; cite Krizhevsky 2009", image_size=32)
    images.build_from_hub(args, about, REPO, files, ("img", "label"), gb=0.15)
