"""The papers' claims as data: well formed, in the papers' direction, and each arm the configuration that its name says.
And what is on record: the pages are made from it, and README says its verdicts."""

import itertools
import math
import re
import shutil
from dataclasses import asdict

import pytest

from studies.claims import experiment, quantities
from studies.claims.arms import ARMS, REFUSED, SCALES, SEEDS, STUDY, TUNING_SEED
from studies.claims.claims import CLAIMS, GAPS
from studies.claims.experiment import Experiment, ReproduceConfig, arms_in, choose_claims, claims_at, split_value
from studies.claims.page import write_page
from studies.sweep.runner import TrainingRun, resolve_configs
from support.claims import make_experiment
from support.pages import complete
from support.runs import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

# The papers' numbers, from their tables: {claim: the value of its primary number}
PUBLISHED = {
    "dnt-sgd": 2.849 - 2.906,
    "dnt-gap": (2.849 - 2.863) - (2.906 - 2.867),
    "blockwise-loss": 2.784 - 2.834,
    "blockwise-order": math.log10(3.1e-5 / 8.6e-7),
    "dyt-rmsnorm": 1.60 - 1.59,
    "lns-loss": math.log(25.76 / 26.73),
    "lns-variance": math.log10(25 / 175),
    "gains-removal": 0.028,
    "gains-unified": -0.04,
}


def arms_at(scale: str) -> dict:
    """The arms that a scale has the bases of."""
    return {name: arm for name, arm in ARMS.items() if arm.family in SCALES[scale].bases}


def test_claims_are_well_formed():
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids) == 14
    for scale in SCALES:
        assert len(claims_at(scale)) == (2 if scale == "digits" else 12)  # rows of the page's table
    for claim in CLAIMS:
        assert set(claim.adequate) < set(SCALES) and claim.why
        assert not claim.beside or claim.beside in [side.says for side in claim.numbers[1:]]
        for number in claim.numbers:
            assert number.measure in {"loss", *quantities.MEASURES}, claim.id
            assert number.says and set(arms_in([number])) <= set(ARMS)


def test_the_published_values_are_the_papers():
    for claim in CLAIMS:
        published, smallest = claim.effect("mini")
        if claim.id not in PUBLISHED:  # ours, and said to be
            assert published is None and "[I]" in claim.note and f"{smallest:g}" in claim.note
            continue
        assert published == pytest.approx(PUBLISHED[claim.id], abs=1e-3), claim.id
        if claim.expect == "equal":
            assert abs(published) < smallest
        else:
            assert smallest == pytest.approx(abs(published) / 2, rel=1e-3), claim.id
            assert (published < 0) == (claim.expect == "below"), claim.id


def test_claims_about_images_are_a_scale_s_own():
    assert [claim.id for claim in claims_at("digits")] == ["vdnt-sgd", "dyt-vit"]
    for claim in claims_at("digits"):  # no size of ImageNet's is compared, and no other scale can show it
        assert claim.numbers[0].published is None and claim.adequate == ("digits",)
    assert [claim.id for claim in choose_claims("DyT", "digits")[0]] == ["dyt-vit"]
    with pytest.raises(ValueError, match="only=dnt-sgd is neither a claim nor a paper of scale digits: allowed are D"):
        choose_claims("dnt-sgd", "digits")


def test_every_arm_is_looked_at(tmp_path):
    needs = {}
    for scale in ("mini", "digits", "small"):
        made = make_experiment(tmp_path, scale, judge_only=True)
        needs[scale] = set(made.list_needs(*choose_claims("", scale)))
    assert needs["digits"] == set(arms_at("digits"))
    assert needs["mini"] | needs["small"] == set(arms_at("mini"))
    alone = {name for claim in CLAIMS for number in claim.numbers if number.left_out for name in arms_in([number])}
    assert needs["small"] - needs["mini"] <= alone and {"HG", "IWD"} <= alone


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_multiples_that_are_left_out_are_those_that_train_py_refuses(name):
    made, (arm, _, factor) = Experiment(ReproduceConfig(judge_only=True)), name.partition(" ×")
    assert name not in ARMS and f"{arm} ×{int(factor) // 2}" in ARMS
    with pytest.raises(ValueError, match="would shrink every matrix"):
        resolve_configs(made.run_of(arm, made.tune(arm).lr * int(factor), TUNING_SEED).args)


def test_the_study_varies_one_thing():
    assert len(GAPS) == 2 * sum(len(values) for values, _ in STUDY.values())
    for number in GAPS:
        layout, what = number.says.split(", ", 1)
        (_, sgd), (_, adam) = split_value(number.value)
        assert sgd in (f"{layout} mSGDW", f"{layout} mSGDW, {what}")
        assert adam in (f"{layout} AdamW", sgd.replace("mSGDW", "AdamW"))


def resolved(run) -> tuple:
    return complete(*resolve_configs(run.args))


