"""The papers' claims as data; how they are judged; the search of a learning rate; and `reproduce.py` as a whole, on a
made-up scale with tiny runs, that is killed, stopped and started again.

Numbers that are expected are worked out by hand, or here from what the runs logged."""

import fcntl
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_same_run, column, finish, load, metrics, wait_for_row

import quantities
import reproduce
from claims import ARMS, CLAIMS, SCALES, Arm, Claim, Row, Scale, interval, limits, together, verdict
from model import GPT, GPTConfig
from optim import fill_defaults
from reproduce import ReproduceConfig, Runner

pytestmark = pytest.mark.usefixtures("one_thread")
inf = math.inf


def runner(tmp_path, scale="tiny", **changes) -> Runner:
    return Runner(ReproduceConfig(scale=scale, out=str(tmp_path / "out"), results=str(tmp_path / "results"), **changes))


# --------------------------------------------------------------------------------------------------- claims as data


def terms(row: Row) -> list:
    return row.value.replace(" + ", " - ").split(" - ")


ROWS = [(claim, row) for claim in CLAIMS for row in claim.rows]


def test_claims_are_named_once_and_rows_are_well_formed():
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids)
    for claim, row in ROWS:
        assert row.measure in {**quantities.MEASURES, **quantities.OF_CONFIG}, claim.id
        assert re.fullmatch(r"(<|>|within) -?\d+(\.\d+)?", row.expect), claim.id
        for term in terms(row):
            known = term in ARMS or re.fullmatch(r"\d+(\.\d+)?", term)
            assert known or (row.measure in quantities.OF_CONFIG and (ROOT / term.split()[0]).is_file()), term
    used = {term for _, row in ROWS for term in terms(row)} | {arm.lr for arm in ARMS.values()}
    assert set(ARMS) <= used, "arms that no claim looks at"


# (lower loss, higher loss) as the papers have it
BETTER = {
    "DNT": [
        ("S3 mSGDW", "S1 mSGDW"),
        ("S4 mSGDW", "S3 mSGDW"),
        ("S5 mSGDW", "S1 mSGDW"),
        ("S5 AdamW", "S1 AdamW"),
        *(
            (f"S4, {stress}", f"S4 without {norm}, {stress}")
            for stress in ("AdamW 0.03", "AdamW 0.1", "mSGDW 3")
            for norm in ("QK", "pre", "mid", "input")
        ),
        ("S5 Muon", "S5 AdamW"),
    ],
    "Blockwise LR": [
        ("all blocks", "one LR"),
        ("Emb", "one LR"),
        ("Emb, FFN", "Emb"),
        ("all blocks", "Emb, FFN"),
        ("one LR", "Norm ×2"),
        ("Adam-mini, blocks", "Adam-mini"),
    ],
    "DyT": [
        *(("DyT", worse) for worse in ("hardtanh", "sigmoid", "identity", "tanh, no α", "no embedding scalar")),
        ("hardtanh", "hardtanh, no α"),
        ("sigmoid", "sigmoid, no α"),
        *(("DyT", f"α₀ {pair}") for pair in "0.5/0.5 0.5/1 0.5/2 1/0.5 1/2 2/0.5 2/1 2/2".split()),
    ],
    "LNS": [
        *(("LNS", worse) for worse in ("Pre-LN", "scaled init", "after the residual sum", "on the branch")),
        *(("LNS", worse) for worse in ("before the norm", "attention only", "FFN only")),
    ],
    "scale vectors": [
        ("shared", "none"),
        ("shared", "none, LR of shared"),
        *(("IWD", worse) for worse in ("QK-norm", "decay all", "decay output")),
        *((better, "shared") for better in ("HG", "DP", "OR", "ER", "unified")),
        *((better, "QK-norm") for better in ("DNP", "unified")),
    ],
}
# what else is claimed: paper, measure, value, expect
OTHERS = [
    ("DNT", "loss", "S2 mSGDW - S1 mSGDW", "within"),
    ("DNT", "loss", "S5 mSGDW - S4 mSGDW", "within"),
    ("DNT", "loss", "S5 mSGDW - S5 AdamW - S1 mSGDW + S1 AdamW", "< 0"),
    ("DNT", "log10 gradient RMS", "S5 AdamW - S1 AdamW", "< 0"),
    ("DNT", "log10 gradient kurtosis", "S5 AdamW - S1 AdamW", "< 0"),
    ("DNT", "rise", "S5 Muon", "<"),
    ("DNT", "rise", "S1 Muon", ">"),
    ("DNT", "state GB", "config/dnt_xl.py --optimizer=adamw - 11.5", "within"),
    ("DNT", "state GB", "config/dnt_xl.py --optimizer=msgdw - 5.7", "within"),
    *(("Blockwise LR", f"log10 sharpness {r}", "one LR", "> 0") for r in ("qk/emb", "ffn/qk", "vo/ffn", "norm/vo")),
    ("Blockwise LR", "onset of the order", "one LR", "<"),
    ("DyT", "loss", "DyT - RMSNorm", "within"),
    ("DyT", "tanh fit", "RMSNorm", ">"),
    ("DyT", "tanh fit over linear", "RMSNorm", ">"),
    ("DyT", "alpha and 1/std", "DyT", ">"),
    ("LNS", "log10 variance growth", "LNS - Pre-LN", "< 0"),
    ("LNS", "angular ratio", "Pre-LN", "< 1"),
    ("LNS", "angular deep", "LNS - Pre-LN", "> 0"),
    ("LNS", "removal ratio", "Pre-LN", "< 1"),
    ("LNS", "removal deep", "LNS - Pre-LN", "> 0"),
    ("LNS", "frozen gains in bf16", "Pre-LN, LR 0.001", "> 0.9"),
    ("LNS", "frozen gains", "Pre-LN, LR 0.001", "< 0.1"),
]


