"""Mixtures of experts and `transformers`: their balance loss, configs of either version, half precision."""

import json
from dataclasses import replace

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from interop.huggingface.families import SAME_KEYS, config_from_theirs
from interop.huggingface.verify import TOLERANCES, difference
from interop.huggingface.write import write_pretrained
from layers.moe import balance_loss
from model import GPT, GPTConfig
from support.models import batch, error
from support.peers import CHARS, edit_config, make_peer, read_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_balance_loss_is_theirs():
    """For one layer and one sequence theirs is k times ours, k the experts of a token: of their shares, one for each
    place among the k, the sum is k, of ours 1. Over several sequences they take one mean, we a mean of each."""
    generator = torch.Generator().manual_seed(1)
    for n_expert, k in ((2, 1), (5, 2), (8, 8)):
        logits = torch.randn(1, 33, n_expert, generator=generator).requires_grad_()
        scores = logits.softmax(-1)
        ours = balance_loss(scores, scores.topk(k).indices)
        theirs = load_balancing_loss_func((logits[0],), n_expert, k)
        assert error(k * ours, theirs) < 1e-6
        grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (k * ours, theirs)]
        assert error(*grads, floor=1e-3) < 1e-4


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_names_of_version_4(name, tmp_path):
    """num_experts, rope_theta, sliding_window beside use_sliding_window; Mixtral's own defaults. Both names of the
    number of experts are written."""
    peer, idx = make_peer(name), batch()[0]
    peer.save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, rope_parameters=None, rope_theta=theirs["rope_parameters"]["rope_theta"])
    if name == "Qwen3-MoE":
        old = dict(num_experts=theirs["num_local_experts"], sliding_window=4096, use_sliding_window=False)
        edit_config(tmp_path, num_local_experts=None, **old)
    model = read_model(tmp_path)
    assert error(model(idx)[0], peer(idx).logits) < 1e-5
    write_pretrained(model, CHARS, tmp_path / "ours", check=False)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {written[key] for pair in SAME_KEYS.items() for key in pair} == {model.config.n_expert}
    bare = config_from_theirs(
        {key: v for key, v in theirs.items() if key not in ("rope_parameters", "rms_norm_eps", "norm_topk_prob")}
    )
    if name == "Mixtral":
        assert (bare.rope_theta, bare.norm_eps, bare.router_norm) == (1e6, 1e-5, True)
    else:
        assert (bare.rope_theta, bare.norm_eps, bare.router_norm) == (1e4, 1e-6, False)


def test_rounding_sends_tokens_to_other_experts(tmp_path):
    """So the worst token is no measure of an export in half precision. The typical one is, and shows another function:
    here one expert a token in place of two, or another last block."""
    sizes = dict(n_layer=6, n_head=4, n_embd=64, n_ff=64, block_size=64, vocab_size=50, n_expert=8, init_std=0.1)
    config = GPTConfig(**sizes, pos="rope", mlp="swiglu")
    model = GPT(config, seed=1).eval()
    assert write_pretrained(model, CHARS, tmp_path / "it", dtype=torch.float16) == ("mixtral", True)
    allowed = TOLERANCES[torch.float16]
    assert difference(tmp_path / "it", model) > 2 * allowed > allowed / 10 > difference(tmp_path / "it", model, True)

    fewer = GPT(replace(config, n_expert_active=1)).eval()
    fewer.load_state_dict(model.state_dict())
    assert difference(tmp_path / "it", fewer, True) > 2 * allowed
    with torch.no_grad():
        model.blocks[-1].mlp.f.router.weight.neg_()
    assert difference(tmp_path / "it", model, True) > 2 * allowed
