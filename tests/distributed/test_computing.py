"""Ways to compute under FSDP; runs of two processes that go wrong together: bad gradients, spikes,
wrong settings."""

import os

import pytest
import torch

from support.parallel_runs import REFUSED
from support.processes import ENDS, SPOILT, assert_close, assert_same_values, left, play, processes
from support.runs import column, different, load, metrics, run
from support.tolerances import roundings


def test_recomputed_activations_change_nothing(two):
    left(two / "recomputed", 2)
    a, b = load(two / "recomputed" / "last.pt"), load(two / "by blocks, whole" / "last.pt")
    assert different(a["model"], b["model"]) == []
    assert different(a["optimizer"]["state"], b["optimizer"]["state"]) == []
    assert column(two / "recomputed", "train_loss") == column(
        two / "by blocks, whole", "train_loss"
    )


@pytest.mark.deep
def test_gathered_by_blocks_in_every_micro_batch(two_more):
    """As FSDP2 does where memory is short."""
    left(two_more / "experts by blocks", 2)
    assert_same_values(two_more / "experts by blocks", two_more / "experts, one1")
    a, b = (
        load(two_more / name / "last.pt")["model"]
        for name in ("experts by blocks", "experts, one1")
    )
    assert_close(a, b, ENDS)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["fsdp", "experts"])
def test_compiled(name, two_more):
    """By dynamo alone, which is quick. FSDP with hooks between the compiled parts; DDP by
    blocks."""
    got, expected = two_more / f"{name}, compiled", two_more / f"{name}, eager"
    output = left(got, 2)[0]["output"]
    assert "embedding, blocks and loss by themselves" in output
    assert "compiled in" in output
    assert_same_values(got, expected)
    a, b = (load(out / "last.pt")["model"] for out in (got, expected))
    assert a.keys() == b.keys()
    chosen = [key for key in a if key.endswith("choice_bias")]
    assert [key for key in chosen if not torch.equal(a[key], b[key])] == []


def inductor(rank, world, folder, dataset):
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name, compile in (("eager", False), ("inductor", True)):
        flags = dict(
            dataset=dataset, n_layer=1, max_iters=4, parallel="fsdp", torchrun=True, compile=compile
        )
        play(rank, world, folder / name, **flags)


@pytest.mark.deep
def test_compiled_by_inductor(dataset, tmp_path):
    """One process under torchrun, to be quick: what is compiled is the same."""
    processes(1, inductor, tmp_path, dataset)
    assert "compiled in" in left(tmp_path / "inductor", 1)[0]["output"]
    assert_same_values(tmp_path / "inductor", tmp_path / "eager")


def test_bfloat16_leaves_gains_in_fp32(two):
    """Gains of 0.1 (LayerScale's), which bf16 cannot represent: rounding them would change the
    first loss."""
    out, one = two / "bf16, fsdp2", two / "bf16, one1"
    assert column(out, "train_loss")[1] == column(one, "train_loss")[1]
    assert column(out, "train_loss") == pytest.approx(
        column(one, "train_loss"), rel=roundings(1 / 2, torch.bfloat16)
    )
    parts = left(out, 2)
    assert "dtype bfloat16" in parts[0]["output"]
    for part in parts:
        assert part["gain"] == {torch.float32}
        assert {kind for kinds in part["grads"].values() for kind in kinds} == {torch.float32}


# ------------------------------------------------------------------------- what goes wrong together


def test_too_many_bad_gradients(two):
    """The first bad tensor has the same name, whichever process has it; the checkpoint is of the
    last good step."""
    for bad in (0, 1):
        out = two / f"bad rank {bad}"
        for rank, part in enumerate(left(out, 2, code=1)):
            (line,) = [line for line in part["output"].splitlines() if "error" in line]
            assert line.startswith(
                f"[rank {rank}] error: 3 steps in a row, up to about step 4, had a gradient"
            )
            assert f"(first bad tensor: the gradient of {SPOILT})" in line
            assert part["frozen"] == [2, 3, 4]
        assert load(out / "last.pt")["skipped"] == 3


def test_fsdp_is_rolled_back_after_a_spike(two):
    """Batch 9 has targets that no one could learn. The loss at step 10 shows it; the run goes on
    from step 8, without the batches since."""
    out = two / "spike, fsdp2"
    left(out, 2)
    (row,) = [row for row in metrics(out) if "rolled_back_from" in row]
    assert row["step"] == 8 and row["rolled_back_from"] == 10
    assert_same_values(out, two / "spike, one1")
    assert load(out / "last.pt")["shift"] == 2


@pytest.mark.parametrize("name", REFUSED)
def test_refused_under_torchrun(name, two):
    for rank, part in enumerate(left(two / name, 2, code=1)):
        errors = [line for line in part["output"].splitlines() if "rror" in line]
        assert errors == [f"[rank {rank}] error: {REFUSED[name][1]}"]
        assert "Traceback" not in part["output"]
    assert not (two / name).exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            dict(parallel="fsdp"),
            "parallel=fsdp needs torchrun: torchrun --standalone --nproc_per_node=N train.py …",
        ),
        (
            dict(fsdp_shard_size=2),
            "fsdp_shard_size=2 needs parallel=fsdp: set that, or leave it out",
        ),
    ],
)
def test_refused_without_torchrun(flags, message, dataset, tmp_path, capsys):
    assert run(dataset=dataset, out_dir=tmp_path / "run", **flags) == 1
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "run").exists()
