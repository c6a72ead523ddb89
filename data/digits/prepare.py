"""The default images: 1,797 handwritten digits of 8 × 8 gray pixels, from scikit-learn. Needs no
network.

From the "Optical Recognition of Handwritten Digits" of the UCI repository (Alpaydin and Kaynak
1998, licence CC BY 4.0): the part of it that the repository calls its test set. Every fifth image,
360 of them, is held out for validation: the same people wrote both splits. Pixels of 0 to 16 become
0 to 240.
"""

import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.prepare import images, script

SOURCE = "sklearn.datasets.load_digits: UCI Optical Recognition of Handwritten Digits, test set"


@script.command
def main(argv: list[str] | None = None) -> None:
    args = script.parser(__doc__, "digits").parse_args(argv)
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    splits = {"train": [], "val": []}
    for i, pixels in enumerate((15 * digits.images).astype("uint8")):
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, format="PNG")
        split = "train" if i % 5 else "val"
        splits[split].append((f"digit {i}", png.getvalue(), int(digits.target[i])))
    about = dict(
        dataset="digits",
        source=SOURCE,
        licence="CC BY 4.0",
        image_size=8,
        channels=1,
        classes=range(10),
    )
    images.build(args.out_dir, about, splits, command="python train.py config/vdnt/digits.py")
