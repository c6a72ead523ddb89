"""bench.py's check of the product of all experts: a fault in a product, or in the model, fails it; experts in its
other benchmarks."""

from dataclasses import replace

import pytest
import torch

from model import GPT, GPTConfig
from nanodnt.bench.checks import products
from nanodnt.bench.checks.verdict import failures
from nanodnt.bench.settings import BenchConfig, Setting
from nanodnt.bench.sweeps import layouts
from nanodnt.bench.sweeps.experts import dense_setting
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig
from support.models import build

pytestmark = pytest.mark.usefixtures("one_thread")
ENV = Env(0, 1, torch.device("cpu"), torch.float32, False)
SIZE = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=64, n_ff=16, n_expert=4, mlp="swiglu")
RUN = dict(data="random", batch_size=2, micro_batch_size=2, compile=False, device="cpu")
SPREADS = list(products.SPREADS)


def make_setting(**changes) -> Setting:
    values = SIZE | RUN | changes
    schemas = (GPTConfig, TrainConfig, BenchConfig)
    return Setting(*(s(**{k: v for k, v in values.items() if hasattr(s, k)}) for s in schemas), ENV)


def failed(setting=None) -> list:
    return [check["what"] for check in failures(products.check_products(setting or make_setting()))]


def lines(spreads) -> list:
    return [f"product, {dtype}, {spread}" for dtype in ("float32", "bfloat16") for spread in spreads]


def test_what_is_right_passes():
    assert failed() == []
    assert len(products.check_products(make_setting(bias=True))["checks"]) == 2 * len(SPREADS) + 2


def test_an_unwritten_gradient_of_an_expert_without_tokens_fails(monkeypatch):
    real = products.grouped

    def grouped(x, weight, bias, routes):
        starts = torch.cat((routes.ends.new_zeros(1), routes.ends[:-1]))
        nothing = (starts == routes.ends)[:, None, None]
        weight.register_hook(lambda grad: grad.masked_fill(nothing, torch.nan))
        return real(x, weight, bias, routes)

    monkeypatch.setattr(products, "grouped", grouped)
    assert failed() == lines(SPREADS[2:])


def test_experts_in_another_order_fail(monkeypatch):
    real = products.grouped
    monkeypatch.setattr(products, "grouped", lambda x, w, b, routes: real(x, w.flip(0), b, routes))
    assert failed() == lines(SPREADS)


def test_a_wrong_model_fails(monkeypatch):
    real = products.prepare_model

    def spoil(model, config, env):
        model.blocks[0].mlp.f.router.weight.register_hook(lambda grad: 1.001 * grad)
        return real(model, config, env)

    monkeypatch.setattr(products, "prepare_model", spoil)
    assert failed() == ["model, float32, eager: gradients"]


def test_both_ask_for_experts():
    for ask in (products.check_products, dense_setting):
        with pytest.raises(ValueError, match="set n_expert, 8 for example"):
            ask(make_setting(n_expert=0))


@pytest.mark.parametrize("shared", (0, 1))
def test_the_dense_model_has_as_many_active_parameters(shared):
    """But for the router; whatever flags only experts have."""
    only = dict(
        n_expert_shared=shared, router="sigmoid", balance="bias", router_scale=2.0, z_coef=0.1, balance_rate=0.1
    )
    setting = make_setting(**only)
    model, dense = GPT(setting.flags), GPT(dense_setting(setting).flags)
    router = sum(p.numel() for name, p in model.named_parameters() if ".router." in name)
    assert dense.num_params() == model.num_params(active=True) - router
    assert dense.num_params() < model.num_params()
    kept = {k: v for k, v in vars(setting.config).items() if k not in ("z_coef", "balance_rate")}
    assert kept.items() <= vars(dense_setting(setting).config).items()


def test_layouts_keep_the_experts():
    flags = make_setting(n_expert_shared=1, router="sigmoid", norm="layernorm", qk_norm=True)
    plain = flags.replace(**layouts.plain_flags()).flags
    assert (plain.n_expert, plain.n_expert_shared, plain.router, plain.norm) == (4, 1, "sigmoid", "rmsnorm")
    assert build(vars(plain)).routers()


@pytest.mark.deep
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("n_ff", (64, 50), ids=("in one kernel", "one by one"))
def test_products_on_a_gpu(n_ff):
    """Eager and compiled, bf16 and fp32, also where rows are of no multiple of 16 bytes."""
    torch._dynamo.reset()
    setting = make_setting(n_ff=n_ff, n_expert=8, compile=True, device="cuda")
    setting.env = replace(ENV, device=torch.device("cuda"))
    result = products.check_products(setting)
    assert failures(result) == [] and "compiled" in result["checks"][-1]["what"]
