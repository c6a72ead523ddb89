"""Weights of Hugging Face, read: the same function as `transformers`', or refused with the
reason."""

import json
import os
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from interop.huggingface import families
from interop.huggingface.hub import NAMES, is_pretrained
from interop.huggingface.read import read_huggingface
from interop.huggingface.write import write_pretrained
from layers.moe import balance_loss
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.generate import generate
from support.models import batch, error, gradients
from support.peers import CHARS, PEERS, edit_config, make_peer, read_model, save_tokenizer
from support.tolerances import FORWARD, GRADIENTS, roundings

ABSENT = {  # {peer: endings of the names of our parameters that theirs lacks}
    "Qwen2": ("o.bias", "gate.bias", "up.bias", "down.bias"),
    "Gemma 3": ("embed_scale.gain",),  # a constant there
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder} of every peer, saved by `transformers`."""
    root = tmp_path_factory.mktemp("peers")
    for name in PEERS:
        make_peer(name).save_pretrained(root / name)
    return {name: root / name for name in PEERS}


@pytest.fixture
def llama(folders, tmp_path):
    """A copy of LLaMA's folder, to be spoilt."""
    return shutil.copytree(folders["LLaMA"], tmp_path / "llama")


@pytest.mark.parametrize("name", PEERS)
def test_the_function_is_theirs(name, folders, tmp_path):
    """Logits, texts, and gradients of the cross-entropy, which are read as weights are, from a
    folder of their own."""
    peer, model, (idx, targets) = make_peer(name), read_model(folders[name]), batch()
    logits = peer(idx).logits
    assert error(model(idx)[0], logits) < FORWARD
    endings = ABSENT.get(name, ())
    absent = {key: p.numel() for key, p in model.named_parameters() if key.endswith(endings)}
    zeros = {key for key, p in model.named_parameters() if not p.any()}
    assert zeros == absent.keys() - {"embed_scale.gain"}
    padding = (-50 % 64) * 16 * (1 if model.head is None else 2)
    assert model.num_params() - padding - sum(absent.values()) == peer.num_parameters()
    expected = peer.generate(idx[:1], max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(model, idx[:1], 12, temperature=0), expected)

    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1).backward()
    with torch.no_grad():
        for p in peer.parameters():
            p.copy_(p.grad)
    peer.save_pretrained(tmp_path)
    wanted, found = read_huggingface(str(tmp_path))[1], gradients(model, idx, targets)[1]
    assert found.keys() == wanted.keys()
    for key in wanted:  # Gemma 3: 1 is added to what is read as a gain
        wanted[key] -= float(name == "Gemma 3" and key.endswith(".gain"))
    scale = max(wanted[key].abs().max() for key in wanted.keys() - absent.keys())
    for key, grad in found.items():
        assert key in absent or error(grad, wanted[key], floor=1e-2 * scale) < GRADIENTS, key


