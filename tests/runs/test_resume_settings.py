"""What a resumed run takes from the checkpoint and what from its flags; runs that start from other
runs' weights."""

import json
import shutil

import pytest
import torch

import train
from nanodnt.data.windows import PreparedText
from nanodnt.engine import training_step
from support.hostile import refusal
from support.runs import (
    assert_same_run,
    column,
    contents,
    damage,
    different,
    load,
    logged,
    resume,
    run,
)
from support.strikes import Crash, at_call, at_row, crash, optimizers

pytestmark = pytest.mark.usefixtures("quick")


def test_training_flags_win_on_resume(begun, dataset, capsys):
    changes = dict(
        learning_rate=5e-3,
        min_lr=4e-3,
        weight_decay=0.05,
        beta1=0.8,
        beta2=0.9,
        schedule="constant",
    )
    groups, seen = [], load(begun / "last.pt")["optimizer"]["state"][0]["exp_avg"].clone()
    states = []

    def prepare(model, optimizer):
        def before(*_):
            groups.append([dict(g, params=None) for g in optimizer.param_groups])
            states.append(optimizer.state_dict()["state"][0]["exp_avg"].clone())

        optimizer.register_step_pre_hook(before)

    with optimizers(prepare):
        assert resume(begun, dataset, **changes) == 0
    assert torch.equal(states[0], seen)  # the state itself is the checkpoint's
    for group in groups[0]:
        assert group["lr"] == 5e-3 and group["betas"] == (0.8, 0.9), group["role"]
        assert group["weight_decay"] == (
            0.05 if group["role"] in ("emb", "pos", "qk", "vo", "ffn") else 0
        ), group
    assert {column(begun, "lr")[step] for step in range(21, 31)} == {5e-3}
    printed = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("changed on resume")
    )
    expected = (
        "learning_rate 0.01 → 0.005, min_lr 0.001 → 0.004, weight_decay 0.1 → 0.05, beta1 0.9 → 0.8"
    )
    for change in [
        *expected.split(", "),
        "beta2 0.95 → 0.9",
        "schedule cosine → constant",
        "max_iters 20 → 30",
    ]:
        assert change in printed
    assert printed.count("→") == 7


def test_nothing_changed_nothing_printed(begun, dataset, capsys):
    assert resume(begun, dataset, max_iters=20, lr_decay_iters=30) == 0
    out = capsys.readouterr().out
    assert f"weights: {begun}, step 20" in out
    assert "→" not in out


def test_the_architecture_is_the_checkpoints(begun, short, dataset, capsys):
    assert resume(begun, dataset, n_layer=3, mid_norm="none", qk_norm=False, block_size=16) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = next(line for line in lines if line.startswith("model of the checkpoint"))
    for change in (
        "n_layer 3 → 2",
        "mid_norm none → both",
        "qk_norm False → True",
        "block_size 16 → 32",
    ):
        assert change in printed
    assert printed.count("→") == 4
    assert_same_run(begun, short)
    assert json.loads((begun / "config.json").read_text())["model"]["n_layer"] == 2


def test_a_resumed_run_is_described_and_checked_before_it_is_compiled(begun, dataset, capsys):
    """Compilation may take minutes: groups, parameters, batch and notes are printed before it. By
    then the optimizer has its state, and one that does not fit is refused."""
    moment = load(begun / "last.pt")["optimizer"]["state"][0]["exp_avg"]
    made = []

    def note(model, optimizer):
        made.append(optimizer)

    with optimizers(note), at_call(train, "compile_if_worthwhile", 1, crash):
        with pytest.raises(Crash):
            resume(begun, dataset, warmup_iters=30)
    out = capsys.readouterr().out
    for words in ("peak LR", " parameters (", " tokens a step = ", "note: warm-up (30 steps) does"):
        assert words in out
    assert torch.equal(made[0].state_dict()["state"][0]["exp_avg"], moment)

    checkpoint = load(begun / "last.pt")
    del checkpoint["optimizer"]["state"][0]
    for name in ("last.pt", "prev.pt"):
        torch.save(checkpoint, begun / name)
    with at_call(train, "compile_if_worthwhile", 1, crash):
        refusal(capsys, resume(begun, dataset), "optimizer state does not fit")


