"""Parametrizations: `standard` at the base size; the papers' numbers for larger models;
equivalences in float64. Refusals, and layouts with their constants: test_layout_*.py. Changes by
width: tests/studies/test_transfer.py."""

import math
from itertools import product

import pytest

from model import GPT, GPTConfig
from nanodnt.optim import make_optimizer
from support.models import ALL, NGPT, SIZE, batch, error
from support.optimizers import filled
from support.runs import bits
from support.tolerances import roundings
from support.vision import config_of
from vision import ViT


def after_steps(model, optimizer):
    """The logits after 3 steps."""
    for _ in range(3):
        model.zero_grad()
        model(*batch())[1].backward()
        for group in optimizer.param_groups:
            group["lr"] = group.get("base_lr", group["lr"]) * group.get("lr_ratio", 1)
        optimizer.step()
    return model(batch()[0])[0]


CASES = dict(
    adamw="llama + S5", msgdw="HG + DNP + OR", muon="llama + HG + DNP + OR + LNS", adam_mini="HG"
)


@pytest.mark.parametrize("name", CASES)
def test_at_the_base_size_all_are_standard(name):
    found, its_own = set(), dict(base_n_embd=16, base_n_layer=2, base_head_size=4)
    for kind, base in product(("standard", "mup", "depth_mup", "completep"), ({}, its_own)):
        model = GPT(GPTConfig(**SIZE | ALL[CASES[name]][0] | base, n_layer=2, parametrization=kind))
        start = bits(model.state_dict())
        optimizer = make_optimizer(model, filled(learning_rate=0.01, optimizer=name))
        found.add(str((start, bits(after_steps(model, optimizer)), bits(model.state_dict()))))
    assert len(found) == 1


# m = 4, l = 2. Outside the blocks; in them: matrices, vectors, scalars, routers. Tensor Programs V
# (arXiv 2203.03466), Table 8 (routers: Table 3); VI (2310.02244); CompleteP (2505.01618), Table 1
LARGE = dict(
    n_layer=4, n_head=16, n_embd=64, block_size=8, vocab_size=31, base_n_embd=16, base_n_layer=2
)
PARTS = dict(
    n_kv_head=8,
    mlp="swiglu",
    n_expert=3,
    bias=True,
    branch_scale="skipinit",
    input_norm=True,
    qk_norm=True,
)
R, HIDDEN = math.sqrt(2), ("qk", "vo", "ffn")
ADAM = dict(
    mup=(1, 1 / 4, 1, 1, 1 / 4),
    depth_mup=(1, R / 8, R / 2, R / 2, R / 8),
    completep=(1, 1 / 4, 1, 1, 1 / 4),
)
SGD = dict(mup=(4, 1, 4, 1, 1 / 4), depth_mup=(4, 1, 4, 1, 1 / 4), completep=(4, 2, 8, 2, 1 / 2))
EPS = dict(mup=(1 / 4, 1 / 4, 1 / 4, 1, 1), depth_mup=(1 / 4, R / 8, R / 8, R / 2, R / 2))
EPS["completep"] = (1 / 4, 1 / 8, 1 / 8, 1 / 2, 1 / 2)
MUON = dict(original=dict(mup=1, depth_mup=R / 2, completep=1))  # of the matrices
MUON["match_rms_adamw"] = dict(mup=1 / 2, depth_mup=R / 4, completep=1 / 2)


def column(name, role, p):
    """Where a parameter's number stands in these tables; 5: it is 1, as for single numbers outside
    the blocks."""
    if p.ndim == 1 and (len(p) == 1 or "q_norm" in name or "k_norm" in name):  # as long as a head
        return 3 if "blocks" in name else 5
    if "blocks" not in name:
        return 0
    return 1 if role in HIDDEN else 4 if role == "router" else 2


def groups(model, config) -> dict:
    found = make_optimizer(model, config).param_groups
    assert len({g["label"] for g in found}) == len(found)
    return {n: g for g in found for n in g["param_names"]}


