"""`python model.py CONFIG`: the printed equations, counts and bytes are those of the network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import summary
from model import GPT, GPTConfig
from optim import OPTIMIZERS

ROOT = Path(__file__).resolve().parent.parent
SIZE = dict(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=50)


def lines(**flags):
    with torch.device("meta"):
        return summary.describe_network(GPT(GPTConfig(**{**SIZE, **flags})))


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
    "Post-LN": (dict(pre_norm="none", post_norm="both"), "x ← γ·RMSNorm(x + ffn(x))", "logits = Wte x"),
    "DeepNorm": (
        dict(pre_norm="none", post_norm="both", deepnorm=True, n_layer=12),
        "x ← γ·RMSNorm(2.213·x + attention(x))",
    ),
    "Admin": (
        dict(pre_norm="none", post_norm="both", admin=True),
        "x ← γ·RMSNorm(ω·x + attention(x))",
        "ω: learned vector, set by a profiling forward when training starts (Admin)",
    ),
    "LayerScale": (
        dict(branch_scale="layerscale"),
        "x ← x + λ·attention(γ·RMSNorm(x))",
        "λ: learned vector, 0.1 at first",
    ),
    "DyT": (
        dict(norm="dyt", embed_scale=True, tie_weights=False),
        "x ← s·(wte[token] + wpe[position])",
        "x ← x + attention(γ·tanh(α x))",
        "logits = Whead γ·tanh(α x)",
        "α: learned scalar of DyT, 1 at first",
    ),
    "DyT, constant α": (
        dict(norm="dyt", dyt_learn_alpha=False, dyt_alpha_attn=0.6, dyt_squash="hardtanh"),
        "x ← x + attention(γ·hardtanh(0.6 x))",
        "x ← x + ffn(γ·hardtanh(1 x))",
    ),
    "unified": (
        dict(gain="branch", gain_out="norm", gain_param="magdir", mlp="swiglu"),
        "x ← x + attention(RMSNorm(x))",
        "q = β·û·RMSNorm[2 groups](Wq β·û·u)",
        "v = β·û·RMSNorm(Wv β·û·u)",
        "ffn(u) = Wdown (silu(β·û·RMSNorm(Wgate β·û·u)) ⊙ β·û·RMSNorm(Wup β·û·u))",
        "β·û: learned magnitude β, 1 at first; û = a/rms(a), a learned direction, all ones at first",
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
    "σReparam": (dict(sigma_reparam=True), "q = g·Wq/σ(Wq) u", "g: learned scalar of σReparam, σ(W) at first; σ(W)"),
    "many starts": (
        dict(norm="dyt", embed_scale=True, branch_scale="layerscale", lns="branch", n_embd=2048, residual_init="depth"),
        "x ← x + c1·λ·attention(γ·tanh(α x))",
        "λ: learned vector, 0.1 at first",
        "s: learned scalar, 45.25 at first",
        "α: learned scalar of DyT, 0.5 to 1 at first",
        "initial weights: N(0, 0.02²); Wo, Wdown times 0.4082 to 0.7071",
    ),
    "OR, LayerScale": (
        dict(gain_param="magdir", branch_scale="layerscale", branch_scale_init=0.01, residual_init="plain"),
        "x ← x + β·û·attention(β·û·RMSNorm(x))",
        "β·û: learned magnitude β, 0.01 to 1 at first; û = a/rms(a), a learned direction, all ones at first",
        "initial weights: N(0, 0.02²)",
    ),
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


def run(*argv):
    done = subprocess.run([sys.executable, "model.py", *argv], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_command():
    """DNT's 1.4B: its parameters, and the optimizer state of the paper's Table 2: 11.5 and 5.7 GB."""
    code, out, err = run("config/dnt_xl.py", "--lns=norm", "--vocab_size=50257")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    d, layers = 1536, 48
    assert int(rows["emb"][2].replace(",", "")) == 50304 * d
    assert int(rows["qk"][2].replace(",", "")) == int(rows["vo"][2].replace(",", "")) == 2 * d * d * layers
    assert int(rows["ffn"][2].replace(",", "")) == 8 * d * d * layers
    assert int(rows["gain_in"][2].replace(",", "")) == (layers + 1) * d
    total = 50304 * d + 1024 * d + 12 * d * d * layers + (layers + 1) * d + 2 * layers * (d + 64) + d
    assert int(rows["all"][2].replace(",", "")) == total
    flops = 6 * (12 * d * d * layers + 50304 * d) + 12 * layers * d * 1024
    assert f"{flops / 1e9:.3f} GFLOPs per token" in out
    sizes = {name: re.findall(r"([\d.]+) GB", " ".join(rows[name])) for name in OPTIMIZERS}
    assert sizes["adamw"] == ["5.75", "5.75", "11.50"] and sizes["msgdw"] == ["5.75", "5.75", "5.75"]
    assert "note: lns has no effect here" in out and "block by block" in out


@pytest.mark.parametrize(
    "argv, code, words",
    [
        (["--lns=norm", "--pre_norm=none"], 1, "error: lns=norm needs a pre norm"),
        (
            ["--decay_gains=input", "--gain=none", "--vocab_size=50"],
            1,
            "error: decay_gains=input, but the model has no",
        ),
        (["no_such_file.py"], 2, "no_such_file.py"),
        (["--n_leyer=3"], 2, "n_layer"),
    ],
)
def test_bad_input_is_one_line(argv, code, words):
    found, _, err = run(*argv)
    assert found == code and words in err and len(err.splitlines()) == 1


def test_a_dataset_that_is_not_prepared_is_said():
    code, out, _ = run("--dataset=/nowhere/at/all", "--n_layer=1", "--n_embd=24")
    assert code == 0 and "vocabulary 50257, padded to 50304; GPT-2's, since dataset" in out


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} model.py --n_layer=64 --lns=norm --vocab_size=50 | head -n 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("64 blocks") and done.stderr == ""
