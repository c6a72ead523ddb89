"""The papers' experiments under config/: sizes, settings and single-flag variants are those that the papers give.

There are two kinds of file: an experiment (size, data, optimizer; it sets n_layer), and an overlay (a few lines that go
on top of an experiment).
"""

import ast
import math
import re

import pytest
import torch

from configurator import read_file
from layers import rules
from model import DYT_ALPHA, GPT
from nanodnt.engine import split_batch
from nanodnt.optim import fill_defaults, lr_at, make_optimizer, notes
from nanodnt.weights import profile_admin
from support.models import spread
from support.pages import ROOT, load

FILES = {str(p.relative_to(ROOT / "config"))[:-3]: p for p in sorted((ROOT / "config").glob("*/*.py"))}
OTHERS = r"moe/small$|claims/|vdnt/|.*/vit_"  # ours; and images: test_configs_images.py
FILES = {name: path for name, path in FILES.items() if not re.match(OTHERS, name)}
KEYS = {name: {k: v for k, (v, _) in read_file(path).items()} for name, path in FILES.items()}
EXPERIMENTS = [name for name in FILES if "n_layer" in KEYS[name]]
OVERLAYS = [name for name in FILES if name not in EXPERIMENTS]
SIZES_OF_DNT = ["dnt_small", "dnt_large", "dnt_xl", "gpt2_small", "gpt2_large", "gpt2_xl"]
BASE = {"lns": "lns/130m", "dyt": "dyt/small", "scale_vectors": "scale_vectors/llama_120m", "dnt": "dnt_small"}
BASE |= {"blockwise": "blockwise/llama_237m", "optimizers": "dnt_small", "decay": "dnt_small", "init": "gpt2_small"}
BASE |= {"sft": "lns/250m"}  # the model of the run that a fine-tuning starts from
# as small as the flags allow: 32 groups of 2 channels, 3 Post-LN blocks of 4
TINY = "n_layer=4 n_head=2 n_embd=64 n_ff=96 block_size=8 vocab_size=64".split()


def config(*names, **flags):
    """(GPTConfig, TrainConfig) of config files, by their short names, with defaults filled in as train.py does."""
    files = [str(ROOT / "config" / f"{name}.py") for name in names]
    model, train = load(*files, *(f"--{k}={v}" for k, v in flags.items()))
    model.vocab_size = model.vocab_size or 50257
    fill_defaults(train)
    return model, train


def build(model):
    with torch.device("meta"):
        return GPT(model)


# ------------------------------------------------------------------------------------------------------ experiments

