"""sweep.py over sizes: the best rates' fits, transfer.md, the flags of a larger run, and the
coordinate check."""

import json
import math
import shlex
from dataclasses import asdict

import pytest
import torch.nn.functional as F
from torch.testing import assert_close

import sweep
from layers.scaling import multiplier
from model import GPT, GPTConfig
from nanodnt.optim.scaling import INPUT, WIDTH
from studies.sweep import coordinates, results
from studies.sweep.fits import best_rate, loss_at, mean_curves, range_over_seeds, slope
from studies.sweep.grid import follow
from studies.sweep.runner import Runner, resolve_configs
from studies.sweep.transfer import large_commands, transfer_rows
from support.claims import points_of, write_base
from support.models import NGPT, S5, build, tokens
from support.optimizers import filled
from support.runs import RECORD, call

RATES = (1.25e-3, 2.5e-3, 5e-3, 1e-2)
GRID = ["--n_embd=32,64", f"--learning_rate={','.join(map(str, RATES))}"]


def loss(rate: float, best: float, seed: int = 1) -> float:
    """An exact parabola in log rate; the seeds differ by a constant."""
    return 3 + math.log(rate / best) ** 2 + 0.5 * seed


def moves(n: int) -> float:
    """A best rate that follows n^-1: 0.005 at 32, 0.0025 at 64."""
    return 0.16 / n


def commands(base, *argv, best=moves) -> list:
    """[remark, GPTConfig, TrainConfig] of what is printed for large.py, were `best(n_embd)` the
    best rates."""
    points, rows = points_of(base, *GRID, *argv), []
    for point in points:
        x, n = float(point.flags["learning_rate"]), int(point.flags["n_embd"])
        rows.append(
            dict(x=x, flags=point.flags, seed=1, loss=loss(x, best(n)), run=point.run.path.name)
        )
    large = write_base(
        base.parent / "large.py",
        "gone",
        n_layer=4,
        n_head=8,
        n_embd=256,
        batch_size=16,
        max_iters=100,
    )
    lines = large_commands({"curves": {"s": rows}}, points, str(large))
    return [
        lines[0],
        *(config for line in lines[1:] for config in resolve_configs(shlex.split(line)[4:])),
    ]


def test_fits_and_intervals_are_those_of_closed_forms():
    for best in (2e-3, 2.5e-3, 4e-3):
        losses = {rate: loss(rate, best) for rate in (1e-3, 3e-3, 1e-2)}
        assert best_rate(losses) == pytest.approx(best) and loss_at(losses, best) == pytest.approx(
            3.5
        )
    for losses in (
        (1, 2, 3),
        (3, 2, 1),
        (None, 1, 2),
        (2, 1, None),
        (None, None, None),
        (1, None, 2),
    ):
        assert math.isnan(best_rate(dict(zip((1, 2, 4), losses, strict=True))))
    assert slope({x: 7 * x**-1.5 for x in (2, 3, 8)}) == pytest.approx(-1.5) and math.isnan(
        slope({1: 2, 2: 0})
    )
    for last, rate, wanted in ((5, 2, 4), (None, 2, math.inf), (5, 5, math.nan), (None, 1, 3)):
        assert loss_at({1: 3, 4: last}, rate) == pytest.approx(wanted, nan_ok=True)
    curves = {64: {1: {1: 2, 2: 4}, 2: {1: 2, 2: None}, 4: {1: 2}}}
    assert mean_curves(curves, [1, 2]) == {64: {1: 3, 2: None}}
    assert range_over_seeds(curves, lambda means: means[64][1]) == (3, 2, 4)
    value, *both = range_over_seeds({64: {1: {1: 2}}}, lambda means: means[64][1])
    assert value == 2 and all(map(math.isnan, both))  # one seed has no range
    value, *both = range_over_seeds(curves, lambda means: math.nan if means[64][1] > 3 else 1.0)
    assert value == 1 and all(map(math.isnan, both))


def test_the_table_has_exponents_and_costs_by_family():
    def curves_by(best, *sizes):
        return {
            n: {rate: {s: loss(rate, best(n), s) for s in (1, 2)} for rate in RATES} for n in sizes
        }

    moved, still = curves_by(moves, 32, 64), curves_by(lambda n: 2e-3, 32, 64)
    del moved[64][5e-3][2]  # not finished: that rate counts for neither seed
    head, one, other = transfer_rows({"a": moved, "b": still}, "n_embd")
    assert (
        head[1:4] == ["best at n_embd=32", "best at n_embd=64", "exponent"]
        and head[5] == "tuned at 32, costs at 64"
    )
    cost = f"{math.log(2) ** 2:+.3f}"
    assert one == ["a", "0.005", "0.0025", "-1.00", "-1.00 to -1.00", cost, f"{cost} to {cost}"]
    assert other == ["b", "0.002", "0.002", "+0.00", "+0.00 to +0.00", "+0.000", "+0.000 to +0.000"]
    # at 999 the lowest is at an end
    head, row = transfer_rows({"a": curves_by(moves, 32, 999)}, "n_layer")
    lost = math.log(5e-3 / moves(999)) ** 2 - math.log(RATES[0] / moves(999)) ** 2
    assert head[2] == "best at n_layer=999" and row[2:6] == ["–", "–", "–", f"{lost:+.3f}"]
    # not at 64
    assert transfer_rows({"a": still, "b": curves_by(moves, 32)}, "n_embd")[2][-2:] == ["–", "–"]


