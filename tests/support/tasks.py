"""What can be trained, as a table: text, examples, documents kept apart, mixtures of experts,
images."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from support.examples import UNEVEN, write_documents, write_examples
from support.runs import make_dataset
from support.vision import TINY, make_digits

EXPERTS = dict(n_ff=16, mlp="swiglu")
BIAS = dict(balance="bias", balance_rate=0.01)
EXAMPLES = dict(block_size=32, doc_mask=True, eval_tokens=0)
DOCUMENTS = EXAMPLES | dict(pos="rope", n_kv_head=1)
PRE = dict(pre_norm="both", mid_norm="none", input_norm=False)


class Task(NamedTuple):
    write: Callable  # write(folder): its dataset
    flags: dict  # of its runs, beside support.runs.TINY


TASKS = {
    "text": Task(make_dataset, {}),
    "examples": Task(lambda folder: write_examples(folder, **UNEVEN), EXAMPLES),
    "documents": Task(write_documents, DOCUMENTS),
    "experts": Task(make_dataset, EXPERTS | dict(n_expert=4)),
    "images": Task(lambda folder: make_digits(folder, train=100, val=47), TINY),
}


def write_all(folder: Path) -> dict:
    """{task: folder of its dataset}."""
    return {name: task.write(folder / name) for name, task in TASKS.items()}
