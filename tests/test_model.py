"""model.py against the equations (reference.py), against its peers in `transformers`, and against its own promises."""

import itertools
import sys
from dataclasses import asdict, replace

import pytest
import reference
import torch
import torch.nn.functional as F
from reference import Net

from model import GPT, GPTConfig, KVCache, Linear, rotary, sample_token

SIZE = dict(n_head=4, n_embd=16, block_size=9, vocab_size=50, norm_eps=1e-2)  # a large eps, so that its place shows
NET = Net(vocab=50, heads=4, kv_heads=4, blocks=1, eps=1e-2)
PRE = dict(attn="pre", mlp="pre")
S4 = dict(input_norm=True, qk_norm=True, mid_norm="both")
S5 = dict(S4, pre_norm="attn")
POST = dict(pre_norm="none", post_norm="both")
LLAMA = dict(pos="rope", rope_theta=500.0, n_kv_head=2, mlp="swiglu", n_ff=24, tie_weights=False)
LLAMA_NET = dict(theta=500.0, kv_heads=2, act="swiglu", tied=False)

# name: (flags of GPTConfig, the same network in the words of reference.Net). test_layouts.py holds each of these,
# and of its own SCHEMES, to the equations.
LAYOUTS = {
    "S1": (dict(), PRE),
    "S2": (dict(qk_norm=True), dict(PRE, qk_norm=True)),
    "S3": (dict(qk_norm=True, input_norm=True), dict(PRE, qk_norm=True, input_norm=True)),
    "S4": (S4, dict(attn="pre mid", mlp="pre mid", qk_norm=True, input_norm=True)),
    "S5": (S5, dict(attn="pre mid", mlp="mid", qk_norm=True, input_norm=True)),
    "input norm": (dict(input_norm=True), dict(PRE, input_norm=True)),
    "pre-LN, bias": (dict(norm="layernorm", bias=True), dict(PRE, kind="layer", norm_bias=True, linear_bias=True)),
    "pre-LN, no bias": (dict(norm="layernorm"), dict(PRE, kind="layer")),
    "rmsnorm, bias": (dict(bias=True), dict(PRE, linear_bias=True)),
    "post-LN": (dict(POST, norm="layernorm"), dict(attn="post", mlp="post", final=False, kind="layer")),
    "post-LN, bias": (
        dict(POST, norm="layernorm", bias=True),
        dict(attn="post", mlp="post", final=False, kind="layer", norm_bias=True, linear_bias=True),
    ),
    "sandwich": (dict(mid_norm="both"), dict(attn="pre mid", mlp="pre mid")),
    "dyt": (dict(norm="dyt"), dict(PRE, kind="dyt")),
    "dyt, beta": (dict(norm="dyt", dyt_bias=True), dict(PRE, kind="dyt", norm_bias=True)),
    "dyt, linear bias": (dict(norm="dyt", bias=True), dict(PRE, kind="dyt", linear_bias=True)),
    "dyt, S5": (
        dict(S5, norm="dyt", dyt_bias=True),
        dict(attn="pre mid", mlp="mid", qk_norm=True, input_norm=True, kind="dyt", norm_bias=True),
    ),
    "dyt, post": (dict(POST, norm="dyt"), dict(attn="post", mlp="post", final=False, kind="dyt")),
    "no norm": (dict(norm="none"), dict(final=False)),
    "no norm but qk": (dict(norm="none", qk_norm=True), dict(final=False, qk_norm=True)),
    "rope": (dict(pos="rope"), dict(PRE, theta=10000.0)),
    "rope, bias, untied": (
        dict(pos="rope", bias=True, tie_weights=False),
        dict(PRE, theta=10000.0, linear_bias=True, tied=False),
    ),
    "gqa": (dict(n_kv_head=2), dict(PRE, kv_heads=2)),
    "mqa, qk norm": (dict(n_kv_head=1, qk_norm=True), dict(PRE, kv_heads=1, qk_norm=True)),
    "relu, n_ff": (dict(mlp="relu", n_ff=24), dict(PRE, act="relu")),
    "relu2": (dict(mlp="relu2"), dict(PRE, act="relu2")),
    "swiglu, bias": (dict(mlp="swiglu", bias=True), dict(PRE, act="swiglu", linear_bias=True)),
    "untied": (dict(tie_weights=False), dict(PRE, tied=False)),
    "llama": (LLAMA, dict(PRE, **LLAMA_NET)),
    "llama, S5": (
        dict(LLAMA, **S5),
        dict(attn="pre mid", mlp="mid", qk_norm=True, input_norm=True, **LLAMA_NET),
    ),
}


