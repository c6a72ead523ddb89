"""Data as a function of the step: batches, validation rows.

`open_dataset(...).batch(step)` depends on (dataset, block_size, seed, batch_size, step) and on nothing else: not on the
number of processes, the micro batch, the evaluation settings, or whether the run was resumed. Nothing is remembered
between calls, so there is no loader state to save. `Dataset` reads a text as windows, `Examples` reads whole examples,
`Images` reads images and their labels.

    python -m nanodnt.data pystdlib      # check a prepared dataset against its checksums and print its meta.json
"""

from nanodnt.data.augment import NONE, Augment
from nanodnt.data.examples import Examples
from nanodnt.data.images import Images
from nanodnt.data.meta import folder_of, load_meta, sha256
from nanodnt.data.order import permutation
from nanodnt.data.prefetch import Prefetch
from nanodnt.data.prepared import Prepared
from nanodnt.data.windows import Dataset

__all__ = [
    "Augment",
    "Dataset",
    "Examples",
    "Images",
    "Prefetch",
    "Prepared",
    "folder_of",
    "load_meta",
    "open_dataset",
    "permutation",
    "sha256",
]


def open_dataset(
    name: str, block_size: int, seed: int = 1337, verify: bool = True, doc_mask: bool = False, **images
) -> Dataset | Examples | Images:
    """The prepared dataset `name` as a `Dataset`, as `Examples` or as `Images`, whichever it holds.

    With `doc_mask` batches also have positions, which begin at 0 in each document or example. `images` (image_size,
    augment, workers) are for `Images` alone. ValueError, one line, where the dataset is not prepared or damaged, or
    does not fit block_size, doc_mask, image_size or augment."""
    kinds = {kind.kind: kind for kind in (Dataset, Examples, Images)}
    kind = kinds[load_meta(name, verify).get("kind", "text")]  # so it is not verified below
    if kind is Images:
        if doc_mask:
            raise ValueError(f"doc_mask=True is for texts, and {name!r} holds images: use doc_mask=False")
        return Images(name, block_size, seed, verify=False, **images)
    if flags := (images.get("augment") or NONE).flags():
        raise ValueError(f"{name!r} holds a text, and these flags are for images, leave them out: {' '.join(flags)}")
    return kind(name, block_size, seed, verify=False, doc_mask=doc_mask)