# d, heads, kv heads, depth, d_ff, the paper's vocabulary, and millions of parameters with it: LNS 32000 (T5),
# blockwise LR 50304, DyT 32000 (LLaMA's). GPT-2 is counted without its position table, as usual.
# The shape of lns/60m is not published: it is the public LLaMA-60M's. Those of scale_vectors/llama_120m and of
# moe/scale_vectors_05b are our choice.
SIZES = {
    "lns/60m": (512, 8, 0, 8, 1376, 32000, 58.1),
    "lns/130m": (768, 12, 0, 12, 2048, 32000, 134.1),
    "lns/250m": (768, 16, 0, 24, 2560, 32000, 247.4),
    "lns/350m": (1024, 16, 0, 24, 2736, 32000, 368.0),
    "lns/1b": (2048, 32, 0, 24, 5461, 32000, 1339.1),
    "dyt/small": (768, 12, 0, 12, 2048, 50304, 162.2),
    "dyt/7b": (4096, 32, 0, 32, 11008, 32000, 6738.4),
    "dyt/13b": (5120, 40, 0, 40, 13824, 32000, 13015.9),
    "dyt/34b": (8192, 64, 8, 48, 22016, 32000, 33744.0),
    "dyt/70b": (8192, 64, 8, 80, 28672, 32000, 68976.6),
    "blockwise/gpt2_124m": (768, 12, 0, 12, 3072, 50304, 123.6),
    "blockwise/llama_134m": (768, 12, 0, 6, 3072, 50304, 133.9),
    "blockwise/llama_237m": (1024, 16, 0, 8, 4096, 50304, 237.2),
    "blockwise/llama_522m": (1280, 20, 0, 15, 5120, 50304, 522.0),
    "blockwise/llama_743m": (1664, 26, 0, 13, 6656, 50304, 743.4),
    "blockwise/llama_1175m": (2048, 32, 4, 22, 5632, 50304, 1175.0),
    "scale_vectors/llama_120m": (768, 12, 0, 6, 2048, 50304, 119.7),
    "moe/scale_vectors_05b": (1024, 16, 0, 10, 1472, 50304, 506.8),
}
# What the papers' names say, in millions of parameters.
NAMED = {"lns/130m": 130, "lns/250m": 250, "lns/350m": 350, "dyt/7b": 6700, "dyt/13b": 13000, "dyt/34b": 34000}
NAMED |= {"dyt/70b": 70000, "blockwise/gpt2_124m": 124, "blockwise/llama_134m": 134, "blockwise/llama_237m": 237}
NAMED |= {"blockwise/llama_522m": 522, "blockwise/llama_743m": 743, "blockwise/llama_1175m": 1175}
NAMED |= {"scale_vectors/llama_120m": 120, "moe/scale_vectors_05b": 500}
# not lns/60m (58) and lns/1b (1339): their names are too round


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_parameter_counts(name):
    d, heads, kv, depth, ff, vocab, millions = SIZES[name]
    model, _ = config(name, vocab_size=vocab)
    shape = (model.n_embd, model.n_head, model.n_kv_head, model.n_layer, model.hidden)
    assert shape == (d, heads, kv, depth, ff)
    n = build(model).num_params(positions=False) / 1e6
    assert n == pytest.approx(millions, abs=0.06)
    assert n == pytest.approx(NAMED.get(name, n), rel=0.055 if name.startswith("lns") else 0.015)


