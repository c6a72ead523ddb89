"""Tiny checkpoints to sample from: one trained, the others with weights written by hand."""

import torch

import train
from model import GPT, GPTConfig
from nanodnt.data.tokenizer import Tokenizer
from support.runs import call, write_ids

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 8
TINY = [
    "--n_layer=1",
    "--n_head=2",
    "--n_embd=16",
    "--block_size=8",
    "--batch_size=4",
    "--eval_interval=10",
]
TINY += [
    "--warmup_iters=1",
    "--learning_rate=1e-2",
    "--device=cpu",
    "--dtype=float32",
    "--compile=False",
]
BYTES = Tokenizer.meta_for("bytes")


def make_dataset(folder, tokenizer=BYTES, text=TEXT):
    """A prepared text."""
    ids = Tokenizer(tokenizer).encode(text)
    return write_ids(folder, tokenizer, {"train": ids, "val": ids[: len(ids) // 2]})


def train_run(out_dir, dataset, *flags):
    assert call(train.main, *TINY, f"--out_dir={out_dir}", f"--dataset={dataset}", *flags) == 0
    return out_dir


# A model that knows only which token follows which: its blocks write nothing, and row w of the head
# looks for the embedding of the tokens that w follows, so that all of them are equally likely and
# nothing else ever is.


def chain(run, out_dir, follows, tokenizer=BYTES, names=("best.pt",)):
    """A run directory whose checkpoints continue token t by one of follows[t], from the trained
    run's by new weights.

    Tokens are characters, "" is end of text."""
    tokens = {*follows, *(c for after in follows.values() for c in after)}
    ids = {c: Tokenizer(tokenizer).encode(c)[0] if c else tokenizer["eot"] for c in tokens}
    sizes = dict(
        n_layer=1,
        n_head=1,
        n_embd=8,
        block_size=8,
        vocab_size=tokenizer["vocab_size"],
        tie_weights=False,
    )
    model = GPT(GPTConfig(**sizes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0 if name == "final_norm.gain" else 0.0)
        for i, (c, after) in enumerate(follows.items()):
            model.wte.weight[ids[c], i] = 1.0
            for d in after:
                model.head.weight[ids[d], i] = 50.0
    checkpoint = torch.load(run / "last.pt", weights_only=True)
    checkpoint |= {
        "model": model.state_dict(),
        "model_config": vars(model.config),
        "meta": checkpoint["meta"] | tokenizer,
    }
    out_dir.mkdir(exist_ok=True)
    for name in names:
        torch.save(checkpoint, out_dir / name)
    return out_dir