def test_all_that_the_papers_claim_is_there_and_in_their_direction():
    found = {(claim.paper, row.measure, row.value, row.expect) for claim, row in ROWS}
    for paper, pairs in BETTER.items():
        for better, worse in pairs:
            either = {(f"{better} - {worse}", "< 0"), (f"{worse} - {better}", "> 0")}
            assert any((paper, "loss", *row) in found for row in either), (paper, better, worse)
    for paper, measure, value, expect in OTHERS:
        assert any(row[:3] == (paper, measure, value) and row[3].startswith(expect) for row in found), (measure, value)


def resolved(run) -> tuple:
    """(GPTConfig, TrainConfig) as train.py would have them, checked as it checks them."""
    model, train = reproduce.resolved(run.args)
    model.vocab_size = 50257
    model.check()
    train.check()
    fill_defaults(train)
    return model, train


@pytest.mark.parametrize("scale", SCALES)
def test_every_arm_is_a_configuration_and_those_compared_differ(scale, tmp_path):
    lr = None if scale == "paper" else 1e-3
    runs = {name: runner(tmp_path, scale).run(arm, lr, 1) for name, arm in ARMS.items()}
    made = {name: [asdict(config) for config in resolved(run)] for name, run in runs.items()}
    for claim, row in ROWS:
        for a, b in itertools.combinations([term for term in terms(row) if term in ARMS], 2):
            assert made[a] != made[b], f"{claim.id}: {a} and {b} are the same"


