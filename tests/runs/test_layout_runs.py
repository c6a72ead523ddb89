"""Layouts in complete runs: what train.py does for them beside training. (test_tasks.py stops and
resumes them.)"""

import re

import pytest
import torch

from model import GPT, GPTConfig
from nanodnt.data.windows import PreparedText
from nanodnt.weights import profile_admin
from support.runs import load, run

pytestmark = pytest.mark.usefixtures("quick")
ADMIN = dict(pre_norm="none", mid_norm="none", post_norm="both", input_norm=False, admin=True)


def test_admin_is_profiled_on_the_first_sequences(dataset, tmp_path, capsys):
    """Only in fresh runs: a run that resumes, or starts from weights, keeps the ω it has."""
    flags = dict(
        ADMIN,
        dataset=dataset,
        out_dir=tmp_path / "a",
        learning_rate=1e-9,
        min_lr=1e-9,
        weight_decay=0,
    )
    assert run(**flags, max_iters=1) == 0
    assert "admin: profiled on the first batch" in capsys.readouterr().out
    trained = load(tmp_path / "a" / "last.pt")
    model = GPT(GPTConfig(**trained["model_config"]), seed=1337)
    assert all((block.attn.skip.gain == 1).all() for block in model.blocks)
    idx = PreparedText(str(dataset), 32, 1337).batch(0, 8)[0]
    profile_admin(model, torch.from_numpy(idx))
    for name, value in model.state_dict().items():
        if "skip" in name:
            assert torch.equal(trained["model"][name], value), name
    assert model.blocks[0].attn.skip.gain[0] == 1 and model.blocks[1].mlp.skip.gain[0] != 1

    assert run(**flags, max_iters=2, init_from="resume") == 0
    assert "profiled on" not in capsys.readouterr().out
    assert (
        run(
            **flags | dict(out_dir=tmp_path / "b", init_from=tmp_path / "a" / "last.pt"),
            max_iters=1,
        )
        == 0
    )
    assert "profiled on" not in capsys.readouterr().out


def test_a_checkpoint_from_before_a_flag_existed(dataset, tmp_path, capsys):
    """It gets the flag's default, and what changes on resume is printed."""
    flags = dict(dataset=dataset, out_dir=tmp_path)
    assert run(**flags, max_iters=3) == 0
    state = load(tmp_path / "last.pt")
    del state["train_config"]["decay_gains"]
    for name in ("lns", "gain_param", "sigma_reparam", "dyt_squash"):
        del state["model_config"][name]
    torch.save(state, tmp_path / "last.pt")
    capsys.readouterr()
    assert run(**flags, max_iters=6, init_from="resume", decay_gains="input") == 0
    out = capsys.readouterr().out
    assert re.search(r"changed on resume: .*decay_gains none → input", out)
    assert re.search(r"gain_in +.* 0\.1$", out, re.M) and re.search(r"gain_out +.* 0$", out, re.M)
    assert load(tmp_path / "last.pt")["step"] == 6
