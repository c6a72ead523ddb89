"""ImageNet-1k (ILSVRC 2012): 1,281,167 images to train on, 50,000 for validation, 1,000 classes.

For non-commercial research and education only. Accept its terms at
https://huggingface.co/datasets/ILSVRC/imagenet-1k and log in with `hf auth login` before. Then this
downloads 154 GB to the Hugging Face cache, which HF_HOME moves, and writes as much to
data/imagenet1k; both are checked first. Run it again after a kill: finished downloads are kept.

The JPEG files stay as they are. They have several sizes, and some are gray or CMYK: reading makes
RGB of them. This script decodes each once, on all cores, to find damaged files.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.prepare import images, script

REPO = "ILSVRC/imagenet-1k"
REVISION = "49e2ee26f3810fb5a7536bbf732a7b07389a47b5"
LICENCE = "non-commercial research and education only: https://image-net.org/download"
HINT = f"accept the terms at https://huggingface.co/datasets/{REPO}, log in with `hf auth login`, "


@script.command
def main(argv: list[str] | None = None) -> None:
    args = script.parser(__doc__, "imagenet1k", REVISION, workers=False).parse_args(argv)
    files = ["data/train-*.parquet", "data/validation-*.parquet"]
    about = dict(dataset="imagenet1k", licence=LICENCE, image_size=None)
    images.build_from_hub(args, about, REPO, files, ("image", "label"), gb=154, hint=HINT)
