"""row["track"]: its numbers against ones computed by other means; it changes nothing in the run;
what is not finite."""

import math
import signal
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import train
from layers.slot import PositiveSlot, Slot
from model import GPT, GPTConfig
from nanodnt.run import compilation, tracking
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.run.directory import RunDirectory
from nanodnt.run.environment import Env
from nanodnt.run.metrics import read_metrics
from nanodnt.weights import model_from_checkpoint
from support.depth import spread
from support.models import NGPT
from support.runs import assert_same_run, bare, column, different, load, metrics, run
from support.strikes import at_call, at_row, kill_me, optimizers, spoil_gradients
from support.tolerances import FOR_PRINTING
from support.tracked import PRE, SIX_DIGITS, UNIFIED, assert_close_numbers

pytestmark = pytest.mark.usefixtures("quick")

POST = dict(pre_norm="none", mid_norm="none", post_norm="both", input_norm=False)
LAYOUTS = {
    "DNT": dict(),
    "LLaMA, LNS": dict(
        PRE, qk_norm=False, pos="rope", mlp="swiglu", tie_weights=False, lns="norm", n_kv_head=2
    ),
    "DyT": dict(PRE, norm="dyt", embed_scale=True),
    "unified": dict(UNIFIED, pos="rope", n_kv_head=1),
    "Post-LN": dict(POST, deepnorm=True, norm="layernorm", bias=True),
    "Fixup": dict(PRE, norm="none", qk_norm=False, fixup=True, residual_init="plain"),
    "LayerScale": dict(PRE, branch_scale="layerscale", sigma_reparam=True),
    "nGPT": NGPT,
    "experts": dict(PRE, n_expert=6, n_expert_shared=1, mlp="swiglu", balance="bias"),
    "experts, HG": dict(
        UNIFIED, n_expert=4, n_expert_active=3, router="sigmoid", router_norm=False
    ),
}
STEPS = 4
ALWAYS = dict(track_interval=1, max_iters=STEPS, lr_decay_iters=20, eval_interval=STEPS)
BY_STEP = ("grad_norm", "grad_kurtosis", "update_ratio")


# --------------------------------------------------------------------------------- one forward pass