def made_up(self, run) -> None:
    """In place of Runner.train: a run that has the loss of `moves`."""
    model, config = resolve_configs(run.args)
    record = RECORD | dict(model=asdict(model), train=asdict(config), started="2026-11-26")
    run.path.mkdir(parents=True)
    (run.path / "last.pt").touch()
    (run.path / "config.json").write_text(json.dumps(record))
    row = dict(
        step=20, tokens=0, val_loss=loss(config.learning_rate, moves(model.n_embd), config.seed)
    )
    (run.path / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def test_a_sweep_over_sizes_writes_its_table_and_does_so_again(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "train", made_up)
    # sweep.png, which test_sweep.py has
    monkeypatch.setattr(results, "save_figure", lambda *_: None)
    argv = [base, *GRID, "--seeds=2", f"--out={tmp_path}"]
    assert call(sweep.main, *argv) == 0
    table = (tmp_path / "transfer.md").read_bytes()
    assert "| the config | 0.005 | 0.0025 | -1.00 | -1.00 to -1.00 |" in table.decode()
    for last in tmp_path.glob("*/last.pt"):
        last.touch()
    (tmp_path / "transfer.md").unlink()
    assert call(sweep.main, *argv, "--collect", "--for=config/dnt_xl.py") == 0
    assert (tmp_path / "transfer.md").read_bytes() == table
    assert "--learning_rate=0.0025 --min_lr=0.00025" in capsys.readouterr().out.splitlines()[-1]


def test_the_large_command_has_its_own_sizes_and_the_tuned_method(base):
    method = [
        "--files=config/dnt/s5.py",
        "--beta2=0.9",
        "--init=xavier",
        "--n_ff=96",
        "--n_kv_head=1",
        "--decay_emb=0",
    ]
    remark, model, config = commands(base, *method)
    tuned, _ = resolve_configs(points_of(base, *GRID, *method)[-1].run.args)
    # from 4 heads, 64 channels
    sizes = dict(n_layer=4, n_head=8, n_embd=256, n_ff=4 * 96, n_kv_head=2)
    assert asdict(model) == asdict(tuned) | sizes
    assert (config.beta2, config.decay_emb, config.batch_size, config.max_iters) == (
        0.9,
        False,
        16,
        100,
    )
    assert (config.learning_rate, config.min_lr) == (0.0025, 0.00025)
    tuned = "best at n_embd=64: 0.0025, in 20 steps of 256 tokens"
    best = f"{tuned}; the command below trains 100 steps of"
    warning = "standard accounts for no other size, and not for more tokens"
    assert remark == f"# s: {best} {16 * model.block_size} tokens: {warning}"
    (remark,) = commands(base, best=lambda n: 9.0)
    assert remark.startswith("# s: no best rate at n_embd=64")


def test_under_mup_the_rate_stays_and_muons_second_rate_too_if_it_is_its_own(base):
    for name, width, sizes in (
        ("mup", 64, "another n_embd"),
        ("completep", 32, "another n_embd or n_layer"),
    ):
        own = ["--optimizer=muon", "--adamw_learning_rate=6e-4", f"--base_n_embd={width % 64}"]
        remark, model, config = commands(base, f"--parametrization={name}", *own)
        assert (config.learning_rate, config.adamw_learning_rate) == (0.0025, 6e-4)
        assert f"{name} accounts for {sizes}," in remark
        assert model.parametrization == name
        assert (model.base_n_embd, model.base_n_layer, model.base_head_size) == (width, 2, 16)
    config = commands(base, "--optimizer=muon")[2]
    assert config.adamw_learning_rate == config.learning_rate


def test_what_cannot_be_is_refused_before_anything_is_run(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "train", lambda self, run: pytest.fail("trains"))
    shallow = write_base(tmp_path / "shallow.py", "gone", n_layer=1)
    for words, *argv in (
        (
            "for needs several values of learning_rate, and of n_embd",
            "--for=config/dnt_xl.py",
            GRID[1],
        ),
        ("coordinates needs several values of n_embd", "--coordinates=2", GRID[1]),
        ("error: shallow.py with n_embd64-", f"--for={shallow}", "--post_norm_blocks=2", *GRID),
        ("there is no config file 'x.py'", "--for=x.py", *GRID),
        ("coordinates=-1 must not be negative", "--coordinates=-1", *GRID),
    ):
        assert call(sweep.main, base, f"--out={tmp_path / 'out'}", *argv) in (1, 2)
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line and not (tmp_path / "out").exists()
    assert call(sweep.main, "--help") == 0 and "  --for=" in capsys.readouterr().out


def test_heads_and_ffn_follow_a_swept_width(base, dataset, tmp_path):
    assert follow([str(base)], {"n_embd": "64"}, []) == {}
    own = str(write_base(tmp_path / "own.py", dataset, n_kv_head=1, n_ff=96))
    assert follow([own], {"n_embd": "128"}, ["n_embd"]) == {
        "n_head": 8,
        "n_kv_head": 4,
        "n_ff": 384,
    }
    one, two = (
        points_of(base, *argv)[-1].run.args
        for argv in (["--n_embd=64"], ["--n_embd=32,64", "--n_head=2"])
    )
    assert not [arg for arg in one if "n_head" in arg] and "--n_head=2" in two
    with pytest.raises(
        ValueError, match="n_head of n_embd=32 does not grow to a whole number at n_embd=40"
    ):
        points_of(base, "--n_embd=32,40")
    # else each width would be its own base
    for kind, wanted in (("standard", {}), ("mup", {"base_n_embd": 32})):
        flags = {"n_embd": "64", "parametrization": kind}
        assert follow([str(base)], flags, ["n_embd"]) == {"n_head": 4} | wanted


@pytest.mark.parametrize("layout", [dict(NGPT, n_kv_head=2), S5])
def test_attention_logits_of_the_coordinate_check(layout, monkeypatch):
    """Those of the network, which has no rotation here."""
    model = build(dict(layout, pos="learned"))
    attend = F.scaled_dot_product_attention
    expected = []

    def note(q, k, v, **how):
        groups = q.shape[1] // k.shape[1]
        expected.append(q @ k.repeat_interleave(groups, 1).mT / q.shape[-1] ** 0.5)
        return attend(q, k, v, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    found = coordinates.outputs(model, (tokens(2, 5),))
    assert len(expected) == len(model.blocks)
    for number, logits in enumerate(expected, start=1):
        assert_close(found[f"{number} attention logits"], logits)


def test_coordinates_in_place_of_runs(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "train", lambda self, run: pytest.fail("trains"))
    assert call(sweep.main, base, "--n_embd=32,64", "--coordinates=2", f"--out={tmp_path}") == 0
    (path,) = tmp_path.iterdir()
    verdict, where = capsys.readouterr().out.splitlines()
    assert verdict.startswith("the config: changes that follow n_embd: ") and where == str(path)
    assert "| 2 FFN |" in path.read_text() and verdict in path.read_text()


def changes(**flags):
    """Of small models, after 10 steps on one short sequence. Of more of them the gradients are
    partly noise to each other, whose effect falls with the width: then logits' change has the
    exponent -0.25 under mup."""

    def check(width, seed):
        sizes = dict(
            n_layer=2,
            n_head=width // 16,
            block_size=16,
            vocab_size=64,
            base_n_embd=32,
            n_embd=width,
        )
        data = [tokens(1, 4, vocab=64, seed=seed + i) for i in (0, 10)]
        return coordinates.check_model(
            GPT(GPTConfig(**sizes | flags), seed), filled(learning_rate=3e-3), data, 10
        )

    return coordinates.averages(
        {w: [check(w, seed) for seed in (1, 2)] for w in (32, 64, 128, 256)}, "change"
    )


def without(which):
    """A fault: no constant on `which`."""
    changed = lambda c, on, other=None: other if on == which else multiplier(c, on, other)  # noqa: E731
    return lambda m: m.setattr("model.multiplier", changed)


# (layout, fault, what is named): the head without its multiplier, attention scaled by 1/√d, the
# embedding's LR / m
WIDE = dict(S5, pos="rope", tie_weights=False, n_head=2, base_head_size=16)
FLATNESS = [
    ({}, lambda m: None, []),
    (WIDE, lambda m: None, []),
    (WIDE, without("logits"), ["logits"]),
]
FLATNESS += [(WIDE, without("q"), ["1 attention logits", "2 attention logits"])]
FLATNESS += [(WIDE, lambda m: m.setitem(WIDTH, "emb", INPUT._replace(adam=-1)), ["embedding"])]


@pytest.mark.parametrize("layout, fault, named", FLATNESS)
def test_changes_are_flat_under_mup_but_for_planted_faults(layout, fault, named, monkeypatch):
    fault(monkeypatch)
    found = coordinates.uneven(changes(**layout, parametrization="mup"), "n_embd")
    assert list(found) == named, found
