"""What nanoGPT writes, made by its own step in nanodnt/bench: token ids, and checkpoints."""

import pickle
import re
from pathlib import Path

import numpy as np
import torch

from model import GPTConfig
from nanodnt.bench import nanogpt
from nanodnt.settings import TrainConfig

CHARS = ["\n", " ", *"zyxwvutsrqponmlkjihgfedcba"]  # not sorted
SIZES = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=len(CHARS), bias=False)
# nanoGPT's config/train_gpt2.py, without its comments
TRAIN_GPT2 = """



wandb_log = True
wandb_project = 'owt'
wandb_run_name='gpt2-124M'



batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8


max_iters = 600000
lr_decay_iters = 600000


eval_interval = 1000
eval_iters = 200
log_interval = 10


weight_decay = 1e-1
"""


def their_name(name: str) -> str:
    """nanoGPT's name of a parameter of nanodnt/bench."""
    name = re.sub(r"(attn|mlp)_c_proj", r"\1.c_proj", name.replace("blocks", "h"))
    name = name.replace("c_attn", "attn.c_attn").replace("c_fc", "mlp.c_fc")
    return name if name.startswith("lm_head") else f"transformer.{name}"


def write_tokens(folder: Path, n: int = 4000) -> Path:
    """The folder of a dataset of characters: train.bin, val.bin and meta.pkl."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    for split, count in (("train", n), ("val", n // 8)):
        ids = np.cumsum(random.choice([1, 2, 5], count)) % len(CHARS)
        ids.astype("<u2").tofile(folder / f"{split}.bin")
    write_alphabet(folder)
    return folder


def write_alphabet(folder: Path, chars: list = CHARS, **changes) -> None:
    """meta.pkl, with `changes` of its keys."""
    itos = dict(enumerate(chars))
    content = {"vocab_size": len(itos), "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(content | changes))


def train(folder: Path, steps: int, **changes) -> nanogpt.NanoGPT:
    """nanoGPT's model after some steps on the token ids of `folder`."""
    config = GPTConfig(**SIZES | changes)
    device = torch.device("cpu")
    torch.manual_seed(0)
    model = nanogpt.NanoGPT(config)
    with torch.no_grad():
        for p in model.parameters():  # so that no gain is one and no bias zero
            p.add_(0.2 * torch.randn_like(p))
    tokens = np.fromfile(folder / "train.bin", "<u2")
    batches = nanogpt.make_get_batch(tokens, 8, config.block_size, device)
    model.optimizer = nanogpt.make_optimizer(model, TrainConfig())  # for `save`, as are the sizes
    model.sizes = SIZES | changes | dict(vocab_size=len(model.wte.weight))
    step = nanogpt.make_step(model, model.optimizer, batches, 1, False, lambda i: 1e-3, device)
    for i in range(steps):
        step(i)
    return model.eval()


def save(folder: Path, model: nanogpt.NanoGPT, prefix: str = "", dataset: str = "walk") -> Path:
    """ckpt.pt of a model, as nanoGPT saves it, in a new folder. `prefix`: what torch.compile or DDP
    puts before the names."""
    content = {
        "model": {prefix + their_name(name): t for name, t in model.state_dict().items()},
        "optimizer": model.optimizer.state_dict(),
        "model_args": model.sizes | {"dropout": 0.0},
        "iter_num": 20,
        "best_val_loss": torch.tensor(2.5),
        "config": {"dataset": dataset, "compile": True},
    }
    folder.mkdir()
    torch.save(content, folder / "ckpt.pt")
    return folder / "ckpt.pt"
