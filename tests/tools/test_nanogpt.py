"""nanoGPT's step as bench.py times it: its model against `transformers`, its start, its update, its
batches; and config/nanogpt/: its network and its configs, which end in one message."""

import ast
import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from configurator import ConfigError
from model import GPT, GPTConfig
from nanodnt.bench import nanogpt
from nanodnt.engine import Trainer, accumulate, set_learning_rates, training_step
from nanodnt.nanogpt_keys import KEYS
from nanodnt.optim import make_optimizer
from support.nanogpt import TRAIN_GPT2, their_name
from support.pages import complete, keys_of, load
from support.runs import ROOT

SIZE = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)


def nano(**changes):
    torch.manual_seed(0)
    model = nanogpt.NanoGPT(GPTConfig(**SIZE | dict(bias=True) | changes))
    with torch.no_grad():
        for p in model.parameters():  # so that no gain is one and no bias zero
            p.add_(0.1 * torch.randn_like(p))
    return model.double()


def test_nanogpt_is_gpt2_with_the_exact_gelu():
    """The same loss and gradients as `transformers` with the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model, sizes = nano(), dict(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=50)
    config = GPT2Config(
        **sizes, activation_function="gelu", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    peer, renamed = GPT2LMHeadModel(config).double(), {}
    for name, p in model.named_parameters():
        renamed[their_name(name)] = p
    theirs = dict(peer.named_parameters())
    assert theirs.keys() == renamed.keys()
    for name, p in theirs.items():  # matrices are stored as (in, out) there
        ours = renamed[name].data
        p.data = ours.T.clone() if ".h." in name and p.ndim == 2 else ours
    x, y = torch.randint(50, (2, 3, 16))
    y[0, :5] = -1  # ignored
    loss = model(x, y)[1]
    want = F.cross_entropy(peer(x).logits.flatten(0, 1), y.flatten(), ignore_index=-1)
    loss.backward(), want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    for name, p in theirs.items():
        ours = renamed[name].grad
        grad = ours.T if ".h." in name and p.ndim == 2 else ours
        torch.testing.assert_close(p.grad, grad, rtol=1e-9, atol=1e-12)


def test_nanogpt_without_biases_has_none_and_pads_gpt2_s_vocabulary():
    model = nano(bias=False)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    with torch.device("meta"):
        big = nanogpt.NanoGPT(GPTConfig(vocab_size=50257))
        ours = GPT(GPTConfig(vocab_size=50257))
    # nanoGPT prints 123.59M, without positions
    assert sum(p.numel() for p in big.parameters()) == 124_373_760
    assert big.flops_per_token() == ours.flops_per_token()
    with torch.device("meta"):
        assert len(nanogpt.NanoGPT(GPTConfig(**SIZE | dict(vocab_size=65))).wte.weight) == 65


def test_nanogpt_s_batches(dataset):
    raw = np.fromfile(dataset / "train.bin", "<u2").astype(np.int64)
    torch.manual_seed(0)
    get_batch = nanogpt.make_get_batch(
        np.fromfile(dataset / "train.bin", "<u2"), 5, 16, torch.device("cpu")
    )
    x, y = get_batch()
    assert x.shape == y.shape == (5, 16) and torch.equal(x[:, 1:], y[:, :-1])
    text = raw.tobytes()
    assert all(text.find(row.tobytes()) >= 0 for row in torch.cat((x, y[:, -1:]), 1).numpy())
    assert not torch.equal(get_batch()[0], x)


# ------------------------------------------------------------------------------- config/nanogpt/

CONFIGS = ROOT / "config"
NANO = CONFIGS / "nanogpt"
OURS = {  # parts of nanoGPT's names of parameters: of ours
    "ln_1.weight": "attn.pre.gain",
    "ln_1.bias": "attn.pre.bias",
    "ln_2.weight": "mlp.pre.gain",
    "ln_2.bias": "mlp.pre.bias",
    "ln_f.weight": "final_norm.gain",
    "ln_f.bias": "final_norm.bias",
    "attn_c_proj": "attn.f.o",
    "mlp_c_proj": "mlp.f.down",
    "c_fc": "mlp.f.up",
}


def renamed(tensors):
    """{our name: tensor} of {nanoGPT's name: tensor}. c_attn is q, k and v, one below the other."""
    ours = {}
    for name, t in tensors.items():
        for old, new in OURS.items():
            name = name.replace(old, new)
        if "c_attn" not in name:
            ours[name] = t
            continue
        for part, rows in zip("qkv", t.chunk(3), strict=True):
            ours[name.replace("c_attn", f"attn.f.{part}")] = rows
    return ours


def read(*argv):
    """[GPTConfig, TrainConfig] of a command line, checked as train.py does."""
    return complete(*load(*map(str, argv)))


@pytest.mark.parametrize("bias", [False, True])
def test_its_network_and_its_update_are_nanogpts(bias):
    """After any layout: the same logits, gradients and optimizer step; float64."""
    files = [CONFIGS / "dyt" / "dyt.py", CONFIGS / "dnt" / "s5.py", NANO / "gpt2.py"]
    flags = [f"--{name}={value}" for name, value in (SIZE | dict(vocab_size=64, bias=bias)).items()]
    model_config, config = read(*files, *flags, "--schedule=constant", "--warmup_iters=0")
    theirs = nano(bias=bias, vocab_size=64)
    ours = GPT(model_config).double()
    ours.load_state_dict(renamed(dict(theirs.named_parameters())))
    x, y = torch.randint(64, (2, 3, 16))
    logits, loss = theirs(x, y)
    torch.testing.assert_close(ours(x)[0], logits, rtol=1e-10, atol=1e-12)
    loss.backward()
    wanted = renamed({name: p.grad for name, p in theirs.named_parameters()})
    theirs.zero_grad()

    optimizer = make_optimizer(ours, config)
    set_learning_rates(optimizer, 0, config)
    scaler = torch.amp.GradScaler(enabled=False)
    trainer = Trainer(ours, optimizer, scaler, 3, grad_clip=config.grad_clip)
    accumulate(trainer, (x, y), None)
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=1e-12)

    training_step(trainer, (x.tile(2, 1), y.tile(2, 1)))
    parts = []
    optimizer = nanogpt.make_optimizer(theirs, config)
    rate = config.learning_rate
    step = nanogpt.make_step(
        theirs, optimizer, lambda: (x, y), 2, False, lambda i: rate, torch.device("cpu")
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    step(0, parts.append)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert parts == ["forward", "data", "backward"] * 2 + ["clip", "optimizer"]
    stepped = renamed(dict(theirs.named_parameters()))
    for name, p in ours.named_parameters():
        # a gradient near 0 has an error of 1e-16, which Adam divides by 1e-8
        torch.testing.assert_close(p, stepped[name], rtol=1e-10, atol=10 * rate * 1e-8)


def test_its_initial_weights_are_nanogpts():
    """N(0, 0.02²), times 1/√(2L) before a sum; within 4.5 standard errors."""
    sizes = "--n_layer=3", "--n_head=2", "--n_embd=64", "--block_size=64", "--vocab_size=512"
    init = CONFIGS / "init" / "xavier.py"
    model_config, _ = read(init, NANO / "network.py", *sizes, "--bias=True")
    for name, p in GPT(model_config, 7).named_parameters():
        if p.ndim < 2:
            assert torch.equal(p, torch.full_like(p, name.endswith("gain"))), name
            continue
        std = 0.02 / math.sqrt(6) if re.search(r"\.(o|down)\.", name) else 0.02
        assert abs(p.std() / std - 1) < 4.5 / math.sqrt(2 * p.numel()), name


@pytest.mark.house
def test_its_network_sets_every_flag_but_sizes():
    """So that it can stand after any config of text. A fork may have other flags."""
    sizes = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size", "dropout"}
    of_images = {"image_size", "channels", "n_class", "pool"}
    keys = keys_of(NANO / "network.py")
    assert {f.name for f in fields(GPTConfig)} - keys.keys() == sizes | of_images


# ------------------------------------------------------------------------------ nanoGPT's configs

DEFAULTS = dict(  # of its train.py, but for out_dir and what a machine decides
    eval_interval=2000,
    log_interval=1,
    eval_iters=200,
    eval_only=False,
    init_from="scratch",
    wandb_log=False,
    wandb_project="owt",
    dataset="openwebtext",
    gradient_accumulation_steps=40,
    batch_size=12,
    block_size=1024,
    n_layer=12,
    n_head=12,
    n_embd=768,
    dropout=0.0,
    bias=False,
    learning_rate=6e-4,
    max_iters=600_000,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    grad_clip=1.0,
    decay_lr=True,
    warmup_iters=2000,
    lr_decay_iters=600_000,
    min_lr=6e-5,
)
SHAKESPEARE = """# as its train_shakespeare_char.py
out_dir = 'out-shakespeare-char'
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
"""
FINETUNE = """import time

out_dir = 'out-shakespeare'
eval_interval = 5
eval_iters = 40
wandb_log = False # off
wandb_project = 'shakespeare'
wandb_run_name = 'ft-' + str(time.time())
dataset = 'shakespeare'
init_from = 'gpt2-xl'
always_save_checkpoint = False
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20
learning_rate = 3e-5
decay_lr = False
"""
EVAL = """batch_size = 8
eval_iters = 500
eval_only = True
wandb_log = False
init_from = 'gpt2'
"""
CPU = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12"
)
CPU += " --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
PORTED = {  # text of a file, flags, and the number of changes
    "train_gpt2": (TRAIN_GPT2, "", 5),
    "train_shakespeare_char": (SHAKESPEARE, "", 5),
    "its README's, for a CPU": (SHAKESPEARE, CPU, 6),
    "finetune_shakespeare": (FINETUNE, "", 8),
    "eval_gpt2": (EVAL, "", 3),
    "two GPUs": (TRAIN_GPT2, "--gradient_accumulation_steps=2 --backend=gloo", 7),
    "another batch": (TRAIN_GPT2, "--batch_size=3", 6),
    "a width": ('"""Mine."""\nn_embd = 96\nbackend = ""\n', "--block_size=32 --decay_lr=True", 4),
    "a context": ("block_size = 512\nbackend = 'nccl'\n", "", 3),
    "no decay": ("decay_lr = False\nwarmup_iters = 5\n", "--warmup_iters=7", 4),
    "decay after all": ("decay_lr = False\n", "--decay_lr=True --warmup_iters=7", 3),
    "what needs no change but its base": ("always_save_checkpoint = True\n", "", 2),
}
CODE = re.compile(r"write `([^`]+)`")