@torch.no_grad()
def perturb(model, seed=0):
    """Random weights of every kind, away from their init: no gain is 1, no bias 0, so that an ignored one shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.empty(p.shape).normal_(generator=generator)
        if name.endswith((".gain", ".magnitude", ".direction", ".alpha", ".sigma")):
            p.copy_(1 + 0.3 * noise)
        elif name.endswith(".bias"):
            p.copy_(0.3 * noise)
        else:  # matrices keep the size of their input; embeddings are of size 1
            p.copy_(noise if name.startswith("w") else noise * p.shape[1] ** -0.5)
    model.power_iteration()  # u and v of σReparam belong to these matrices
    return model


def build(flags, n_layer=2, dtype=torch.float64):
    return perturb(GPT(GPTConfig(**{**SIZE, "n_layer": n_layer, **flags}))).to(dtype).eval()


def tokens(*shape, vocab=50, seed=1):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def batch(T=7):
    """idx and targets (2, T); two targets are ignored."""
    idx, targets = tokens(2, T), tokens(2, T, seed=2)
    targets[0, 3] = targets[1, 0] = -1
    return idx, targets


def error(ours, theirs, floor=1e-9):
    """Largest difference, relative to the largest entry of `theirs` (or to `floor`, if that is all zeros)."""
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp(min=floor)).item()


def floats(model):
    """{name: float64 copy} of every parameter and buffer."""
    return {name: t.detach().double().clone() for name, t in model.state_dict().items()}


def gradients(model, *args):
    model.zero_grad(set_to_none=True)
    loss = model(*args)[1]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------------------- 1. layouts against their equations


def compare_with_equations(flags, net, dtype, tolerance):
    model, (idx, targets) = build(flags, net.blocks, dtype), batch()
    logits, loss = reference.forward(net, floats(model), idx, targets)
    ours, none = model(idx)
    assert none is None and ours.dtype == dtype and ours.shape == (2, 7, 50)
    assert error(ours, logits) < tolerance
    none, ours = model(idx, targets)
    assert none is None and ours.shape == ()
    assert error(ours, loss) < tolerance


BRANCHES = {"both": ("attn", "mlp"), "attn": ("attn",), "mlp": ("mlp",), "none": ()}


@pytest.mark.parametrize("kind, net_kind", (("rmsnorm", "rms"), ("dyt", "dyt")))
def test_every_placement_is_the_equation(kind, net_kind):
    for choice in itertools.product(BRANCHES, repeat=3):
        flags = dict(zip(("pre_norm", "mid_norm", "post_norm"), choice, strict=True))
        placed = dict(zip(("pre", "mid", "post"), (BRANCHES[c] for c in choice), strict=True))
        attn, mlp = (" ".join(p for p, branches in placed.items() if b in branches) for b in ("attn", "mlp"))
        net = dict(attn=attn, mlp=mlp, final="mlp" not in placed["post"], kind=net_kind)
        compare_with_equations(dict(flags, norm=kind), replace(NET, **net), torch.float64, 1e-10)


# -------------------------------------------------------------------------------------------- 2. peers as oracles


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
    """`theirs` has our names and, for tables, no padding rows."""
    assert ours.keys() == theirs.keys()
    scale = max(g.abs().max() for g in theirs.values())
    for name, grad in ours.items():  # that of k's bias is rounding alone: softmax cannot see it
        n = len(theirs[name])
        assert error(grad[:n], theirs[name], floor=1e-2 * scale) < 1e-4, name
        assert not grad[n:].any(), name


def test_gpt2_equals_transformers():
    peer, (idx, targets) = peer_gpt2(), batch()
    config = GPTConfig(**{**SIZE, "norm_eps": 1e-5}, n_layer=2, norm="layernorm", bias=True)
    model = GPT(config)
    model.load_gpt2(peer.state_dict())
    assert error(model(idx)[0], peer(idx).logits) < 1e-5

    grads, theirs = peer_gradients(peer, idx, targets), {}
    for name, grad in grads.items():
        name = name.removeprefix("transformer.").replace("h.", "blocks.", 1)
        grad = grad.T if grad.ndim == 2 and name.startswith("blocks") else grad  # Conv1D stores (in, out)
        if "ln_" in name:
            name = name.replace("weight", "gain").replace("ln_f", "final_norm")
            name = name.replace("ln_1", "attn.pre").replace("ln_2", "mlp.pre")
        name = name.replace("attn.c_proj", "attn.f.o").replace("mlp.c_fc", "mlp.f.up")
        name = name.replace("mlp.c_proj", "mlp.f.down")
        if "c_attn" in name:
            for part, third in zip("qkv", grad.split(16), strict=True):
                theirs[name.replace("attn.c_attn", f"attn.f.{part}")] = third
        else:
            theirs[name] = grad
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
    with torch.no_grad():
        for name, p in model.named_parameters():
            p[: len(theirs[names[name]])].copy_(theirs[names[name]])
    assert error(model(idx)[0], peer(idx).logits) < 1e-5
    grads = peer_gradients(peer, idx, targets)
    compare_gradients(gradients(model, idx, targets)[1], {ours: grads[name] for ours, name in names.items()})


def test_from_pretrained_reads_a_saved_folder(tmp_path):
    peer, idx = peer_gpt2(layer_norm_epsilon=1e-3), batch()[0]
    peer.save_pretrained(tmp_path)
    model = GPT.from_pretrained(str(tmp_path), dropout=0.25)
    assert model.config.dropout == 0.25 and model.config.vocab_size == 50
    assert error(model.eval()(idx)[0], peer(idx).logits) < 1e-5


@pytest.mark.parametrize(
    "flags",
    (
        dict(n_inner=24),
        dict(activation_function="relu"),
        dict(scale_attn_weights=False),
        dict(scale_attn_by_inverse_layer_idx=True),
        dict(tie_word_embeddings=False),
    ),
    ids=lambda flags: next(iter(flags)),
)
def test_from_pretrained_copies_or_refuses_a_variant_of_gpt2(tmp_path, flags):
    """A local folder may hold any GPT2LMHeadModel: what cannot be represented must not come out silently different."""
    peer, idx = peer_gpt2(**flags), batch()[0]
    peer.save_pretrained(tmp_path)
    try:
        model = GPT.from_pretrained(str(tmp_path))
    except ValueError as e:
        assert next(iter(flags)) in str(e)
    else:
        assert error(model(idx)[0], peer(idx).logits) < 1e-5


def test_from_pretrained_says_what_is_missing(tmp_path, monkeypatch):
    missing = str(tmp_path / "no-such-model")
    with pytest.raises(ValueError, match=r"no-such-model could not be fetched \(.+\): check the name and the network"):
        GPT.from_pretrained(missing)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        GPT.from_pretrained(missing)


# -------------------------------------------------------------------------------- 3. loss, ignored targets, padding


@pytest.mark.parametrize("tied", (True, False))
def test_padding_has_no_influence(tied):
    model, (idx, targets) = build(dict(tie_weights=tied)), batch()
    table = model.wte.weight if tied else model.head.weight
    assert table.shape == (64, 16)
    logits, (loss, grads) = model(idx)[0], gradients(model, idx, targets)
    with torch.no_grad():
        model.wte.weight[50:] = table[50:] = 1e4
    assert torch.equal(model(idx)[0], logits)
    after, after_grads = gradients(model, idx, targets)
    assert torch.equal(after, loss)
    for name, grad in grads.items():
        assert torch.equal(after_grads[name], grad), name
    for name in ("wte.weight",) if tied else ("wte.weight", "head.weight"):
        assert not grads[name][50:].any() and grads[name][:50].any()
    for temperature in (0, 1.0, 100.0):
        out = model.generate(tokens(64, 2), 3, temperature, generator=torch.Generator().manual_seed(0))
        assert out.max() < 50


@pytest.mark.parametrize("vocab, padded", ((1, 64), (64, 64), (65, 128), (50257, 50304)))
def test_vocabulary_is_padded_to_64(vocab, padded):
    assert GPTConfig(vocab_size=vocab).padded_vocab_size == padded


def test_loss_is_the_mean_over_the_targets_that_count():
    model, (idx, _) = build(dict()), batch()
    log_p = torch.log(reference.softmax(model(idx)[0]))
    targets = torch.full((2, 7), -1)
    targets[0, 2], targets[1, 6], targets[1, 5] = 4, 0, 49
    expected = -(log_p[0, 2, 4] + log_p[1, 6, 0] + log_p[1, 5, 49]) / 3
    assert error(model(idx, targets)[1], expected) < 1e-12


def test_all_targets_ignored_is_a_zero_loss():
    loss, grads = gradients(build(dict()), batch()[0], torch.full((2, 7), -1))
    assert loss == 0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads.values())


# ------------------------------------------------------------------------------------------------- 4. properties


def test_a_parameter_without_a_role_raises():
    model = build(dict())
    model.blocks[1].extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"blocks\.1\.extra\.weight .*param_roles"):
        model.roles()
    model = build(dict())
    model.blocks[0].extra = Linear(2, 2, "no_such_role")
    with pytest.raises(ValueError, match=r"blocks\.0\.extra\.weight has role no_such_role"):
        model.roles()


def scaled(flags, factors):
    """Logits before and after multiplying, in every block, the weights named in `factors`."""
    model, idx = build(dict(flags, norm_eps=1e-14)), batch()[0]
    before = model(idx)[0]
    with torch.no_grad():
        for block in model.blocks:
            for name, factor in factors.items():
                block.get_submodule(name).weight.mul_(factor)
    return error(model(idx)[0], before)


@pytest.mark.parametrize(
    "with_norm, without, factors",
    (
        (dict(qk_norm=True), dict(), {"attn.f.q": 3.0, "attn.f.k": 0.2}),
        (dict(qk_norm=True, pos="rope"), dict(pos="rope"), {"attn.f.q": 0.1, "attn.f.k": 7.0}),
        (dict(mid_norm="both"), dict(), {"attn.f.o": 3.0, "mlp.f.down": 0.2}),
        (dict(mid_norm="attn"), dict(mid_norm="mlp"), {"attn.f.o": 5.0}),
        (dict(mid_norm="mlp"), dict(mid_norm="attn"), {"mlp.f.down": 5.0}),
        (dict(mid_norm="both", mlp="relu"), dict(mlp="relu"), {"mlp.f.up": 5.0}),  # ReLU is homogeneous
        (dict(mid_norm="both"), dict(), {"attn.f.v": 5.0}),
    ),
)
def test_a_norm_ignores_the_scale_of_the_matrix_before_it(with_norm, without, factors):
    assert scaled(with_norm, factors) < 1e-9
    assert scaled(without, factors) > 1e-3


@pytest.mark.parametrize("flags", (dict(), dict(norm="layernorm"), dict(norm="dyt"), LLAMA, dict(LLAMA, **S4)))
def test_a_pre_norm_gain_folds_into_the_matrices_after_it(flags):
    model, idx = build(dict(flags, tie_weights=False)), batch()[0]
    before = model(idx)[0]
    pairs = [(model.final_norm, [model.head])]
    for block in model.blocks:
        attn, mlp = block.attn.f, block.mlp.f
        pairs += [(block.attn.pre, [attn.q, attn.k, attn.v])]
        pairs += [(block.mlp.pre, [mlp.up] if mlp.gate is None else [mlp.up, mlp.gate])]
    with torch.no_grad():
        for slot, matrices in pairs:
            for matrix in matrices:
                matrix.weight.mul_(slot.gain)
            slot.gain.fill_(1)
    assert error(model(idx)[0], before) < 1e-12


def test_rope_sees_relative_positions_only():
    torch.manual_seed(0)
    model, x = build(dict(pos="rope", qk_norm=True)), torch.randn(2, 6, 16, dtype=torch.float64)
    y, shifted, stretched = (
        model.blocks[0](x, rotary(positions, head_dim=4, theta=10000.0))
        for positions in (torch.arange(6), torch.arange(6) + 11, torch.arange(6) * 2)
    )
    assert error(shifted, y) < 1e-5 < 1e-3 < error(stretched, y)


# ------------------------------------------------------------------------------------------------ 5. initialisation

WIDE = dict(n_layer=3, n_head=4, n_embd=192, block_size=256, vocab_size=640, pos="learned", tie_weights=False)
GPT2_FACTOR, DEPTH_FACTORS = [6**-0.5] * 3, [2**-0.5, 4**-0.5, 6**-0.5]  # 1/√(2L), 1/√(2ℓ)
XAVIER = {"attn": (2 / (192 + 192)) ** 0.5, "mlp": (2 / (192 + 768)) ** 0.5}


@pytest.mark.parametrize(
    "flags, attn, mlp, table, factors",
    (
        (dict(), 0.02, 0.02, 0.02, GPT2_FACTOR),
        (dict(residual_init="plain", init_std=0.05), 0.05, 0.05, 0.05, [1.0] * 3),
        (dict(residual_init="depth"), 0.02, 0.02, 0.02, DEPTH_FACTORS),
        (dict(init="xavier", residual_init="plain"), XAVIER["attn"], XAVIER["mlp"], 0.02, [1.0] * 3),
        (dict(init="xavier", mlp="swiglu"), XAVIER["attn"], XAVIER["mlp"], 0.02, GPT2_FACTOR),
        (dict(init="xavier", residual_init="depth"), XAVIER["attn"], XAVIER["mlp"], 0.02, DEPTH_FACTORS),
    ),
    ids=("gpt2", "plain", "depth", "xavier", "xavier gpt2", "xavier depth"),
)
def test_initial_standard_deviations(flags, attn, mlp, table, factors):
    """`attn`, `mlp`, `table`: std of attention, FFN, and embeddings with the head; `factors` on o and down by block."""
    model = GPT(GPTConfig(**WIDE, **flags))
    expected = {"wte.weight": table, "wpe.weight": table, "head.weight": table}
    for i, factor in enumerate(factors):
        expected |= {f"blocks.{i}.attn.f.{part}.weight": attn for part in "qkv"}
        expected |= {f"blocks.{i}.mlp.f.{part}.weight": mlp for part in ("gate", "up")}
        expected |= {f"blocks.{i}.attn.f.o.weight": attn * factor, f"blocks.{i}.mlp.f.down.weight": mlp * factor}
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    for name, p in matrices.items():
        n, z = p.numel(), p / expected[name]
        assert abs(z.mean()) < 5 / n**0.5, name
        assert abs(z.std() - 1) < 5 / (2 * n) ** 0.5, name
        assert abs((z**4).mean() - 3) < 5 * (96 / n) ** 0.5, name  # a normal distribution, not a uniform one
    corners = [p[0, 0].item() for p in matrices.values()]
    assert len(set(corners)) == len(corners)  # no two matrices start alike


def test_gains_start_at_one_biases_at_zero():
    for norm in ("layernorm", "dyt"):
        model = GPT(GPTConfig(**SIZE, n_layer=2, norm=norm, bias=True, **S4))
        kinds = {"gain": 1.0, "bias": 0.0, "alpha": 1.0}
        vectors = {name: p for name, p in model.named_parameters() if p.ndim == 1}
        assert {name.rsplit(".")[-1] for name in vectors} == (kinds.keys() if norm == "dyt" else {"gain", "bias"})
        for name, p in vectors.items():
            assert (p == kinds[name.rsplit(".")[-1]]).all(), name


DYT_TABLE = {
    1024: (1, 1),
    2048: (1, 0.5),
    4096: (0.8, 0.2),
    5120: (0.6, 0.15),
    8192: (0.2, 0.05),
}  # the paper's, by width


@pytest.mark.parametrize(
    "width, flags, attention, other",
    [(width, dict(), *alphas) for width, alphas in DYT_TABLE.items()]
    + [(256, dict(), 1, 1), (768, dict(), 1, 1), (16384, dict(), 0.2, 0.05)]
    + [(4096, dict(dyt_alpha_attn=0.7), 0.7, 0.2), (4096, dict(dyt_alpha_other=0.3), 0.8, 0.3)],
)
def test_dyt_alpha_by_width(width, flags, attention, other):
    places = dict(norm="dyt", mid_norm="both", post_norm="attn", input_norm=True)
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=1, n_head=8, n_embd=width, vocab_size=64, **places, **flags))
    block = model.blocks[0]
    others = (model.input_norm, block.attn.mid, block.attn.post, block.mlp.pre, block.mlp.mid, model.final_norm)
    assert block.attn.pre.init_alpha == attention
    assert [slot.init_alpha for slot in others] == [other] * 6


def test_dyt_alpha_reaches_the_parameter():
    model = GPT(GPTConfig(**SIZE, n_layer=1, norm="dyt", dyt_alpha_attn=0.75, dyt_alpha_other=0.25))
    alphas = {name: p for name, p in model.named_parameters() if name.endswith("alpha")}
    assert {p.shape for p in alphas.values()} == {(1,)}
    assert {name: p.item() for name, p in alphas.items()} == {
        "blocks.0.attn.pre.alpha": 0.75,
        "blocks.0.mlp.pre.alpha": 0.25,
        "final_norm.alpha": 0.25,
    }


def test_a_seed_means_the_same_weights_whatever_the_global_generator_does():
    config = GPTConfig(**SIZE, n_layer=2, **LLAMA)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = GPT(config, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = GPT(config, seed=5), GPT(config, seed=6)
    for (name, p), q, r in zip(model.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert torch.equal(p, r) == (p.ndim == 1), name
    other.init_weights(5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


# -------------------------------------------------------------------------------------------------------- 6. counts


@pytest.mark.parametrize(
    "d, heads, depth, millions",  # the V shapes with GPT-2's vocabulary
    (
        (768, 12, 12, 123.6),
        (1280, 20, 36, 772.2),
        (1536, 24, 48, 1436.2),
        (1024, 16, 24, None),
        (1280, 16, 32, None),
    ),
)
def test_counts_of_the_dnt_models(d, heads, depth, millions):
    config = GPTConfig(n_layer=depth, n_head=heads, n_embd=d, vocab_size=50257, **S5)
    with torch.device("meta"):
        model = GPT(config)
    matrices, table, gains = 12 * d**2 * depth, 50304 * d, depth * (3 * d + 2 * d // heads) + 2 * d
    assert model.num_params(positions=False) == matrices + table + gains
    assert model.num_params() == matrices + table + gains + 1024 * d
    assert model.flops_per_token() == 6 * (matrices + table) + 12 * depth * d * 1024
    if millions:
        assert round((matrices + table) / 1e6, 1) == millions


def test_counts_of_a_llama():
    d, kv, hidden, vocab, L, T = 16, 8, 24, 64, 2, 9
    model = build(dict(LLAMA, bias=True))
    matrices = L * (2 * d * d + 2 * kv * d + 3 * d * hidden)
    biases, gains = L * (2 * d + 2 * kv + 2 * hidden + d), (2 * L + 1) * d
    assert model.num_params() == model.num_params(positions=False) == matrices + 2 * vocab * d + biases + gains
    assert model.flops_per_token() == 6 * (matrices + vocab * d) + 12 * L * d * T


# ------------------------------------------------------------------------------------- 7. KV cache and generation

cached_layouts = pytest.mark.parametrize(
    "flags",
    (dict(), dict(pos="rope"), dict(n_kv_head=2), LLAMA, S5, dict(LLAMA, **S5), dict(POST, pos="rope")),
    ids=("learned", "rope", "gqa", "llama", "S5", "llama S5", "post rope"),
)


@cached_layouts
@pytest.mark.parametrize("prefill", (1, 5))
def test_cached_logits_equal_the_full_forward(flags, prefill):
    model, idx = build(flags), tokens(2, 9)
    cache = [KVCache() for _ in model.blocks]
    parts = [model(idx[:, :prefill], cache=cache)[0]]
    parts += [model(idx[:, t : t + 1], cache=cache)[0] for t in range(prefill, 9)]
    assert len(cache[0]) == 9
    assert error(torch.cat(parts, dim=1), model(idx)[0]) < 1e-12
    with pytest.raises(ValueError, match="10 tokens does not fit block_size=9"):
        model(idx[:, :1], cache=cache)


def plain_loop(model, idx, n, temperature=0.0, generator=None):
    """Sampling without a cache. Past block_size (9) a window restarts at the last 4 tokens and grows again."""
    start = 0
    for _ in range(n):
        if idx.shape[1] - start > 9:
            start = idx.shape[1] - 4
        logits = model(idx[:, start:])[0][:, -1]
        if temperature == 0:
            new = logits.max(-1, keepdim=True).indices
        else:
            new = torch.multinomial(reference.softmax(logits / temperature), 1, generator=generator)
        idx = torch.cat((idx, new), dim=1)
    return idx


@cached_layouts
@pytest.mark.parametrize("prompt, new", ((1, 8), (4, 6), (3, 20), (9, 7), (12, 8)))
def test_generate_equals_a_plain_loop(flags, prompt, new):
    model, idx = build(flags), tokens(3, prompt)
    out = model.generate(idx, new, temperature=0)
    assert torch.equal(out, plain_loop(model, idx, new))
    seeded = [torch.Generator().manual_seed(4) for _ in range(2)]
    out = model.generate(idx, new, temperature=1.3, generator=seeded[0])
    assert torch.equal(out, plain_loop(model, idx, new, 1.3, seeded[1]))
    assert out.shape == (3, prompt + new) and torch.equal(out[:, :prompt], idx)


def test_generate_stops_row_by_row():
    model, idx = build(dict(vocab_size=4)), tokens(4, 2, vocab=4)

    def run(n, stop=None):
        return model.generate(idx, n, 5.0, stop=stop, generator=torch.Generator().manual_seed(0))

    for stop in (0, 3):
        expected, ends = run(30), []
        for row in expected:
            hits = (row[2:] == stop).nonzero()
            assert len(hits)
            ends.append(2 + hits[0].item() + 1)
            row[ends[-1] :] = stop
        assert len(set(ends)) > 1  # the rows end at different places, and none by a stop token in its prompt
        assert torch.equal(run(30, stop), expected[:, : max(ends)])
        short = max(ends) - 2 - 1  # cut off before the last row ends
        assert torch.equal(run(short, stop), expected[:, : 2 + short])


def drawn(p, n=4000, **options):
    """The set of tokens drawn from probabilities p in n tries, row by row."""
    logits = torch.tensor(p).log().repeat(n, 1)
    out = sample_token(logits, generator=torch.Generator().manual_seed(0), **options)
    assert out.shape == (n, 1)
    return set(out.flatten().tolist())


@pytest.mark.parametrize(
    "options, support",
    (
        (dict(), {0, 1, 2, 3}),
        (dict(temperature=0), {1}),
        (dict(temperature=0, top_k=3, top_p=0.9), {1}),
        (dict(temperature=0.02), {1}),
        (dict(top_k=1), {1}),
        (dict(top_k=2), {1, 3}),
        (dict(top_k=3), {0, 1, 3}),
        (dict(top_k=4), {0, 1, 2, 3}),
        (dict(top_k=99), {0, 1, 2, 3}),
        (dict(top_p=1.0), {0, 1, 2, 3}),
        (dict(top_p=0.91), {0, 1, 2, 3}),
        (dict(top_p=0.89), {0, 1, 3}),
        (dict(top_p=0.76), {0, 1, 3}),
        (dict(top_p=0.74), {1, 3}),
        (dict(top_p=0.51), {1, 3}),
        (dict(top_p=0.49), {1}),
        (dict(top_p=0.0), {1}),
        (dict(top_k=2, top_p=0.6), {1}),  # of the two that top_k leaves, token 1 has p = 2/3
        (dict(top_k=2, top_p=0.7), {1, 3}),
        (dict(top_p=0.51, temperature=0.5), {1}),  # probabilities squared: .25 of .345
    ),
    ids=str,
)
def test_sampling_support(options, support):
    assert drawn([0.15, 0.5, 0.1, 0.25], **options) == support


def test_sampling_treats_rows_apart():
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.05, 0.05, 0.9]]).log().repeat(500, 1)
    for options, expected in ((dict(top_k=2), [{0, 1}, {1, 2}]), (dict(top_p=0.6), [{0, 1}, {1, 2}, {2}])):
        out = sample_token(logits, generator=torch.Generator().manual_seed(0), **options).view(500, 3)
        assert [set(column.tolist()) for column in out.T][: len(expected)] == expected


@pytest.mark.parametrize(
    "options, p",
    (
        (dict(), (0.64, 0.32, 0.04)),
        (dict(temperature=0.5), (0.64**2, 0.32**2, 0.04**2)),
        (dict(temperature=2.0), (0.8, 0.32**0.5, 0.2)),
        (dict(top_k=2), (0.64, 0.32, 0)),
        (dict(top_p=0.9), (0.64, 0.32, 0)),
    ),
    ids=str,
)
def test_sampling_frequencies(options, p):
    n, expected = 20000, torch.tensor(p) / sum(p)
    logits = torch.tensor([0.64, 0.32, 0.04]).log().repeat(n, 1)
    out = sample_token(logits, generator=torch.Generator().manual_seed(0), **options)
    counts = out.flatten().bincount(minlength=3)
    assert ((counts - n * expected).abs() <= 5 * (n * expected * (1 - expected)).sqrt()).all()


# -------------------------------------------------------------------------------------------------- 8. compute dtype


@pytest.mark.parametrize("norm, normalise", (("rmsnorm", reference.rms), ("layernorm", reference.standardise)))
def test_norms_of_bf16_numbers_are_computed_in_fp32(norm, normalise):
    model, seen = build(dict(norm=norm, mid_norm="both", qk_norm=True), dtype=torch.float32), []
    block = model.set_compute_dtype(torch.bfloat16).blocks[0]
    for slot in (block.attn.mid, block.mlp.mid, block.attn.f.q_norm, block.attn.f.k_norm):
        slot.register_forward_hook(lambda *call: seen.append(call))
    model(batch()[0])
    assert len(seen) == 4
    for slot, (x,), out in seen:
        assert x.dtype == torch.bfloat16 and out.dtype == torch.float32
        function = normalise if x.shape[-1] == 16 else reference.rms  # q and k always have RMSNorm
        assert error(out, slot.gain * function(x.double(), 1e-2)) < 1e-6


def test_the_cache_holds_the_compute_dtype():
    model = build(dict(S5, pos="rope"), dtype=torch.float32).set_compute_dtype(torch.bfloat16)  # rotated in fp32
    cache = [KVCache() for _ in model.blocks]
    model(batch()[0], cache=cache)
    assert {x.dtype for layer in cache for x in (layer.k, layer.v)} == {torch.bfloat16}


def test_no_compute_dtype_means_the_parameters_own():
    model, idx = build(dict()), batch()[0]
    before = model(idx)[0]
    after = model.set_compute_dtype(torch.bfloat16).set_compute_dtype(None)(idx)[0]
    assert after.dtype == torch.float64 and torch.equal(after, before)


def test_the_head_computes_in_the_compute_dtype():
    for tied in (True, False):
        model, idx = build(dict(norm="none", tie_weights=tied), dtype=torch.float32), batch()[0]
        kept = []
        model.blocks[-1].register_forward_hook(lambda _, args, out: kept.append(out))  # noqa: B023
        logits = model.set_compute_dtype(torch.bfloat16)(idx)[0]
        table = (model.wte if tied else model.head).weight
        assert torch.equal(logits, logits.bfloat16().float())
        assert error(logits, kept.pop() @ table[:50].T) < 0.02


# ---------------------------------------------------------------------------------------------------- 9. bad input

SMALL = dict(n_layer=1, n_head=4, n_embd=16, block_size=8, vocab_size=50)


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(norm="rms"), "norm 'rms' rmsnorm layernorm dyt none"),
        (dict(pre_norm="ffn"), "pre_norm 'ffn' both attn mlp none"),
        (dict(mid_norm=True), "mid_norm True both attn mlp none"),
        (dict(post_norm="Both"), "post_norm 'Both' both attn mlp none"),
        (dict(pos="alibi"), "pos 'alibi' learned rope"),
        (dict(mlp="silu"), "mlp 'silu' gelu relu relu2 swiglu"),
        (dict(init="kaiming"), "init 'kaiming' normal xavier"),
        (dict(residual_init="gpt3"), "residual_init 'gpt3' gpt2 plain depth"),
        (dict(dyt_alpha_attn=0.5), "dyt_alpha_attn norm=dyt rmsnorm"),
        (dict(dyt_alpha_other=0.5, norm="layernorm"), "dyt_alpha_other norm=dyt layernorm"),
        (dict(dyt_alpha_attn=0.0), "dyt_alpha_attn norm=dyt"),
        (dict(dyt_bias=True), "dyt_bias norm=dyt"),
        (dict(dyt_bias=True, dyt_alpha_attn=1.0), "dyt_bias dyt_alpha_attn norm=dyt"),
        (dict(norm="none", mid_norm="both"), "norm=none mid_norm"),
        (dict(norm="none", post_norm="mlp"), "norm=none post_norm"),
        (dict(norm="none", input_norm=True), "norm=none input_norm"),
        (dict(pos="rope", n_embd=12), "pos=rope even 12/4"),
        (dict(rope_theta=500.0), "rope_theta pos=rope"),
        (dict(rope_theta=-1.0, pos="rope"), "rope_theta positive"),
        (dict(n_embd=18), "n_embd=18 n_head=4"),
        (dict(n_kv_head=3), "n_head=4 n_kv_head=3"),
        (dict(n_kv_head=8), "n_head=4 n_kv_head=8"),
        (dict(n_kv_head=-1), "n_kv_head negative"),
        (dict(n_ff=-4), "n_ff negative"),
        (dict(vocab_size=0), "vocab_size=0 at least 1"),
        (dict(n_layer=0), "n_layer=0 at least 1"),
        (dict(n_head=0), "n_head=0 at least 1"),
        (dict(n_embd=-16), "n_embd=-16 at least 1"),
        (dict(block_size=0), "block_size=0 at least 1"),
        (dict(n_layer=-1, block_size=-2), "n_layer=-1 block_size=-2"),
        (dict(dropout=1.0), "dropout=1.0 below 1"),
        (dict(dropout=-0.1), "dropout=-0.1 at least 0"),
        (dict(norm_eps=-1e-6), "norm_eps negative"),
        (dict(init_std=0.0), "init_std positive"),
        (dict(n_layer="2"), "n_layer='2' int"),
        (dict(n_embd=16.0), "n_embd=16.0 int"),
        (dict(n_head=True), "n_head=True int"),
        (dict(bias=1), "bias=1 bool"),
        (dict(input_norm="False"), "input_norm='False' bool"),
        (dict(dropout="0.1"), "dropout='0.1' float"),
        (dict(norm="dyt", dyt_alpha_other="0.5"), "dyt_alpha_other='0.5' float"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_flags_are_refused_in_one_line_that_names_them(flags, words):
    with pytest.raises(ValueError) as caught:
        GPT(GPTConfig(**{**SMALL, **flags}))
    message = str(caught.value)
    assert "\n" not in message
    for word in words.split():
        assert word in message, message


def test_whole_numbers_are_floats_too():
    GPT(GPTConfig(**SMALL, dropout=0, norm="dyt", dyt_alpha_attn=1, dyt_alpha_other=None))


@pytest.mark.parametrize("flags", (dict(), dict(pos="rope")), ids=("learned", "rope"))
def test_a_sequence_longer_than_the_block_is_refused(flags):
    model = build(flags)
    assert model(tokens(1, 9))[0].shape == (1, 9, 50)
    with pytest.raises(ValueError, match="10 tokens does not fit block_size=9"):
        model(tokens(1, 10))


def test_a_model_survives_a_checkpoint():
    model = build(dict(LLAMA, norm="dyt", dyt_alpha_attn=0.3), dtype=torch.float32)
    checkpoint = dict(model_config=asdict(model.config), model=model.state_dict())
    copy = GPT.from_checkpoint(checkpoint, dropout=0.5)
    assert copy.config == replace(model.config, dropout=0.5)
    assert torch.equal(copy.eval()(batch()[0])[0], model(batch()[0])[0])


@pytest.mark.parametrize(
    "flags, weights, words",
    (
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
        GPT.from_checkpoint(checkpoint)
    for word in words.split():
        assert word in str(caught.value), str(caught.value)


# ------------------------------------------------------------------------------------- 10. dropout and torch.compile


def test_dropout_acts_in_training_only():
    idx, plain = batch()[0], build(dict())
    model = build(dict(dropout=0.3))
    assert torch.equal(model(idx)[0], plain(idx)[0]) and torch.equal(model(idx)[0], model(idx)[0])
    torch.manual_seed(0)
    first, second = model.train()(idx)[0], model(idx)[0]
    assert error(first, second) > 1e-2
    torch.manual_seed(0)
    assert torch.equal(model(idx)[0], first)
    assert torch.equal(plain.train()(idx)[0], plain(idx)[0])


@pytest.mark.parametrize("site", ("embedding", "attention weights", "attention branch", "ffn branch"))
def test_each_dropout_site_acts_alone(site):
    model, idx = build(dict(dropout=0.5), n_layer=1).train(), batch()[0]
    block, whole = model.blocks[0], build(dict(), n_layer=1)(idx)[0]
    modules = {"embedding": model, "attention branch": block.attn, "ffn branch": block.mlp}
    for name, module in modules.items():
        module.dropout.p = 0.5 if name == site else 0.0
    block.attn.f.dropout = 0.5 if site == "attention weights" else 0.0
    torch.manual_seed(0)
    assert error(model(idx)[0], whole) > 1e-2
    # with every site off, nothing is left: those four are all there are
    for module in modules.values():
        module.dropout.p = 0.0
    block.attn.f.dropout = 0.0
    assert torch.equal(model(idx)[0], whole)


def test_branch_dropout_comes_after_the_mid_norm():
    """x + dropout(mid(f(x))): what is kept of a branch output is that output, doubled at p = 0.5."""
    torch.manual_seed(0)
    model, x = build(dict(dropout=0.5, mid_norm="both")), torch.randn(2, 7, 16, dtype=torch.float64)
    for branch in (model.blocks[0].attn, model.blocks[0].mlp):
        whole = branch(x) - x
        branch.dropout.train()
        kept = branch(x) - x
        assert ((kept.abs() < 1e-12) | ((kept - 2 * whole).abs() < 1e-12)).all()
        assert 0.3 < (kept.abs() < 1e-12).double().mean() < 0.7


@pytest.mark.parametrize(
    "name", ("S1", "S5", "pre-LN, bias", "post-LN", "sandwich", "dyt, S5", "no norm but qk", "llama, S5")
)
def test_compiles_without_a_graph_break_to_the_same_function(name):
    model, (idx, targets) = build(LAYOUTS[name][0], n_layer=1), batch()
    loss, grads = gradients(model, idx, targets)
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(idx, targets)[1]
    compiled.backward()
    assert error(compiled, loss) < 1e-12
    for name, p in model.named_parameters():
        assert error(p.grad, grads[name], floor=1e-5) < 1e-9, name
