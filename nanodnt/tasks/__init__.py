"""What a model is trained on: text, examples or images. The training loop asks only the task.

`Task` says what a task answers for, `Transformer` in model.py what a network does, `PreparedData` in nanodnt/data what
a dataset does. To add a task:
1. A subclass in a file of its own, in TASKS, and in `task_of` if it has a network of its own.
2. Its files in `DATASET_KINDS` of nanodnt/data/meta.py.
3. With a network of its own: its fields in `GPTConfig`, one of which the user sets and tells the network by; their
   refusals in layers/rules.py; `causal` and DyT's defaults in model.py.
4. Its flags of training: a dataclass that TrainConfig inherits, as image_flags.py, and their names in FLAGS.
"""

from importlib import import_module

from model import GPTConfig
from nanodnt.data import load_meta
from nanodnt.tasks.image_flags import FLAGS_OF_IMAGES
from nanodnt.tasks.task import Task

TASKS = {"text": "TextTask", "examples": "ExamplesTask", "images": "ImageTask"}  # kind of dataset, and file: class
FLAGS = {"text": ("doc_mask", "loss_chunks"), "images": FLAGS_OF_IMAGES}  # what a network reads: flags for it alone


def task_named(kind: str) -> Task:
    """The task of a kind of dataset. Its file is imported here, so that a run on text reads no code for images."""
    return getattr(import_module(f"nanodnt.tasks.{kind}"), TASKS[kind])()


def task_of(model: GPTConfig | dict) -> Task:
    """The task that a network reads: of a GPTConfig, or of its fields, as a checkpoint holds them. Text and examples
    share a network, so this is text for both."""
    fields = model if isinstance(model, dict) else vars(model)
    return task_named("images" if fields.get("patch_size") else "text")


def task_of_data(meta: dict) -> Task:
    """The task of a prepared dataset, by its meta.json, or a checkpoint's copy. ValueError for an unknown kind."""
    kind = meta.get("kind", "text")
    if kind not in list(TASKS):  # a list: it may be anything, even what no dict can look up
        raise ValueError(f"data of kind {str(kind)[:20]!r}, which is none of {', '.join(TASKS)}")
    return task_named(kind)


def fill_from_dataset(config: GPTConfig, meta: dict, dataset: str) -> None:
    """Fill in what a config leaves to the dataset, in place. ValueError where they do not fit each other."""
    task, found = task_of(config), task_of_data(meta)
    if found.reads != task.reads:
        raise ValueError(
            f"dataset {dataset!r} is of {found.reads}, but patch_size={config.patch_size} is for {task.reads}: "
            f"{found.how_chosen}, or choose a dataset of {task.reads}"
        )
    task.fill_from_dataset(config, meta, dataset)


def open_data(config, model_config: GPTConfig, meta: dict | None = None):
    """The dataset of a TrainConfig, a `PreparedData`, cut into what the model reads at once. `meta`: its meta.json, if
    it was read and verified already. ValueError for a dataset that is not prepared or damaged, and for flags of another
    task."""
    meta = meta or load_meta(config.dataset)
    task = task_of_data(meta)
    check_flags(task, config)
    return task.open_data(meta, config, model_config)


def check_flags(task: Task, config) -> None:
    """ValueError for flags of a TrainConfig that are for another task."""
    for reads in FLAGS.keys() - {task.reads}:
        given = [name for name in FLAGS[reads] if getattr(config, name) != getattr(type(config), name)]
        if given:
            flags = " ".join(f"--{name}={getattr(config, name)}" for name in given)
            raise ValueError(f"the model reads {task.reads}, and these flags are for {reads}: leave out {flags}")


def resolve_none(fields: dict) -> dict:
    """The fields of a GPTConfig, with what None means in place of it: then those that older versions wrote compare."""
    meaning = task_of(fields).meaning_of_none(uses_dyt=fields["norm"] == "dyt")
    return fields | {name: value for name, value in meaning.items() if fields.get(name) is None}
