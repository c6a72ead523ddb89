"""The code that an exported folder carries: loaded by `transformers`, it is our network and needs
nothing of ours."""

import copy
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from interop.huggingface.carry import ROOT, START, carried_files
from interop.huggingface.write import write_pretrained
from model import GPT, GPTConfig
from nanodnt.generate import generate
from support.depth import spread
from support.examples import starting_tokenizer
from support.models import LLAMA, POST, REPRESENTATIVES, S5, SIZE, build, error, network, tokens
from support.moe import backward
from support.peers import CHARS
from support.tolerances import LOSS, as_near, flat

LEARNED = dict(POST, norm="layernorm", bias=True, deepnorm=True)
ROTARY = dict(LLAMA, **S5, lns="norm")
EXPERTS = dict(
    LLAMA, gain="branch", n_expert=4, n_expert_shared=1, router="sigmoid", balance="bias"
)
EACH = pytest.mark.parametrize(
    "flags", [LEARNED, ROTARY, EXPERTS], ids=["learned positions", "rotary", "experts"]
)


def export(folder, model, meta=CHARS):
    write_pretrained(model, meta, folder, target="nanodnt", check=False)
    return folder


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def pair(tmp_path, flags, n_layer=2):
    """(our model, its copy as `transformers` loads it), in fp32."""
    ours = build(flags, n_layer, torch.float32)
    return ours, load(export(tmp_path / "exported", ours))


def greedy(model, *args, new=4, **options):
    return model.generate(*args, max_new_tokens=new, do_sample=False, **options)


