"""What nanoGPT writes, made by its own step in nanodnt/bench: token ids, and checkpoints."""

import pickle
from pathlib import Path

import numpy as np
import torch

from model import GPTConfig
from nanodnt.bench import nanogpt
from nanodnt.settings import TrainConfig

# {name of a module of nanodnt/bench: nanoGPT's}
NAMES = {
    "blocks": "h",
    "attn_c_proj": "attn.c_proj",
    "mlp_c_proj": "mlp.c_proj",
    "c_attn": "attn.c_attn",
    "c_fc": "mlp.c_fc",
}
CHARS = ["\n", " ", *"zyxwvutsrqponmlkjihgfedcba"]  # not sorted
SIZES = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=len(CHARS), bias=False)


def their_name(name: str) -> str:
    """nanoGPT's name of a parameter of nanodnt/bench."""
    parts = [NAMES.get(part, part) for part in name.split(".")]
    prefix = "" if parts[0] == "lm_head" else "transformer."
    return prefix + ".".join(parts)


def write_tokens(folder: Path, chars: list | None = CHARS, n: int = 4000) -> Path:
    """The folder of a dataset: train.bin, val.bin and, with `chars`, meta.pkl."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    for split, count in (("train", n), ("val", n // 8)):
        ids = np.cumsum(random.choice([1, 2, 5], count)) % len(CHARS)
        ids.astype("<u2").tofile(folder / f"{split}.bin")
    if chars:
        itos = dict(enumerate(chars))
        stoi = {char: i for i, char in itos.items()}
        content = {"vocab_size": len(chars), "itos": itos, "stoi": stoi}
        (folder / "meta.pkl").write_bytes(pickle.dumps(content))
    return folder


def train(folder: Path, steps: int = 20, **changes) -> nanogpt.NanoGPT:
    """nanoGPT's model after some steps on the token ids of `folder`."""
    config = GPTConfig(**SIZES | changes)
    torch.manual_seed(0)
    model = nanogpt.NanoGPT(config)
    with torch.no_grad():
        for name, p in model.named_parameters():  # so that no gain is one and no bias zero
            is_gain = ".ln_" in f".{name}" and name.endswith("weight")
            p.normal_(1.0 if is_gain else 0.0, 0.2)
    get_batch = nanogpt.make_get_batch(
        np.fromfile(folder / "train.bin", "<u2"), 8, config.block_size, torch.device("cpu")
    )
    optimizer = nanogpt.make_optimizer(model, TrainConfig())
    step = nanogpt.make_step(
        model, optimizer, get_batch, 1, False, lambda i: 1e-3, torch.device("cpu")
    )
    for i in range(steps):
        step(i)
    model.optimizer = optimizer  # for `save`
    return model.eval()


def save(path: Path, model: nanogpt.NanoGPT, dataset: str = "walk", **changes) -> Path:
    """The checkpoint of a model, as nanoGPT saves it. `changes`: other values of its keys."""
    weights = {their_name(name): t for name, t in model.state_dict().items()}
    vocab_size, n_embd = model.wte.weight.shape
    sizes = SIZES | dict(vocab_size=vocab_size, n_embd=n_embd)
    sizes["block_size"] = len(model.wpe.weight)
    sizes["n_layer"] = len(model.blocks)
    sizes["bias"] = model.ln_f.bias is not None
    content = {
        "model": weights,
        "optimizer": model.optimizer.state_dict(),
        "model_args": sizes | {"dropout": 0.0},
        "iter_num": 20,
        "best_val_loss": torch.tensor(2.5),
        "config": {"dataset": dataset, "batch_size": 12, "compile": True},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content | changes, path)
    return path