# What an arm is, beyond its base
MEANING = {
    "S1 mSGDW": dict(pre_norm="both", mid_norm="none", input_norm=False, qk_norm=False, optimizer="msgdw"),
    "S4 mSGDW": dict(pre_norm="both", mid_norm="both", input_norm=True, qk_norm=True, optimizer="msgdw"),
    "S5 AdamW": dict(pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True, optimizer="adamw"),
    "S5 Muon": dict(pre_norm="attn", optimizer="muon"),
    "S4, mSGDW 3": dict(qk_norm=True, optimizer="msgdw", warmup_iters=0),
    "S4 without QK, mSGDW 3": dict(pre_norm="both", mid_norm="both", input_norm=True, qk_norm=False, warmup_iters=0),
    "S4 without pre, AdamW 0.1": dict(pre_norm="none", mid_norm="both", input_norm=True, qk_norm=True, warmup_iters=0),
    "S4 without mid, AdamW 0.1": dict(pre_norm="both", mid_norm="none", input_norm=True, qk_norm=True, warmup_iters=0),
    "S4 without input, AdamW 0.1": dict(pre_norm="both", mid_norm="both", input_norm=False, qk_norm=True),
    "one LR": dict(blockwise_lr=False, optimizer="adamw"),
    "all blocks": dict(lr_ratio_emb=10, lr_ratio_qk=8, lr_ratio_ffn=6, lr_ratio_vo=4, lr_ratio_norm=1),
    "Emb": dict(lr_ratio_emb=10, lr_ratio_qk=1, lr_ratio_ffn=1, lr_ratio_vo=1, lr_ratio_norm=1),
    "Emb, FFN": dict(lr_ratio_emb=10, lr_ratio_qk=1, lr_ratio_ffn=6, lr_ratio_vo=1, lr_ratio_norm=1),
    "Norm ×2": dict(lr_ratio_emb=1, lr_ratio_qk=1, lr_ratio_ffn=1, lr_ratio_vo=1, lr_ratio_norm=2),
    "Adam-mini": dict(optimizer="adam_mini", blockwise_lr=False),
    "Adam-mini, blocks": dict(optimizer="adam_mini", blockwise_lr=True, lr_ratio_emb=4, lr_ratio_qk=1, lr_ratio_ffn=4),
    "RMSNorm": dict(norm="rmsnorm", embed_scale=False),
    "DyT": dict(norm="dyt", dyt_squash="tanh", dyt_learn_alpha=True, embed_scale=True),
    "sigmoid, no α": dict(norm="dyt", dyt_squash="sigmoid", dyt_learn_alpha=False, dyt_alpha_attn=1.0),
    "α₀ 2/0.5": dict(norm="dyt", dyt_alpha_attn=2.0, dyt_alpha_other=0.5, dyt_squash="tanh"),
    "no embedding scalar": dict(norm="dyt", embed_scale=False),
    "Pre-LN": dict(lns="off", residual_init="plain", pre_norm="both"),
    "scaled init": dict(lns="off", residual_init="gpt2"),
    "LNS": dict(lns="norm", lns_power=0.5, lns_branches="both", residual_init="plain"),
    "before the norm": dict(lns="input"),
    "FFN only": dict(lns="norm", lns_branches="mlp"),
    "none": dict(gain="none"),
    "HG": dict(gain="branch", gain_out="none", gain_param="direct"),
    "DNP": dict(gain_out="norm"),
    "IWD": dict(qk_norm=True, decay_gains="input"),
    "unified": dict(gain="branch", gain_out="norm", gain_param="magdir", decay_gains="input"),
}


@pytest.mark.parametrize("name", MEANING)
def test_arms_are_what_they_are_called(name, tmp_path):
    model, train = resolved(runner(tmp_path).run(ARMS[name], 1e-3, 1))
    found = asdict(model) | asdict(train)
    assert {key: found[key] for key in MEANING[name]} == MEANING[name]
    assert (train.learning_rate, train.min_lr, train.seed) == (1e-3, 1e-4, 1)


# ---------------------------------------------------------------------------------------------------------- verdicts


def test_intervals_by_hand():
    # standard deviation 1, t = 4.303 for two degrees of freedom: 4.303 / √3 = 2.4843
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.4843, 4.4843), abs=1e-4)
    # two values: deviation √2, t = 12.706 for one: 12.706 · √2 / √2
    assert interval([1.0, 3.0]) == pytest.approx((2.0, -10.706, 14.706), abs=1e-3)
    # ten: 0 and 2 in turns, deviation √(10/9), t = 2.262 for nine: 2.262 / 3
    assert interval([0.0, 2.0] * 5) == pytest.approx((1.0, 0.246, 1.754), abs=1e-3)
    assert interval([0.1]) == (0.1, 0.1, 0.1)
    assert interval([0.1, 0.1, 0.1]) == (0.1, 0.1, 0.1)  # not 0.1 plus what rounding adds
    assert interval([inf, inf]) == (inf, inf, inf)
    assert interval([inf, 1.0, 2.0])[1:] == (-inf, inf)
    assert interval([math.nan, 1.0, 2.0])[1:] == (-inf, inf)


def test_limits():
    assert limits("< 0") == (-inf, 0)
    assert limits("> 0.5") == (0.5, inf)
    assert limits("within 0.02") == (-0.02, 0.02)


@pytest.mark.parametrize(
    "low, high, expect, word",
    [
        (-2.0, -1.0, "< 0", "confirmed"),
        (1.0, 2.0, "< 0", "not confirmed"),
        (-1.0, 1.0, "< 0", "inconclusive"),
        (-1.0, 0.0, "< 0", "inconclusive"),  # up to the limit
        (0.0, 1.0, "< 0", "not confirmed"),  # from it on
        (0.0, 0.0, "< 0", "not confirmed"),  # no spread, at the limit: 0 is not less than 0
        (0.0, 0.0, "> 0", "not confirmed"),
        (0.6, 0.7, "> 0.5", "confirmed"),
        (-0.5, -0.1, "> -1", "confirmed"),
        (-0.01, 0.01, "within 0.02", "confirmed"),
        (0.0, 0.03, "within 0.02", "inconclusive"),
        (-0.5, 0.5, "within 0.02", "inconclusive"),
        (0.03, 0.04, "within 0.02", "not confirmed"),
        (-0.04, -0.03, "within 0.02", "not confirmed"),
        (0.0, 0.0, "within 0.02", "confirmed"),
        (inf, inf, "< 0.25", "not confirmed"),  # the order is never reached
        (-inf, inf, "< 0", "inconclusive"),
        (-inf, inf, "within 1", "inconclusive"),
    ],
)
def test_verdicts_by_hand(low, high, expect, word):
    assert verdict(low, high, expect) == word