def test_the_optimizers_state_is_found_by_name(dataset, tmp_path):
    """With ratios of 1, blockwise_lr on resume changes nothing but how parameters are grouped.
    Without clipping: the norm is a sum in their order."""
    ones = {f"lr_ratio_{block}": 1 for block in ("emb", "qk", "ffn", "vo", "norm", "head", "pos")}
    config = dict(
        dataset=dataset, bias=True, norm="layernorm", schedule="constant", max_iters=20, grad_clip=0
    )
    assert run(out_dir=tmp_path / "whole", **config) == 0
    assert run(out_dir=tmp_path / "run", **config | dict(max_iters=10)) == 0
    assert (
        run(out_dir=tmp_path / "run", **config, init_from="resume", blockwise_lr=True, **ones) == 0
    )
    one, other = (load(tmp_path / name / "last.pt") for name in ("whole", "run"))
    assert different(one["model"], other["model"]) == []
    labels = [
        [group["label"] for group in checkpoint["optimizer"]["param_groups"]]
        for checkpoint in (one, other)
    ]
    assert (
        set(labels[1]) - set(labels[0]) == {"bias_qk", "bias_vo", "bias_ffn"}
        and len(labels[0]) == 8
    )


@pytest.mark.parametrize("sizes", [(8, 16), (12, 4, 12)], ids=str)
def test_another_batch_size_goes_on_with_the_next_rows(sizes, dataset, tmp_path, monkeypatch):
    """Rows are neither trained on again nor left out: together the steps read the first rows of the
    order, once."""
    used = []

    def note(trainer, batch, *args):
        used.append(batch[0].clone())
        return training_step(trainer, batch, *args)

    monkeypatch.setattr("train.training_step", note)
    for i, size in enumerate(sizes, 1):
        settings = dict(batch_size=size, max_iters=5 * i, lr_decay_iters=15, init_from="auto")
        assert run(out_dir=tmp_path, dataset=dataset, **settings) == 0
    n_rows = 5 * sum(sizes)
    first_rows, _ = PreparedText(str(dataset), 32, 1337).batch(0, n_rows)
    assert torch.equal(torch.cat(used), torch.from_numpy(first_rows))
    last = load(tmp_path / "last.pt")
    assert (last["step"], last["rows"], last["tokens"]) == (5 * len(sizes), n_rows, 32 * n_rows)


def test_a_checkpoint_from_before_there_were_experts(begun, dataset, tmp_path, capsys):
    """It goes on with the same bits, and nothing counts as changed."""
    shutil.copytree(begun, tmp_path / "older")
    saved = load(begun / "last.pt")
    # from before there were roll-backs, too
    for name in ("names", "recent", "shift", "rollbacks", "rows"):
        del saved[name]
    for part in ("model_config", "train_config"):
        words = ("expert", "router", "balance", "z_coef")
        kept = {
            name: value
            for name, value in saved[part].items()
            if not any(word in name for word in words)
        }
        assert len(saved[part]) - len(kept) == {"model_config": 7, "train_config": 4}[part]
        saved[part] = kept
    torch.save(saved, tmp_path / "older" / "last.pt")
    assert resume(begun, dataset) == 0
    capsys.readouterr()
    assert resume(tmp_path / "older", dataset) == 0
    printed = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("changed on resume")
    )
    assert printed == "changed on resume: max_iters 20 → 30"
    assert_same_run(tmp_path / "older", begun)


@pytest.mark.parametrize("switch", ["adamw msgdw", "msgdw muon", "muon adam_mini"])
def test_another_optimizer_on_resume(switch, dataset, tmp_path, capsys):
    """It says so and starts with a fresh state: the next step is that of a new run from those
    weights."""
    old, new = switch.split()
    config = dict(dataset=dataset, schedule="constant", warmup_iters=0, weight_decay=0.1)
    assert run(**config, out_dir=tmp_path, optimizer=old, max_iters=5) == 0
    first_rows = PreparedText(str(dataset), 32, 1337).batch(5, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreparedText, "batch", lambda *_: first_rows)
        weights = tmp_path / "last.pt"
        assert (
            run(**config, out_dir=tmp_path / "new", init_from=weights, optimizer=new, max_iters=1)
            == 0
        )
    capsys.readouterr()
    assert run(**config, out_dir=tmp_path, optimizer=new, init_from="resume", max_iters=6) == 0
    assert f"optimizer {old} → {new}: its state starts fresh" in capsys.readouterr().out
    one, other = load(tmp_path / "last.pt"), load(tmp_path / "new" / "last.pt")
    assert different(one["model"], other["model"]) == []
    assert different(one["optimizer"]["state"], other["optimizer"]["state"]) == []
    assert run(**config, out_dir=tmp_path, optimizer=new, init_from="resume", max_iters=8) == 0
    assert "fresh" not in capsys.readouterr().out  # now its state is resumed
    steps = {
        s["step"].item()
        for s in load(tmp_path / "last.pt")["optimizer"]["state"].values()
        if "step" in s
    }
    assert steps == (set() if new == "msgdw" else {3.0})