def by_hand(model, idx) -> dict:
    """What `probe` measures, from the equation of a sub-layer, x ← post(skip(x) + mid(f(pre(x)))),
    with NumPy; q and k are those that attention is called with."""
    pairs, attention, c = [], F.scaled_dot_product_attention, model.config

    def note(q, k, v, **options):
        pairs.append([x.detach().double().numpy() for x in (q, k)])
        return attention(q, k, v, **options)

    def spread(x):  # variance over channels, mean over tokens
        return float(x.double().numpy().var(-1).mean())

    x = model.wte(idx) + (0 if model.wpe is None else model.wpe(torch.arange(idx.shape[1])))
    inputs = {"input_norm": (x := model.embed_scale(x))}
    x = model.input_norm(x)
    angles = np.arange(idx.shape[1])[:, None] * c.rope_theta ** (
        -np.arange(0, c.head_dim, 2) / c.head_dim
    )
    rope = (
        [torch.tensor(f(angles)).float()[:, None] for f in (np.cos, np.sin)]
        if c.pos == "rope"
        else None
    )
    found = {"stream_var": [], "branch_var": {"attn": [], "mlp": []}, "logit_max": []}
    found |= {name: [] for name in ("load", "router_entropy", "dropped") if c.n_expert}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", note)
        for i, block in enumerate(model.blocks):
            found["stream_var"].append(spread(x))
            for name, r, args in (("attn", block.attn, (rope,)), ("mlp", block.mlp, ())):
                path = f"blocks.{i}.{name}"
                inputs[f"{path}.pre"] = x
                u = r.pre(x)
                if c.n_expert and name == "mlp":
                    load, entropy = routing_by_hand(r.f.router, u.double().numpy(), r.pre, c)
                    for key, value in (
                        ("load", load),
                        ("router_entropy", entropy),
                        ("dropped", 0.0),
                    ):
                        found[key].append(value)
                inputs[f"{path}.mid"] = r.f(u, r.pre.factor_for_weight(), *args)
                y = r.mid(inputs[f"{path}.mid"])
                found["branch_var"][name].append(spread(y))
                inputs[f"{path}.post"] = r.skip(x) + y
                x = r.post(inputs[f"{path}.post"])
    inputs["final_norm"] = x
    found["stream_var"].append(spread(x))
    for q, k in pairs:
        k, largest = k.repeat(q.shape[1] // k.shape[1], axis=1), 0.0
        for t in range(q.shape[2]):  # a token sees itself and those before
            largest = max(
                largest, np.abs(np.einsum("bhd,bhsd->bhs", q[:, :, t], k[:, :, : t + 1])).max()
            )
        found["logit_max"].append(largest / math.sqrt(c.head_dim))
    slots = {name: m for name, m in model.named_modules() if isinstance(m, Slot)}
    dyt = [name for name, slot in slots.items() if slot.norm_kind == "dyt"]
    found["alpha"] = {name: float(slots[name].alpha) for name in dyt}
    found["inv_std"] = {name: float(1 / inputs[name].double().numpy().std()) for name in dyt}
    found["gain"] = {}
    for name, slot in slots.items():
        gain = gain_by_hand(slot)
        if gain.size > 1:
            found["gain"][name] = [
                float(np.sqrt((gain**2).mean())),
                float(gain.min()),
                float(gain.max()),
            ]
    found["block_norm"] = {
        f"{branch}_gain": [
            joint_gain_by_hand(slots, f"blocks.{i}.{branch}.") for i in range(c.n_layer)
        ]
        for branch in ("attn", "mlp")
    }
    rows = model.wte.weight.double().numpy()[: c.vocab_size]
    smallest = min(((row - row.mean()) ** 2).sum() for row in rows)
    gains = [
        joint_gain_by_hand(slots, name)
        for name in ("input_norm", "blocks.0.attn.pre", "blocks.0.attn.")
    ]
    gain = next((g for g in gains if g > 0), math.nan)
    return found | dict(embedding=dict(rows=c.vocab_size, smallest=float(smallest), gain=gain))


def joint_gain_by_hand(slots, prefix) -> float:
    """The norm of all gains of slots whose name begins so; nan for none."""
    gains = [gain_by_hand(slot) for name, slot in slots.items() if name.startswith(prefix)]
    return math.sqrt(sum((gain**2).sum() for gain in gains if gain.size > 1)) or math.nan


def routing_by_hand(router, u, pre, config) -> tuple:
    """(each expert's share of the choices, mean entropy of the scores) for u (B, T, C), token by
    token."""
    gain = gain_by_hand(pre) * gain_by_hand(router.pre)
    bias = (
        np.zeros(len(router.weight))
        if router.choice_bias is None
        else router.choice_bias.double().numpy()
    )
    chosen, entropies = np.zeros(len(bias)), []
    for token in u.reshape(-1, u.shape[-1]):
        scores = np.exp(router.weight.double().numpy() @ (gain * token))
        scores = scores / (1 + scores) if config.router == "sigmoid" else scores / scores.sum()
        chosen[np.argsort(scores + bias)[-config.n_expert_active :]] += 1
        shares = scores / scores.sum()
        entropies.append(-(shares * np.log(shares)).sum())
    return (chosen / chosen.sum()).tolist(), float(np.mean(entropies))


def gain_by_hand(slot) -> np.ndarray:
    """The scale vector of a slot from its parameters: γ, |γ| where it is positive, or
    β·α/rms(α)."""
    if isinstance(slot, PositiveSlot):
        return abs(slot.gain.double().numpy())
    if slot.direction is None:
        return np.ones(1) if slot.gain is None else slot.gain.double().numpy()
    direction = slot.direction.double().numpy()
    return slot.magnitude.double().numpy() * direction / np.sqrt((direction**2).mean())


def model_of(flags, seed=3, **more) -> GPT:
    """A model none of whose parameters has its initial value."""
    sizes = dict(
        n_layer=3,
        n_head=4,
        n_embd=32,
        block_size=16,
        vocab_size=50,
        mid_norm="both",
        pre_norm="attn",
    )
    model = GPT(GPTConfig(**sizes | dict(input_norm=True, qk_norm=True) | flags | more))
    model.config.check()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_the_probe_measures_what_the_equations_say(flags, monkeypatch):
    model = model_of(flags, dropout=0.5).eval()
    idx = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = by_hand(model, idx)
    state, shapes, logits = torch.get_rng_state(), [], GPT.logits
    monkeypatch.setattr(GPT, "logits", lambda self, x: shapes.append(y := logits(self, x)) or y)
    found = tracking.fetch_numbers(tracking.probe(model.train(), idx))
    assert_close_numbers(found, expected)
    assert [len(found[name]) for name in ("stream_var", "logit_max")] == [4, 3]
    assert flags.get("n_expert") is None or sum(found["load"][0]) == pytest.approx(
        1, abs=2 * FOR_PRINTING
    )
    assert all(
        m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules()
    )
    # logits of one token, not of 16
    assert torch.equal(torch.get_rng_state(), state) and shapes[0].shape == (3, 1, 50)
    tracking.probe(model.eval(), idx)
    assert not any(m.training for m in model.modules())


# ----------------------------------------------------------------------------------------- the step


@contextmanager
def watched():
    """A list that gets, for each step of a run, its gradients before clipping and the weights
    before and after it, {name: array}, and the roles."""
    seen = []

    def prepare(model, optimizer):
        def copy(tensors):
            return {
                n: t.detach().double().numpy().copy()
                for n, t in zip(model.roles(), tensors, strict=True)
            }

        def before(*_):
            seen.append([copy([p.grad for p in model.parameters()]), copy(model.parameters())])

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(
            lambda *_: seen[-1].extend([copy(model.parameters()), model.roles()])
        )

    with optimizers(prepare):
        yield seen


def measure_by_hand(gradients, old, new, roles) -> dict:
    """The tracked numbers of a step, from copies of its tensors."""
    found = {name: {} for name in (*BY_STEP, "weight_norm")}
    for role in dict.fromkeys(role for role in roles.values() if role != "balance"):  # of no loss
        g, a, b = (
            np.concatenate([t.ravel() for n, t in d.items() if roles[n] == role])
            for d in (gradients, old, new)
        )
        found["grad_norm"][role] = np.sqrt((g**2).sum())
        found["weight_norm"][role] = np.sqrt((b**2).sum())
        found["grad_kurtosis"][role] = (g**4).mean() / (g**2).mean() ** 2 if g.any() else None
        found["update_ratio"][role] = (
            np.sqrt(((b - a) ** 2).sum() / (a**2).sum()) if a.any() else None
        )
    return found


def block_norms_by_hand(new) -> dict:
    """{type of a block's matrix: ‖W‖ by block}, from copies {name: array} of the weights after a
    step."""
    squares, kinds = {}, dict(q="q", k="k", v="v", o="o", up="w1", gate="w1", down="w2")
    for name, w in new.items():
        *path, last = name.split(".")
        if kind := last == "weight" and kinds.get(path[-1]):
            squares.setdefault(kind, {}).setdefault(int(name.split(".")[1]), []).append(
                (w**2).sum()
            )
    return {
        kind: [math.sqrt(sum(its[i])) for i in range(len(its))] for kind, its in squares.items()
    }


EXPERTS = dict(n_expert=3, n_expert_shared=1, z_coef=0.01)
CASES = {
    "adamw, clipped": dict(grad_clip=0.01),
    "unified, accumulation": dict(
        UNIFIED, micro_batch_size=2, grad_clip=0.1, optimizer="adam_mini"
    ),
    "float16": dict(dtype="float16"),
    "experts, bfloat16": dict(
        EXPERTS, dtype="bfloat16", dropout=0.3, activation_checkpointing=True
    ),
    "muon, DyT": dict(
        PRE, norm="dyt", embed_scale=True, optimizer="muon", blockwise_lr=True, learning_rate=1e-3
    ),
}


@pytest.mark.parametrize("case", spread(CASES, [*CASES][:4]))
def test_a_step_by_role_and_the_same_run_without_tracking(case, dataset, tmp_path, monkeypatch):
    """Tracked numbers are those of copies of the step's tensors. Without tracking the run has the
    same bits."""
    flags = CASES[case]
    with watched() as seen:
        assert run(out_dir=tmp_path / "on", dataset=dataset, **ALWAYS, **flags) == 0
    rows = metrics(tmp_path / "on")
    assert [row["step"] for row in rows] == list(range(STEPS + 1)) and "track" not in rows[0]
    for row, step in zip(rows[1:], seen, strict=True):
        expected = measure_by_hand(*step)
        assert_close_numbers({name: row["track"][name] for name in expected}, expected)
        norms = block_norms_by_hand(step[2])
        assert (
            list(row["track"]["block_norm"]) == ["attn_gain", "mlp_gain", *norms]
            and len(norms) == 6
        )
        assert_close_numbers({kind: row["track"]["block_norm"][kind] for kind in norms}, norms)
        assert math.hypot(*row["track"]["grad_norm"].values()) == pytest.approx(
            row["grad_norm"], rel=SIX_DIGITS
        )

    monkeypatch.setattr("nanodnt.run.tracking.Tracker", None)  # calling it would be an error
    assert (
        run(out_dir=tmp_path / "off", dataset=dataset, **ALWAYS | dict(track_interval=0), **flags)
        == 0
    )
    without = [bare(row) for row in metrics(tmp_path / "off")]
    assert [bare(row) | dict(track=None) for row in rows] == [
        row | dict(track=None) for row in without
    ]
    on, off = (load(tmp_path / name / "last.pt") for name in ("on", "off"))
    assert (
        different(on["model"], off["model"]) == []
        and different(on["optimizer"], off["optimizer"]) == []
    )


def test_the_probe_is_of_the_first_validation_sequences(dataset, tmp_path, monkeypatch):
    """As many as a step has, of at most 4096 tokens; the weights are those after the step, in the
    run's precision."""
    read, probe = [], tracking.probe
    monkeypatch.setattr(tracking, "probe", lambda model, idx: read.append(idx) or probe(model, idx))
    flags = dict(ALWAYS, dataset=dataset, max_iters=1, eval_interval=1, eval_tokens=512)
    assert run(out_dir=tmp_path / "a", **flags) == 0
    monkeypatch.setattr(tracking, "TOKENS", 70)
    assert run(out_dir=tmp_path / "b", micro_batch_size=2, **flags) == 0
    tokens = np.fromfile(dataset / "val.bin", "<u2")
    every = (len(tokens) - 1) // 32
    windows = np.stack([tokens[32 * (i * every // 16) :][:32] for i in range(16)])  # evenly spaced
    for idx, expected in zip(read, (windows[:8], windows[:2]), strict=True):
        assert np.array_equal(idx, expected)
    model = model_from_checkpoint(load_checkpoint(tmp_path / "a" / "last.pt"))
    last = column(tmp_path / "a", "track")[1]
    with torch.no_grad():
        expected = by_hand(model, torch.tensor(windows[:8].astype(np.int64)))
    del expected["block_norm"]
    assert_close_numbers({name: last[name] for name in expected}, expected)


def test_the_sample_of_a_large_parameter():
    """At most SAMPLE entries, as many from every column."""
    for shape in ((1000, 768), (768, 1000), (3, 70001), (65536,), (2**17, 2)):
        p = torch.nn.Parameter(torch.arange(math.prod(shape), dtype=torch.float64).view(shape))
        entries, n = tracking.sample(p)
        assert 2**15 / 2 < len(entries) <= 2**16 and len(entries) == -(-p.numel() // n)
        counts = torch.bincount(entries.long() % p[0].numel(), minlength=p[0].numel())
        assert counts.max() - counts.min() <= 1 and (counts.min() or p[0].numel() > 2**16)


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
def test_numbers_of_a_large_matrix(size):
    """Those of a sample are right to its error. The kurtosis does not depend on the gradient's
    size, though fourth powers leave the range of fp32."""
    draws = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(1000, 768, generator=draws))
    gradient = torch.randn(1000, 768, generator=draws)
    p.grad, old = size * gradient, p.detach().clone()
    batches = dict(validation=lambda n: np.zeros(1), val_batch=lambda *_: np.ones((2, 1, 16), int))
    data = SimpleNamespace(block_size=16, **batches)
    config = SimpleNamespace(grad_clip=0.0, eval_tokens=0, batch_size=1)
    optimizer = SimpleNamespace(param_groups=[dict(role="ffn", params=[p], param_names=["p"])])
    env = Env(0, 1, torch.device("cpu"), torch.float32, False)
    tracker = tracking.Tracker(model_of({}), optimizer, data, config, env)
    tracker.before()
    with torch.no_grad():
        p.mul_(0.9).add_(0.5 * gradient)
    found = tracker.after(torch.tensor(1.0), torch.tensor(False))
    assert found["update_ratio"]["ffn"] == pytest.approx(
        ((p - old).norm() / old.norm()).item(), rel=0.02
    )
    assert found["weight_norm"]["ffn"] == pytest.approx(p.norm().item(), rel=SIX_DIGITS)
    assert found["grad_norm"]["ffn"] == pytest.approx(size * gradient.norm().item(), rel=SIX_DIGITS)
    assert found["grad_kurtosis"]["ffn"] == pytest.approx(3, rel=0.02)  # Gaussian


# ----------------------------------------------------------------------------------- when, and rows


def test_rows_of_the_interval_whatever_else_is_logged(dataset, tmp_path):
    flags = dict(dataset=dataset, max_iters=10, eval_interval=5, log_interval=3, n_layer=1)
    assert run(out_dir=tmp_path, track_interval=4, **flags) == 0
    rows = {row["step"]: row.keys() for row in metrics(tmp_path)}
    assert [step for step, keys in rows.items() if "track" in keys] == [4, 8]
    assert rows[4] == {"step", "tokens", "track"} and rows.keys() == {0, 3, 4, 5, 6, 8, 9, 10}


def test_an_interrupted_run_tracks_what_the_uninterrupted_one_does(dataset, tmp_path):
    """Between two tracked steps; and during the evaluation after a tracked step whose gradient is
    not finite: its row then waits in the checkpoint."""
    config = dict(dataset=dataset, track_interval=2, max_iters=12, eval_interval=4)
    with spoil_gradients(math.inf, {7}, "wte.weight"):
        assert run(out_dir=tmp_path / "uninterrupted", **config) == 0
        with at_row(3, lambda: kill_me(signal.SIGTERM)):
            assert run(out_dir=tmp_path / "run", **config) == 143
        with at_call(train, "evaluate", 2, lambda *_: kill_me(signal.SIGTERM)):
            assert run(out_dir=tmp_path / "run", **config, init_from="resume") == 143
        waiting = load(tmp_path / "run" / "last.pt")["pending"]
        assert (
            waiting["step"] == 8 and waiting["grad_norm"] is None and waiting["track"]["stream_var"]
        )
        assert run(out_dir=tmp_path / "run", **config, init_from="resume") == 0
    assert list(column(tmp_path / "run", "track")) == [2, 4, 6, 8, 10, 12]
    assert_same_run(tmp_path / "run", tmp_path / "uninterrupted")


def test_a_step_that_is_not_finite_has_null(dataset, tmp_path):
    """For all roles, since the step was skipped. Numbers of the weights and of the forward pass are
    those of before."""
    with spoil_gradients(math.inf, {2}, "blocks.0.mlp.f.up.weight"):
        assert (
            run(out_dir=tmp_path, dataset=dataset, **ALWAYS | dict(max_iters=4, eval_interval=4))
            == 0
        )
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    found = column(tmp_path, "track")
    for name in BY_STEP:
        assert set(found[3][name].values()) == {None} and None not in found[4][name].values()
    rest = {name: part for name, part in found[3].items() if name not in BY_STEP}
    assert rest == {name: found[2][name] for name in rest} and None not in tree_leaves(rest)


def test_rows_become_json(tmp_path):
    log = RunDirectory(tmp_path)
    log.write(
        {
            "step": 3,
            "tokens": 9,
            "track": {"stream_var": [1.0, math.inf], "grad_norm": {"qk": math.nan}},
        }
    )
    clean = {
        "step": 3,
        "tokens": 9,
        "track": {"stream_var": [1.0, None], "grad_norm": {"qk": None}},
    }
    assert read_metrics(tmp_path) == [clean] and "NaN" not in log.metrics.read_text()


# ----------------------------------------------------------------------------------------- compiled


@pytest.mark.deep
@pytest.mark.parametrize(
    "layout", [dict(), dict(n_expert=4, n_expert_shared=1, balance="bias")], ids=str
)
def test_tracking_compiles_nothing(layout, dataset, tmp_path, monkeypatch):
    """One graph for evaluation, one for training, no graph break; and the bits of the run without
    tracking."""
    compile_ = torch.compile
    compile_model = compilation.compile_model
    counters = torch._dynamo.utils.counters
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: compile_(model, backend="eager", **options)
    )

    def compile_and_try(*args):
        # the two graphs are of one function
        with torch._dynamo.config.patch(error_on_recompile=False):
            return compile_model(*args)

    monkeypatch.setattr(compilation, "compile_model", compile_and_try)
    flags = dict(
        ALWAYS, dataset=dataset, n_layer=1, dropout=0.1, compile=True, eval_interval=2, **layout
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for name, interval in ("on", 1), ("off", 0):
            torch._dynamo.reset()
            counters.clear()
            assert run(out_dir=tmp_path / name, **flags | dict(track_interval=interval)) == 0
            assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    torch._dynamo.reset()
    assert len(column(tmp_path / "on", "track")) == STEPS
    on, off = (load(tmp_path / name / "last.pt") for name in ("on", "off"))
    assert different(on["model"], off["model"]) == []
