"""What train.py, model.py, bench.py and sample.py say to settings of experts that are wrong, and to damaged checkpoints
of a mixture of experts: one line that names the mistake, and nothing changed."""

import shutil

import pytest

import sample
import train
from support import runs
from support.hostile import RESUME, TRAIN, assert_refused, cases, refuse, start
from support.spoil import checkpoint, put

pytestmark = pytest.mark.usefixtures("quick")
FOUR = "--n_expert=4"
BIAS = f"{FOUR} --balance=bias"

SETTINGS = cases(  # test_layout_refusals.py has those of the model alone, test_schedules.py negative ratios
    ("balance_coef, without experts", "--balance_coef=0.5", ["balance_coef=0.5 needs experts", "leave balance_coef"]),
    ("balance_coef of a bias", f"{BIAS} --balance_coef=0.5", ["balance_coef=0.5 needs balance=loss", "balance=bias"]),
    ("router's ratio, not blockwise", f"{FOUR} --lr_ratio_router=2", ["lr_ratio_router", "blockwise_lr=True"]),
)


@SETTINGS
def test_settings(world, case):
    refuse(world, train, case)


def test_a_dense_run_stays_dense_when_resumed_with_experts(world):
    """The architecture comes from the checkpoint, and a line says so; a penalty then has nothing to act on."""
    assert_refused(start(world, train, f"{RESUME} {FOUR} --z_coef=0.1"), ["z_coef=0.1 needs experts"])
    outcome = start(world, train, f"{RESUME} {FOUR} --n_expert_active=1 --max_iters=4")
    assert (outcome.code, outcome.err) == (0, "")
    assert "model of the checkpoint, not of the flags: n_expert 4 → 0, n_expert_active 1 → 2\n" in outcome.out
    assert runs.load(world.run / "last.pt")["model_config"]["n_expert"] == 0


# --------------------------------------------------------------------------------------------- damaged checkpoints

MLP = "blocks.0.mlp.f."


@pytest.fixture(scope="module")
def trained(earlier, quick, tmp_path_factory):
    """The folder of a run of a mixture of experts. Read only."""
    out = tmp_path_factory.mktemp("trained") / "run"
    flags = dict(n_expert=4, n_expert_shared=1, balance="bias", n_ff=8, mlp="swiglu")
    assert runs.run(**TRAIN | flags, out_dir=out, dataset=earlier.data) == 0
    return out


@pytest.fixture
def experts(world, trained):
    """The World, with a copy of that run in the place of its own."""
    shutil.rmtree(world.run)
    shutil.copytree(trained, world.run)
    return world


def weight(name, change):
    """Change a tensor of all checkpoints."""
    return checkpoint(lambda c: c["model"].update({MLP + name: change(c["model"][MLP + name])}))


def without(name):
    return checkpoint(lambda c: c["model"].pop(MLP + name))


def forget_a_choice(c):
    """The state of a parameter fewer."""
    c["optimizer"]["param_groups"] = [g for g in c["optimizer"]["param_groups"] if g["label"] != "balance"]


def model_setting(name, value):
    return checkpoint(put("model_config", name, value))


BOTH = cases(  # refused by train.py and sample.py
    ("an expert fewer", "", ["experts.up.weight", "model_config"], weight("experts.up.weight", lambda w: w[:3])),
    ("no biases", "", ["router.choice_bias is absent"], without("router.choice_bias")),
    ("dense", "", ["n_expert_shared=1, balance=bias: needs experts"], model_setting("n_expert", 0)),
)
STATE = cases(("a group fewer", RESUME, ["optimizer state does not fit"], checkpoint(forget_a_choice)))


@BOTH
def test_damaged_experts(experts, case):
    refuse(experts, train, case._replace(argv=RESUME))
    refuse(experts, sample, case._replace(spoil=None))


@STATE
def test_damaged_state(experts, case):
    refuse(experts, train, case)