# ----------------------------------------------------------------------- new runs from earlier ones


def test_a_new_run_from_a_checkpoints_weights(short, dataset, tmp_path):
    """Step 0, fresh optimizer: the very run that starts with those parameters."""
    assert run(out_dir=tmp_path / "a", dataset=dataset, init_from=short / "best.pt", n_layer=7) == 0
    trained = load(short / "best.pt")
    rows = logged(tmp_path / "a")
    assert [step for step, _ in rows] == list(range(21))
    assert rows[0][1] == {
        "step": 0,
        "tokens": 0,
        "val_loss": column(short, "val_loss")[trained["step"]],
    }
    assert column(tmp_path / "a", "lr")[1] == 0.002
    last = load(tmp_path / "a" / "last.pt")
    assert (last["step"], last["tokens"]) == (20, 20 * 8 * 32)
    assert last["model_config"] == trained["model_config"]
    assert {s["step"].item() for s in last["optimizer"]["state"].values()} == {20.0}
    assert different(load(tmp_path / "a" / "last.pt")["model"], trained["model"])


def test_a_run_directory_is_its_best_checkpoint(short, dataset, tmp_path, monkeypatch, capsys):
    """Alone, or after "auto:", with which the same command goes on, and which reads a path in the
    home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "short").symlink_to(short)
    assert (
        run(out_dir=tmp_path / "a", dataset=dataset, init_from=short / "best.pt", max_iters=6) == 0
    )
    for iters in (3, 6):
        assert (
            run(out_dir=tmp_path / "b", dataset=dataset, init_from="auto:~/short", max_iters=iters)
            == 0
        )
    assert not different(
        load(tmp_path / "a" / "last.pt")["model"], load(tmp_path / "b" / "last.pt")["model"]
    )
    assert f"weights: {tmp_path / 'b'}, step 3" in capsys.readouterr().out
    shutil.copytree(dataset, tmp_path / "other")
    refused = dict(out_dir=tmp_path / "b", dataset=tmp_path / "other", init_from=f"auto:{short}")
    refusal(
        capsys, run(**refused), tmp_path / "b", "holds a run on the dataset", "--init_from=resume"
    )
    assert run(**refused | dict(init_from="resume", max_iters=7)) == 0
    assert "note: the run goes on, but was on the dataset" in capsys.readouterr().out
    refusal(
        capsys,
        run(out_dir=tmp_path / "c", dataset=dataset, init_from="auto:"),
        "init_from='auto:'",
        "auto:SOURCE",
    )


@pytest.mark.parametrize("kept", ["last.pt", "step_5.pt"])
def test_scratch_does_not_overwrite(kept, begun, dataset, capsys):
    (begun / "prev.pt").rename(begun / "step_5.pt") if kept == "step_5.pt" else None
    for path in begun.glob("*.pt"):
        if path.name != kept:
            path.unlink()
    before = contents(begun)
    for source in ("scratch", begun / kept, *["auto"] * (kept == "step_5.pt")):
        code = run(out_dir=begun, dataset=dataset, init_from=source)
        found = f"{begun} holds checkpoints of an earlier run ({kept})"
        refusal(capsys, code, found, "--init_from=resume", "--overwrite=True")
    assert contents(begun) == before


def test_overwrite(begun, short, dataset, tmp_path):
    (begun / "metrics.jsonl").write_text('{"step": 1000, "train_loss": 0.0}\nnot even a row\n')
    damage(begun / "best.pt")
    with at_row(0, crash), pytest.raises(Crash):
        run(out_dir=begun, dataset=dataset, max_iters=30, overwrite=True)
    # so that no checkpoint of the earlier run is taken for the new one's
    assert contents(begun, "*.pt") == {}
    assert run(out_dir=begun, dataset=dataset, max_iters=30, overwrite=True) == 0
    assert_same_run(begun, short)
    assert load(begun / "best.pt")["step"] == load(short / "best.pt")["step"]
