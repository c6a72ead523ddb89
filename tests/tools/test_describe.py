"""`python model.py CONFIG`: equations, counts, bytes and learning rates are those of the network
and its optimizer. What --plan counts is in test_plan.py."""

import re

import pytest

import model
from layers.slot import Slot
from model import GPT, Attention, Block, GPTConfig, Residual
from nanodnt.optim import OPTIMIZERS
from nanodnt.plan.__main__ import main
from nanodnt.plan.equations import describe_network
from nanodnt.plan.planning import PlanConfig
from support.models import ALL, DERF, HYBRID, NGPT, POST, QK_FULL
from support.optimizers import OURS
from support.runs import ROOT, call

SIZE = dict(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=50)


def lines(**flags):
    return describe_network(GPT.empty(GPTConfig(**{**SIZE, **flags})))


# flags: lines that must be among those printed, in this order
EQUATIONS = {
    "pre-LN": (
        dict(),
        "x ← wte[token] + wpe[position]",
        "blocks 1 to 3:",
        "x ← x + attention(γ·RMSNorm(x))",
        "q = Wq u",
        "k = Wk u",
        "v = Wv u",
        "attention(u) = Wo (softmax(q kᵀ/√8 + causal mask) v)",
        "x ← x + ffn(γ·RMSNorm(x))",
        "ffn(u) = Wdown gelu(Wup u)",
        "logits = Wte γ·RMSNorm(x)",
        "γ: learned vector, 1 at first",
    ),
    "DNT": (
        dict(pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True, pos="rope"),
        "x ← γ·RMSNorm(wte[token])",
        "x ← x + γ·RMSNorm(attention(γ·RMSNorm(x)))",
        "q = γ·RMSNorm(Wq u) per head, rotated (RoPE)",
        "x ← x + γ·RMSNorm(ffn(x))",
    ),
    "LNS": (
        dict(lns="norm"),
        "blocks 1 to 3:",
        "x ← x + attention(c1·γ·RMSNorm(x))",
        "x ← x + ffn(c1·γ·RMSNorm(x))",
        "c1 = 1, 0.7071, 0.5774, block by block",
    ),
    "Mix-LN": (
        dict(post_norm_blocks=1, norm="layernorm"),
        "block 1:",
        "x ← γ·LayerNorm(x + attention(x))",
        "blocks 2 to 3:",
        "x ← x + attention(γ·LayerNorm(x))",
        "logits = Wte γ·LayerNorm(x)",
    ),
    "DeepNorm": (dict(POST, deepnorm=True, n_layer=12), "x ← γ·RMSNorm(2.213·x + attention(x))"),
    "Admin": (
        dict(POST, admin=True),
        "x ← γ·RMSNorm(ω·x + attention(x))",
        "ω: learned vector, set by a profiling forward when training starts (Admin)",
    ),
    "DyT": (
        dict(norm="dyt", embed_scale=True, tie_weights=False),
        "x ← s·(wte[token] + wpe[position])",
        "x ← x + attention(γ·tanh(α x))",
        "logits = Whead γ·tanh(α x)",
        "α: learned scalar of DyT, 1 at first",
    ),
    "unified": (
        dict(gain="branch", gain_out="norm", gain_param="magdir", mlp="swiglu"),
        "x ← x + attention(RMSNorm(x))",
        "q = β·û·RMSNorm[2 groups](Wq β·û·u)",
        "v = β·û·RMSNorm(Wv β·û·u)",
        "ffn(u) = Wdown (silu(β·û·RMSNorm(Wgate β·û·u)) ⊙ β·û·RMSNorm(Wup β·û·u))",
        "β·û: learned magnitude β, 1 at first; û = a/rms(a), a learned direction, all ones at "
        "first",
    ),
    "Fixup": (
        dict(norm="none", fixup=True),
        "x ← x + (s·attention(x + b) + b)",
        "ffn(u) = Wdown (gelu(Wup u + b) + b)",
        "logits = Wte x",
        "s: learned scalar, 1 at first",
        "b: learned bias, 0 at first",
        "initial weights: N(0, 0.02²); Wv, Wup times 0.4082; Wo, Wdown times 0",
    ),
    "σReparam": (
        dict(sigma_reparam=True),
        "q = g·Wq/σ(Wq) u",
        "g: learned scalar of σReparam, σ(W) at first; σ(W)",
    ),
    "experts, unified, shared, even by a bias": (
        dict(
            n_expert=8,
            n_expert_active=3,
            n_expert_shared=2,
            router="sigmoid",
            router_scale=2.5,
            balance="bias",
        )
        | dict(gain="branch", gain_out="scale", mlp="swiglu", mid_norm="mlp"),
        "x ← x + γ·RMSNorm(ffn(RMSNorm(x)))",
        "r = sigmoid(Wrouter γ·u)",
        "S = the 3 of 8 experts with the largest rₑ + bₑ",
        "wₑ = 2.5·rₑ / Σ r over S",
        "expertₑ(u) = Wdownₑ (silu(γ·Wgateₑ γ·u) ⊙ γ·Wupₑ γ·u)",
        "shared(u) = Wdown (silu(γ·Wgate γ·u) ⊙ γ·Wup γ·u)",
        "ffn(u) = Σ wₑ expertₑ(u) over S + shared(u)",
        "bₑ: bias on the choice of experts, 0 at first; no loss trains it, "
        "it follows the experts' load",
    ),
    "HybridNorm with OLMo-2's QK-norm": (
        dict(HYBRID, **QK_FULL),
        "q = γ·RMSNorm(Wq u)",
        "v = γ·RMSNorm(Wv u) per head",
        "x ← x + ffn(x)",
    ),
    "Keel": (
        dict(post_norm="both", pre_norm_sublayers=1, skip_scale=0.0),
        "block 1:",
        "x ← x + attention(γ·RMSNorm(x))",
        "blocks 2 to 3:",
        "x ← γ·RMSNorm(6·x + attention(γ·RMSNorm(x)))",
        "logits = Wte x",
    ),
    "nGPT": (NGPT, "x ← RMSNorm((1 − 1.2·|λ|)·x + 1.2·|λ|·RMSNorm(ffn(x)))"),
    "Derf, GPAS": (DERF | dict(gpas=True), "x ← shrink(x + ffn((γ·erf(α x + δ) + b)))"),
    "Group-LN": (dict(norm_groups=4), "x ← x + attention(γ·RMSNorm[4 groups](x))"),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_equations(name):
    flags, *wanted = EQUATIONS[name]
    printed = iter([line.strip() for line in lines(**flags)])
    for line in wanted:
        assert any(p.startswith(line) if line.endswith("σ(W)") else p == line for p in printed), (
            f"{line!r} is not printed, or not here:\n" + "\n".join(lines(**flags))
        )


# -------------------------------------------------------------------------------------- the command


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*argv): `python model.py ARGV` in this process, in the root folder: (exit code, stdout,
    stderr)."""
    monkeypatch.chdir(ROOT)
    return lambda *argv: (call(main, *argv), *capsys.readouterr())


def test_a_large_model(run):
    """DNT's 1.4B: its parameters, and the optimizer state of the paper's Table 2: 11.5 and 5.7 GB.
    Muon has AdamW's second moment for what is no matrix of the blocks; Adam-mini's one number per
    block of weights is too small to show."""
    code, out, err = run("config/dnt_xl.py", "--lns=norm", "--vocab_size=50257")
    assert (code, err) == (0, "")
    rows = {}
    # the optimizer's table of groups comes later and has the same labels
    for line in out.splitlines():
        if line.strip():
            rows.setdefault(line.split()[0], line.split())
    d, layers = 1536, 48
    total = (
        50304 * d + 1024 * d + 12 * d * d * layers + (layers + 1) * d + 2 * layers * (d + 64) + d
    )
    counts = dict(
        emb=50304 * d, qk=2 * d * d * layers, vo=2 * d * d * layers, ffn=8 * d * d * layers
    )
    for role, count in (counts | dict(gain_in=(layers + 1) * d, all=total)).items():
        assert rows[role][2] == f"{count:,}", role
    flops = 6 * (12 * d * d * layers + 50304 * d) + 12 * layers * d * 1024
    assert f"{flops / 1e9:.3f} GFLOPs per token" in out
    sizes = {name: re.findall(r"([\d.]+) GB", " ".join(rows[name])) for name in OURS}
    assert OPTIMIZERS.keys() <= rows.keys()
    state = dict(adamw="11.50", msgdw="5.75", adam_mini="5.75")
    state |= dict(muon=f"{(8 * total - 4 * 12 * d * d * layers) / 1e9:.2f}")
    # of both sides two matrices: four of d × d in a block, and two of d × 4 d
    squares = (4 * (1 + 1) + 2 * (1 + 16)) * d * d * layers
    state |= dict(soap=f"{(8 * total + 8 * squares) / 1e9:.2f}")
    assert sizes == {name: ["5.75", "5.75", of_name] for name, of_name in state.items()}
    assert "note: lns acts less than it seems" in out and "block by block" in out


def test_every_parameter_is_in_an_equation_or_named(monkeypatch):
    layouts = [flags for flags, _ in ALL.values()]
    layouts += [dict(n_expert=4, n_expert_shared=1, balance="bias", bias=True, mlp="swiglu")]
    for flags in layouts:
        printed = lines(**flags)
        assert not [line for line in printed if line.startswith(("not in", "NOT THE"))], flags
        assert any(line.startswith("compared with the code: the lines x ←") for line in printed)

    class WithScalar(Attention):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.temperature = Slot(n_gain=1, role="scalar")

    monkeypatch.setattr(model, "Attention", WithScalar)
    (line,) = [line for line in lines() if line.startswith("not in")]
    assert line.endswith("equations.py): blocks.*.attn.f.temperature.gain")


CHANGED = {  # a forward of the fork, by its class
    "a gated residual": (Residual, lambda self, x, *args: self.skip(x) + x.sigmoid() * self.pre(x)),
    "parallel": (Block, lambda self, x, *args: self.attn(x) + self.mlp(x) - x),
    "a pair": (Block, lambda self, x, *args: (self.mlp(self.attn(x)), x)),
    "the embedding too": (Block, lambda self, x, x0, *args: self.mlp(self.attn(x + x0))),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_forward_is_noticed(name, monkeypatch):
    cls, forward = CHANGED[name]
    monkeypatch.setattr(cls, "forward", forward)
    (line,) = [line for line in lines() if "code" in line.lower()]
    assert line.startswith("NOT THE EQUATIONS OF THIS CODE")


def test_a_mixture_of_experts(run):
    """Parameters in all and active, by hand: of 8 experts a token meets 2 and the shared ones, an
    FFN of 2 widths."""
    flags = dict(
        SIZE, n_expert=8, n_expert_shared=2, n_ff=24, mlp="swiglu", gain="branch", balance="bias"
    )
    code, out, err = run(*(f"--{name}={value}" for name, value in flags.items()))
    assert (code, err) == (0, "")
    assert out.startswith(
        "3 blocks, 16 wide, 2 heads of 8, 8 experts of FFN 24 (2 active, 2 shared), context 8\n"
    )
    table = [line.split() for line in out.split("\n\n")[2].splitlines()]
    assert table[0] == ["role", "tensors", "parameters", "share", "active"]
    numbers = {row[0]: [int(row[i].replace(",", "")) for i in (1, 2, -1)] for row in table[1:]}
    d, width, layers = 16, 24, 3
    assert numbers["ffn"] == [
        3 * 6,
        layers * 3 * d * width * (8 + 2),
        layers * 3 * d * width * (2 + 2),
    ]
    assert numbers["router"] == [3, layers * 8 * d, layers * 8 * d] and numbers["balance"] == [
        3,
        3 * 8,
        3 * 8,
    ]
    # q, k, v, router, gate and up twice
    assert numbers["gain_in"] == [3 * 8 + 1] + 2 * [(layers * 8 + 1) * d]
    assert [sum(column) for column in zip(*numbers.values(), strict=True)] == [
        2 * n for n in numbers["all"]
    ]
    active = sum(numbers[role][2] for role in ("qk", "vo", "ffn", "router")) + 64 * d
    gflops = (6 * active + 12 * layers * d * 8) / 1e9
    assert f"{gflops:.3f} GFLOPs per token, forward and backward, counting" in out
    assert "active" not in run("--n_layer=1")[1]


def test_a_dataset_that_is_not_prepared_is_named(run):
    code, out, _ = run("--dataset=/nowhere/at/all", "--n_layer=1", "--n_embd=24")
    assert code == 0 and "vocabulary 50257, padded to 50304; GPT-2's, since dataset" in out


# ----------------------------------------------------------------------------------- learning rates

TRAINED = dict(SIZE, n_layer=1, warmup_iters=5, max_iters=25, learning_rate=1e-2, batch_size=12)


@pytest.fixture
def run_small(run):
    """`run` with the flags TRAINED, unless given."""

    def run_small(*argv):
        return run(
            *argv, *(f"--{k}={v}" for k, v in TRAINED.items() if f"--{k}=" not in " ".join(argv))
        )

    return run_small


def test_learning_rates_of_a_configuration(run_small):
    """Of every group, where the schedule turns; by hand. min_lr is 0.001."""
    muon = "--optimizer=muon", "--adamw_learning_rate=5e-3"
    code, out, err = run_small("--schedule=wsd", "--wsd_decay_iters=10", *muon)
    assert (code, err) == (0, "")
    *_, groups, rates = out.split("\n\n")
    groups, _, gains = groups.rpartition("\n")
    assert gains == "  gains with decay 0: attn.pre (1), mlp.pre (1), final_norm (1)"
    shown = {line.split()[0]: line.split()[1:] for line in rates.splitlines()}
    roles = [line.split()[0] for line in groups.splitlines()[1:]]
    assert list(shown) == ["LR", *roles] and set(roles) == {
        "emb",
        "pos",
        "qk",
        "vo",
        "ffn",
        "gain_in",
    }
    assert shown["LR"] == ["at", "update", "1", "5", "6", "15", "20", "25"]
    assert shown["ffn"] == ["0.002", "0.01", "0.01", "0.01", "0.0055", "0.001"]
    assert shown["pos"] == ["0.001", "0.005", "0.005", "0.005", "0.00275", "0.0005"]


# --------------------------------------------------------------------------------------------- plan


def test_a_plan(run_small):
    code, out, err = run_small("--plan", "--gpus=3", "--gpu=a800", "--micro_batch_size=2")
    assert (code, err) == (0, "")
    # a cell is two spaces or more from the next
    found = {
        line[0]: line[1:]
        for line in (re.split("  +", line) for line in out.splitlines())
        if len(line) > 1
    }
    assert found["GB"] == ["DDP", "DDP, checkpointing", "FSDP", "FSDP, checkpointing"]
    assert found["micro_batch_size that fits"] == ["4"] * 4 and found["accumulation"] == ["1"] * 4
    assert "80 GB each" in out and "MFU of 40% of 3 × 312 TFLOP/s" in out and "bfloat16" in out
    assert "\na run with these flags: parallel ddp, micro_batch_size 2 (as set; " in out
    code, out, _ = run_small("--plan", "--gpu=t4", "--gpu_mem_gb=0.0002", "--n_expert=8")
    assert code == 0 and re.search("^GB +one GPU +one GPU, checkpointing$", out, re.MULTILINE)
    assert re.search("^micro_batch_size that fits +none, 1 shown", out, re.MULTILINE)
    assert "parallel none, warning: memory may run out" in out
    d = 16  # embeddings and positions, attention and experts, router and gains
    n, active = (64 * d + 8 * d + (4 + 8 * k) * d * d + 8 * d + 3 * d for k in (8, 2))
    assert f"{n:,} parameters, {active:,} of them active, adamw, products in float16" in out


def test_without_a_dataset_it_is_imagenet(run_small):
    code, text, _ = run_small(
        "--dataset=nowhere", "--patch_size=16", "--vocab_size=0", "--block_size=1024"
    )
    first, second, *_ = text.splitlines()
    assert code == 0 and first.endswith("197 tokens an image")
    sizes = "images of 224 × 224 pixels, 3 channels, patches of 16 × 16, 1000 classes"
    assert second == f"{sizes}; ImageNet-1k's, since dataset 'nowhere' is not prepared here"
    assert "vocabulary" not in text


def test_flags_of_the_plan_belong_to_it(run):
    assert "unknown flag --gpus" in run("--gpus=4")[2]
    code, out, _ = run("--help")
    assert code == 0 and "--plan --gpus=32" in out and "a word without a value" in out
    assert all(f"--{name}=" in out for name in PlanConfig.__dataclass_fields__)


# what is refused: the exit code, and what is said
REFUSED = {
    "--n_leyer=3": (2, "n_layer"),
    "--plot": (1, "--plot is gone"),
    "--lns=norm --pre_norm=none": (1, "error: lns=norm needs a pre norm"),
    "--decay_gains=input --gain=none": (1, "error: decay_gains=input, but the model has no"),
    "--plan --gpu=h1000": (2, "h100 | h200"),
    "--plan --gpus=0": (1, "gpus=0 must be at least 1"),
    "--plan --mfu=1.5": (1, "mfu=1.5 must be above 0"),
    "--plan --gpu_mem_gb=-1": (1, "gpu_mem_gb=-1 must not be negative"),
    "--plan --gpus=5": (1, "cannot be split over 5 processes: use 10 or 15"),
    "--plan --gpus=4 --parallel=fsdp --fsdp_shard_size=3": (
        1,
        "fsdp_shard_size=3 does not divide the 4 processes",
    ),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_input_is_one_line(flags, run_small):
    code, _, err = run_small(*flags.split())
    assert code == REFUSED[flags][0] and REFUSED[flags][1] in err and err.count("\n") == 1