# LR, min LR, steps, warm-up, sequences, tokens a sequence, betas, decay, clip, decay of gains
ADAM, ADAMW, GAINS = ((0.9, 0.999), 0.0, 0.0, "none"), ((0.9, 0.95), 0.1, 1.0, "none"), ((0.9, 0.95), 0.1, 1.0, "all")
SETTINGS = {
    "lns/60m": (1e-3, 1e-4, 10_000, 1000, 512, 256, *ADAM),
    "lns/130m": (1e-3, 1e-4, 20_000, 2000, 512, 256, *ADAM),
    "lns/250m": (1e-3, 1e-4, 40_000, 4000, 512, 256, *ADAM),
    "lns/350m": (5e-4, 5e-5, 60_000, 6000, 512, 256, *ADAM),
    "lns/1b": (5e-4, 5e-5, 100_000, 1000, 512, 256, *ADAM),
    "dyt/small": (6e-4, 6e-5, 50_000, 2000, 480, 1024, *ADAMW),
    "dyt/7b": (3e-4, 3e-5, 47_684, 2000, 1024, 4096, *GAINS),
    "dyt/13b": (3e-4, 3e-5, 47_684, 2000, 1024, 4096, *GAINS),
    "dyt/34b": (1.5e-4, 1.5e-5, 47_684, 2000, 1024, 4096, *GAINS),
    "dyt/70b": (1.5e-4, 1.5e-5, 47_684, 2000, 1024, 4096, *GAINS),
    "blockwise/gpt2_124m": (6e-4, 3e-5, 50_000, 1000, 480, 1024, *GAINS),
    "blockwise/llama_134m": (1.2e-3, 6e-5, 30_000, 600, 300, 512, *GAINS),
    "blockwise/llama_237m": (8e-4, 4e-5, 50_000, 1000, 480, 1024, *GAINS),
    "blockwise/llama_522m": (8e-4, 4e-5, 50_000, 1000, 480, 1024, *GAINS),
    "blockwise/llama_743m": (6e-4, 3e-5, 50_000, 1000, 480, 1024, *GAINS),
    "blockwise/llama_1175m": (4e-4, 2e-5, 50_000, 1000, 480, 1024, *GAINS),
    "scale_vectors/llama_120m": (1e-3, 1e-4, 24_400, 1000, 480, 1024, *ADAMW),
    "moe/scale_vectors_05b": (8e-4, 8e-5, 48_000, 1000, 480, 1024, *ADAMW),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_training_settings(name):
    model, c = config(name)
    lrs = pytest.approx((c.learning_rate, c.min_lr))
    assert SETTINGS[name][:2] == lrs
    steps = (c.max_iters, c.warmup_iters, c.batch_size, model.block_size)
    assert SETTINGS[name][2:] == (*steps, (c.beta1, c.beta2), c.weight_decay, c.grad_clip, c.decay_gains)
    assert (c.optimizer, c.blockwise_lr, model.dropout, model.bias) == ("adamw", False, 0.0, False)
    llama_of_dyt = bool(re.search(r"dyt/\d", name))  # only these have a schedule of their own, and decay scalars
    assert (c.schedule, c.decay_scalars) == ("dyt" if llama_of_dyt else "cosine", llama_of_dyt)
    llama = (model.norm_eps, model.pos, model.mlp, model.tie_weights, model.residual_init)
    gpt2 = (1e-5, "learned", "gelu", True, "gpt2")
    assert llama == (gpt2 if "gpt2" in name else (1e-6, "rope", "swiglu", False, "plain"))
    norm = "layernorm" if "gpt2" in name else "dyt" if llama_of_dyt else "rmsnorm"
    assert (model.norm, model.embed_scale) == (norm, norm == "dyt")
    for gpus in (1, 2, 4) if c.batch_size == 300 else (1, 2, 4, 8):  # 300 is the paper's, and does not split over 8
        assert split_batch(c.batch_size, c.micro_batch_size, gpus)[0] == c.micro_batch_size
    assert rules.notes(model) == notes(c, build(model)) == []


# At step t the LR over its peak is min(1 − (1 − t/w)², 0.1 + 0.45 (1 + cos(πt/T))), w = min(2000, T/20)
@pytest.mark.parametrize("name, peak", [("7b", 3e-4), ("13b", 3e-4), ("34b", 1.5e-4), ("70b", 1.5e-4)])
def test_dyts_schedule(name, peak):
    T, w = 47_684, 2000
    assert w == min(2000, T // 20)
    _, c = config(f"dyt/{name}")
    for t in (1, 500, 1900, 2000, 2001, 20_000, T, T + 1):
        rising, falling = 1 - (1 - min(t, w) / w) ** 2, 0.1 + 0.45 * (1 + math.cos(math.pi * min(t, T) / T))
        assert lr_at(t - 1, c) == pytest.approx(peak * min(rising, falling), rel=1e-12)


def test_every_experiment_is_in_the_tables_and_has_a_run_directory_of_its_own():
    assert set(SIZES) == set(SETTINGS) == set(EXPERIMENTS)
    assert len({KEYS[name]["out_dir"] for name in EXPERIMENTS}) == len(EXPERIMENTS)


def test_scale_vectors_1b_is_the_papers_by_its_two_published_counts():
    text = FILES["scale_vectors/llama_120m"].read_text().replace("\\\n", " ")
    line = next(line for line in text.split("\n") if "--n_embd=1792" in line)
    flags = dict(re.findall(r"--(n_\w+)=(\d+)", line))
    model = build(config("scale_vectors/llama_120m", **flags)[0])
    gains = sum(p.numel() for name, p in model.named_parameters() if model.roles()[name].startswith("gain"))
    assert (gains, model.num_params()) == (80_640, 1_028_065_024)


def test_the_mixture_of_0_5b_has_the_experts_of_its_header():
    model, train = config("moe/scale_vectors_05b")
    experts = (model.n_expert, model.n_expert_active, model.n_expert_shared, model.router, model.balance)
    assert experts == (8, 2, 0, "softmax", "loss")
    net = build(model)
    active = net.num_params(active=True)
    assert (round(net.num_params() / 1e6), round(active / 1e6)) == (507, 236)
    assert train.max_iters * train.batch_size * model.block_size / active == pytest.approx(100, rel=0.01)


# DyT's α₀ for LLMs: width, before attention, elsewhere (the FFN norm and the final norm)
@pytest.mark.parametrize("name, width, attn, other", [
    ("7b", 4096, 0.8, 0.2), ("13b", 5120, 0.6, 0.15), ("34b", 8192, 0.2, 0.05), ("70b", 8192, 0.2, 0.05),
])  # fmt: skip
@pytest.mark.parametrize("overlay", [[], ["dyt/dyt"]], ids=["written out", "by width"])
def test_alpha_is_the_papers(name, width, attn, other, overlay):
    model = build(config(f"dyt/{name}", *overlay, n_layer=2)[0])
    blocks = [(b.attn.pre.init_alpha, b.mlp.pre.init_alpha) for b in model.blocks]
    assert model.config.n_embd == width and blocks == [(attn, other)] * 2 and model.final_norm.init_alpha == other
    assert DYT_ALPHA[width] == (attn, other)
    assert all(slot.alpha.shape == (1,) for b in model.blocks for slot in (b.attn.pre, b.mlp.pre))


# --------------------------------------------------------------------------------------------------------- overlays

ONE = dict(lr_ratio_emb=1.0, lr_ratio_qk=1.0, lr_ratio_ffn=1.0, lr_ratio_vo=1.0)
POST, QK, BARE = dict(pre_norm="none", post_norm="both"), dict(qk_norm=True), dict(norm="none", embed_scale=False)
# family's baseline: {overlay: exactly the lines in which it differs from the baseline}
DIFFERENCES = {
    "lns/pre_ln": {
        "lns": dict(lns="norm"),
        "mix_ln": dict(post_norm_blocks=3),
        "post_ln": POST,
        "deepnorm": POST | dict(deepnorm=True, init="xavier"),
        "sandwich": dict(mid_norm="both"),
        "layerscale": dict(branch_scale="layerscale"),
        "skipinit": dict(branch_scale="skipinit"),
        "scaled_init": dict(residual_init="gpt2"),
        "depth_init": dict(residual_init="depth"),
        "admin": POST | dict(admin=True, input_norm=True),
        "group_ln": dict(norm_groups=32),
    },
    "dyt/dyt": {
        "rmsnorm": dict(norm="rmsnorm", embed_scale=False),
        "no_alpha": dict(dyt_alpha_attn=1.0, dyt_alpha_other=1.0, dyt_learn_alpha=False),
        "hardtanh": dict(dyt_squash="hardtanh"),
        "sigmoid": dict(dyt_squash="sigmoid"),
        "identity": dict(dyt_squash="identity"),
        "beta": dict(dyt_bias=True),
        "no_embed_scale": dict(embed_scale=False),
        "sigma_reparam": BARE | dict(sigma_reparam=True),
        "fixup": BARE | dict(fixup=True),
        "skipinit": BARE | dict(branch_scale="skipinit", branch_scale_init=0.0),
    },
    "scale_vectors/shared": {
        "none": dict(gain="none"),
        "hg": dict(gain="branch"),
        "dp": dict(gain_out="scale"),
        "dnp": dict(gain_out="norm"),
        "or_magdir": dict(gain_param="magdir"),
        "er_magdir": dict(gain_param="expmagdir"),
        "unified": dict(gain="branch", gain_out="norm", gain_param="magdir", decay_gains="input"),
        "qk_norm": QK,
        "decay_all": QK | dict(decay_gains="all"),
        "decay_output": QK | dict(decay_gains="output"),
        "iwd": QK | dict(decay_gains="input"),
    },
    "dnt/s4": {
        "s1": dict(input_norm=False, mid_norm="none", qk_norm=False),
        "s2": dict(input_norm=False, mid_norm="none"),
        "s3": dict(mid_norm="none"),
        "s5": dict(pre_norm="attn"),
        "no_input_norm": dict(input_norm=False),
        "no_pre_norm": dict(pre_norm="none"),
        "no_mid_norm": dict(mid_norm="none"),
        "no_qk_norm": dict(qk_norm=False),
    },
    "blockwise/blockwise": {
        "tuned_8643": dict(lr_ratio_emb=8.0, lr_ratio_qk=6.0, lr_ratio_ffn=4.0, lr_ratio_vo=3.0),
        "tuned_6432": dict(lr_ratio_emb=6.0, lr_ratio_qk=4.0, lr_ratio_ffn=3.0, lr_ratio_vo=2.0),
        "emb": dict(lr_ratio_qk=1.0, lr_ratio_ffn=1.0, lr_ratio_vo=1.0),
        "emb_ffn": dict(lr_ratio_qk=1.0, lr_ratio_vo=1.0),
        "norm_double": ONE | dict(lr_ratio_norm=2.0),
        "warmup_end": dict(blockwise_start="warmup_end"),
        "head_10": dict(lr_ratio_head=10.0),
        "decay_unscaled": dict(blockwise_decay="unscaled"),
    },
    "decay/nanogpt": {
        "blockwise": dict(decay_gains="all"),
        "dyt": dict(decay_gains="all", decay_scalars=True),
        "lns": dict(weight_decay=0.0),
        "iwd": dict(decay_gains="input"),
    },
    "init/gpt2": {
        "width_128": dict(init_std=0.02 * 6**0.5),
        "xavier": dict(init="xavier", residual_init="plain"),
        "xavier_unit": dict(init="xavier", residual_init="plain", init_std=1.0),
    },
}
# Overlays without a baseline, for most knobs of an optimizer are refused by the others: every line of each.
MUON = dict(optimizer="muon", momentum=0.95, nesterov=True, muon_steps=5)
MINI = dict(optimizer="adam_mini", decay_gains="none")
LINES = {
    "optimizers/msgdw": dict(optimizer="msgdw", learning_rate=1.0, min_lr=6e-5, weight_decay=1e-4)
    | dict(momentum=0.9, dampening=0.0, nesterov=False, grad_clip=1.0),
    "optimizers/adam_mini": dict(optimizer="adam_mini"),
    "optimizers/muon": MUON | dict(muon_adjust_lr="match_rms_adamw"),
    "optimizers/muon_original": MUON
    | dict(muon_adjust_lr="original", learning_rate=0.02, min_lr=0.002, weight_decay=0.01)
    | dict(adamw_learning_rate=6e-4, adamw_weight_decay=0.1),
    "optimizers/muon_dnt": MUON
    | dict(muon_adjust_lr="match_rms_adamw", learning_rate=1e-4, min_lr=1e-5, weight_decay=0.1)
    | dict(adamw_learning_rate=6e-4),
    "optimizers/wsd": dict(schedule="wsd", wsd_decay="linear", wsd_decay_iters=None),
    "blockwise/adam_mini": MINI,
    "blockwise/adam_mini_blockwise": MINI
    | dict(blockwise_lr=True, lr_ratio_emb=4.0, lr_ratio_qk=1.0, lr_ratio_ffn=4.0, lr_ratio_vo=4.0, lr_ratio_norm=1.0)
    | dict(lr_ratio_head=1.0, lr_ratio_pos=1.0)
    | dict(blockwise_start="start", blockwise_min_lr="shared", blockwise_decay="scaled"),
}


@pytest.mark.parametrize("baseline", DIFFERENCES)
def test_overlays_differ_from_their_baseline_in_the_lines_meant(baseline):
    family = baseline.split("/")[0]
    overlays = {name.split("/")[1] for name in OVERLAYS if name.startswith(family) and name not in LINES}
    assert overlays - {baseline.split("/")[1]} == DIFFERENCES[baseline].keys()
    for name, changes in DIFFERENCES[baseline].items():
        keys = KEYS[f"{family}/{name}"]
        assert list(keys) == list(KEYS[baseline]), f"{name}: overlays of a family set the same lines, in the same order"
        assert {k: v for k, v in keys.items() if v != KEYS[baseline][k]} == changes, name
    varied = {k for changes in DIFFERENCES[baseline].values() for k in changes}
    complete = ("dnt", "blockwise", "decay")  # these write out every line: the norm, every ratio, every rule
    assert family in complete or varied == KEYS[baseline].keys()


def test_overlays_without_a_baseline_have_the_lines_meant():
    assert {name: KEYS[name] for name in OVERLAYS if name in LINES} == LINES
    assert {name for name in OVERLAYS if name.startswith("optimizers/")} <= LINES.keys()


@pytest.mark.parametrize("baseline", ["lns/pre_ln", "scale_vectors/shared", "dyt/rmsnorm"])
def test_the_baseline_overlay_changes_nothing_in_its_family(baseline):
    base = BASE[baseline.split("/")[0]]
    assert config(base) == config(base, baseline)


def test_families_are_complete():
    assert {name.split("/")[0] for name in OVERLAYS} == BASE.keys()


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_build_train_and_print_no_notes(name):
    base = BASE[name.split("/")[0]]
    model, train = config(base, name)
    scalars = [
        "decay_scalars has no effect: the model has no learned scalars or biases"
    ]  # true of the base model of the decay files
    assert (rules.notes(model), notes(train, build(model))) == ([], scalars if name == "decay/dyt" else [])
    model, train = config(base, name, **dict(flag.split("=") for flag in TINY))
    net = GPT(model)
    optimizer = make_optimizer(net, train)  # refuses decay of gains that the model does not have
    ids = torch.arange(16).view(2, 8)
    profile_admin(net, ids)
    loss = net(ids, ids)[1]
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    decay = {g["role"]: g["weight_decay"] > 0 for g in optimizer.param_groups}
    wanted = {"all": ("gain_in", "gain_out"), "input": ("gain_in",), "output": ("gain_out",), "none": ()}
    for role in decay.keys() & {"gain_in", "gain_out"}:
        assert decay[role] == (role in wanted[train.decay_gains])
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = lr_at(train.warmup_iters, train, group)
    optimizer.step()
    for name, p in net.named_parameters():
        assert p.isfinite().all() and (not torch.equal(p, before[name]) or not p.grad.any()), name


@pytest.mark.parametrize("name", spread(["lns/250m", "lns/350m", "lns/1b"], fast=["lns/250m"]))
def test_lns_overlays_go_over_the_deep_sizes(name):
    for overlay in DIFFERENCES["lns/pre_ln"]:
        model, _ = config(name, f"lns/{overlay}")
        assert rules.notes(model) == []
        build(model)


# -------------------------------------------------------------------------- optimizers, blockwise LR, decay, by hand


def groups(*names, **flags):
    """{label: (rule, LR at the end of warm-up, LR at the last step, decay)}, as in a run."""
    model, c = config(*names, **flags)
    optimizer = make_optimizer(build(model), c)
    rates = [(lr_at(c.warmup_iters - 1, c, g), lr_at(c.max_iters - 1, c, g)) for g in optimizer.param_groups]
    return {
        g["label"]: (g["rule"], *map(pytest.approx, (peak, end, g["weight_decay"])))
        for g, (peak, end) in zip(optimizer.param_groups, rates, strict=True)
    }


DNT_SGD, MUON_REST = ("msgdw", 1.0, 6e-5, 1e-4), ("adamw", 6e-4, 6e-5, 0.1)


# (rule, peak LR, last LR, decay) of the matrices in the blocks, and of the embedding
@pytest.mark.parametrize(
    "size, overlay, hidden, emb",
    [
        *((size, "msgdw", DNT_SGD, DNT_SGD) for size in [*SIZES_OF_DNT, "lns/130m", "blockwise/llama_134m"]),
        ("dnt_xl", "adam_mini", ("adam_mini", 6e-4, 6e-5, 0.1), ("adam_mini", 6e-4, 6e-5, 0.1)),
        ("gpt2_large", "adam_mini", ("adam_mini", 2.5e-4, 6e-5, 0.1), ("adam_mini", 2.5e-4, 6e-5, 0.1)),
        ("dnt_xl", "muon", ("muon", 6e-4, 6e-5, 0.1), ("adamw", 6e-4, 6e-5, 0.1)),
        ("gpt2_xl", "muon", ("muon", 1.5e-4, 6e-5, 0.1), ("adamw", 1.5e-4, 6e-5, 0.1)),
        ("lns/130m", "muon", ("muon", 1e-3, 1e-4, 0.0), ("adamw", 1e-3, 1e-4, 0.0)),
        *((size, "muon_original", ("muon", 0.02, 0.002, 0.01), MUON_REST) for size in SIZES_OF_DNT),
        *((size, "muon_dnt", ("muon", 1e-4, 1e-5, 0.1), MUON_REST) for size in SIZES_OF_DNT),
        ("gpt2_large", "wsd", ("adamw", 2.5e-4, 6e-5, 0.1), ("adamw", 2.5e-4, 6e-5, 0.1)),
    ],
)
def test_optimizer_overlays(size, overlay, hidden, emb):
    found = groups(size, f"optimizers/{overlay}", n_layer=2)
    assert [found[role] for role in ("qk", "vo", "ffn")] == [hidden] * 3
    gains = size.startswith("blockwise") and 1e-4  # there gains decay as much as the rest
    assert found["emb"] == emb and found["gain_in"] == (*emb[:3], gains or 0.0)


@pytest.mark.parametrize("size", SIZES_OF_DNT)
def test_the_dnt_papers_baselines(size):
    """AdamW, Table 5: 6e-4 for DNT; 6e-4, 2.5e-4, 1.5e-4 for GPT-2. All end at 6e-5."""
    peak = {"gpt2_large": 2.5e-4, "gpt2_xl": 1.5e-4}.get(size, 6e-4)
    found = groups(size, n_layer=2)
    assert found["qk"] == found["emb"] == ("adamw", peak, 6e-5, 0.1)
    assert found["gain_in"] == ("adamw", peak, 6e-5, 0.0)


def test_wsd_is_constant_for_four_fifths():
    _, c = config("gpt2_large", "optimizers/wsd")
    for t, lr in ((1000, 1.25e-4), (2000, 2.5e-4), (160_000, 2.5e-4), (180_000, 1.55e-4), (200_000, 6e-5)):
        assert lr_at(t - 1, c) == pytest.approx(lr)


# Ratios of emb, qk, ffn, vo, gains, untied head
TABLE = {
    "blockwise": (10, 8, 6, 4, 1, 1),
    "tuned_8643": (8, 6, 4, 3, 1, 1),
    "tuned_6432": (6, 4, 3, 2, 1, 1),
    "emb": (10, 1, 1, 1, 1, 1),
    "emb_ffn": (10, 1, 6, 1, 1, 1),
    "norm_double": (1, 1, 1, 1, 2, 1),
    "warmup_end": (10, 8, 6, 4, 1, 1),
    "head_10": (10, 8, 6, 4, 1, 10),
    "decay_unscaled": (10, 8, 6, 4, 1, 1),
    "adam_mini": (1, 1, 1, 1, 1, 1),
    "adam_mini_blockwise": (4, 1, 4, 4, 1, 1),
}


@pytest.mark.parametrize("overlay", TABLE)
def test_blockwise_overlays(overlay):
    assert {f"blockwise/{name}" for name in TABLE} == {name for name in OVERLAYS if name.startswith("blockwise/")}
    found = groups("blockwise/llama_237m", f"blockwise/{overlay}")
    assert list(found) == ["emb", "qk", "vo", "gain_in", "ffn", "head"]
    mini = overlay.startswith("adam_mini")
    for role, ratio in zip(("emb", "qk", "ffn", "vo", "gain_in", "head"), TABLE[overlay], strict=True):
        peak = 8e-4 if overlay == "warmup_end" else 8e-4 * ratio  # all groups have the base LR until then
        decay = 0.1 / ratio if overlay == "decay_unscaled" else 0.0 if mini and role == "gain_in" else 0.1
        assert found[role] == ("adam_mini" if mini else "adamw", peak, 4e-5, decay), role
    if overlay == "warmup_end":
        model, c = config("blockwise/llama_237m", "blockwise/warmup_end")
        group = make_optimizer(build(model), c).param_groups[0]
        assert [lr_at(step, c, group) for step in (999, 1000)] == pytest.approx([8e-4, 8e-3], rel=1e-4)


def test_blockwise_lr_of_a_tied_head_is_the_embeddings():
    found = groups("blockwise/gpt2_124m", "blockwise/blockwise")
    assert "head" not in found and found["emb"][1:3] == (6e-3, 3e-5) and found["pos"][1:3] == (6e-4, 3e-5)


MATRICES = {"emb", "head", "qk", "vo", "ffn"}
DECAYED = {
    "nanogpt": MATRICES,
    "blockwise": MATRICES | {"gain_in", "gain_out"},
    "dyt": MATRICES | {"gain_in", "gain_out", "scalar"},
    "lns": set(),
    "iwd": MATRICES | {"gain_in"},
}


@pytest.mark.parametrize("overlay", DECAYED)
@pytest.mark.parametrize("size", ["dyt/7b", "lns/130m"])  # one decays everything, one nothing
@pytest.mark.parametrize("optimizer, decay", [([], 0.1), (["optimizers/msgdw"], 1e-4)], ids=["AdamW", "mSGDW"])
def test_decay_overlays_go_over_any_size_and_optimizer(overlay, size, optimizer, decay):
    found = groups(size, *optimizer, f"decay/{overlay}", n_layer=2, qk_norm=True, embed_scale=True)
    assert found.keys() == MATRICES | {"gain_in", "gain_out", "scalar"}
    assert {role: group[3] for role, group in found.items()} == {r: decay * (r in DECAYED[overlay]) for r in found}


def test_gains_under_muon_decay_by_the_decay_of_the_rest():
    """AdamW updates the gains, so decay_gains needs adamw_weight_decay, not weight_decay."""
    flags = dict(decay_gains="all", n_layer=2)
    found = groups("dnt_small", "optimizers/muon", weight_decay=0.0, adamw_weight_decay=0.1, **flags)
    assert found["gain_in"][3] == 0.1 and found["qk"][3] == 0.0
    with pytest.raises(ValueError, match="adamw_weight_decay"):
        config("dnt_small", "optimizers/muon", adamw_weight_decay=0.0, **flags)


@pytest.mark.deep
def test_optimizer_and_blockwise_overlays_start_after_every_size():
    over = [name for name in OVERLAYS if name.split("/")[0] in ("optimizers", "blockwise", "decay")]
    sizes = [*EXPERIMENTS, *SIZES_OF_DNT, "quickstart", "shakespeare_char"]
    for size in sizes:
        for overlay in over:
            model, c = config(size, overlay)
            model.check()
            c.check()
    assert len(sizes) * len(over) > 400


def test_flags_named_in_headers_exist_with_values_that_go_with_the_file():
    """Every `--flag=value` in a header, also in prose, is accepted on top of the file and its family's base."""
    checked = 0
    for name, path in FILES.items():
        header = ast.get_docstring(ast.parse(path.read_text())).replace("\\\n", " ")
        prose = [line for line in header.split("\n") if not re.search(r"\w\.py ", line)]
        files = [name] if name in EXPERIMENTS else [BASE[name.split("/")[0]], name]
        for flag, value in re.findall(r"--(\w+)=([\w.+-]*\w)", "\n".join(prose)):
            model, train = config(*files, **{flag: value})
            model.check()
            train.check()
            checked += 1
    assert checked > 20