def test_a_claim_is_as_good_as_its_worst_number():
    assert together(["confirmed", "confirmed"]) == "confirmed"
    assert together(["confirmed", "inconclusive"]) == "inconclusive"
    assert together(["confirmed", "inconclusive", "not confirmed"]) == "not confirmed"


# ---------------------------------------------------------------------------------------------------- learning rates


def flag(run, name: str):
    """The value of a flag of the run's command, as text; None without."""
    found = [arg.partition("=")[2] for arg in run.args if arg.startswith(f"--{name}=")]
    assert len(found) < 2
    return found[0] if found else None


def searching(tmp_path, monkeypatch, loss, scale="tiny") -> Runner:
    """A runner whose runs have the loss `loss(learning rate)`, at once."""
    made = runner(tmp_path, scale)
    monkeypatch.setattr(made, "finish", lambda run: None)

    def measured(measure, run):
        assert measure == "loss" and flag(run, "seed") == "1"
        return loss(float(flag(run, "learning_rate")))

    monkeypatch.setattr(made, "measured", measured)
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
        (lambda lr: math.log(256), 2.5e-4, {0.25, 0.5, 1, 2, 4, 8}),  # all diverged: so small a one as there is
        (lambda lr: valley(5e-4)(lr) if lr < 1e-3 else 9.0, 5e-4, {0.25, 0.5, 1, 2, 4, 8}),  # down from a plateau
    ],
)
def test_the_search_goes_downhill_and_no_further(loss, best, tried, tmp_path, monkeypatch):
    found, losses = searching(tmp_path, monkeypatch, loss).rates(Arm("dnt"))
    assert found == pytest.approx(best)
    assert sorted(losses) == pytest.approx(sorted(lr * 1e-3 for lr in tried))
    assert all(losses[lr] == loss(lr) for lr in losses)


def test_learning_rates_that_are_given(tmp_path, monkeypatch):
    made = searching(tmp_path, monkeypatch, valley(8e-3))
    assert made.rates(Arm("dnt", lr=0.1)) == (0.1, {})
    assert made.rates(ARMS["Norm ×2"]) == (pytest.approx(8e-3), {})  # that of "one LR"
    assert made.rates(Arm("dnt", grid="msgdw"))[0] == pytest.approx(0.025)  # its grid ends there
    paper = searching(tmp_path, monkeypatch, valley(8e-3), "paper")
    assert paper.rates(ARMS["S5 AdamW"]) == paper.rates(ARMS["Norm ×2"]) == (None, {})
    assert flag(paper.run(ARMS["S1 AdamW"], None, 1), "learning_rate") is None  # the config's own
    assert flag(paper.run(ARMS["S5 AdamW"], None, 1), "learning_rate") == "6e-4"  # DNT's, at every size


# -------------------------------------------------------------------------------------------------------------- runs


def test_the_folder_is_of_the_command_but_not_of_what_is_kept(tmp_path):
    made = runner(tmp_path)
    run, kept = (made.run(Arm("dnt", "config/dnt/s5.py", keep=keep), 1e-3, 2) for keep in (False, True))
    assert run.path == kept.path and run.path.parent == tmp_path / "out" / "tiny"
    assert kept.args == (*run.args, "--keep_every=40")  # ten of 400 steps
    assert run.args[:2] == ("config/claims/tiny_gpt.py", "config/dnt/s5.py")
    assert (flag(run, "learning_rate"), flag(run, "min_lr"), flag(run, "seed")) == ("0.001", "0.0001", "2")
    others = [
        made.run(Arm("dnt", "config/dnt/s4.py"), 1e-3, 2),
        made.run(Arm("dnt", "config/dnt/s5.py"), 2e-3, 2),
        made.run(Arm("dnt", "config/dnt/s5.py"), 1e-3, 3),
        made.run(Arm("dnt", "config/dnt/s5.py --weight_decay=0.2"), 1e-3, 2),
        made.run(Arm("lns", "config/dnt/s5.py"), 1e-3, 2),
    ]
    assert len({run.path, *(other.path for other in others)}) == 6