@pytest.mark.parametrize("gain_param", ("direct", "magdir"))
@pytest.mark.parametrize("kind", EPS)
def test_learning_rates(kind, gain_param):
    flags = LARGE | PARTS | dict(tie_weights=gain_param == "direct", gain_param=gain_param)
    cases = [
        (dict(optimizer="adamw", blockwise_lr=True), ADAM[kind]),
        (dict(optimizer="msgdw"), SGD[kind]),
        (dict(optimizer="soap"), ADAM[kind]),
    ]
    outside, _, *others = ADAM[kind]
    cases += [
        (dict(optimizer="muon", muon_adjust_lr=s), (outside, its[kind], *others))
        for s, its in MUON.items()
    ]
    for changes, rates in cases:
        config = filled(decay_gains="all", decay_scalars=True, weight_decay=0.05, **changes)
        models = [GPT.empty(GPTConfig(**flags, parametrization=its)) for its in (kind, "standard")]
        (large, base), roles = (groups(model, config) for model in models), models[0].roles()
        for name, p in models[0].named_parameters():
            g, old, i = large[name], base[name], column(name, roles[name], p)
            lr, base_lr = (group["base_lr"] * group["lr_ratio"] for group in (g, old))
            assert lr == pytest.approx(base_lr * (*rates, 1)[i]), name
            assert lr * g["weight_decay"] == pytest.approx(base_lr * old["weight_decay"]), name
            assert "eps" not in g or g["eps"] == pytest.approx(old["eps"] * (*EPS[kind], 1)[i]), (
                name
            )


def test_the_bias_of_classes_does_not_grow():
    model = ViT.empty(config_of(LARGE | dict(bias=True, parametrization="mup")))
    found = groups(model, filled(optimizer="msgdw", learning_rate=1.0, weight_decay=0))
    assert [found[name]["base_lr"] for name in ("head.bias", "patch.bias", "head.weight")] == [
        1,
        4,
        4,
    ]


@pytest.mark.parametrize("init", ("normal", "xavier"))
@pytest.mark.parametrize("is_text", (True, False), ids=("text", "images"))
def test_initial_weights(is_text, init):
    """Beside `standard` of this size. A branch's last matrix has 1/√(2 L), SkipInit 1/√L: L is the
    base's."""
    flags = (
        LARGE
        | (dict(PARTS, tie_weights=False) if is_text else dict(embed_scale=True))
        | dict(init=init)
    )
    configs = [flags | dict(parametrization=kind) for kind in ("completep", "standard")]
    large, base = (GPT(GPTConfig(**its)) if is_text else ViT(config_of(its)) for its in configs)
    wanted = dict.fromkeys(HIDDEN, 1 if init == "xavier" else 0.5) | dict(router=1 / 4)
    for (name, p), q in zip(large.named_parameters(), base.parameters(), strict=True):
        role = large.roles()[name]
        factor = 0.5 if name == "embed_scale.gain" else wanted.get(role, 1)  # √16, not √64
        if init == "xavier" and role in ("patch", "router"):  # Xavier's is that of the base's shape
            fixed = p.shape[role == "patch"]
            factor *= math.sqrt((fixed + 64) / (fixed + 16))
        factor *= R if name.endswith(("f.o.weight", "down.weight", "mid.gain")) else 1
        assert error(p, q * factor) < roundings(8), name


def test_scales_on_the_sphere_are_stored_as_the_bases():
    """At 1/√16, so Adam moves their values as the base's."""
    model = GPT(GPTConfig(**LARGE | NGPT | dict(unit_rows=False, parametrization="mup")))
    consts = {"blocks.3.attn.mid": 0.3 * 4, "blocks.3.attn.f.qk_scale": 4, "logits_scale": 1}
    for name, const in consts.items():
        slot = model.get_submodule(name)
        assert set(slot.gain.tolist()) == {1 / 4} and slot.const == const


# A constant c on a matrix with std σ, LR η, ε is a matrix with std cσ and LR cη, ε/c (Adam) or LR
# c²η (SGD): so the head of Table 8 is Table 3's. For m = 4, l = 2, heads × 4: {part of the name:
# (c, Adam's LR, ε, SGD's LR)}
END, ANY, GAIN = (1 / 2, 1 / 8, 1 / 4, 1 / 2), (1, 1 / 4, 1 / 8, 2), (1, 1, 1 / 8, 8)
