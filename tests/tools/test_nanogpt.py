"""nanoGPT's step as bench.py times it: its model against `transformers`, its start, its update, its
batches."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from configurator import configure
from model import GPT, GPTConfig
from nanodnt.bench import nanogpt
from nanodnt.settings import TrainConfig
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
        name = (
            name.replace("blocks", "h")
            .replace("attn_c_proj", "attn.c_proj")
            .replace("mlp_c_proj", "mlp.c_proj")
        )
        name = name.replace("c_attn", "attn.c_attn").replace("c_fc", "mlp.c_fc")
        renamed[f"transformer.{name}"] = p
    theirs = dict(peer.named_parameters())
    assert theirs.keys() == renamed.keys()
    # stored as (in, out) there
    turned = {name for name in theirs if ".h." in name and theirs[name].ndim == 2}
    with torch.no_grad():
        for name, p in renamed.items():
            theirs[name].copy_(p.T if name in turned else p)
    x, y = torch.randint(50, (2, 3, 16))
    y[0, :5] = -1  # ignored
    loss = model(x, y)[1]
    want = F.cross_entropy(peer(x).logits.flatten(0, 1), y.flatten(), ignore_index=-1)
    loss.backward(), want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    for name, p in renamed.items():
        grad = theirs[name].grad
        torch.testing.assert_close(
            p.grad, grad.T if name in turned else grad, rtol=1e-9, atol=1e-12
        )


@pytest.mark.house
def test_the_page_ports_nanogpts_first_config(tmp_path):
    """config/train_shakespeare_char.py of nanoGPT: 64 rows of 256 tokens a step, 200 such batches
    an evaluation."""
    page = (ROOT / "docs" / "from_nanogpt.md").read_text(encoding="utf-8")
    file = tmp_path / "ported.py"
    file.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    (model_config, config), given = configure(GPTConfig, TrainConfig, argv=[str(file)])
    sizes = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.2, bias=False)
    network = dict(norm="layernorm", norm_eps=1e-5, mlp="gelu_erf", pos="learned", tie_weights=True)
    steps = dict(
        batch_size=64,
        eval_tokens=200 * 64 * 256,
        eval_interval=250,
        log_interval=10,
        max_iters=5000,
    )
    rates = dict(
        learning_rate=1e-3,
        min_lr=1e-4,
        warmup_iters=100,
        lr_decay_iters=5000,
        beta1=0.9,
        beta2=0.99,
    )
    for part, wanted in (
        (model_config, sizes | network),
        (config, steps | rates | dict(grad_clip=1.0)),
    ):
        assert {name: getattr(part, name) for name in wanted} == wanted


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


def test_a_nanogpt_step_is_clipped_adamw_with_decay_on_matrices():
    model, before = nano(), {}
    x, y = torch.randint(50, (2, 3, 16))
    loss = model(x, y)[1]
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert norm > 1
    for name, p in model.named_parameters():
        before[name] = p.detach().clone(), p.grad / (norm + 1e-6)
        p.grad = None
    parts, optimizer = [], nanogpt.make_optimizer(model, TrainConfig())
    step = nanogpt.make_step(
        model, optimizer, lambda: (x, y), 2, False, lambda i: 1e-2, torch.device("cpu")
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    step(0, parts.append)
    assert (
        torch.are_deterministic_algorithms_enabled()
        and torch.is_deterministic_algorithms_warn_only_enabled()
    )
    assert parts == ["forward", "data", "backward"] * 2 + ["clip", "optimizer"]
    for name, p in model.named_parameters():
        w, g = before[name]
        decay = 0.1 if p.ndim >= 2 else 0.0
        torch.testing.assert_close(
            p.data, w * (1 - 1e-2 * decay) - 1e-2 * g / (g.abs() + 1e-8), rtol=1e-7, atol=1e-9
        )
        assert p.grad is None


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