def test_later_flags_replace_earlier_ones(tmp_path):
    made = runner(tmp_path)  # whose DyT family has --init_std=0.125
    assert flag(made.run(Arm("dyt"), 1e-3, 1), "init_std") == "0.125"
    assert flag(made.run(Arm("dyt", "--init_std=0.5 --init_std=0.25"), 1e-3, 1), "init_std") == "0.25"
    assert flag(made.run(Arm("dyt", "--learning_rate=7"), 1e-3, 1), "learning_rate") == "0.001"


@pytest.mark.parametrize("scale", SCALES)
def test_arms_share_a_folder_only_where_their_commands_are_equal(scale, tmp_path):
    made, commands = runner(tmp_path, scale), {}
    for arm, lr, seed in itertools.product(ARMS.values(), (1e-3, 2e-3), (1, 2)):
        run = made.run(arm, lr, seed)
        args = tuple(arg for arg in run.args if not arg.startswith("--keep_every"))
        assert commands.setdefault(run.path, args) == args
    assert len(set(commands.values())) == len(commands)


def test_a_folder_in_use_is_waited_for(tmp_path, monkeypatch, capsys):
    made, other = runner(tmp_path), open(tmp_path / ".reproduce", "w")
    fcntl.flock(other, fcntl.LOCK_EX)
    naps = iter(range(3))
    monkeypatch.setattr(time, "sleep", lambda seconds: next(naps) == 2 and other.close())
    made.hold(tmp_path).close()
    assert list(naps) == []
    assert capsys.readouterr().out == f"waiting: {tmp_path} is being trained by another process\n"
    with open(tmp_path / ".reproduce", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        made.stop()
        with pytest.raises(reproduce.Stopped):
            made.hold(tmp_path)


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
    assert (quantities.loss(falling), quantities.rise(falling)) == (3.0, 0.0)
    rising = left(tmp_path / "b", {"val_loss": 3.9}, {"val_loss": 3.0}, {"val_loss": 3.25})
    assert (quantities.loss(rising), quantities.rise(rising)) == (3.25, 0.25)
    for name, last in {
        "failed": {"train_loss": None, "failure": "10 steps in a row"},
        "failed at an evaluation": {"val_loss": 2.0, "failure": "10 steps in a row"},
        "not finite": {"val_loss": None},
        "worse than at first": {"val_loss": 1e9},
    }.items():
        path = left(tmp_path / name, {"val_loss": 3.9}, {"val_loss": 3.5}, last)
        assert quantities.loss(path) == pytest.approx(3.9120, abs=1e-4), name
        assert quantities.rise(path) == pytest.approx(0.4120 + (1.5 if "evaluation" in name else 0), abs=1e-4), name


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
        assert (quantities.cached("loss", tmp_path), quantities.cached("rise", tmp_path)) == (1.5, 0.5)
    assert calls == ["loss", "rise"]
    for module in (quantities.diagnostics, quantities):
        edited = tmp_path / f"{module.__name__}.py"
        edited.write_text(Path(module.__file__).read_text() + "\n# edited\n")
        monkeypatch.setattr(module, "__file__", str(edited))
        calls.clear()
        for _ in range(2):
            assert quantities.cached("loss", tmp_path) == 1.5
        assert calls == ["loss"], module.__name__
    assert json.loads((tmp_path / "measures.json").read_text())["loss"][1] == 1.5


# --------------------------------------------------------------------------------------------------------- the whole

TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=8, warmup_iters=5, max_iters=160)
TINY |= dict(eval_interval=20, eval_tokens=512, log_interval=1, device="cpu", dtype="float32", compile=False)
NOTHING = "--norm=none --pre_norm=none --weight_decay=0"  # a network that a large step makes infinite
MADE_UP_ARMS = {
    "fast": Arm("f", lr=1e-2, keep=True),
    "slow": Arm("f", lr=1e-4),
    "found": Arm("f", grid="two"),
    "wrong": Arm("f", "--micro_batch_size=3", lr=1e-2),
    "broken": Arm("f", NOTHING, lr=1e15),
}
MADE_UP = [
    Claim("learns", "A", "Fast is better", "ours", [Row("fast minus slow", "fast - slow", "< 0")]),
    Claim("one", "A", "Fast learns", "ours", [Row("of 3.9", "fast - 3.9", "< 0"), Row("up", "fast", "< 9", "rise")]),
    Claim("search", "B", "The search finds it", "ours", [Row("found | it", "found - fast", "within 0.01")], "A note."),
    Claim("fails", "B", "A run fails", "ours", [Row("wrong", "wrong", "< 9")]),
]


