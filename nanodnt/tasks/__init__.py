"""What a model is trained on: text, examples or images. A task is an object, and the training loop asks it alone.

`Task` says what a task answers for. To add one:
1. A subclass in a file of its own, named in `task_of_data`, and in `task_of` if it has a network of its own. It imports
   its network and its dataset when they are asked for.
2. Its files in `KINDS` of nanodnt/data/meta.py; what a checkpoint holds of them is checked by `check_meta` of
   nanodnt/run/checkpoints.py.
3. With a network of its own: its fields in `GPTConfig`, one of which the user sets and tells the network by; their
   refusals in layers/rules.py; `causal` and DyT's defaults in model.py.
4. Flags of training: a dataclass that TrainConfig inherits, as image_flags.py. The other tasks refuse them in
   `open_data`.
"""

from model import GPTConfig
from nanodnt.data import load_meta
from nanodnt.tasks.task import Task


def task_of(model: GPTConfig | dict) -> Task:
    """The task that a network reads: of a GPTConfig, or of its fields, as a checkpoint holds them. Text and examples
    share a network, so this is text for both."""
    fields = model if isinstance(model, dict) else vars(model)
    return _images() if fields.get("patch_size") else _text()


def task_of_data(meta: dict) -> Task:
    """The task of a prepared dataset, by its meta.json."""
    return {"text": _text, "examples": _examples, "images": _images}[meta.get("kind", "text")]()


def open_data(config, model_config: GPTConfig, meta: dict | None = None):
    """The dataset of a TrainConfig, cut into what the model reads at once. `meta`: its meta.json, if it was read and
    verified already. ValueError for a dataset that is not prepared or damaged, and for settings of another task."""
    meta = meta or load_meta(config.dataset)
    return task_of_data(meta).open_data(meta, config, model_config)


def meant(fields: dict) -> dict:
    """The fields of a GPTConfig, with what None means in place of it: then those that older versions wrote compare."""
    meaning = task_of(fields).meaning_of_none(uses_dyt=fields["norm"] == "dyt")
    return fields | {name: value for name, value in meaning.items() if fields.get(name) is None}


def _text():
    from nanodnt.tasks.text import Text

    return Text()


def _examples():
    from nanodnt.tasks.examples import Examples

    return Examples()


def _images():
    from nanodnt.tasks.images import Images

    return Images()