@pytest.mark.parametrize("scale", SCALES)
def test_every_arm_is_a_configuration_and_those_compared_differ(scale, tmp_path):
    made, configs, commands = make_experiment(tmp_path, scale), {}, {}
    for i, (name, arm) in enumerate(arms_at(scale).items()):
        own = made.scale.own and arm.lr is None and arm.times == 1
        run = made.run_of(name, None if own else 1e-3 if arm.of == "" else 2e-3 + i * 1e-6, 1)
        configs[name] = [asdict(config) for config in resolved(run)]
        for other in (run, made.run_of(name, 1e-3, 1), made.run_of(name, 1e-3, 2)):  # a folder is of one command
            args = tuple(arg for arg in other.args if not arg.startswith("--keep_every"))
            assert commands.setdefault(other.path, args) == args
    assert len(set(commands.values())) == len(commands)
    for number in (number for claim in made.claims for number in claim.numbers_at(scale)):
        for a, b in itertools.combinations(arms_in([number]), 2):
            tuned = ARMS[a].tries or ARMS[b].tries  # then they differ in what is chosen
            assert tuned or configs[a] != configs[b], f"{number.says}: {a} and {b} are the same"


# The papers' own runs: {arm: files after config/ and flags at 124m, at paper if they differ}; {s}: small or xl
OWN = {
    "S1 Muon": ["gpt2_{s} optimizers/muon_dnt"],
    "S4 mSGDW": ["dnt_{s} dnt/s4 optimizers/msgdw"],
    "S5 AdamW ×8": ["dnt_{s} --learning_rate=4.8e-3"],
    "S4 without QK, stress": ["dnt_{s} dnt/no_qk_norm --learning_rate=0.3 --warmup_iters=0 --weight_decay=0"],
    "Adam-mini, blocks": ["blockwise/llama_237m blockwise/adam_mini_blockwise"],
    "Fig. 8, 6 4 3 2": [
        "blockwise/llama_237m blockwise/minipile blockwise/rejected_6432 --learning_rate=7.5e-4 --min_lr=3.75e-5"
    ],
    "RMSNorm": ["dyt/small dyt/rmsnorm decay/dyt --schedule=dyt", "dyt/7b dyt/rmsnorm"],
    "DyT": ["dyt/small dyt/dyt decay/dyt --schedule=dyt", "dyt/7b"],
    "LNS": ["lns/130m lns/lns", "lns/1b lns/lns"],
    "unified": ["scale_vectors/llama_120m scale_vectors/unified"],
}


@pytest.mark.parametrize("scale", ["124m", "paper"])
@pytest.mark.parametrize("name", OWN)
def test_large_scales_run_the_papers_own_configurations(name, scale, tmp_path, monkeypatch):
    made = make_experiment(tmp_path, scale)
    monkeypatch.setattr(made, "measure", lambda measure, run: pytest.fail("tunes a rate"))
    words = OWN[name][-1 if scale == "paper" else 0].format(s="small" if scale == "124m" else "xl").split()
    own = [word if word.startswith("--") else f"config/{word}.py" for word in words]
    found, expected = (resolved(TrainingRun(tmp_path, tuple(args))) for args in (made.reported(name, 1).args, own))
    changes = dict(seed=1, keep_every=found[1].keep_every)
    assert (found[0], asdict(found[1])) == (expected[0], asdict(expected[1]) | changes)
    if "mSGDW" in name:  # 6e-5 under every optimizer (DNT, Table 5), also at another rate
        assert (found[1].min_lr, found[1].weight_decay, found[0].init) == (6e-5, 1e-4, "xavier")


def test_claims_keep_what_they_measure_whatever_an_arm_is_called(tmp_path):
    """Arms with one command are one run: all have the checkpoints and the seeds that any of them needs."""
    for scale in ("mini", "124m"):
        made, args = make_experiment(tmp_path, scale), {}
        assert "S1 AdamW" in made.names_of("one rate") or scale == "124m"
        for name in ("one rate", "RMSNorm", "sharpness"):
            assert len({len(made.seeds_of(other)) for other in made.names_of(name)}) == 1
        for name in (name for name, arm in arms_at(scale).items() if arm.times == 1):
            run = made.run_of(name, None, 1)
            assert args.setdefault(run.path, run.args) == run.args, name
        assert any(arg.startswith("--keep_every") for arg in made.run_of("sharpness", None, 1).args)


def test_datasets_of_the_commands_are_looked_at(tmp_path, monkeypatch):
    for scale, only, datasets in (
        ("paper", "dyt-rmsnorm", {"c4"}),
        ("124m", "blockwise-loss", {"openwebtext", "minipile"}),
    ):
        made, found = make_experiment(tmp_path, scale), set()
        monkeypatch.setattr(experiment, "load_meta", found.add)
        made.check_datasets(made.list_needs(*choose_claims(only, scale)))
        assert found == datasets


