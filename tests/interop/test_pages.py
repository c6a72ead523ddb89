"""Commands and Python of docs/{use,fine_tuning,python,from_nanogpt}.md, and of the tokenizer in
docs/runs.md, in a copy of the tree with a small run in the quickstart's place."""

import re
import shutil
import sys

import numpy as np
import pytest

from support import nanogpt
from support.pages import load
from support.prepared import needs_gpt2
from support.runs import ROOT
from support.trees import call, copy_tree

pytestmark = pytest.mark.house
KINDS = ("bash", "bash network", "bash illustration", "python", "python illustration", "")
# of a step of a run that a page starts
SHORT = " --max_iters=1 --batch_size=4 --eval_tokens=256 --compile=False --device=cpu"


def blocks_of(page: str, start: str = "") -> list:
    """[(kind, text)] of the blocks of docs/PAGE.md from a text on, all of which are known."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    text = text[text.index(start) :]
    found = re.findall(r"```([^\n]*)\n(.*?)```", text, re.DOTALL)
    assert text.count("```") == 2 * len(found) and {kind for kind, _ in found} <= set(KINDS)
    return found


USE, FINE_TUNING = blocks_of("use"), blocks_of("fine_tuning")
FROM_NANOGPT = blocks_of("from_nanogpt")
NETWORK = [
    line for kind, block in USE if kind == "bash network" for line in block.splitlines() if line
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with a run of a small DNT in out/quickstart, on bytes of the README."""
    root = copy_tree(tmp_path_factory.mktemp("pages") / "tree")
    call(root, "python data/local/prepare.py --input=README.md --tokenizer=bytes --name=readme")
    small = dict(
        n_layer=2, n_head=2, n_embd=32, block_size=128, batch_size=4, max_iters=20, warmup_iters=5
    )
    small |= dict(eval_interval=20, eval_tokens=512, compile=False, device="cpu", dataset="readme")
    flags = " ".join(f"--{name}={value}" for name, value in small.items())
    call(root, f"python train.py config/quickstart.py {flags}")
    return root


@pytest.mark.deep
def test_use_from_beginning_to_end(tree):
    printed = {}
    for kind, block in USE:
        for line in block.splitlines() if kind == "bash" else []:
            printed[line] = call(tree, line)
        if kind == "python":
            printed[block] = call(tree, [sys.executable, "-c", block])
        if kind == "":
            command, *shown = block.splitlines()
            assert call(tree, command.removeprefix("$ "), code=1).splitlines() == shown
    commands = list(printed)
    assert (len(commands), len(NETWORK)) == (12, 6)
    assert "as nanodnt in float32: exported/quickstart" in printed[commands[0]]
    assert "import " in printed[commands[1]] and "LlamaConfig" in commands[2]
    assert "vocabulary 257" in printed[commands[3]] and "bytes tokenizer" in printed[commands[3]]
    assert "weights: models/llama" in printed[commands[4]] and printed[commands[5]].startswith(
        "The"
    )
    assert "as llama in float32: exported/llama" in printed[commands[6]]
    for text in ("text README.md", "text docs/runs.md", "text docs_llama", "bits_per_byte"):
        assert text in printed[commands[-1]], printed[commands[-1]]


@pytest.mark.deep
# that is as hellaswag's
@pytest.mark.parametrize("line", [line for line in NETWORK if "dyt15" not in line])
def test_what_needs_a_network_says_so(line, tree):
    """Without one: one line, and an exit code."""
    (tree / "corpus").mkdir(exist_ok=True)
    (tree / "corpus" / "text.txt").write_text("a text\n" * 50)
    if "evaluate.py" in line and "--init_from" not in line:
        pytest.importorskip("lm_eval", reason="needs `make install-eval`")
    if line.startswith("python train.py"):
        shutil.copytree(
            tree / "data" / "readme", tree / "data" / "corpus_smollm", dirs_exist_ok=True
        )
    err = call(tree, line, code=1, HF_HUB_OFFLINE="1")
    messages = [text for text in err.splitlines() if "error: " in text]
    assert messages and "Traceback" not in err, err
    assert any(word in messages[0] for word in ("network", "connect", "fetched")), err