def invent(base) -> None:
    """Put the made-up scale, arms and claims in place of the real ones."""
    SCALES["tiny"] = Scale("a test", {"f": str(base)}, {"adamw": ((None,), None), "two": ((1e-4, 1e-2), 1e-4)})
    ARMS.clear()
    ARMS.update(MADE_UP_ARMS)
    CLAIMS[:] = MADE_UP


@contextmanager
def invented(base):
    kept = dict(SCALES), dict(ARMS), list(CLAIMS)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        invent(base)
        yield
    finally:
        for real, was in zip((SCALES, ARMS), kept[:2], strict=True):
            real.clear()
            real.update(was)
        CLAIMS[:] = kept[2]
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def call(base, folder: Path, *flags) -> int:
    """The exit code of reproduce.py, in this process, with the made-up claims."""
    argv = ["reproduce.py", f"--out={folder / 'out'}", f"--results={folder / 'results'}", *flags]
    argv += [] if any(flag.startswith("--jobs") for flag in flags) else ["--jobs=1"]
    with invented(base), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(sys, "argv", argv)
        try:
            return reproduce.main()
        except SystemExit as e:
            return e.code


@pytest.fixture(scope="module")
def base(dataset, tmp_path_factory):
    """The config file of the made-up family."""
    path = tmp_path_factory.mktemp("base") / "base.py"
    path.write_text("".join(f"{k} = {v!r}\n" for k, v in (TINY | {"dataset": str(dataset)}).items()))
    return path


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """All claims but the one that fails, with two seeds: four runs."""
    folder = tmp_path_factory.mktemp("whole")
    assert call(base, folder, "--only=learns,one,search", "--seeds=2") == 0
    return folder


def final(folder: Path, lr: str) -> list:
    """The last validation losses of the runs at this learning rate, by seed."""
    return [column(one_run(folder, lr, seed), "val_loss")[160] for seed in (1, 2)]


def one_run(folder: Path, lr: str, seed: int) -> Path:
    (path,) = (folder / "out" / "tiny").glob(f"f-base-lr{lr}-seed{seed}-*")
    return path


def test_the_results_are_what_the_runs_say(whole):
    assert len(list((whole / "out" / "tiny").iterdir())) == 4  # "found" shares those of the two others
    fast, slow = final(whole, "0.01"), final(whole, "0.0001")
    found = json.loads((whole / "results" / "claims" / "tiny.json").read_text())
    assert set(found) == {"learns", "one", "search"}
    (row,) = found["learns"]["rows"]
    differences = [fast[0] - slow[0], fast[1] - slow[1]]
    assert row["values"] == pytest.approx(differences, abs=1e-12)
    assert row["parts"] == {"fast": fast, "slow": slow}
    mean, half = sum(differences) / 2, 12.706 * abs(differences[0] - differences[1]) / 2  # t of one degree of freedom
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((mean, mean - half, mean + half), abs=1e-9)
    word = "confirmed" if mean + half < 0 else "inconclusive"
    assert row["verdict"] == found["learns"]["verdict"] == word
    assert mean < -0.1  # or the test has shown nothing
    assert found["one"]["rows"][0]["values"] == pytest.approx([fast[0] - 3.9, fast[1] - 3.9], abs=1e-12)
    assert found["search"]["rows"][0]["values"] == [0.0, 0.0]
    assert found["search"]["verdict"] == "confirmed"
    arm = found["search"]["arms"]["found"]
    assert (arm["lr"], arm["tried"]) == (0.01, {"0.0001": slow[0], "0.01": fast[0]})
    assert (found["learns"]["seeds"], found["learns"]["torch"]) == (2, torch.__version__)
    steps = {f"step_{n}.pt" for n in range(0, 161, 16)}
    assert {p.name for p in one_run(whole, "0.01", 2).glob("step_*")} == steps
    assert not list(one_run(whole, "0.0001", 2).glob("step_*"))


