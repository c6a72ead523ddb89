"""The runs behind the claims: the search for a learning rate, the folder of a run, and what is measured of it."""

import fcntl
import itertools
import json
import math
import time
from pathlib import Path

import pytest
import torch

from model import GPT, GPTConfig
from nanodnt.claims import quantities
from nanodnt.claims.claims import ARMS, SCALES, Arm
from nanodnt.claims.runner import Runner, Stopped
from nanodnt.settings import TrainConfig
from support.claims import flag, make_runner

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------------------------------------- learning rates


def searching(tmp_path, monkeypatch, loss, scale="tiny") -> Runner:
    """A runner whose runs have the loss `loss(learning rate)`, at once."""
    made = make_runner(tmp_path, scale)
    monkeypatch.setattr(made, "finish", lambda run: None)

    def measured(measure, run):
        assert measure == "loss" and flag(run, "seed") == "1"
        return loss(float(flag(run, "learning_rate")))

    monkeypatch.setattr(made, "measure", measured)
    return made


def valley(best: float):
    return lambda lr: math.log2(lr / best) ** 2


# At scale tiny AdamW's grid is 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64 · 1e-3, and the search begins with 4e-3.
@pytest.mark.parametrize(
    "loss, best, tried",
    [
        (valley(4e-3), 4e-3, {2, 4, 8}),
        (valley(1.7e-3), 2e-3, {1, 2, 4, 8}),
        (valley(1.6e-2), 1.6e-2, {2, 4, 8, 16, 32}),
        (valley(1.0), 6.4e-2, {2, 4, 8, 16, 32, 64}),  # at the upper edge
        (valley(1e-6), 2.5e-4, {0.25, 0.5, 1, 2, 4, 8}),  # at the lower
        (lambda lr: math.log(256), 2.5e-4, {0.25, 0.5, 1, 2, 4, 8}),  # all diverged: the smallest
        (lambda lr: valley(5e-4)(lr) if lr < 1e-3 else 9.0, 5e-4, {0.25, 0.5, 1, 2, 4, 8}),  # down from a plateau
    ],
)
def test_the_search_goes_downhill_and_no_further(loss, best, tried, tmp_path, monkeypatch):
    found, losses = searching(tmp_path, monkeypatch, loss).search_rate(Arm("dnt"))
    assert found == pytest.approx(best)
    assert sorted(losses) == pytest.approx(sorted(lr * 1e-3 for lr in tried))
    assert all(losses[lr] == loss(lr) for lr in losses)


def test_learning_rates_that_are_given(tmp_path, monkeypatch):
    made = searching(tmp_path, monkeypatch, valley(8e-3))
    assert made.search_rate(Arm("dnt", lr=0.1)) == (0.1, {})
    assert made.search_rate(ARMS["Norm ×2"]) == (pytest.approx(8e-3), {})  # that of "one LR"
    assert made.search_rate(Arm("dnt", grid="msgdw"))[0] == pytest.approx(0.025)  # its grid ends there
    paper = searching(tmp_path, monkeypatch, valley(8e-3), "paper")
    assert paper.search_rate(ARMS["S5 AdamW"]) == paper.search_rate(ARMS["Norm ×2"]) == (None, {})
    assert flag(paper.training_run(ARMS["S1 AdamW"], None, 1), "learning_rate") is None  # the config's own
    assert flag(paper.training_run(ARMS["S5 AdamW"], None, 1), "learning_rate") == "6e-4"  # DNT's, at every size


# -------------------------------------------------------------------------------------------------------------- runs


def test_the_folder_is_of_the_command_but_not_of_what_is_kept(tmp_path):
    made = make_runner(tmp_path)
    run, kept = (made.training_run(Arm("dnt", "config/dnt/s5.py", keep=keep), 1e-3, 2) for keep in (False, True))
    assert run.path == kept.path and run.path.parent == tmp_path / "out" / "tiny"
    assert kept.args == (*run.args, "--keep_every=40")  # ten of 400 steps
    assert run.args[:2] == ("config/claims/tiny_gpt.py", "config/dnt/s5.py")
    assert (flag(run, "learning_rate"), flag(run, "min_lr"), flag(run, "seed")) == ("0.001", "0.0001", "2")
    others = [
        made.training_run(Arm("dnt", "config/dnt/s4.py"), 1e-3, 2),
        made.training_run(Arm("dnt", "config/dnt/s5.py"), 2e-3, 2),
        made.training_run(Arm("dnt", "config/dnt/s5.py"), 1e-3, 3),
        made.training_run(Arm("dnt", "config/dnt/s5.py --weight_decay=0.2"), 1e-3, 2),
        made.training_run(Arm("lns", "config/dnt/s5.py"), 1e-3, 2),
    ]
    assert len({run.path, *(other.path for other in others)}) == 6


