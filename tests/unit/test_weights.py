"""Weights: parity with `transformers`' GPT-2 and LLaMA, checkpoints into models, and Admin's profiled start values."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig
from nanodnt.weights import model_from_checkpoint, profile_admin
from support import reference
from support.models import (
    LAYERNORM_NET,
    LLAMA,
    LLAMA_NET,
    NET,
    POST,
    POST_NET,
    SIZE,
    batch,
    build,
    error,
    floats,
    gradients,
)


def peer_gpt2(**flags):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=50, n_positions=9, n_embd=16, n_layer=2, n_head=4)
    return perturb_peer(GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **flags)))


@torch.no_grad()
def perturb_peer(peer):
    torch.manual_seed(3)
    for name, p in peer.named_parameters():
        is_gain = "ln_" in name or "norm" in name
        p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else 0.35) + (is_gain and name.endswith("weight")))
    return peer.eval()


def peer_gradients(peer, idx, targets):
    F.cross_entropy(peer(idx).logits.flatten(0, 1), targets.flatten(), ignore_index=-1).backward()
    return {name: p.grad for name, p in peer.named_parameters()}


def compare_gradients(ours, theirs):
    """Compare {our parameter name: gradient}; the tables of `theirs` have no padding rows."""
    assert ours.keys() == theirs.keys()
    scale = max(g.abs().max() for g in theirs.values())
    for name, grad in ours.items():  # the gradient of k's bias is only rounding: softmax cannot see it
        n = len(theirs[name])
        assert error(grad[:n], theirs[name], floor=1e-2 * scale) < 1e-4, name
        assert not grad[n:].any(), name


def gpt2_in_our_names(theirs: dict) -> dict:
    """Parameters of theirs, or the gradients of these, under our names."""
    found = {}
    for name, t in theirs.items():
        name = name.removeprefix("transformer.").replace("h.", "blocks.", 1)
        t = t.T if t.ndim == 2 and name.startswith("blocks") else t  # Conv1D stores (in, out)
        if "ln_" in name:
            name = name.replace("weight", "gain").replace("ln_f", "final_norm")
            name = name.replace("ln_1", "attn.pre").replace("ln_2", "mlp.pre")
        name = name.replace("attn.c_proj", "attn.f.o").replace("mlp.c_fc", "mlp.f.up")
        name = name.replace("mlp.c_proj", "mlp.f.down")
        if "c_attn" in name:
            for part, third in zip("qkv", t.split(16), strict=True):
                found[name.replace("attn.c_attn", f"attn.f.{part}")] = third
        else:
            found[name] = t
    return found


@torch.no_grad()
def fill(model, weights):
    """Set the parameters; the tables of `weights` have no padding rows."""
    for name, p in model.named_parameters():
        p[: len(weights[name])].copy_(weights[name])


def test_gpt2_equals_transformers():
    peer, (idx, targets) = peer_gpt2(), batch()
    model = GPT(GPTConfig(**{**SIZE, "norm_eps": 1e-5}, n_layer=2, norm="layernorm", bias=True))
    fill(model, gpt2_in_our_names(dict(peer.named_parameters())))
    assert error(model(idx)[0], peer(idx).logits) < 1e-5
    theirs = gpt2_in_our_names(peer_gradients(peer, idx, targets))
    compare_gradients(gradients(model, idx, targets)[1], theirs)


def test_llama_equals_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, max_position_embeddings=9)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False)
    rope = dict(rope_parameters=dict(rope_type="default", rope_theta=500.0))
    peer, (idx, targets) = perturb_peer(LlamaForCausalLM(LlamaConfig(**sizes, **heads, **rope))), batch()
    names = {"wte.weight": "model.embed_tokens.weight", "final_norm.gain": "model.norm.weight"}
    names["head.weight"] = "lm_head.weight"
    for i in range(2):
        block, layer = f"blocks.{i}.", f"model.layers.{i}."
        names |= {f"{block}attn.f.{part}.weight": f"{layer}self_attn.{part}_proj.weight" for part in "qkvo"}
        names |= {f"{block}mlp.f.{part}.weight": f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        names[f"{block}attn.pre.gain"] = f"{layer}input_layernorm.weight"
        names[f"{block}mlp.pre.gain"] = f"{layer}post_attention_layernorm.weight"
    model = GPT(GPTConfig(**{**SIZE, "norm_eps": 1e-5}, n_layer=2, **LLAMA))
    theirs = peer.state_dict()
    fill(model, {ours: theirs[name] for ours, name in names.items()})
    assert error(model(idx)[0], peer(idx).logits) < 1e-5
    grads = peer_gradients(peer, idx, targets)
    compare_gradients(gradients(model, idx, targets)[1], {ours: grads[name] for ours, name in names.items()})


# ------------------------------------------------------------------------------------------------------- checkpoints


EXPERTS = dict(n_expert=4, n_expert_shared=1, router="sigmoid", balance="bias")


@pytest.mark.parametrize("flags", [dict(norm="dyt", dyt_alpha_attn=0.3), EXPERTS], ids=["DyT", "experts"])
def test_a_model_survives_a_checkpoint(flags):
    model = build(dict(LLAMA, **flags), dtype=torch.float32)
    checkpoint = dict(model_config=asdict(model.config), model=model.state_dict())
    copy = model_from_checkpoint(checkpoint, dropout=0.5)
    assert copy.config == replace(model.config, dropout=0.5)
    assert torch.equal(copy.eval()(batch()[0])[0], model(batch()[0])[0])


def test_a_checkpoint_without_the_flags_of_experts_is_dense():
    """One that an earlier version has written."""
    model = build(dict(), dtype=torch.float32)
    new = ("expert", "router", "balance")
    flags = {name: value for name, value in asdict(model.config).items() if not any(word in name for word in new)}
    assert len(flags) == len(asdict(model.config)) - 7
    copy = model_from_checkpoint(dict(model_config=flags, model=model.state_dict()))
    assert copy.config == model.config and torch.equal(copy.eval()(batch()[0])[0], model(batch()[0])[0])


@pytest.mark.parametrize(
    "flags, weights, words",
    (
        (dict(n_expert=4), dict(), "mlp.f.router.weight absent"),
        (dict(no_such_flag=1), dict(), "no_such_flag"),
        (dict(norm="rms"), dict(), "norm 'rms'"),
        (dict(n_layer=3), dict(), "blocks.2 absent"),
        (dict(n_layer=1), dict(), "blocks.1 absent"),
        (dict(mid_norm="both"), dict(), "mid.gain absent"),
        (dict(n_ff=24), dict(), "mlp.f.up.weight [64, 16] [24, 16]"),
        (dict(), dict(extra=torch.zeros(2)), "extra absent"),
        (dict(), {"wte.weight": None}, "wte.weight absent"),
    ),
    ids=str,
)
def test_a_checkpoint_that_does_not_fit_is_refused(flags, weights, words):
    model = build(dict(), dtype=torch.float32)
    checkpoint = dict(model_config=asdict(model.config) | flags, model=model.state_dict() | weights)
    with pytest.raises(ValueError) as caught:
        model_from_checkpoint(checkpoint)
    for word in words.split():
        assert word in str(caught.value), str(caught.value)


# -------------------------------------------------------------------------------------------------------------- Admin


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize(
    "flags, net",
    (
        (dict(), dict()),
        (dict(norm="layernorm", bias=True, init_std=0.3), LAYERNORM_NET),
        (dict(LLAMA, init="xavier", lns="branch", dropout=0.5), dict(LLAMA_NET, lns="branch")),
        (dict(pre_norm="both", mid_norm="attn"), dict(attn="pre mid post", mlp="pre post")),
    ),
    ids=str,
)
def test_admin_profiles_its_vectors(flags, net, training):
    idx = batch()[0]
    flags = {**SIZE, "n_layer": 3, **POST, **flags, "admin": True}
    model = GPT(GPTConfig(**flags)).double().train(training)
    before = floats(model)
    net = replace(NET, blocks=3, admin=True, **{**POST_NET, **net})
    expected = reference.admin_omegas(net, before, idx)
    profile_admin(model, idx)
    assert model.training == training == model.blocks[0].attn.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    after = floats(model)
    assert len(expected) == 6 and list(expected.values())[0] == 1.0
    assert len({round(omega, 9) for omega in expected.values()}) == 6
    for key, t in after.items():
        if key in expected:
            assert error(t, torch.full_like(t, expected[key])) < 1e-6, key
        else:
            assert torch.equal(t, before[key]), key
    profile_admin(model, idx)  # the result does not depend on the values before
    assert all(torch.equal(t, after[key]) for key, t in floats(model).items())


def test_admin_profiling_is_nothing_to_other_models():
    model = build(POST)
    before = floats(model)
    profile_admin(model, batch()[0])
    assert all(torch.equal(t, before[key]) for key, t in floats(model).items())