def left_padded(rows, length):
    """(input_ids, attention_mask), both (B, length), of `rows`, each (T,)."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, 1
    return ids, mask


OURS = ("model", "vision", "layers", "nanodnt", "interop", "support")
CARRIED = carried_files()
ROWS = [tokens(n, seed=n) for n in (2, 5, 3)]


# --------------------------------------------------------------------------------- the same network


@pytest.mark.parametrize(
    "name", spread([*REPRESENTATIVES, "experts"], fast=[*REPRESENTATIVES][::4] + ["experts"])
)
@torch.no_grad()
def test_every_layout(name, tmp_path):
    ours, theirs = pair(tmp_path, EXPERTS if name == "experts" else network(name, 2)[0])
    idx = tokens(2, 7)
    logits, loss = ours(idx)[0], ours(idx[:, :-1], idx[:, 1:])[1]
    exact = copy.deepcopy(ours).double()
    output = theirs(idx, labels=idx)
    assert type(theirs).__module__.startswith("transformers_modules.")
    assert (logits.shape, output.logits.dtype) == ((2, 7, SIZE["vocab_size"]), torch.float32)
    right = flat(exact(idx)[0], exact(idx[:, :-1], idx[:, 1:])[1])
    assert as_near(flat(output.logits, output.loss), flat(logits, loss), right)
    assert torch.equal(
        greedy(theirs, idx[:, :3], new=5), generate(ours, idx[:, :3], 5, temperature=0)
    )
    ids, mask = left_padded(ROWS, 5)
    padded = theirs(ids, attention_mask=mask).logits
    for row, found in zip(ROWS, padded, strict=True):
        assert as_near(found[-len(row) :], ours(row[None])[0][0], exact(row[None])[0][0])


@EACH
@torch.no_grad()
def test_bf16(flags, tmp_path):
    ours, _ = pair(tmp_path, flags)
    theirs = load(tmp_path / "exported", dtype=torch.bfloat16)
    assert {p.dtype for p in theirs.parameters()} == {torch.bfloat16}
    idx = tokens(2, 7)
    assert torch.equal(theirs(idx).logits, ours.to(torch.bfloat16)(idx)[0])


def use_alone(folder, idx, path):
    """In a process that cannot import this repository: logits and a text, saved at `path`."""
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [
        p for p in sys.path if ".venv" in p or not os.path.realpath(p).startswith(str(ROOT))
    ]
    os.chdir(path.parent)
    assert not [name for name in OURS if importlib.util.find_spec(name)]
    torch.set_num_threads(1)  # a forked process has none of its parent's
    model = load(folder)
    torch.save((model(idx).logits, greedy(model, idx, new=3)), path)


def test_folder_alone(tmp_path):
    ours, idx = build(ROTARY, 2, torch.float32), tokens(2, 6)
    folder = export(tmp_path / "exported", ours)
    process = multiprocessing.get_context("fork").Process(
        target=use_alone, args=(folder, idx, tmp_path / "found.pt")
    )
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
    logits, text = torch.load(tmp_path / "found.pt")
    exact = copy.deepcopy(ours).double()(idx)[0]
    assert as_near(logits, ours(idx)[0], exact) and torch.equal(
        text, generate(ours, idx, 3, temperature=0)
    )


# --------------------------------------------------------------------------------------- generation


@EACH
def test_padded_batch_generates_what_its_rows_do(flags, tmp_path):
    """Greedily and by beams; and beams with a cache, which they reorder, find what they find
    without."""
    ours, theirs = pair(tmp_path, flags)
    ids, mask = left_padded(ROWS, 5)
    together = greedy(theirs, ids, attention_mask=mask)
    assert together.shape == (3, 9)
    beams = greedy(theirs, ids, attention_mask=mask, num_beams=3)
    for row, found, beam in zip(ROWS, together, beams, strict=True):
        assert torch.equal(found[5 - len(row) :], generate(ours, row[None], 4, temperature=0)[0])
        assert torch.equal(beam[5 - len(row) :], greedy(theirs, row[None], num_beams=3)[0])
    idx = tokens(2, 3)
    with_cache, without = (
        greedy(theirs, idx, new=6, num_beams=4, use_cache=use) for use in (True, False)
    )
    assert torch.equal(with_cache, without) and not torch.equal(
        with_cache, greedy(theirs, idx, new=6)
    )


@EACH
def test_continuing_a_cache(flags, tmp_path):
    """By one token and by several, with logits of all of them or of the last."""
    ours, theirs = pair(tmp_path, flags)
    idx = tokens(2, 8)
    expected, exact = ours(idx)[0], copy.deepcopy(ours).double()(idx)[0]
    first = theirs(idx[:, :3])
    cache = first.past_key_values
    assert cache.get_seq_length() == 3
    second = theirs(idx[:, 3:4], past_key_values=cache, attention_mask=torch.ones(2, 4))
    third = theirs(idx[:, 4:], past_key_values=cache)
    assert as_near(torch.cat([o.logits for o in (first, second, third)], dim=1), expected, exact)
    for keep, positions in ((1, [2]), (2, [1, 2]), (torch.tensor([0, 2]), [0, 2])):
        kept = theirs(idx[:, :3], logits_to_keep=keep).logits
        assert as_near(kept, expected[:, positions], exact[:, positions])
    assert theirs(idx, use_cache=False).past_key_values is None
    # generate takes whole sequences, and feeds what the cache lacks
    cache = theirs(idx[:, :3]).past_key_values
    assert torch.equal(
        greedy(theirs, idx[:, :5], past_key_values=cache),
        generate(ours, idx[:, :5], 4, temperature=0),
    )


# ------------------------------------------------------------------------ training, saving, loading


@EACH
def test_training(flags, tmp_path):
    """Our loss and gradients, whatever the padding; dropout is on."""
    ours, theirs = pair(tmp_path, flags)
    rows = [tokens(6, seed=3), tokens(4, seed=4)]
    ids, mask = left_padded(rows, 6)
    targets = torch.full((2, 6), -1)  # of our model, whose rows have their padding on the right
    idx = torch.zeros(2, 6, dtype=torch.long)
    for i, row in enumerate(rows):
        idx[i, : len(row)], targets[i, : len(row) - 1] = row, row[1:]
    expected, usual = backward(ours, idx, targets)
    exact = backward(copy.deepcopy(ours).double(), idx, targets)[1]
    labels = ids.masked_fill(mask == 0, -100)
    output = theirs.train()(ids, attention_mask=mask, labels=labels)
    output.loss.backward()
    assert output.past_key_values is None and error(output.loss, expected) < LOSS
    found = {name: p.grad for name, p in theirs.network.named_parameters()}
    assert as_near(found, usual, exact)
    assert all(name.endswith("choice_bias") for name, grad in found.items() if grad is None)
    # as Trainer accumulates
    summed = theirs(ids, attention_mask=mask, labels=labels, num_items_in_batch=16).loss
    assert error(summed, expected * 8 / 16) < LOSS
    right = theirs(
        idx, attention_mask=mask.flip(1), labels=idx.masked_fill(mask.flip(1) == 0, -100)
    ).loss
    assert error(right, expected) < LOSS
    theirs.config.network["dropout"] = 0.5
    dropping = type(theirs)(theirs.config).train()
    assert not torch.equal(dropping(ids).logits, dropping(ids).logits)
    assert torch.equal(dropping.eval()(ids).logits, dropping(ids).logits)


def test_biases_of_routers_are_not_trained(tmp_path):
    """However the model was made."""
    _, loaded = pair(tmp_path, EXPERTS)
    for model in (loaded, type(loaded)(loaded.config).train()):
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert frozen == {f"network.blocks.{i}.mlp.f.router.choice_bias" for i in range(2)}


@pytest.mark.parametrize("name", ["Admin", "sigmaReparam + HG + DP + bias", "experts"])
def test_saved_again(name, tmp_path):
    """What `transformers` writes loads again, code included, and has the same content."""
    ours, theirs = pair(tmp_path, EXPERTS if name == "experts" else network(name, 2)[0])
    theirs.save_pretrained(tmp_path / "saved")
    for file, text in CARRIED.items():
        assert (tmp_path / "saved" / file).read_text(encoding="utf-8") == text
    first, saved = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("exported", "saved")
    )
    assert first.keys() == saved.keys() and all(
        torch.equal(first[name], saved[name]) for name in first
    )
    again = load(tmp_path / "saved")
    assert torch.equal(again(tokens(2, 7)).logits, theirs(tokens(2, 7)).logits)
    assert again.config.network == theirs.config.network == vars(ours.config)


def test_config(tmp_path):
    """It survives saving; a new model of it has our initialisation, from torch's seed."""
    export(tmp_path / "exported", build(ROTARY, 2, torch.float32), starting_tokenizer())
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    config = AutoConfig.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    assert (config.bos_token_id, config.eos_token_id, config.dtype) == (1, 2, torch.float32)
    config.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {name: saved[name] for name in written} == written
    derived = type(config)(network=written["network"])
    assert (derived.hidden_size, derived.max_position_embeddings, derived.num_key_value_heads) == (
        16,
        9,
        2,
    )
    for seed in (5, 6):
        torch.manual_seed(seed)
        found = AutoModelForCausalLM.from_config(
            config, trust_remote_code=True
        ).network.state_dict()
        expected = GPT(GPTConfig(**config.network), seed=seed).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.deep