@pytest.mark.parametrize("name", ["GPT-2", "SmolLM"])
def test_names_without_the_prefix_and_old_constants(name, folders, tmp_path):
    """Folders made by older versions: GPT-2's on the Hub has no "transformer.", and saves its
    causal masks."""
    folder = shutil.copytree(folders[name], tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    prefix = "transformer." if name == "GPT-2" else "model."
    tensors = {key.removeprefix(prefix): t for key, t in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((2,), torch.inf)
    tensors["lm_head.weight"] = tensors[
        "wte.weight" if name == "GPT-2" else "embed_tokens.weight"
    ].clone()
    save_file(tensors, folder / "model.safetensors")
    rope = json.loads((folder / "config.json").read_text()).get("rope_parameters") or {}
    edit_config(folder, rope_parameters=None, rope_theta=rope.get("rope_theta"), rope_scaling={})
    idx = batch()[0]
    assert error(read_model(folder)(idx)[0], make_peer(name)(idx).logits) < FORWARD


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3"])
def test_several_files_and_half_precision(name, tmp_path):
    rounded, idx = make_peer(name).bfloat16(), batch()[0]
    rounded.save_pretrained(tmp_path, max_shard_size="4KB")
    peer = type(rounded).from_pretrained(tmp_path, dtype=torch.float32)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert error(read_model(tmp_path)(idx)[0], peer(idx).logits) < FORWARD
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(ValueError, match="it has no model-.*safetensors"):
        read_model(tmp_path)


@pytest.mark.parametrize("name", ["GPT-2", "SmolLM"])
def test_a_shorter_context(name, folders):
    peer = make_peer(name)
    model = read_model(folders[name], block_size=8, dropout=0.25)
    idx = batch(8)[0]
    assert (model.config.block_size, model.config.dropout) == (8, 0.25)
    assert read_model(folders[name], block_size=99).config.block_size == 32
    assert error(model(idx)[0], peer(idx).logits) < FORWARD


# ------------------------------------------------------------------------------------------ experts


def test_the_balance_loss_is_theirs():
    """For one layer and one sequence theirs is k times ours, k the experts of a token: of their
    shares, one for each place among the k, the sum is k, of ours 1. Over several sequences they
    take one mean, we a mean of each."""
    generator = torch.Generator().manual_seed(1)
    for n_expert, k in ((2, 1), (5, 2), (8, 8)):
        logits = torch.randn(1, 33, n_expert, generator=generator).requires_grad_()
        scores = logits.softmax(-1)
        ours = balance_loss(scores, scores.topk(k).indices)
        theirs = load_balancing_loss_func((logits[0],), n_expert, k)
        assert error(k * ours, theirs) < roundings(8)
        grads = [
            torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (k * ours, theirs)
        ]
        assert error(*grads, floor=1e-3) < GRADIENTS


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_names_of_version_4(name, tmp_path):
    """num_experts, rope_theta, sliding_window beside use_sliding_window; Mixtral's own defaults.
    Both names of the number of experts are written."""
    peer, idx = make_peer(name), batch()[0]
    peer.save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, rope_parameters=None, rope_theta=theirs["rope_parameters"]["rope_theta"])
    if name == "Qwen3-MoE":
        old = dict(
            num_experts=theirs["num_local_experts"], sliding_window=4096, use_sliding_window=False
        )
        edit_config(tmp_path, num_local_experts=None, **old)
    model = read_model(tmp_path)
    assert error(model(idx)[0], peer(idx).logits) < FORWARD
    write_pretrained(model, CHARS, tmp_path / "ours", check=False)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {written[key] for pair in families.SAME_KEYS.items() for key in pair} == {
        model.config.n_expert
    }
    left_out = ("rope_parameters", "rms_norm_eps", "norm_topk_prob")
    bare = families.config_from_theirs({key: v for key, v in theirs.items() if key not in left_out})
    if name == "Mixtral":
        assert (bare.rope_theta, bare.norm_eps, bare.router_norm) == (1e6, 1e-5, True)
    else:
        assert (bare.rope_theta, bare.norm_eps, bare.router_norm) == (1e4, 1e-6, False)


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("key", families.NEUTRAL)
def test_each_part_that_we_lack_is_refused(key, folders):
    theirs = json.loads((folders["GPT-2"] / "config.json").read_text())
    value = False if key == "scale_attn_weights" else 0.5
    with pytest.raises(ValueError, match=f"parts that this model lacks: {key}={value}"):
        families.config_from_theirs(theirs | {key: value})


def test_heads(folders):
    """Qwen3's are 128 wide where it does not say, and a remainder of n_embd/n_head is no
    default."""
    theirs = json.loads((folders["Qwen3"] / "config.json").read_text())
    del theirs["head_dim"]
    assert families.config_from_theirs(theirs).head_size == 128
    assert families.config_from_theirs(theirs | dict(hidden_size=18, head_dim=4)).head_size == 4
    assert families.config_from_theirs(theirs | dict(hidden_size=16, head_dim=4)).head_size == 0


def change(name, edit):
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = edit(tensors[name])
        save_file(tensors, folder / "model.safetensors")

    return spoil


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def as_run(checkpoint, config):
    def spoil(folder):
        (folder / checkpoint).touch()
        (folder / "config.json").write_text(config)

    return spoil


def edit(**changes):
    return lambda folder: edit_config(folder, **changes)


FILE = "model.safetensors"
NORM = "model.norm.weight"
FEW = dict(model_type="mixtral", num_local_experts=2)
BAD = {  # how LLaMA's folder is spoilt, and words of the refusal
    "sliding window": (edit(sliding_window=16), "parts that this model lacks: sliding_window=16"),
    "layers with windows": (
        edit(layer_types=["sliding_attention", "full_attention"]),
        "layer_types sliding_attention",
    ),
    "layers with windows by default": (
        edit(model_type="gemma3_text"),
        "lacks: layer_types with sliding_attention",
    ),
    "another scale of attention": (
        edit(model_type="gemma3_text", layer_types=["full_attention"] * 2),
        "query_pre_attn_scalar=256 head_dim=4",
    ),
    "scaled RoPE": (
        edit(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0)),
        "RoPE llama3",
    ),
    "old scaled RoPE": (
        edit(rope_parameters=None, rope_scaling=dict(type="linear", factor=2.0)),
        "RoPE linear",
    ),
    "experts without a number": (
        edit(model_type="mixtral", num_experts_per_tok=2),
        "lacks num_local_experts",
    ),
    "no expert's tensors": (
        edit(**FEW, num_experts_per_tok=1),
        "layers.0.block_sparse_moe.gate.weight is missing",
    ),
    "another family": (edit(model_type="mamba"), "model_type='mamba' gpt2 llama qwen3"),
    "half of the biases": (edit(attention_bias=True), "attention_bias=True mlp_bias=False"),
    "another activation": (edit(hidden_act="gelu"), "hidden_act=gelu silu"),
    "a size of the wrong type": (edit(num_hidden_layers="two"), "n_layer='two'"),
    "RoPE of the wrong type": (edit(rope_parameters="fast"), ".json damaged"),
    "another width": (edit(intermediate_size=32), "gate_proj [24, 16]"),
    "more blocks": (edit(num_hidden_layers=3), "layers.2 missing"),
    "millions of blocks": (edit(num_hidden_layers=10**6), "n_layer=1000000 10,000"),
    "old weights": (
        lambda folder: (folder / FILE).rename(folder / "x.bin"),
        f"no {FILE} .bin files are not read",
    ),
    "cut off": (lambda folder: os.truncate(folder / FILE, 5000), f"{FILE} is damaged"),
    "another shape": (change(NORM, lambda t: t[:3]), "norm.weight [3]"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config is no JSON": (write("config.json", "{"), "config.json is damaged"),
    "index with strange files": (
        write("model.safetensors.index.json", '{"weight_map": {"a": 3}}'),
        ".json files is damaged",
    ),
    "tokenizer without a model": (
        write("tokenizer.json", '{"version": "1.0"}'),
        "tokenizer cannot be read",
    ),
    "no model": (write("config.json", "{}"), "no config.json of a model"),
    "a run": (as_run("last.pt", '{"model": {}}'), "it is a run: train.py takes last.pt"),
    "a network of another version": (
        write("config.json", '{"model_type": "nanodnt", "network": {"x": 1}}'),
        "model_config has ['x'], unknown to this version",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_in_one_line(case, llama):
    spoil, words = BAD[case]
    spoil(llama)
    with pytest.raises(ValueError) as caught:
        read_model(llama)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{llama} cannot be used: ")
    assert [word for word in words.split() if word not in message] == [], message


def test_a_larger_tokenizer_is_refused(llama):
    save_tokenizer(Tokenizer.meta_for("bytes"), llama)
    with pytest.raises(ValueError, match="its tokenizer has 257 tokens, its model only 50"):
        read_model(llama)


def test_what_a_name_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "run").mkdir(parents=True)
    assert all(
        map(
            is_pretrained,
            (*NAMES, "out/run", "out", "HuggingFaceTB/SmolLM-135M", "Qwen/Qwen3-0.6B"),
        )
    )
    others = ("scratch", "resum", "out/typo", "out/run/last.pt", "a/b/c", "a/b.pt", "/a/b", "")
    assert not any(map(is_pretrained, others))


def test_without_a_network(monkeypatch):
    import huggingface_hub

    def fail(name, **how):
        raise OSError("no route\nto the host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    words = r"is no folder, and could not be fetched \(OSError: no route\): check name and network$"
    with pytest.raises(ValueError, match=f"^openai-community/gpt2 {words}"):
        read_huggingface("openai-community/gpt2")
