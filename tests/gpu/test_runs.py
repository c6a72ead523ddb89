"""Whole runs on this device: killed and resumed, moved between CPU and device, sampled from."""

import shutil

import pytest
import torch

import sample
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.generate import generate
from nanodnt.weights import model_from_checkpoint
from support.devices import GPU
from support.processes import finish, start, wait_for_row
from support.runs import assert_same_run, call, column, load, run, tensors

STEPS, THIRD = 60, 20
RUN = dict(max_iters=STEPS, eval_interval=THIRD, keep_every=THIRD, track_interval=0)
SIZES = {"cpu": {}, "cuda": dict(n_layer=4, n_head=4, n_embd=256, block_size=64)}
EXPERTS = dict(n_expert=4, n_ff=32, mlp="swiglu", balance="bias")


TRIED = pytest.param("cpu", marks=pytest.mark.deep)  # where it tries the code of the test
on_device = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU), TRIED])


@pytest.fixture
def flags(device, dataset, tmp_path):
    """flags(name, …): those of the run `name` on this device."""

    def make(name, **changes):
        return (
            RUN
            | SIZES[device]
            | dict(dataset=dataset, device=device, out_dir=tmp_path / name)
            | changes
        )

    return make


def distance(one, other) -> float:
    """The largest relative difference of two runs: their losses, weights and optimizer state."""
    a, b = column(one, "train_loss"), column(other, "train_loss")
    assert a.keys() == b.keys() and len(b) == STEPS
    apart = [abs(a[step] - b[step]) / abs(b[step]) for step in b]
    a, b = (
        tensors([c["model"], c["optimizer"]["state"]])
        for c in (load(path / "last.pt") for path in (one, other))
    )
    apart += [
        ((a[n] - t).double().norm() / t.double().norm().clamp(min=1e-30)).item()
        for n, t in b.items()
    ]
    return max(apart)


@on_device
def test_a_run_of_experts_is_killed_and_resumed(flags, device, tmp_path):
    """As one that was not. On a GPU sums are not made in the same order each time: two undisturbed
    runs show how far apart they may be."""
    assert run(**flags("whole", **EXPERTS)) == 0
    process = start(**flags("killed", **EXPERTS))
    wait_for_row(process, tmp_path / "killed", THIRD + 2)
    process.kill()
    finish(process, -9)
    assert max(column(tmp_path / "killed", "train_loss")) < STEPS
    assert run(**flags("killed", **EXPERTS, init_from="resume")) == 0
    assert column(tmp_path / "killed", "lr") == column(tmp_path / "whole", "lr")
    if device == "cpu":
        assert_same_run(tmp_path / "killed", tmp_path / "whole")
    else:
        assert run(**flags("again", **EXPERTS)) == 0
        allowed = max(10 * distance(tmp_path / "again", tmp_path / "whole"), 1e-5)
        assert distance(tmp_path / "killed", tmp_path / "whole") <= allowed


@on_device
def test_a_checkpoint_moves_to_the_cpu_and_back(flags, device, tmp_path):
    """A run of the CPU goes on here, then on the CPU again, as one that never moved. Products in
    TF32 round by 2⁻¹¹, and later steps start from weights that differ."""
    assert run(**flags("cpu", device="cpu")) == 0
    for name, source, step, where in (
        ("here", "cpu", THIRD, device),
        ("back", "here", 2 * THIRD, "cpu"),
    ):
        (tmp_path / name).mkdir()
        shutil.copyfile(tmp_path / source / f"step_{step}.pt", tmp_path / name / "last.pt")
        assert run(**flags(name, device=where, init_from="resume")) == 0
        for key, allowed, steps in (
            ("lr", 0, STEPS),
            ("train_loss", 0.02, STEPS),
            ("grad_norm", 5e-3, step + 1),
        ):
            found, wanted = (column(tmp_path / n, key) for n in (name, "cpu"))
            wanted = {s: value for s, value in wanted.items() if step < s <= steps}
            assert {s: found[s] for s in wanted} == pytest.approx(wanted, rel=allowed, abs=0), (
                name,
                key,
            )
    first = [column(tmp_path / name, "train_loss")[THIRD + 1] for name in ("here", "cpu")]
    assert first[0] == pytest.approx(first[1], rel=5e-3)


# ----------------------------------------------------------------------------------------- sampling

NEW = 64  # tokens


def sampled(capsys, out_dir, device) -> str:
    """The most likely continuation, as sample.py prints it."""
    words = f"--checkpoint=last.pt --start=A --num_samples=1 --max_new_tokens={NEW}"
    words += " --temperature=0 --dtype=float32"
    capsys.readouterr()
    assert call(sample.main, f"--out_dir={out_dir}", f"--device={device}", *words.split()) == 0
    return capsys.readouterr().out.rsplit("\n" + "-" * 80, 1)[0]


@torch.no_grad()
def without_cache(model, idx) -> list:
    """The token ids of idx (1, T) and its most likely continuation, each token from a pass over all
    before it."""
    for _ in range(NEW):
        recent = idx[:, -model.config.block_size :]
        idx = torch.cat((idx, model(recent)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx[0].tolist()


@torch.no_grad()
def assert_same_text(a: list, b: list, exact) -> None:
    """Where token ids a and b part, rounding must have decided: the logits of both tokens are
    nearly the same."""
    assert len(a) == len(b) == NEW + 1 and a[0] == b[0]
    if a != b:
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        logits = exact(torch.tensor([b[max(0, at - exact.config.block_size) : at]]))[0][0, -1]
        assert (logits[a[at]] - logits[b[at]]).abs() <= 0.02, f"the same up to token {at}"


@on_device
def test_samples(flags, device, tmp_path, capsys):
    """Of sample.py on this device and on the CPU; of `generate` with its cache, and without one."""
    assert run(**flags("run", block_size=128)) == 0  # as long as the text
    checkpoint = load(tmp_path / "run" / "last.pt")
    tokenizer = Tokenizer(checkpoint["meta"])
    exact = model_from_checkpoint(checkpoint).eval().double()
    model = model_from_checkpoint(checkpoint).eval().to(device)
    prompt = torch.tensor([tokenizer.encode("A")], device=device)
    whole = without_cache(model, prompt)
    cached = generate(model, prompt, NEW, temperature=0, stop=tokenizer.eot)[0].tolist()
    assert_same_text(cached, whole, exact)
    here, there = (
        tokenizer.encode(sampled(capsys, tmp_path / "run", where)) for where in (device, "cpu")
    )
    assert_same_text(here, there, exact)