def test_the_page_and_the_figures(whole):
    fast, slow = final(whole, "0.01"), final(whole, "0.0001")
    found = json.loads((whole / "results" / "claims" / "tiny.json").read_text())
    text = (whole / "results" / "claims.md").read_text()
    for claim, says in (("learns", "Fast is better"), ("one", "Fast learns"), ("search", "The search finds it")):
        png = whole / "results" / "claims" / f"tiny-{claim}.png"
        assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert f"![{claim}](claims/tiny-{claim}.png)" in text and says in text
        assert f"### {claim}: {found[claim]['verdict']}" in text
        assert f"(#tiny-{claim})" in text and f'<a id="tiny-{claim}"></a>' in text
    assert "`fails`" in text and "not run" in text and "A note." in text
    assert ", ".join(f"{a - b:.4f}" for a, b in zip(fast, slow, strict=True)) in text
    assert f"{slow[0]:.4f}, {slow[1]:.4f}" in text
    assert f"0.01, searched, the edge of the grid (0.0001: {slow[0]:.4f}, 0.01: {fast[0]:.4f})" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.count("|") in (4, 5, 6), line  # a "|" in a text would break the table


def test_started_again_it_trains_nothing(whole, base, monkeypatch):
    page = (whole / "results" / "claims.md").read_text()
    kept = {path: path.stat().st_mtime_ns for path in (whole / "out").rglob("*") if path.is_file()}
    monkeypatch.setattr(Runner, "train", lambda self, run: pytest.fail(f"trains {run.path}"))
    for function in ("loss", "rise"):
        monkeypatch.setitem(quantities.MEASURES, function, lambda path: pytest.fail(f"measures {path}"))
    assert call(base, whole, "--only=learns,one,search", "--seeds=2") == 0
    assert kept == {path: path.stat().st_mtime_ns for path in (whole / "out").rglob("*") if path.is_file()}
    assert (whole / "results" / "claims.md").read_text() == page


def test_a_run_that_diverges_counts_as_knowing_nothing(base, tmp_path):
    with invented(base):
        made = runner(tmp_path, jobs=1)
        run = made.run(ARMS["broken"], 1e15, 1)
        assert made.measured("loss", run) == pytest.approx(math.log(50))
    assert "failure" in metrics(run.path)[-1] and metrics(run.path)[-1]["step"] < 160
    done = json.loads((run.path / "done.json").read_text())
    assert (done["outcome"], done["args"]) == ("diverged", list(run.args))


