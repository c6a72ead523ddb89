"""What an error message advises works in the state in which it is given: a test provokes it, and
does as it says."""

import os
import re
import shlex
import shutil
import subprocess
from typing import NamedTuple

import pytest
import torch

import sample
import train
from support.hostile import RESUME, World, assert_refused, start
from support.runs import make_dataset
from support.spoil import cut

pytestmark = pytest.mark.usefixtures("quick")
KEEP = "--overwrite=False"


class Advice(NamedTuple):
    refused: str  # flags that are refused; {tmp} {run} {data} are filled in
    patterns: list  # regular expressions: their groups are the flags, or the shell command, that
    #   the message advises
    spoil: object = lambda world: None  # called with the World before
    replace: str = ""  # a pattern for flags of `refused` that the advice replaces


def keep_alone(name: str):
    """Leave this one checkpoint, under its name."""

    def spoil(world: World) -> None:
        (world.run / "best.pt").rename(world.run / "kept")
        for path in world.run.glob("*.pt"):
            path.unlink()
        (world.run / "kept").rename(world.run / name)

    return spoil


def damage_all_but_best(world: World) -> None:
    best = world.run / "best.pt"
    shutil.copy(best, world.run / "copy")  # it may be the same file as last.pt
    (world.run / "copy").replace(best)
    cut("last.pt", "prev.pt")(world)


def damage_all_but_step_3(world: World) -> None:
    shutil.copy(world.run / "best.pt", world.run / "step_3.pt")
    (world.run / "best.pt").unlink()
    cut("last.pt", "prev.pt")(world)
    # damaged as that one is, and younger than step_3.pt
    os.link(world.run / "last.pt", world.run / "best.pt")


def other_optimizer_state(world: World) -> None:
    path = world.run / "last.pt"
    content = torch.load(path, weights_only=True)
    content["optimizer"]["param_groups"].pop()
    path.unlink()
    torch.save(content, path)


LINK = r"`(ln -f [^`]+)`"
ADVICE = {
    "resume, only best.pt": Advice(RESUME, [LINK, f"({RESUME})"], keep_alone("best.pt")),
    "resume, only step_3.pt": Advice(RESUME, [LINK, f"({RESUME})"], keep_alone("step_3.pt")),
    "resume, replace it": Advice(
        f"{RESUME} {KEEP}", ["(--init_from=auto) (--overwrite=True)"], keep_alone("best.pt")
    ),
    "scratch, replace": Advice(KEEP, ["(--overwrite=True)"]),
    "nothing there": Advice(f"{RESUME} --out_dir={{tmp}}/new", ["(--init_from=scratch)"]),
    "latest damaged": Advice(RESUME, [LINK, f"({RESUME})"], damage_all_but_best),
    "latest damaged, a link": Advice(RESUME, [LINK, f"({RESUME})"], damage_all_but_step_3),
    "a run as weights": Advice(
        "--init_from={run} --out_dir={tmp}/new",
        [r"train\.py takes (\S+),"],
        keep_alone("step_3.pt"),
        "init_from",
    ),
    "state of other parameters": Advice(
        RESUME, ["(--init_from=)CHECKPOINT_FILE"], other_optimizer_state
    ),
    "another dataset, a new run": Advice(
        "--init_from=auto:{run}/last.pt --dataset={tmp}/other",
        ["another (--out_dir)"],
        lambda world: make_dataset(world.tmp / "other", seed=1),
    ),
    "micro batch": Advice(
        "--batch_size=12 --micro_batch_size=5", ["use (4) or 6"], replace="micro_batch_size"
    ),
    "doc_mask": Advice("--doc_mask=True --out_dir={tmp}/new", ["use (doc_mask=False)"]),
}


def without(flags: str, names: list) -> list:
    return [flag for flag in shlex.split(flags) if flag.lstrip("-").partition("=")[0] not in names]


@pytest.mark.parametrize("name", ADVICE)
def test_the_advice_works_when_it_is_given(name, world):
    case = ADVICE[name]
    case.spoil(world)
    outcome = start(world, train, case.refused)
    assert_refused(outcome)
    found = [part for pattern in case.patterns for part in re.search(pattern, outcome.err).groups()]
    flags = []
    for part in found:
        if part.startswith("ln "):
            subprocess.run(shlex.split(part), check=True)
        # the message leaves the file open, and says that out_dir must be another
        elif part == "--init_from=":
            assert "another --out_dir" in outcome.err
            flags += [f"--init_from={world.run}/last.pt", f"--out_dir={world.tmp}/new"]
        elif part == "--out_dir":
            flags.append(f"--out_dir={world.tmp}/new")
        elif case.replace:
            flags.append(f"--{case.replace}={part}")
        else:
            flags.append(f"--{part.lstrip('-')}")
    names = [flag.lstrip("-").partition("=")[0] for flag in flags]
    followed = start(
        world, train, shlex.join(without(case.refused, names) + flags) + " --max_iters=4"
    )
    assert followed.code == 0, followed.err


def test_a_checkpoint_that_exists_is_advised(world):
    (world.run / "best.pt").unlink()
    outcome = start(world, sample, "--checkpoint=best.pt")
    assert_refused(outcome, ["--checkpoint"])
    for name in re.search(r": ([\w., ]+\.pt) \(choose", outcome.err)[1].split(", "):
        assert start(world, sample, f"--checkpoint={name}").code == 0


def test_a_checkpoint_that_cannot_be_read_is_not_advised(world):
    """ckpt.pt is nanoGPT's."""
    for path in world.run.glob("*.pt"):
        path.unlink()
    (world.run / "ckpt.pt").touch()
    outcome = start(world, sample, "")
    assert_refused(outcome, ["best.pt", "name the --out_dir of a run"])
    assert "ckpt" not in outcome.err
