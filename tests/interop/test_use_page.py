"""docs/use.md, from the first command to the last, in a copy of the tree with a small run in the quickstart's place."""

import re
import shutil
import sys

import pytest

from support.runs import ROOT
from support.trees import call, copy_tree

PAGE = (ROOT / "docs" / "use.md").read_text()
BLOCKS = re.findall(r"```(bash network|bash|python|)\n(.*?)```", PAGE, re.DOTALL)
pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("use page")]  # a minute; one after the other


def lines_of(kind: str) -> list:
    return [line for found, block in BLOCKS if found == kind for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with a run of a small DNT in out/quickstart, on bytes of the README."""
    root = copy_tree(tmp_path_factory.mktemp("use") / "tree")
    call(root, "python data/local/prepare.py --input=README.md --tokenizer=bytes --name=readme")
    small = dict(n_layer=2, n_head=2, n_embd=32, block_size=64, batch_size=8, max_iters=20, warmup_iters=5)
    small |= dict(eval_interval=20, eval_tokens=512, compile=False, device="cpu", dataset="readme")
    call(root, f"python train.py config/quickstart.py {' '.join(f'--{name}={value}' for name, value in small.items())}")
    return root


def test_the_page_from_beginning_to_end(tree):
    printed = {}
    for kind, block in BLOCKS:
        for line in block.splitlines() if kind == "bash" else []:
            printed[line] = call(tree, line)
        if kind == "python":
            printed[block] = call(tree, [sys.executable, "-c", block])
        if kind == "":
            command, *shown = block.splitlines()
            assert call(tree, command.removeprefix("$ "), code=1).splitlines() == shown
    commands = list(printed)
    assert len(commands) == 11
    assert "as nanodnt in float32: exported/quickstart" in printed[commands[0]]
    assert "import " in printed[commands[1]] and "LlamaConfig" in commands[2]
    assert "vocabulary 257" in printed[commands[3]] and "bytes tokenizer" in printed[commands[3]]
    assert "weights: models/llama" in printed[commands[4]] and printed[commands[5]].startswith("The")
    assert "as llama in float32: exported/llama" in printed[commands[6]]
    for text in ("text README.md", "text docs/runs.md", "text docs_llama", "bits_per_byte"):
        assert text in printed[commands[-1]], printed[commands[-1]]


@pytest.mark.parametrize("line", lines_of("bash network"))
def test_what_needs_a_network_says_so(line, tree):
    """Without one: one line, and an exit code."""
    (tree / "corpus").mkdir(exist_ok=True)
    (tree / "corpus" / "text.txt").write_text("a text\n" * 50)
    if "evaluate.py" in line and "--init_from" not in line:
        pytest.importorskip("lm_eval", reason="needs `make install-eval`")
    if line.startswith("python train.py"):
        shutil.copytree(tree / "data" / "readme", tree / "data" / "corpus_smollm", dirs_exist_ok=True)
    err = call(tree, line, code=1, HF_HUB_OFFLINE="1")
    messages = [text for text in err.splitlines() if "error: " in text]
    assert messages and ("Traceback" not in err or line.startswith("torchrun")), err  # torchrun prints its own
    assert any(word in messages[0] for word in ("network", "connect", "fetched")), err


def test_every_block_is_run():
    assert {kind for kind, _ in BLOCKS} == {"bash", "bash network", "python", ""}
    assert PAGE.count("```") == 2 * len(BLOCKS) and len(lines_of("bash network")) == 7