def settings(text, flags=""):
    """The flags of a run of nanoGPT's, by its own rules: a config is Python that it runs."""
    theirs = dict(DEFAULTS)
    exec(text, {}, theirs)
    for flag in flags.split():
        name, _, value = flag.removeprefix("--").partition("=")
        theirs[name] = value if name in ("device", "backend") else ast.literal_eval(value)
    micro = theirs["batch_size"]
    theirs["batch_size"] *= theirs["gradient_accumulation_steps"]
    theirs["eval_tokens"] = theirs["eval_iters"] * micro * theirs["block_size"]
    theirs |= dict(norm="layernorm", norm_eps=1e-5, mlp="gelu_erf", pos="learned", init_std=0.02)
    theirs |= dict(optimizer="adamw", decay_emb=True, decay_gains="none", decay_scalars=False)
    theirs["schedule"] = "cosine"
    if not theirs["decay_lr"]:
        theirs |= dict(schedule="constant", warmup_iters=0)
    return {name: theirs[name] for name in theirs.keys() - {*KEYS, "__doc__", "time"}}


def apply(message, text, flags):
    """The text and the flags after every change of a message."""
    lines = text.split("\n")
    flags = {flag.removeprefix("--").partition("=")[0]: flag for flag in flags.split()}
    for change in message.split("\n")[1:]:
        code = "".join(CODE.findall(change))
        assert code or "remove" in change
        if number := re.match(r"  config/theirs\.py:(\d+): ", change):
            i = int(number[1]) - 1
            base, _, line = lines[i].rpartition("\n")
            lines[i] = f"{code}\n{line}" if "above this" in change else f"{base}\n{code}"
        else:
            flags[re.search(r"flag --(\w+)", change)[1]] = code
    return "\n".join(lines), " ".join(flags.values()).split()


