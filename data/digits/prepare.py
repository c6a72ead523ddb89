"""The default images: 1,797 handwritten digits of 8 × 8 gray pixels, which scikit-learn brings along. No network.

From the "Optical Recognition of Handwritten Digits" of the UCI repository (Alpaydin and Kaynak 1998, licence CC BY
4.0): the part of it that the repository calls its test set. Every fifth image, 360 of them, is held out for validation:
the same people wrote both splits. Pixels of 0 to 16 become 0 to 240.

    python data/digits/prepare.py
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.prepare import script
from nanodnt.prepare.images import build, encode_png

EVERY = 5  # images, the first of which is held out


def main(argv=None):
    args = script.parser(__doc__, "digits").parse_args(argv)
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = [
        (f"digit {i}", encode_png((15 * pixels).astype(np.uint8)), int(label))
        for i, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True))
    ]
    build(
        args.out_dir,
        "sklearn.datasets.load_digits: UCI Optical Recognition of Handwritten Digits, test set",
        "CC BY 4.0",
        list(range(10)),
        {
            "train": [image for i, image in enumerate(images) if i % EVERY],
            "val": [image for i, image in enumerate(images) if not i % EVERY],
        },
        image_size=8,
        channels=1,
        name="digits",
        train="python train.py config/vdnt/digits.py",
    )


if __name__ == "__main__":
    script.run(main)
