"""What a model is trained on: text, examples or images. The training loop asks only the task.

`Task` says what a task answers for, `Transformer` in model.py what a network does, `PreparedData` in nanodnt/data what
a dataset does. To add a task:
1. A subclass in a file of its own, which `task_of_data` returns for its kind.
2. Its files in `DATASET_KINDS` of nanodnt/data/meta.py, and in `BESIDE` of nanodnt/prepare/script.py; a `PreparedData`
   that reads them, a script that prepares them.
3. With a network of its own: its fields in `GPTConfig`, and in CHOOSES, KIND_FLAGS and KIND_SIZES of layers/rules.py. Roles
   of its parameters are those of layers/roles.py; `patch` is the matrix that reads the input.
4. Its flags of training: fields of TrainConfig, in a section of their own, and their names in FLAGS. There, as in KIND_FLAGS,
   one may stand under several kinds.
"""

from layers.rules import CHOOSES, kind_of
from model import GPTConfig
from nanodnt.data import folder_of, load_meta
from nanodnt.optim import fill_defaults
from nanodnt.tasks.text import Task

# Flags of training that do something for one kind of network only.
FLAGS = {
    "text": ("doc_mask", "loss_chunks", "sample_interval", "sample_start"),
    "images": ("label_smoothing", "crop_area", "crop_padding", "flip"),
}
FLAGS["images"] += ("rand_augment", "mixup", "cutmix")


def task_of(model: GPTConfig | dict) -> Task:
    """The task that a network reads: of a GPTConfig, or of its fields, as a checkpoint holds
    them."""
    return task_of_data({"kind": kind_of(model)})


def task_of_data(meta: dict) -> Task:
    """The task of a prepared dataset, by its meta.json, or a checkpoint's copy."""
    if meta.get("kind") != "images":
        return Task()
    from nanodnt.tasks.images import ImageTask  # a run on text reads no code for images

    return ImageTask()


def fill_from_dataset(config: GPTConfig, meta: dict, dataset: str) -> None:
    """Fill in what a config leaves to the dataset, in place. ValueError where they do not fit each
    other."""
    task, found = task_of(config), task_of_data(meta).reads
    if found != task.reads:
        flag = CHOOSES.get(found) or CHOOSES[task.reads]
        fix = f"set {flag} (see config/vdnt/)" if found in CHOOSES else f"leave {flag} out"
        what = f"dataset {dataset!r} is of {found}, but {flag}={getattr(config, flag)} is for {task.reads}"
        raise ValueError(f"{what}: {fix}, or choose a dataset of {task.reads}")
    task.fill_from_dataset(config, meta, dataset)


def resolve(model_config: GPTConfig, config, meta: dict | None = None) -> tuple:
    """(meta.json of the dataset, the network without storage) of these flags, in which defaults and
    what the dataset decides are filled in, in place. Without `meta` it is read; of a dataset that
    is not prepared, GPT-2's vocabulary or ImageNet's images stand in. ValueError for flags that
    contradict each other or the dataset."""
    config.check()
    fill_defaults(config)
    task = task_of(model_config)
    if meta is None:
        prepared = (folder_of(config.dataset) / "meta.json").exists()
        meta = (
            load_meta(config.dataset, verify=False)
            if prepared
            else task.placeholder_meta(model_config)[0]
        )
    fill_from_dataset(model_config, meta, config.dataset)
    check_flags(task, config)
    return meta, task.network().empty(model_config)


def open_data(config, model_config: GPTConfig, meta: dict | None = None):
    """The dataset of a TrainConfig, a `PreparedData`, cut into what the model reads at once.
    `meta`: its meta.json, if it is verified already. ValueError for a dataset that is not prepared
    or damaged, and flags of another task."""
    meta = meta or load_meta(config.dataset)
    task = task_of_data(meta)
    check_flags(task, config)
    return task.open_data(meta, config, model_config)


def check_flags(task: Task, config) -> None:
    """ValueError for flags of a TrainConfig that are for another task."""
    for reads in FLAGS.keys() - {task.reads}:
        others = (name for name in FLAGS[reads] if name not in FLAGS[task.reads])
        given = [name for name in others if getattr(config, name) != getattr(type(config), name)]
        if given:
            flags = " ".join(f"--{name}={getattr(config, name)}" for name in given)
            raise ValueError(
                f"the model reads {task.reads}, and these flags are for {reads}: leave out {flags}"
            )


def resolve_none(fields: dict) -> dict:
    """The fields of a GPTConfig, with what None means in place of it: then those that older
    versions wrote compare."""
    meaning = task_of(fields).meaning_of_none(uses_dyt=fields["norm"] == "dyt")
    return fields | {name: value for name, value in meaning.items() if fields.get(name) is None}