def message_of(*argv):
    with pytest.raises(ConfigError) as error:
        load(*map(str, argv))
    return str(error.value)


@pytest.mark.parametrize("name", PORTED)
def test_a_config_of_nanogpt_ends_in_one_message_which_makes_it_run(name, tmp_path, monkeypatch):
    text, flags, n_changes = PORTED[name]
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    file = Path("config/theirs.py")
    file.write_text(text, encoding="utf-8")
    message = message_of(file, *flags.split())
    assert message.startswith(f"{n_changes} changes are needed:\n")
    assert message.count("\n") == n_changes
    text_after, flags_after = apply(message, text, flags)
    file.write_text(text_after, encoding="utf-8")
    model_config, config = read(file, *flags_after)
    assert settings(text, flags).items() <= (vars(model_config) | vars(config)).items()


def test_the_port_of_nanogpts_first_config():
    model_config, config = read(NANO / "shakespeare_char.py")
    wanted = settings(SHAKESPEARE + "out_dir = 'out/nanogpt_shakespeare_char'")
    assert wanted.items() <= (vars(model_config) | vars(config)).items()


FIRST = "name config/nanogpt/gpt2.py first on the command line"
OTHERS = {  # a command line, and what the message says to write
    "config/nanogpt/shakespeare_char.py --eval_iters=20 --block_size=64 --batch_size=12": [
        "--eval_tokens=15360"
    ],
    "config/nanogpt/gpt2.py --gradient_accumulation_steps=5": ["--batch_size=60"],
    "config/gpt2_small.py config/nanogpt/gpt2.py --eval_iters=20": ["--eval_tokens=245760"],
    # batches of 16 × 128 tokens
    "config/quickstart.py --eval_iters=5": ["--eval_tokens=10240"],
    # its own eval_tokens stay
    "config/quickstart.py --batch_size=48 --gradient_accumulation_steps=2": ["--batch_size=96"],
    "config/quickstart.py --eval_iters=x --batch_size=4 --decay_lr=False": [
        "--schedule=constant --warmup_iters=0"
    ],
    "--eval_iters=2 --batch_size=3": [FIRST, "--eval_tokens=6144", "--batch_size=120"],
    "{tmp}/width.py {tmp}/eval.py": [FIRST, "eval_tokens = 1024"],
}


@pytest.mark.parametrize("line", OTHERS)
def test_names_of_nanogpt_among_files_of_ours(line, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "width.py").write_text("batch_size = 1\nn_embd = 96")
    (tmp_path / "eval.py").write_text("eval_iters = 1")
    message = message_of(*line.format(tmp=tmp_path).split())
    assert re.findall(f"{FIRST}|(?<=write `)[^`]+", message) == OTHERS[line]
