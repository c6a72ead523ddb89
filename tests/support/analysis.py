"""What the tests of studies/analysis share: networks solved by the reference, types by name,
made-up runs."""

import json
from dataclasses import replace
from types import SimpleNamespace

import torch

from support import reference
from support.models import (
    LLAMA,
    LLAMA_NET,
    NET,
    POST,
    POST_NET,
    PRE,
    S5,
    S5_NET,
    SCHEMES,
    build,
    error,
    floats,
    tokens,
)
from support.moe import MIXTURES
from support.runs import RECORD
from support.tolerances import FORWARD

# name: (flags, the same network for support.reference): together every norm placement, constant and
# kind of gain.
NETS = {
    "Pre-LN": (dict(), PRE),
    "DNT S5": (S5, S5_NET),
    "Post-LN": (POST, POST_NET),
    "LNS": (dict(lns="norm"), dict(PRE, lns="norm")),
    "LNS branch, mid": SCHEMES["S5 + LNS branch + swiglu"],
    "SkipInit": SCHEMES["SkipInit"],
    "Mix-LN, HG, llama": (
        dict(LLAMA, post_norm_blocks=1, gain="branch"),
        dict(PRE, **LLAMA_NET, post_blocks=1, gains="branch"),
    ),
    "DyT, embed scale": SCHEMES["dyt + embed scale"],
    "experts": MIXTURES["sigmoid, shared, bias, llama"],
    "experts, HG, DP": MIXTURES["softmax, shared, bias, HG, DP"],
}


def solve(name, n_layer=2, idx=None, scale=None):
    """A network of NETS in fp32 (`model`) and, by its equations in float64, the two terms of every
    residual sum (`terms`) and the stream before each block and after the last (`streams`). `scale`
    (64, 1) multiplies the rows of the embedding."""
    flags, words = NETS[name]
    model, net = build(flags, n_layer, torch.float32), replace(NET, blocks=n_layer, **words)
    if scale is not None:
        with torch.no_grad():
            model.wte.weight.mul_(scale)
    idx, terms, weights = tokens(3, 7) if idx is None else idx, [], floats(model)
    reference.forward(net, weights, idx, seen=terms)
    last = sum(terms[-1])
    if "post" in net.mlp:
        last = weights[f"blocks.{n_layer - 1}.mlp.post.gain"] * reference.rms(last, net.eps)
    streams = [x for x, _ in terms[::2]] + [last]
    return SimpleNamespace(model=model, idx=idx, terms=terms, streams=streams, eps=net.eps)


def batches_of(inputs, rows=9) -> list:
    """Inputs as batches of so many rows, without targets."""
    return [(part, None) for part in inputs.split(rows)]


def close(ours, theirs, tolerance=FORWARD):
    """Numbers or lists of them, equal to a relative tolerance of the largest."""
    ours = torch.as_tensor(ours, dtype=torch.float64)
    theirs = torch.as_tensor(theirs, dtype=torch.float64)
    return error(ours, theirs) < tolerance


def type_by_name(name, matrices):
    """The type of a parameter, read off its name: with `matrices` one of q … w2 or None, else the
    block type."""
    *path, last = name.split(".")
    part = path[-1]
    if matrices:
        types = dict(q="q", k="k", v="v", o="o", up="w1", gate="w1", down="w2")
        return types.get(part) if last == "weight" else None
    types = dict(
        wte="emb",
        wpe="pos",
        head="head",
        q="qk",
        k="qk",
        v="vo",
        o="vo",
        up="ffn",
        gate="ffn",
        down="ffn",
    )
    types["router"] = "router"
    return types.get(part, "norm")


def two_batches():
    """Of different size, with different numbers of ignored targets."""
    first, second = tokens(3, 7, seed=4), tokens(1, 7, seed=6)
    first[0, 2:] = second[0, 5] = -1
    return [(tokens(3, 7, seed=3), first), (tokens(1, 7, seed=5), second)]


# ------------------------------------------------------------------------------------- made-up runs

MODEL = {"n_embd": 768, "block_size": 10, "vocab_size": 50, "norm": "rmsnorm"}
TRAIN = {
    "dataset": "words",
    "batch_size": 1,
    "eval_tokens": 100,
    "max_iters": 200,
    "out_dir": "somewhere",
}


def make_run(
    folder, losses=None, rows=None, model=None, command=("train.py",), record=None, **train
):
    """A run directory with these validation losses {step: loss}, at 10 tokens a step, or with these
    rows."""
    folder.mkdir(parents=True)
    losses = {0: 4.0, 100: 3.0, 200: 2.0} if losses is None else losses
    rows = rows or [
        {"step": step, "tokens": 10 * step, "val_loss": loss} for step, loss in losses.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RECORD | {
        "model": MODEL | (model or {}),
        "train": TRAIN | train,
        "command": list(command),
    }
    (folder / "config.json").write_text(json.dumps(config | (record or {})))
    return folder