def test_our_own_network_still_compiles(tmp_path):
    """The copy uses the operators of layers/ops.py and layers/moe.py, which have the same names; so
    does a second."""
    ours, theirs = pair(tmp_path, dict(EXPERTS, **S5, lns="norm"))
    second = load(shutil.copytree(tmp_path / "exported", tmp_path / "second"))
    assert type(second) is not type(theirs)
    idx = tokens(2, 7)
    for network_ in (ours, theirs.network, second.network):
        compiled = torch.compile(network_, backend="aot_eager")
        loss = compiled(idx[:, :-1], idx[:, 1:])[1]
        assert error(loss, ours(idx[:, :-1], idx[:, 1:])[1]) < LOSS
        loss.backward()


# ----------------------------------------------------------------------------------------- refusals


def test_what_is_refused(tmp_path):
    _, theirs = pair(tmp_path, LEARNED)
    idx, ones = tokens(2, 4), torch.ones(2, 4, dtype=torch.long)
    hole, nothing = ones.clone(), ones.clone()
    hole[1, 1] = nothing[0] = 0
    for message, arguments in {
        "does not take inputs_embeds": dict(inputs_embeds=torch.zeros(2, 4, 16)),
        "does not take output_hidden_states": dict(output_hidden_states=True),
        "attention_mask with padding must be of the shape": dict(attention_mask=hole[:, 1:]),
        "padding between tokens": dict(attention_mask=hole),
        "a row without tokens": dict(attention_mask=nothing),
        "a sequence of 10 tokens does not fit block_size=9": dict(input_ids=tokens(2, 10)),
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            theirs(**dict(input_ids=idx) | arguments)
        assert "\n" not in str(caught.value)
    assert theirs(idx, position_ids=None, output_hidden_states=False).logits.shape == (2, 4, 50)


# ---------------------------------------------------------------------------------- what is carried


def test_carried_files():
    """The network's code, in flat files with relative imports, and else as it is here."""
    files = carried_files()
    reached = "attention cores draws ffn linear loss moe network".split()
    reached += "ops roles rules runtime scaling sharding slot".split()
    assert set(files) == {
        "modeling_nanodnt.py",
        "model.py",
        *(f"layers_{name}.py" for name in reached),
    }
    for name, text in files.items():
        path = {"modeling_nanodnt.py": f"{START.replace('.', '/')}.py"}.get(
            name, name.replace("layers_", "layers/")
        )
        ours, carried = (ROOT / path).read_text(encoding="utf-8").splitlines(), text.splitlines()
        changed = [(a, b) for a, b in zip(ours, carried, strict=False) if a != b]
        assert all(
            a.lstrip().startswith(("from layers.", "from model "))
            and b.lstrip().startswith("from .")
            for a, b in changed
        )


MODEL = "import math\nfrom layers.slot import (\n    Slot,\n)\nimport torch.nn as nn\n"
START_OF_FORK = "from transformers import x\nfrom model import GPT\n"
FORK = {
    "layers/__init__.py": "",
    "layers/slot.py": "import torch\n",
    "layers/unused.py": "from layers.slot import Slot\n",
    "model.py": MODEL,
    "nanodnt/__init__.py": "",
    "interop/huggingface/modeling_nanodnt.py": START_OF_FORK,
}


def made_up_tree(root, changes):
    """The source files FORK | changes below `root`."""
    for name, source in (FORK | changes).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def test_a_fork_is_carried(tmp_path):
    """New files in layers/ too, if anything reaches them."""
    late = (
        "def f():\n    from layers.norms.new import g as h  # late\n    import layerstack, models\n"
    )
    tree = made_up_tree(
        tmp_path, {"layers/slot.py": late, "layers/norms/new.py": "import triton\n"}
    )
    assert carried_files(tree) == {
        "model.py": MODEL.replace("layers.slot", ".layers_slot"),
        "layers_slot.py": late.replace("layers.norms.new", ".layers_norms_new"),
        "layers_norms_new.py": "import triton\n",
        "modeling_nanodnt.py": "from transformers import x\nfrom .model import GPT\n",
    }


def test_imports_that_cannot_be_carried(tmp_path):
    for i, line in enumerate(
        ["from layers import slot", "import layers.slot", "import math, layers.slot as s"]
    ):
        with pytest.raises(ValueError, match="cannot be exported: write") as caught:
            carried_files(made_up_tree(tmp_path / str(i), {"model.py": f"import math\n{line}\n"}))
        assert str(caught.value).startswith(f"model: `{line}` ") and "\n" not in str(caught.value)