def test_a_run_that_fails_is_one_line(base, tmp_path, capsys):
    assert call(base, tmp_path, "--only=fails") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: fails: a run ended with exit code 1 (error: micro_batch_size=3 does not divide")
    (folder,) = (tmp_path / "out" / "tiny").iterdir()
    assert line.endswith(f"see {folder / 'train.log'}")
    assert not (folder / "done.json").exists()


def test_mistakes_are_one_line_before_anything_is_run(base, tmp_path, capsys):
    other = tmp_path / "other.py"
    other.write_text(base.read_text().replace("walk", "gone"))
    for flags, words, code in (
        (["--only=learns,nothing"], "only=nothing is neither a claim nor a paper: allowed are A, B, fails, learns", 1),
        (["--seeds=0"], "seeds=0 must be between 1 and 10", 1),
        (["--seeds=11"], "seeds=11 must be between 1 and 10", 1),
        (["--jobs=-1"], "jobs=-1 must not be negative", 1),
        (["--scale=large"], "--scale cannot be 'large'", 2),
        ([], "gone", 1),  # the dataset
    ):
        assert call(other, tmp_path, *flags) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and words in line
    assert [path.name for path in tmp_path.iterdir()] == ["other.py"]


def test_a_run_made_with_other_settings_is_not_taken_for_this_one(whole, base, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(whole / "out", out)
    before = base.read_text()
    try:
        base.write_text(before.replace("n_embd = 32", "n_embd = 64") + "grad_clip = 0.5\n")  # the same name and flags
        assert call(base, tmp_path, "--only=one") == 1
    finally:
        base.write_text(before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: one: {out / 'tiny'}") and "was trained with other settings (" in line
    assert "n_embd 32 → 64" in line and "grad_clip 1.0 → 0.5" in line and line.endswith("remove it")


@pytest.mark.parametrize(
    "a, b, seeds, says",
    [
        ([5.5, 5.5], [5.5, 5.5], 2, "inconclusive"),  # both diverged: nothing is known of their order
        ([5.5, 5.5], [2.0, 2.1], 2, "confirmed"),
        ([2.0, 2.1], [5.5, 5.5], 2, "not confirmed"),
        ([5.5], [2.0], 1, "inconclusive"),  # one seed has no spread
    ],
)
def test_what_differences_may_say(a, b, seeds, says, tmp_path, monkeypatch):
    measured = {"S4, AdamW 0.1": a, "S4 without QK, AdamW 0.1": b}
    monkeypatch.setattr(Runner, "values", lambda self, name, measure: measured[name])
    row = Row("worse", "S4, AdamW 0.1 - S4 without QK, AdamW 0.1", "> 0")
    found = reproduce.judge(Claim("c", "p", "s", "n", [row]), runner(tmp_path, seeds=seeds))
    assert found["verdict"] == found["rows"][0]["verdict"] == says


def test_a_dry_run_prints_commands_and_writes_nothing(whole, base, tmp_path, capsys):
    assert call(base, tmp_path, "--only=A,search", "--seeds=2", "--dry_run=True") == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    with invented(base):
        made = runner(tmp_path)
        wanted = {made.run(ARMS["fast"], lr, seed) for lr in (1e-4, 1e-2) for seed in (1, 2)}
    commands = {tuple(line[line.index("train.py") + 1 : -2]) for line in lines}
    assert commands >= {run.args for run in wanted if flag(run, "learning_rate") == "0.01"}
    assert {line[-1] for line in lines} == {f"--out_dir={run.path}" for run in wanted}
    assert all(line[-2] == "--init_from=auto" for line in lines)
    assert not list(tmp_path.iterdir())
    assert call(base, whole, "--only=learns,one,search", "--seeds=2", "--dry_run=True") == 0  # all is there
    assert capsys.readouterr().out == ""


def test_judging_alone_trains_nothing(whole, base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "train", lambda self, run: pytest.fail(f"trains {run.path}"))
    assert call(base, tmp_path, "--judge_only=True") == 0
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    again = ["--judge_only=True", "--seeds=2", f"--results={tmp_path / 'again'}"]
    argv = ["reproduce.py", f"--out={whole / 'out'}", *again]
    with invented(base):
        monkeypatch.setattr(sys, "argv", argv)
        assert reproduce.main() == 0
    assert "fails" not in capsys.readouterr().out
    one, other = (json.loads((f / "claims" / "tiny.json").read_text()) for f in (whole / "results", tmp_path / "again"))
    assert set(one) == set(other) == {"learns", "one", "search"}
    assert [one[claim]["rows"] for claim in one] == [other[claim]["rows"] for claim in one]


# ---------------------------------------------------------------------------------------------------- kills and stops

DRIVER = "import sys, test_reproduce as t; t.invent(sys.argv.pop(1)); sys.exit(t.reproduce.main())"


def begin(base, folder: Path) -> subprocess.Popen:
    """reproduce.py on the first seed of "fast", in a process group of its own; what it says goes to folder/said."""
    flags = ["--only=one", "--seeds=1", "--jobs=1", f"--out={folder / 'out'}", f"--results={folder / 'results'}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    with open(folder / "said", "wb") as said:
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(base), *flags],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def test_killed_and_stopped_it_goes_on_and_ends_the_same(whole, base, tmp_path):
    undisturbed = one_run(whole, "0.01", 1)
    run = tmp_path / "out" / "tiny" / undisturbed.name
    said = tmp_path / "said"

    process = begin(base, tmp_path)  # both killed
    wait_for_row(process, run, 58)
    os.killpg(process.pid, signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert not (run / "done.json").exists()

    process = begin(base, tmp_path)  # stopped
    wait_for_row(process, run, 80)
    process.terminate()
    finish(process, 130)
    assert said.read_text() == "stopped; the same command goes on from here\n"
    assert not (run / "done.json").exists()
    saved = load(run / "last.pt")["step"]
    assert 80 <= saved < 160

    process = begin(base, tmp_path)  # killed alone: train.py lives on, here until the next reproduce.py has seen it
    wait_for_row(process, run, 110)
    child = int(re.match(r"process (\d+)", (run / ".lock").read_text())[1])
    os.kill(child, signal.SIGSTOP)
    process.kill()
    finish(process, -signal.SIGKILL)
    process = begin(base, tmp_path)
    deadline = time.monotonic() + 60
    while "waiting" not in said.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(child, signal.SIGCONT)
    finish(process, 0)
    assert f"waiting: {run} is being trained by another process" in said.read_text()

    resumed = [int(step) for step in re.findall(r"weights: .*, step (\d+)", (run / "train.log").read_text())]
    assert resumed[0] in (40, 48) and resumed[1:] == [saved, 160]  # of the last two that were saved before row 58
    assert json.loads((run / "done.json").read_text())["outcome"] == "finished"
    assert_same_run(run, undisturbed)
    (row, _) = json.loads((tmp_path / "results" / "claims" / "tiny.json").read_text())["one"]["rows"]
    assert row["parts"]["fast"] == [column(undisturbed, "val_loss")[160]]
    assert not list(tmp_path.rglob("*.tmp"))