def test_from_python(tree):
    program = "\n".join(block for kind, block in blocks_of("python") if kind == "python")
    program = program.replace("dataset=pystdlib", "dataset=readme")
    printed = call(tree, [sys.executable, "-c", program])
    losses = re.findall(r"^[012] (\d\.\d+)$", printed, re.MULTILINE)
    assert printed.count("import ") == 2 and len(losses) == 3
    # at first that of a byte that is drawn evenly
    assert float(losses[0]) == pytest.approx(np.log(257), abs=0.3)


@pytest.mark.deep
def test_a_tokenizer_of_ones_own(tree):
    (_, program), (_, commands), *_ = blocks_of("runs", "**A tokenizer of your own.**")
    call(tree, [sys.executable, "-c", program])
    prepare, train = commands.splitlines()
    prepared = call(tree, prepare)
    assert "json tokenizer, vocabulary 2,048" in prepared and "no end of text" not in prepared
    assert "done at step 1" in call(tree, train + SHORT)


# ------------------------------------------------------------------------------------ from nanoGPT


def test_the_config_of_the_page_is_nanogpts(tmp_path):
    (ported,) = (block for kind, block in FROM_NANOGPT if kind == "python")
    file = tmp_path / "ported.py"
    file.write_text(ported.replace('base = "', f'base = "{ROOT}/config/'))
    theirs = "--eval_interval=1000", "--log_interval=10", "--wandb_log=True"
    assert load(str(file)) == load(str(ROOT / "config" / "nanogpt" / "gpt2.py"), *theirs)


@pytest.mark.deep
@needs_gpt2
def test_moving_in_from_nanogpt(tree):
    """The config, tokens and checkpoint of the page, each by its command."""
    theirs = tree.parent / "nanoGPT"
    (nanogpt.write_tokens(theirs / "data" / "openwebtext") / "meta.pkl").unlink()
    model = nanogpt.train(nanogpt.write_tokens(theirs / "data" / "shakespeare_char"), steps=1)
    nanogpt.save(theirs / "out-shakespeare-char", model, dataset="shakespeare_char")
    (_, _), (_, shown), (_, ported), (_, tokens), (_, checkpoint), *_ = FROM_NANOGPT

    config = tree / "config" / "train_gpt2.py"
    config.write_text(nanogpt.TRAIN_GPT2)
    command = "python train.py config/train_gpt2.py"
    assert call(tree, command, code=2) == shown
    config.write_text(ported)
    gpt2_ids, characters = tokens.splitlines()
    assert "train 4,000 tokens, val 500 tokens; gpt2 tokenizer" in call(tree, gpt2_ids)
    assert "train 4,000 tokens, val 500 tokens; chars tokenizer" in call(tree, characters)
    small = SHORT + " --n_layer=1 --n_head=2 --n_embd=16 --block_size=32 --wandb_log=False"
    assert "done at step 1" in call(tree, command + small)

    train, sample, evaluate, export = checkpoint.splitlines()
    assert "done at step 1" in call(tree, train + SHORT)
    texts = call(tree, sample.replace("ROMEO:", "romeo ") + " --max_new_tokens=8")
    assert texts.count("romeo ") == 2
    assert "bits_per_byte" in call(tree, evaluate)
    assert "transformers computes the same" in call(tree, export)


# -------------------------------------------------------------------------------------- fine-tuning


def test_python_of_fine_tuning():
    (block,) = (block for kind, block in FINE_TUNING if kind == "python")
    exec(compile(block, "page", "exec"), {})


@pytest.mark.deep
def test_the_ten_minutes_of_fine_tuning(tree):
    """The commands of the first block, one after the other, with a model too small to learn the
    answers."""
    (block,) = (block for kind, block in FINE_TUNING if kind == "bash")
    made, prepared, trained, evaluated, chat = block.splitlines()
    assert "6,000 conversations" in call(tree, made)
    assert "train 5,692 examples" in call(tree, prepared)
    short = " --max_iters=100 --eval_tokens=4096 --batch_size=8 --compile=False"
    assert "done at step 100" in call(tree, trained + short)
    # auto: it goes on
    assert "done at step 101" in call(tree, trained + short.replace("=100", "=101"))
    assert "answers sft_example  exact_match" in call(tree, evaluated)
    assert call(tree, chat + " --max_new_tokens=12").count("\n") >= 2
    refused = call(
        tree,
        "python train.py config/sft/example.py --init_from=auto:nowhere --out_dir=out/x",
        code=1,
    )
    assert "init_from='auto:nowhere' names neither a run directory" in refused
