"""docs/fine_tuning.md: its commands in a copy of the tree, with a tiny run in the quickstart's place."""

import re

import pytest

from support.runs import ROOT
from support.trees import call, copy_tree

PAGE = (ROOT / "docs" / "fine_tuning.md").read_text()
BLOCKS = re.findall(r"```(bash network|bash illustration|bash|python|)\n(.*?)```", PAGE, re.DOTALL)


def blocks_of(kind: str) -> list:
    return [block for found, block in BLOCKS if found == kind]


def test_every_block_is_known():
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert [len(blocks_of(kind)) for kind in ("bash", "python", "")] == [1, 1, 1]


def test_the_python_on_the_page():
    exec(compile(blocks_of("python")[0], "page", "exec"), {})


@pytest.mark.deep
def test_the_ten_minutes(tmp_path):
    """The commands of the first block, one after the other, with a model too small to learn the answers."""
    root = copy_tree(tmp_path / "tree")
    call(root, "python data/local/prepare.py --input=README.md --tokenizer=bytes --name=readme")
    small = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=128 --batch_size=4 --max_iters=20 --warmup_iters=5"
    small += " --eval_interval=20 --eval_tokens=512 --compile=False --device=cpu --dataset=readme"
    call(root, f"python train.py config/quickstart.py {small}")
    made, prepared, trained, evaluated, chat = blocks_of("bash")[0].splitlines()
    assert "6,000 conversations" in call(root, made)
    assert "train 5,692 examples" in call(root, prepared)
    short = " --max_iters=100 --eval_tokens=4096 --batch_size=8 --compile=False"
    assert "done at step 100" in call(root, trained + short)
    assert "done at step 101" in call(root, trained + short.replace("=100", "=101"))  # auto: it goes on
    assert "exact_match counts 416 with at most 32 tokens" in call(root, evaluated)
    assert call(root, chat + " --max_new_tokens=12").count("\n") >= 2
    refused = call(root, "python train.py config/sft/example.py --init_from=auto:nowhere --out_dir=out/x", code=1)
    assert "init_from='auto:nowhere' names neither a run directory" in refused
