"""Tasks: training on text, examples or images. The training loop asks only the task.

The contracts are `Task` in task.py, `Transformer` in model.py for its network, and `PreparedData`
in nanodnt/data for its dataset. To add a kind of dataset:

1. A row in KINDS of nanodnt/data/meta.py: its files, and its flags of training (fields of
   TrainConfig, in a section of their own).
2. A `PreparedData` that reads its files, and a script that prepares them.
3. A `Task` in a file of its own, which `task_of_data` returns for its kind.
4. With a network of its own: its fields in `GPTConfig`, and in CHOOSES, KIND_FLAGS and KIND_SIZES
   of layers/rules.py. Roles of its parameters are those of layers/roles.py; `patch` is the matrix
   that reads the input.
"""

from typing import Any, NamedTuple

from layers.rules import CHOOSES, kind_of
from model import GPTConfig, Transformer
from nanodnt.data import PreparedData, folder_of, load_meta
from nanodnt.data.meta import KINDS, Meta
from nanodnt.optim import fill_defaults
from nanodnt.settings import TrainConfig
from nanodnt.tasks.task import Task


class Resolved(NamedTuple):
    """Flags made complete."""

    meta: Meta  # meta.json of the dataset
    network: Transformer  # without storage


def task_of(model: GPTConfig | dict[str, Any]) -> Task:
    """The task of a network: of a GPTConfig, or of its fields, as a checkpoint holds them."""
    return task_of_data({"kind": kind_of(model)})


def task_of_data(meta: Meta) -> Task:
    """The task of a prepared dataset, by its meta.json, or a checkpoint's copy."""
    kind = meta.get("kind")  # a meta.json without a kind describes a text
    # Imported here: a run loads only the code of its own task.
    if kind == "examples":
        from nanodnt.tasks.examples import ExamplesTask

        return ExamplesTask()
    if kind == "images":
        from nanodnt.tasks.images import ImageTask

        return ImageTask()
    from nanodnt.tasks.text import TextTask

    return TextTask()


def fill_from_dataset(config: GPTConfig, meta: Meta, dataset: str) -> None:
    """Set the fields that a config leaves to the dataset. ValueError where they do not fit each
    other."""
    task = task_of(config)
    data_reads = task_of_data(meta).reads
    if data_reads != task.reads:
        if data_reads in CHOOSES:
            flag = CHOOSES[data_reads]
            fix = f"set {flag} (see config/vdnt/)"
        else:
            flag = CHOOSES[task.reads]
            fix = f"leave {flag} out"
        raise ValueError(
            f"dataset {dataset!r} is of {data_reads}, but {flag}={getattr(config, flag)} is for "
            f"{task.reads}: {fix}, or choose a dataset of {task.reads}"
        )
    task.fill_from_dataset(config, meta, dataset)


def resolve(model_config: GPTConfig, config: TrainConfig, meta: Meta | None = None) -> Resolved:
    """Set defaults, and the sizes that the dataset decides, in both configs.

    Without `meta` it is read. Where the dataset is not prepared, GPT-2's vocabulary or ImageNet's
    images stand in. ValueError for flags that contradict each other or the dataset."""
    config.check()
    fill_defaults(config)
    task = task_of(model_config)
    if meta is None:
        if (folder_of(config.dataset) / "meta.json").exists():
            meta = load_meta(config.dataset, verify=False)
        else:
            meta = task.placeholder_meta(model_config).meta
    fill_from_dataset(model_config, meta, config.dataset)
    check_flags(task, config)
    return Resolved(meta, task.network().empty(model_config))


def open_data(
    config: TrainConfig, model_config: GPTConfig, meta: Meta | None = None
) -> PreparedData:
    """The dataset of a TrainConfig, in rows for the model. `meta`: its meta.json, if it is verified
    already. ValueError for a dataset that is not prepared or damaged, too few validation rows for
    eval_rows=first, and flags of another task."""
    meta = meta or load_meta(config.dataset)
    task = task_of_data(meta)
    check_flags(task, config)
    data = task.open_data(meta, config, model_config)
    data.validation(config.eval_tokens, config.eval_rows)  # refuses a split that is too short
    return data


def check_flags(task: Task, config: TrainConfig) -> None:
    """ValueError for flags of training that are for another task."""
    own = KINDS[task.kind].flags
    for kind in KINDS.values():
        others = [name for name in kind.flags if name not in own]
        given = [name for name in others if getattr(config, name) != getattr(TrainConfig, name)]
        if given:
            flags = " ".join(f"--{name}={getattr(config, name)}" for name in given)
            raise ValueError(
                f"the model reads {task.reads}, and these flags are for {kind.reads}: "
                f"leave out {flags}"
            )


def resolve_none(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a GPTConfig, with values in place of None. So those that older versions wrote
    compare."""
    values = task_of(fields).meaning_of_none(uses_dyt=fields["norm"] == "dyt")
    missing = {name: value for name, value in values.items() if fields.get(name) is None}
    return fields | missing