def test_later_flags_replace_earlier_ones(tmp_path):
    made = make_runner(tmp_path)  # whose DyT family has --init_std=0.125
    assert flag(made.training_run(Arm("dyt"), 1e-3, 1), "init_std") == "0.125"
    assert flag(made.training_run(Arm("dyt", "--init_std=0.5 --init_std=0.25"), 1e-3, 1), "init_std") == "0.25"
    assert flag(made.training_run(Arm("dyt", "--learning_rate=7"), 1e-3, 1), "learning_rate") == "0.001"


@pytest.mark.parametrize("scale", SCALES)
def test_arms_share_a_folder_only_where_their_commands_are_equal(scale, tmp_path):
    made, commands = make_runner(tmp_path, scale), {}
    for arm, lr, seed in itertools.product(ARMS.values(), (1e-3, 2e-3), (1, 2)):
        run = made.training_run(arm, lr, seed)
        args = tuple(arg for arg in run.args if not arg.startswith("--keep_every"))
        assert commands.setdefault(run.path, args) == args
    assert len(set(commands.values())) == len(commands)


def test_a_folder_in_use_is_waited_for(tmp_path, monkeypatch, capsys):
    made, other = make_runner(tmp_path), open(tmp_path / ".reproduce", "w")
    fcntl.flock(other, fcntl.LOCK_EX)
    naps = iter(range(3))
    monkeypatch.setattr(time, "sleep", lambda seconds: next(naps) == 2 and other.close())
    made.lock_folder(tmp_path).close()
    assert list(naps) == []
    assert capsys.readouterr().out == f"waiting: {tmp_path} is being trained by another process\n"
    with open(tmp_path / ".reproduce", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        made.stop()
        with pytest.raises(Stopped):
            made.lock_folder(tmp_path)


# ---------------------------------------------------------------------------------------------------------- measures


def left(folder: Path, *rows: dict) -> Path:
    """A run directory with these rows, of a model with 50 tokens: it begins with a loss of ln 50 = 3.912."""
    folder.mkdir()
    lines = [json.dumps({"step": 10 * i, "tokens": 0} | row) for i, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text(json.dumps({"model": {"vocab_size": 50}, "train": {}}))
    return folder


def test_loss_and_rise_by_hand(tmp_path):
    falling = left(tmp_path / "a", {"val_loss": 3.9}, {"train_loss": 1.0}, {"val_loss": 3.0})
    assert (quantities.final_loss(falling), quantities.loss_rise(falling)) == (3.0, 0.0)
    rising = left(tmp_path / "b", {"val_loss": 3.9}, {"val_loss": 3.0}, {"val_loss": 3.25})
    assert (quantities.final_loss(rising), quantities.loss_rise(rising)) == (3.25, 0.25)
    for name, last in {
        "failed": {"train_loss": None, "failure": "10 steps in a row"},
        "failed at an evaluation": {"val_loss": 2.0, "failure": "10 steps in a row"},
        "not finite": {"val_loss": None},
        "worse than at first": {"val_loss": 1e9},
    }.items():
        path = left(tmp_path / name, {"val_loss": 3.9}, {"val_loss": 3.5}, last)
        assert quantities.final_loss(path) == pytest.approx(3.9120, abs=1e-4), name
        rise = 0.4120 + (1.5 if "evaluation" in name else 0)
        assert quantities.loss_rise(path) == pytest.approx(rise, abs=1e-4), name


def test_flags_of_an_earlier_version_are_dropped(tmp_path):
    record = {"model": {"n_embd": 8}, "train": {"seed": 3, "cuda_graphs": False}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert quantities.load_configs(tmp_path) == (GPTConfig(n_embd=8), TrainConfig(seed=3))


def test_share_of_ones_by_hand():
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=10), 1)
    assert quantities.share_of_ones(model) == 1.0  # two pre norms and the final one, 8 gains each
    with torch.no_grad():
        model.final_norm.gain[:5] = 1.0078125  # the next above 1 in bf16
        model.blocks[0].mlp.pre.gain[0] = 0.0
    assert quantities.share_of_ones(model) == 18 / 24


def test_a_measure_is_kept_until_code_changes(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(quantities.MEASURES, "loss", lambda path: calls.append("loss") or 1.5)
    monkeypatch.setitem(quantities.MEASURES, "rise", lambda path: calls.append("rise") or 0.5)
    for _ in range(2):
        assert (quantities.measure_cached("loss", tmp_path), quantities.measure_cached("rise", tmp_path)) == (1.5, 0.5)
    assert calls == ["loss", "rise"]
    files = list(quantities.CODE)
    assert {file.name for file in files} == {"gradients.py", "streams.py", "norms.py", "quantities.py"}
    for i, file in enumerate(files):
        edited = tmp_path / file.name
        edited.write_text(file.read_text() + "\n# edited\n")
        monkeypatch.setattr(quantities, "CODE", [*files[:i], edited, *files[i + 1 :]])
        calls.clear()
        for _ in range(2):
            assert quantities.measure_cached("loss", tmp_path) == 1.5
        assert calls == ["loss"], file.name
    assert json.loads((tmp_path / "measures.json").read_text())["loss"][1] == 1.5