# What an arm is, beyond its base: of those that no record has
MEANING = {
    "S4 without pre, stress": dict(pre_norm="none", mid_norm="both", input_norm=True, qk_norm=True, weight_decay=0),
    "S4 without mid, stress": dict(pre_norm="both", mid_norm="none", input_norm=True, warmup_iters=0),
    "S4 without input, stress": dict(pre_norm="both", mid_norm="both", input_norm=False, qk_norm=True),
    "Fig. 8, 6 4 3 2": dict(lr_ratio_emb=6, lr_ratio_qk=4, lr_ratio_ffn=3, lr_ratio_vo=2),
    "before the norm": dict(lns="input", n_layer=16, beta2=0.999, grad_clip=0, weight_decay=0),
    "HG": dict(gain="branch", gain_out="none", gain_param="direct"),
    "DNP": dict(gain_out="norm"),
    "IWD": dict(qk_norm=True, decay_gains="input"),
    "sigmoid, no α": dict(norm="dyt", dyt_squash="sigmoid", dyt_learn_alpha=False, dyt_alpha_attn=1.0),
    "no embedding scalar": dict(norm="dyt", embed_scale=False),
    "S1 AdamW, initial weights Xavier, 1": dict(init="xavier", init_std=1.0),
    "ViT identity": dict(norm="dyt", dyt_squash="identity", dyt_bias=True),
}


@pytest.mark.parametrize("name", MEANING)
def test_arms_are_what_they_are_called(name, tmp_path):
    made = make_experiment(tmp_path, "digits" if ARMS[name].family == "vit" else "mini")
    model, train = resolved(made.run_of(name, 1e-3, 1))
    found = asdict(model) | asdict(train)
    assert {key: found[key] for key in MEANING[name]} == MEANING[name]
    assert (train.learning_rate, train.min_lr, train.seed) == (1e-3, 1e-4, 1)
    assert (train.max_iters, train.warmup_iters) in ((300, 30), (300, 0), (400, 40), (1600, 160))  # warm-up: a tenth


def test_a_ratio_of_one_makes_no_other_run(tmp_path):
    """A record outlives the day on which another type of block gets a learning rate of its own."""
    run = make_experiment(tmp_path).run_of("all blocks", 1e-3, 1)
    flags = [(), ("--dropout=0.0",), ("--lr_ratio_router=1",), ("--lr_ratio_router=2",)]
    plain, *same, other = (experiment.digest_settings(run._replace(args=run.args + more)) for more in flags)
    assert same == [plain] * 2 and plain != other


def test_no_number_is_reported_with_a_seed_that_chose_something(tmp_path):
    assert not set(SEEDS) & {TUNING_SEED, 0, 5} and len(set(SEEDS)) == 8  # 0 and 5: docs/results/init.md
    for seeds, scale in itertools.product((1, 2, 4, 8), ("mini", "digits")):
        made = make_experiment(tmp_path, scale, seeds=seeds)
        for name in arms_at(scale):
            reported = made.seeds_of(name)
            assert reported == list(SEEDS[: len(reported)])
            assert len(reported) in (seeds, (seeds + 1) // 2, min(made.scale.side_seeds, seeds))
        for claim in made.claims:  # what can decide has all seeds
            whole = scale in claim.adequate and not claim.few_seeds
            enough = seeds if whole else (seeds + 1) // 2
            assert all(len(made.seeds_of(name)) >= enough for name in arms_in(claim.numbers[:1]))


@pytest.mark.parametrize("scale, name", [("mini", "claims.md"), ("digits", "claims_digits.md")])
def test_the_pages_are_those_of_the_record(scale, name, tmp_path):
    (tmp_path / "results" / "claims").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "results" / "claims" / f"{scale}.json", tmp_path / "results" / "claims")
    write_page(make_experiment(tmp_path, scale, judge_only=True))
    assert (tmp_path / "results" / name).read_text() == (ROOT / "docs" / "results" / name).read_text()


def test_readme_says_the_verdicts_of_the_record():
    results = (ROOT / "README.md").read_text().split("## Results")[1].split("\n## ")[0]
    said = re.findall(r"^\| (.+) \| \[(.+)\]\(docs/results/(.+)#(.+)\) \| \W*([^:*\n|]+)", results, re.MULTILINE)
    found = []
    for page in ("claims.md", "claims_digits.md"):  # they are those of the record, as the test above sees
        text = (ROOT / "docs" / "results" / page).read_text()
        rows = re.findall(r"^\| ([^|]+) \| \[(.+?)(?: \[I\])?\]\(#(.+?)\) \|.*\*\*([^*|]+)\*\*", text, re.MULTILINE)
        found += [(paper, statement, page, name, verdict) for paper, statement, name, verdict in rows]
    assert len(found) == 14
    for rows in (said, found):
        rows[:] = sorted((*row[:4], row[4].strip().removesuffix(" on digits")) for row in rows)
    assert said == found
    assert not re.findall(r"\d\.\d\d", results)  # no number is typed
