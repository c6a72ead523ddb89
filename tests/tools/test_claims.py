"""The papers' claims as data: well formed, complete, in the papers' direction, and each arm the configuration that its
name says. And how numbers become verdicts, worked out by hand."""

import itertools
import json
import math
import re
import shutil
from dataclasses import asdict

import pytest

from nanodnt.claims import quantities
from nanodnt.claims.claims import ARMS, CLAIMS, SCALES, Claim, Row
from nanodnt.claims.judge import judge
from nanodnt.claims.report import write_page
from nanodnt.claims.runner import Runner, resolve_configs
from nanodnt.claims.statistics import interval, limits, overall_verdict, verdict
from nanodnt.optim import fill_defaults
from support.claims import make_runner
from support.runs import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
inf = math.inf


def terms(row: Row) -> list:
    return row.value.replace(" + ", " - ").split(" - ")


ROWS = [(claim, row) for claim in CLAIMS for row in claim.rows]


def test_claims_are_named_once_and_rows_are_well_formed():
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids)
    for claim, row in ROWS:
        assert row.measure in {**quantities.MEASURES, **quantities.CONFIG_MEASURES}, claim.id
        assert re.fullmatch(r"(<|>|within) -?\d+(\.\d+)?", row.expect), claim.id
        for term in terms(row):
            known = term in ARMS or re.fullmatch(r"\d+(\.\d+)?", term)
            assert known or (row.measure in quantities.CONFIG_MEASURES and (ROOT / term.split()[0]).is_file()), term
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
    model, train = resolve_configs(run.args)
    model.vocab_size = 50257
    model.check()
    train.check()
    fill_defaults(train)
    return model, train


@pytest.mark.parametrize("scale", SCALES)
def test_every_arm_is_a_configuration_and_those_compared_differ(scale, tmp_path):
    lr = None if scale == "paper" else 1e-3
    runs = {name: make_runner(tmp_path, scale).training_run(arm, lr, 1) for name, arm in ARMS.items()}
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
    model, train = resolved(make_runner(tmp_path).training_run(ARMS[name], 1e-3, 1))
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
    assert overall_verdict(["confirmed", "confirmed"]) == "confirmed"
    assert overall_verdict(["confirmed", "inconclusive"]) == "inconclusive"
    assert overall_verdict(["confirmed", "inconclusive", "not confirmed"]) == "not confirmed"


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
    monkeypatch.setattr(Runner, "measure_seeds", lambda self, name, measure: measured[name])
    row = Row("worse", "S4, AdamW 0.1 - S4 without QK, AdamW 0.1", "> 0")
    found = judge(Claim("c", "p", "s", "n", [row]), make_runner(tmp_path, seeds=seeds))
    assert found["verdict"] == found["rows"][0]["verdict"] == says


# -------------------------------------------------------------------------------------------------- what is on record


def test_every_claim_is_on_record_with_three_seeds():
    record = json.loads((ROOT / "docs" / "results" / "claims" / "tiny.json").read_text())
    assert set(record) == {claim.id for claim in CLAIMS if "tiny" in claim.scales}
    rows = [row for claim in record.values() for row in claim["rows"] if row["measure"] != "state GB"]
    assert all(len(row["values"]) >= 3 for row in rows)


def test_the_page_of_claims_is_that_of_its_record(tmp_path):
    shutil.copytree(ROOT / "docs" / "results" / "claims", tmp_path / "claims")
    assert write_page(tmp_path).read_text() == (ROOT / "docs" / "results" / "claims.md").read_text()
