"""Initialisation: standard deviations, initial values of gains and scalars, seeds; and parameter
counts."""

import math
import re
from collections import Counter

import pytest
import torch

import model as model_file
from layers.draws import Draws
from model import GPT, GPTConfig
from support import models
from support.models import DERF, FIXUP, LLAMA, MANY_GAINS, POST, S5, SIZE, batch, gradients
from support.tolerances import roundings

WIDE = dict(
    n_layer=3,
    n_head=4,
    n_embd=192,
    block_size=256,
    vocab_size=640,
    pos="learned",
    tie_weights=False,
)


def test_a_seed_means_the_same_weights_whatever_the_global_generator_does():
    config = GPTConfig(**SIZE, n_layer=2, **LLAMA)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = GPT(config, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = GPT(config, seed=5), GPT(config, seed=6)
    for (name, p), q, r in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(p, q), name
        assert torch.equal(p, r) == (p.ndim == 1), name
    other.init_weights(5)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


# Fixup: (2L)^(-1/2) at L = 3 with two matrices in a branch; SwiGLU's gate and up each get its root
M = 6**-0.5
BETA = 24**-0.25  # DeepNorm: (8L)^(-1/4)
XAVIER_ATTN, XAVIER_FFN = (2 / (192 + 192)) ** 0.5, (2 / (192 + 768)) ** 0.5
# by block: 1, 1/√(2L), 1/√(2ℓ)
SAME, GPT2, DEPTH = [1.0] * 3, [6**-0.5] * 3, [2**-0.5, 4**-0.5, 6**-0.5]


@pytest.mark.parametrize(
    "flags, qk, v, up, head, ends, factors",
    (
        (dict(), 0.02, 0.02, 0.02, 0.02, (0.02, 0.02), GPT2),
        (dict(residual_init="plain", init_std=0.05), 0.05, 0.05, 0.05, 0.05, (0.05, 0.05), SAME),
        (dict(residual_init="depth"), 0.02, 0.02, 0.02, 0.02, (0.02, 0.02), DEPTH),
        (
            dict(init="xavier"),
            XAVIER_ATTN,
            XAVIER_ATTN,
            XAVIER_FFN,
            0.02,
            (XAVIER_ATTN, XAVIER_FFN),
            GPT2,
        ),
        (
            dict(POST, deepnorm=True, init="xavier", residual_init="depth"),
            *(
                XAVIER_ATTN,
                XAVIER_ATTN * BETA,
                XAVIER_FFN * BETA,
                0.02,
                (XAVIER_ATTN, XAVIER_FFN),
                [BETA] * 3,
            ),
        ),
        (
            dict(FIXUP, init="xavier"),
            XAVIER_ATTN,
            XAVIER_ATTN * M,
            XAVIER_FFN * M**0.5,
            0,
            (0, 0),
            SAME,
        ),
        (dict(sigma_reparam=True), 0.02, 0.02, 0.02, 0.02, (0.02, 0.02), GPT2),  # of the matrix W
    ),
    ids=str,
)
def test_initial_standard_deviations(flags, qk, v, up, head, ends, factors):
    """`ends`: of o and down, times the block's factor. All are normal distributions, and no two
    start alike."""
    model = GPT(GPTConfig(**{**WIDE, "mlp": "swiglu", "n_ff": 768, **flags}))
    table = flags.get("init_std", 0.02)
    wanted = {"wte.weight": table, "wpe.weight": table, "head.weight": head}
    for i, factor in enumerate(factors):
        attn, mlp = f"blocks.{i}.attn.f", f"blocks.{i}.mlp.f"
        wanted |= {f"{attn}.q.weight": qk, f"{attn}.k.weight": qk, f"{attn}.v.weight": v}
        wanted |= {f"{mlp}.gate.weight": up, f"{mlp}.up.weight": up}
        wanted |= {f"{attn}.o.weight": ends[0] * factor, f"{mlp}.down.weight": ends[1] * factor}
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    assert matrices.keys() == wanted.keys()
    for name, p in matrices.items():
        n, std = p.numel(), wanted[name]
        if std == 0:
            assert not p.count_nonzero(), name
            continue
        z = p / std
        assert abs(z.mean()) < 5 / n**0.5, name
        assert abs(z.std() - 1) < 5 / (2 * n) ** 0.5, name
        assert abs((z**4).mean() - 3) < 5 * (96 / n) ** 0.5, name
    corners = [p[0, 0].item() for name, p in matrices.items() if wanted[name]]
    assert len(set(corners)) == len(corners)


LAYERSCALE = dict(branch_scale="layerscale")
START = {"gain": 1.0, "magnitude": 1.0, "direction": 1.0, "bias": 0.0, "alpha": 1.0}
START |= {"shift": 0.0, "gate": 0.0}


@pytest.mark.parametrize(
    "flags, changed",
    [(dict(LAYERSCALE, n_layer=n), {"mid.gain": 0.1}) for n in (1, 18)]
    + [(dict(LAYERSCALE, n_layer=n), {"mid.gain": 1e-5}) for n in (19, 24)]
    + [(dict(LAYERSCALE, n_layer=25), {"mid.gain": 1e-6})]
    + [
        (
            dict(LAYERSCALE, mid_norm="attn", gain_param="expmagdir"),
            {"magnitude": 0.0, "mid.magnitude": math.log(0.1)},
        ),
        (dict(branch_scale="skipinit", n_layer=16), {"mid.gain": 0.25}),
        (dict(branch_scale="skipinit", branch_scale_init=0.0, norm="none"), {"mid.gain": 0.0}),
        (dict(norm="dyt", embed_scale=True, dyt_bias=True), {"embed_scale.gain": 4.0}),
        (dict(DERF, gpas=True, post_norm_blocks=1), {}),
        (models.NGPT, {"gain": 0.25, "up.out.gain": 1.0}),
        (dict(MANY_GAINS, gain_param="magdir"), {}),
        (dict(FIXUP, mlp="swiglu"), {}),
    ],
    ids=str,
)
def test_start_values_of_vectors_and_scalars(flags, changed):
    model, wrong = GPT(GPTConfig(**{**SIZE, "n_layer": 2, **flags})), []
    hits = Counter()
    for key, p in model.named_parameters():
        if p.ndim == 1:
            value = START[key.split(".")[-1]]
            for pattern, other in changed.items():
                if re.search(pattern + "$", key):
                    value, hits[pattern] = other, hits[pattern] + 1
            if not torch.allclose(p, torch.tensor(value), rtol=roundings(4), atol=0):
                wrong.append((key, p[0].item(), value))
    assert not wrong and hits.keys() == changed.keys()


@pytest.mark.parametrize(
    "flags", (dict(), dict(LLAMA), dict(bias=True, qk_norm=True, gain_out="scale")), ids=str
)
def test_fixup_starts_as_the_identity(flags):
    idx, targets = batch()
    flags = dict(FIXUP, **flags)
    model = GPT(GPTConfig(**{**SIZE, "n_layer": 2, **flags, "tie_weights": False}))
    x = torch.randn(2, 7, 16)
    assert abs(model(idx, targets)[1].item() - math.log(50)) < roundings(16)
    rope = None if "pos" not in flags else (torch.ones(7, 1, 2), torch.zeros(7, 1, 2))
    for block in model.blocks:
        assert torch.equal(block(x, rope), x)
    loss, grads = gradients(model, idx, targets)
    assert grads["head.weight"].any()
    model = GPT(GPTConfig(**{**SIZE, "n_layer": 2, **flags, "tie_weights": True}))
    # the branches can start to learn
    assert gradients(model, idx, targets)[1]["blocks.0.mlp.f.down.weight"].any()


@pytest.mark.parametrize("d, heads, depth", ((768, 12, 12), (1536, 24, 48)))
def test_counts_of_the_dnt_models(d, heads, depth):
    model = GPT.empty(GPTConfig(n_layer=depth, n_head=heads, n_embd=d, vocab_size=50257, **S5))
    matrices, table, gains = 12 * d**2 * depth, 50304 * d, depth * (3 * d + 2 * d // heads) + 2 * d
    assert model.num_params(positions=False) == matrices + table + gains
    assert model.num_params() == matrices + table + gains + 1024 * d
    assert model.flops_per_token() == 6 * (matrices + table) + 12 * depth * d * 1024


class WithTemperature(model_file.Attention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.temperature = torch.nn.Parameter(torch.full((1,), 0.5))
        self.param_roles = {"temperature": "scalar"}


def test_a_network_that_does_not_share_its_runtime_raises(monkeypatch):
    """Its modules would compute in fp32, whatever `set_runtime` says."""
    monkeypatch.setattr(GPT, "share_runtime", lambda self: None)
    with pytest.raises(ValueError, match="call share_runtime .*: embed_scale$"):
        GPT.empty(GPTConfig(**SIZE, n_layer=2))


def test_a_parameter_without_an_initial_value_raises(monkeypatch):
    """`to_empty` would leave it as it finds the memory."""
    monkeypatch.setattr(model_file, "Attention", WithTemperature)
    message = r"parameter blocks\.0\.attn\.f\.temperature has no initial value: .*Slot"
    with pytest.raises(ValueError, match=message):
        GPT.empty(GPTConfig(**SIZE, n_layer=2))

    def init(self):
        self.temperature.fill_(0.5)

    monkeypatch.setattr(WithTemperature, "init", init, raising=False)
    model = GPT.empty(GPTConfig(**SIZE, n_layer=2)).to_empty(device="cpu")
    model.init_weights()
    assert model.blocks[1].attn.f.temperature.item() == 0.5


@pytest.mark.parametrize("cut", (None, 2.0))
def test_no_block_is_drawn_twice(cut, monkeypatch):
    monkeypatch.setattr("layers.draws.BLOCK_SIZE", 7)
    draws, weights = Draws(1), [torch.zeros(5, 3), torch.zeros(5, 4, 3)]
    for weight in weights:
        draws.fill(weight, 0.5, cut)
    drawn = torch.cat([weight.flatten() for weight in weights])
    assert len(set(drawn.tolist())) == drawn.numel() and (cut is None or drawn.abs().max() <= 1.0)
