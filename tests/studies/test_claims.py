"""The papers' claims as data: well formed, in the papers' direction, and each arm the configuration that its name says.
And what is on record: pages and README are those of the record."""

import copy
import itertools
import math
import re
import shutil
from dataclasses import asdict

import pytest

from nanodnt.optim import fill_defaults
from nanodnt.tasks import task_of
from studies.claims import quantities, report, reproduce
from studies.claims.arms import (
    ARMS,
    FACTORS,
    INIT_SEEDS,
    LAYOUTS,
    OPTIMIZERS,
    REFUSED,
    ROBUSTNESS,
    SCALES,
    SEEDS,
    STUDY,
    TUNING_SEED,
    study_arm,
)
from studies.claims.claims import CLAIMS, COUNTED
from studies.claims.experiment import Experiment, ReproduceConfig, choose_claims, claims_at, split_value
from studies.claims.judge import count_all
from studies.claims.record import digest_settings
from studies.claims.reproduce import list_needs
from studies.claims.study import gap_number
from studies.sweep.runner import TrainingRun, resolve_configs
from support.claims import make_experiment
from support.runs import ROOT
from vision import ViT

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = [(claim, number) for claim in CLAIMS for number in (claim.primary, *claim.sides)]


# ------------------------------------------------------------------------------------------------------------ claims


def test_claims_are_well_formed():
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids)
    for scale in SCALES:
        assert len(claims_at(scale)) == (2 if scale == "digits" else 12)  # rows of the page's table
    assert {claim.paper for claim in CLAIMS} == {"DNT", "Blockwise LR", "DyT", "LNS", "scale vectors"}
    for claim, number in NUMBERS:
        assert number.measure in {"loss", *quantities.MEASURES}, claim.id
        assert split_value(number.value) and number.says
        assert not claim.beside or claim.beside in [side.says for side in claim.sides]
    for claim in CLAIMS:
        assert set(claim.adequate) < set(SCALES) and "tiny" not in claim.adequate and claim.why
        published = claim.primary.published
        if claim.expect == "equal":
            assert abs(published) < claim.smallest
        elif published is None:  # ours, and said to be
            assert "[I]" in claim.note and f"{claim.smallest:g}" in claim.note
        else:
            assert claim.smallest == pytest.approx(abs(published) / 2, rel=1e-3), claim.id
            assert (published < 0) == (claim.expect == "below"), claim.id


# The papers' numbers, from their tables: {claim: the value of its primary number}
PUBLISHED = {
    "dnt-sgd": 2.849 - 2.906,
    "dnt-gap": (2.849 - 2.863) - (2.906 - 2.867),
    "blockwise-loss": 2.784 - 2.834,
    "blockwise-order": math.log10(3.1e-5 / 8.6e-7),
    "lns-loss": math.log(25.76 / 26.73),
    "lns-variance": math.log10(25 / 175),
    "gains-removal": 0.028,
    "gains-unified": -0.04,
}


def test_the_published_values_are_the_papers():
    found = {claim.id: claim.primary.published for claim in CLAIMS if claim.expect != "equal"}
    assert {name for name, value in found.items() if value is not None} == set(PUBLISHED)
    for name, value in PUBLISHED.items():
        assert found[name] == pytest.approx(value, abs=1e-3), name


def arms_at(scale: str) -> dict:
    """The arms that a scale has the bases of."""
    return {name: arm for name, arm in ARMS.items() if arm.family in SCALES[scale].bases}


def test_claims_about_images_are_a_scale_s_own():
    images = [claim.id for claim in claims_at("digits")]
    assert images == ["vdnt-sgd", "dyt-vit"] and not set(images) & {claim.id for claim in claims_at("mini")}
    for claim in claims_at(
        "digits"
    ):  # as what they are: no size of ImageNet's is compared, and no other scale can show it
        assert claim.primary.published is None and claim.adequate == ("digits",) and "ImageNet" in claim.published
    assert SCALES["digits"].on == "on digits" and "not ImageNet" in SCALES["digits"].note
    assert [claim.id for claim in choose_claims("DyT", "digits")[0]] == ["dyt-vit"]
    with pytest.raises(
        ValueError, match="only=dnt-sgd is neither a claim nor a paper of scale digits: allowed are DNT, "
    ):
        choose_claims("dnt-sgd", "digits")


def test_every_arm_is_looked_at(tmp_path):
    needs = {}
    for scale in ("mini", "digits", "small"):
        made = make_experiment(tmp_path, scale, judge_only=True)
        needs[scale] = set(list_needs(*choose_claims("", scale), made))
    assert needs["digits"] == set(arms_at("digits"))
    assert needs["mini"] | needs["small"] == set(arms_at("mini"))
    alone = {name for claim in CLAIMS for number in claim.sides if number.left_out for name in arms_in(number)}
    assert needs["small"] - needs["mini"] <= alone and {"HG", "IWD"} <= alone


def arms_in(number) -> list:
    return [name for _, name in split_value(number.value)]


def test_robustness_has_the_layouts_under_every_optimizer():
    assert set(ROBUSTNESS) == set(OPTIMIZERS) == {"AdamW", "mSGDW", "Muon", "Adam-mini"}
    assert FACTORS == (4, 8, 16)
    for optimizer, layouts in ROBUSTNESS.items():
        assert {"S1", "S5"} <= set(layouts) <= set(LAYOUTS)
        assert optimizer not in ("AdamW", "mSGDW") or set(layouts) == set(LAYOUTS)
        for layout, factor in itertools.product(layouts, FACTORS):
            if (name := f"{layout} {optimizer} ×{factor}") in REFUSED:
                continue
            arm = ARMS[name]
            assert (arm.of, arm.times) == (f"{layout} {optimizer}", factor)


def test_a_rate_is_left_out_because_train_py_refuses_it():
    made = Experiment(ReproduceConfig(judge_only=True))
    for name in REFUSED:
        plain, _, factor = name.partition(" ×")
        run = made.run_of(plain, made.tune(plain).lr * int(factor), TUNING_SEED)
        with pytest.raises(ValueError, match="would shrink every matrix"):
            fill_defaults(resolve_configs(run.args)[1])


def test_what_is_counted():
    for (what, ours, published, _), row in zip(count_all(), COUNTED, strict=True):
        assert ours == pytest.approx(published, abs=0.06), (what, row)


# -------------------------------------------------------------------------------------------------------------- arms


def resolved(run) -> tuple:
    """(GPTConfig, TrainConfig) as train.py would have them, checked as it checks them."""
    model, train = resolve_configs(run.args)
    task_of(model).fit(model, task_of(model).stand_in(model)[0], train.dataset)
    model.check()
    train.check()
    fill_defaults(train)
    return model, train


@pytest.mark.parametrize("scale", SCALES)
def test_every_arm_is_a_configuration_and_those_compared_differ(scale, tmp_path):
    made, configs = make_experiment(tmp_path, scale), {}
    for i, (name, arm) in enumerate(arms_at(scale).items()):
        own = made.scale.own and arm.lr is None and arm.times == 1
        lr = None if own else 1e-3 if arm.of == "" else 2e-3 + i * 1e-6
        configs[name] = [asdict(config) for config in resolved(made.run_of(name, lr, 1))]
    for claim, number in NUMBERS:
        if claim not in made.claims:
            continue
        for (_, a), (_, b) in itertools.combinations(split_value(number.value), 2):
            if scale in number.left_out:
                continue
            tuned = ARMS[a].tries or ARMS[b].tries  # then they differ in what is chosen
            assert tuned or configs[a] != configs[b], f"{claim.id}: {a} and {b} are the same"


# The papers' own runs: {arm: files after config/ and flags at 124m, at paper if they differ}; {s}: small or xl
OWN = {
    "S1 AdamW": ["gpt2_{s}"],
    "S1 mSGDW": ["gpt2_{s} optimizers/msgdw"],
    "S1 mSGDW ×8": ["gpt2_{s} optimizers/msgdw --learning_rate=8"],
    "S1 Muon": ["gpt2_{s} optimizers/muon_dnt"],
    "S2 mSGDW": ["dnt_{s} dnt/s2 optimizers/msgdw"],
    "S4 mSGDW": ["dnt_{s} dnt/s4 optimizers/msgdw"],
    "S5 AdamW": ["dnt_{s}"],
    "S5 AdamW ×8": ["dnt_{s} --learning_rate=4.8e-3"],
    "S5 mSGDW": ["dnt_{s} optimizers/msgdw"],
    "S5 mSGDW, half": ["dnt_{s} optimizers/msgdw --learning_rate=0.5"],
    "S5 Muon": ["dnt_{s} optimizers/muon_dnt"],
    "S4 without QK, stress": ["dnt_{s} dnt/no_qk_norm --learning_rate=0.3 --warmup_iters=0 --weight_decay=0"],
    "one rate": ["blockwise/llama_237m"],
    "sharpness": ["blockwise/llama_237m"],
    "all blocks": ["blockwise/llama_237m blockwise/blockwise"],
    "after warm-up": ["blockwise/llama_237m blockwise/warmup_end"],
    "Norm ×2": ["blockwise/llama_237m blockwise/norm_double"],
    "Adam-mini, one rate": ["blockwise/llama_237m blockwise/adam_mini"],
    "Adam-mini, blocks": ["blockwise/llama_237m blockwise/adam_mini_blockwise"],
    "Fig. 8, one rate": ["blockwise/llama_237m blockwise/minipile --learning_rate=7.5e-4 --min_lr=3.75e-5"],
    "Fig. 8, 6 4 3 2": [
        "blockwise/llama_237m blockwise/minipile blockwise/rejected_6432 --learning_rate=7.5e-4 --min_lr=3.75e-5"
    ],
    "RMSNorm": ["dyt/small dyt/rmsnorm decay/dyt --schedule=dyt", "dyt/7b dyt/rmsnorm"],
    "DyT": ["dyt/small dyt/dyt decay/dyt --schedule=dyt", "dyt/7b"],
    "Pre-LN": ["lns/130m", "lns/1b"],
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
        made = make_experiment(tmp_path, scale)
        assert "S1 AdamW" in made.names_of("one rate") or scale == "124m"
        for name in ("one rate", "RMSNorm", "sharpness"):
            assert len({len(made.seeds_of(other)) for other in made.names_of(name)}) == 1
        args = {}
        for name in (name for name, arm in arms_at(scale).items() if arm.times == 1):
            run = made.run_of(name, None, 1)
            assert args.setdefault(run.path, run.args) == run.args, name
        assert any(arg.startswith("--keep_every") for arg in made.run_of("sharpness", None, 1).args)


def test_datasets_of_the_commands_are_looked_at(tmp_path, monkeypatch):
    found = set()
    monkeypatch.setattr(reproduce, "load_meta", found.add)
    for scale, only, datasets in (
        ("paper", "dyt-rmsnorm", {"c4"}),
        ("124m", "blockwise-loss", {"openwebtext", "minipile"}),
    ):
        made = make_experiment(tmp_path, scale)
        reproduce.check_datasets(list_needs(*choose_claims(only, scale), made), made)
        assert found == datasets
        found.clear()


@pytest.mark.parametrize("scale", SCALES)
def test_arms_share_a_folder_only_where_their_commands_are_equal(scale, tmp_path):
    made, commands = make_experiment(tmp_path, scale), {}
    for name, lr, seed in itertools.product(arms_at(scale), (1e-3, 2e-3), (1, 2)):
        run = made.run_of(name, lr, seed)
        args = tuple(arg for arg in run.args if not arg.startswith("--keep_every"))
        assert commands.setdefault(run.path, args) == args
    assert len(set(commands.values())) == len(commands)


# What an arm is, beyond its base
MEANING = {
    "S1 mSGDW": dict(pre_norm="both", mid_norm="none", input_norm=False, qk_norm=False, optimizer="msgdw"),
    "S4 mSGDW": dict(pre_norm="both", mid_norm="both", input_norm=True, qk_norm=True, optimizer="msgdw"),
    "S5 AdamW": dict(pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True, optimizer="adamw"),
    "S5 Muon": dict(pre_norm="attn", optimizer="muon"),
    "S3 mSGDW ×16": dict(input_norm=True, mid_norm="none", optimizer="msgdw"),
    "LNS AdamW": dict(lns="norm", residual_init="plain", pre_norm="both", qk_norm=False),
    "DyT Muon": dict(norm="dyt", embed_scale=None, optimizer="muon"),
    "unified mSGDW": dict(gain="branch", gain_out="norm", gain_param="magdir", optimizer="msgdw"),
    "S4 without pre, stress": dict(pre_norm="none", mid_norm="both", input_norm=True, qk_norm=True, weight_decay=0),
    "S4 without mid, stress": dict(pre_norm="both", mid_norm="none", input_norm=True, warmup_iters=0),
    "S4 without input, stress": dict(pre_norm="both", mid_norm="both", input_norm=False, qk_norm=True),
    "all blocks": dict(lr_ratio_emb=10, lr_ratio_qk=8, lr_ratio_ffn=6, lr_ratio_vo=4, blockwise_start="start"),
    "after warm-up": dict(lr_ratio_emb=10, lr_ratio_vo=4, blockwise_start="warmup_end"),
    "Emb": dict(lr_ratio_emb=10, lr_ratio_qk=1, lr_ratio_ffn=1, lr_ratio_vo=1, lr_ratio_norm=1),
    "Emb, FFN": dict(lr_ratio_emb=10, lr_ratio_qk=1, lr_ratio_ffn=6, lr_ratio_vo=1, lr_ratio_norm=1),
    "Norm ×2": dict(lr_ratio_emb=1, lr_ratio_qk=1, lr_ratio_ffn=1, lr_ratio_vo=1, lr_ratio_norm=2),
    "Adam-mini, blocks": dict(optimizer="adam_mini", blockwise_lr=True, lr_ratio_emb=4, lr_ratio_qk=1, lr_ratio_ffn=4),
    "shared": dict(norm="rmsnorm", gain="shared", embed_scale=False, qk_norm=False, pos="rope", mlp="swiglu"),
    "DyT": dict(norm="dyt", dyt_squash="tanh", dyt_learn_alpha=True, embed_scale=None),
    "sigmoid, no α": dict(norm="dyt", dyt_squash="sigmoid", dyt_learn_alpha=False, dyt_alpha_attn=1.0),
    "no embedding scalar": dict(norm="dyt", embed_scale=False),
    "Pre-LN": dict(lns="off", residual_init="plain", pre_norm="both", beta2=0.999, grad_clip=0, weight_decay=0),
    "scaled init": dict(lns="off", residual_init="gpt2"),
    "LNS": dict(lns="norm", lns_power=0.5, lns_branches="both", residual_init="plain", n_layer=16, beta2=0.999),
    "before the norm": dict(lns="input"),
    "none": dict(gain="none"),
    "HG": dict(gain="branch", gain_out="none", gain_param="direct"),
    "DNP": dict(gain_out="norm"),
    "IWD": dict(qk_norm=True, decay_gains="input"),
    "unified": dict(gain="branch", gain_out="norm", gain_param="magdir", decay_gains="input"),
    "ViT S1 mSGDW": dict(patch_size=2, pre_norm="both", mid_norm="none", input_norm=False, qk_norm=False, grad_clip=0),
    "ViT S5 mSGDW": dict(
        pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True, optimizer="msgdw", momentum=0.9
    )
    | dict(weight_decay=2e-4, grad_clip=0, norm="rmsnorm"),
    "ViT LayerNorm": dict(norm="layernorm", pre_norm="both", mid_norm="none", qk_norm=False, optimizer="adamw"),
    "ViT DyT": dict(norm="dyt", dyt_alpha_attn=0.5, dyt_alpha_other=0.5, dyt_bias=True, embed_scale=False),
    "ViT identity": dict(norm="dyt", dyt_squash="identity", dyt_bias=True),
    "ViT DyT, long": dict(norm="dyt", dyt_bias=True, eval_interval=1600),
    "S1 AdamW, batch, sequences 4": dict(batch_size=4, optimizer="adamw"),
    "S5 mSGDW, momentum 0.98": dict(momentum=0.98, pre_norm="attn", optimizer="msgdw"),
}


def scale_of(name: str) -> str:
    return "digits" if ARMS[name].family == "vit" else "mini"


@pytest.mark.parametrize("name", MEANING)
def test_arms_are_what_they_are_called(name, tmp_path):
    model, train = resolved(make_experiment(tmp_path, scale_of(name)).run_of(name, 1e-3, 1))
    found = asdict(model) | asdict(train)
    assert {key: found[key] for key in MEANING[name]} == MEANING[name]
    assert (train.learning_rate, train.min_lr, train.seed) == (1e-3, 1e-4, 1)
    assert (train.max_iters, train.warmup_iters) in ((300, 30), (300, 0), (400, 40), (1600, 160))  # warm-up: a tenth


def test_the_regime_of_mini(tmp_path):
    model, train = resolve_configs(make_experiment(tmp_path).run_of("S1 AdamW", 1e-3, 1).args)
    assert (model.n_layer, model.n_embd, model.block_size) == (8, 128, 128)
    assert train.dataset == "pystdlib_gpt2_4096" and train.eval_tokens >= 200_000


def test_the_regime_of_digits(tmp_path):
    made = make_experiment(tmp_path, "digits")
    model, train = resolve_configs(made.run_of("ViT S5 mSGDW", 1e-3, 1).args)
    task_of(model).fit(model, {"kind": "images", "image_size": 8, "channels": 1, "classes": range(10)}, train.dataset)
    assert train.dataset == "digits" and model.image_tokens == 17
    assert train.eval_tokens == 0 and train.eval_interval == train.max_iters  # all images, at the end
    assert resolved(made.run_of("ViT DyT, long", 1e-3, 1))[1].max_iters == 4 * train.max_iters
    assert 0.25e6 < ViT(model).num_params() < 0.35e6 and "0.3M" in made.scale.title
    assert f"{train.max_iters * train.batch_size / 1437:.0f} passes over 1,437" in made.scale.title
    assert len(made.seeds_of("ViT S5 mSGDW")) == len(made.seeds_of("ViT DyT")) == 8
    assert len(made.seeds_of("ViT S3 mSGDW")) == len(made.seeds_of("ViT identity")) == 4


def test_the_study_varies_one_thing():
    for what, (values, both) in STUDY.items():
        assert "" in values.values()
        for value, flags in values.items():
            sgd, adam = (name for _, name in split_value(gap_number("S5", what, value).value))
            assert (sgd == "S5 mSGDW") == (not flags) and (adam == "S5 AdamW") == (not flags or not both)
            assert study_arm("S5", "mSGDW", what, value) == sgd and {sgd, adam} <= set(ARMS)


def test_the_study_tunes_around_the_layout_s_own_rate(tmp_path, monkeypatch):
    made, asked = make_experiment(tmp_path), []

    def measure(measure, run):  # S5's best rate is 1, whatever is varied
        lr = float(next(arg for arg in run.args if arg.startswith("--learning_rate=")).partition("=")[2])
        asked.append((lr, "--momentum=0.98" in run.args))
        return abs(math.log2(lr))

    monkeypatch.setattr(made, "measure", measure)
    assert made.tune("S5 mSGDW").lr == made.tune(study_arm("S5", "mSGDW", "momentum", "0.98")).lr == 1
    assert sorted(lr for lr, varied in asked if varied) == [0.5, 1, 2]
    assert sorted({lr for lr, varied in asked if not varied}) == [0.0625, 0.125, 0.25, 0.5, 1, 2]


def test_a_ratio_of_one_makes_no_other_run(tmp_path):
    """A record outlives the day on which another type of block gets a learning rate of its own."""
    run = make_experiment(tmp_path).run_of("all blocks", 1e-3, 1)
    same, other = (run._replace(args=(*run.args, f"--lr_ratio_router={ratio}")) for ratio in (1, 2))
    assert digest_settings(run) == digest_settings(same) != digest_settings(other)


# --------------------------------------------------------------------------------------------------------- seeds


def test_no_number_is_reported_with_a_seed_that_chose_something(tmp_path):
    assert TUNING_SEED in INIT_SEEDS and len(set(SEEDS)) == len(SEEDS) == 8
    for seeds, scale in itertools.product((1, 2, 4, 8), ("mini", "digits")):
        made = make_experiment(tmp_path, scale, seeds=seeds)
        for name in arms_at(scale):
            reported = made.seeds_of(name)
            assert not set(reported) & {TUNING_SEED, *INIT_SEEDS} and reported == list(SEEDS[: len(reported)])
            assert len(reported) in (seeds, (seeds + 1) // 2, min(made.scale.side_seeds, seeds))
        for claim in made.claims:  # what can decide has all seeds
            whole = scale in claim.adequate and not claim.few_seeds
            enough = seeds if whole else (seeds + 1) // 2
            assert all(len(made.seeds_of(name)) >= enough for _, name in split_value(claim.primary.value))


# -------------------------------------------------------------------------------------------------- what is on record


@pytest.fixture(scope="module")
def on_record(tmp_path_factory):
    """An Experiment on a copy of the committed record of scale mini, and its folder, which has that of digits too."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "results" / "claims").mkdir(parents=True)
    for scale in ("mini", "digits"):
        shutil.copy(ROOT / "docs" / "results" / "claims" / f"{scale}.json", folder / "results" / "claims")
    return make_experiment(folder, judge_only=True), folder / "results"


def test_the_pages_are_those_of_the_record(on_record):
    made, folder = on_record
    report.write_page(made)
    report.write_page(make_experiment(folder.parent, "digits", judge_only=True))
    for name in ("claims.md", "momentum_sgd.md", "claims_digits.md"):
        assert (folder / name).read_text() == (ROOT / "docs" / "results" / name).read_text(), name


def test_no_figure_on_claims_is_typed_into_the_readme(on_record):
    """What README says between its marks is written from the record, and outside of them it has no loss."""
    made, _ = on_record
    readme = (ROOT / "README.md").read_text()
    found = report.judge(made.claims, made.reading())
    assert report.fill_readme(readme, found, made) == readme
    before, _, rest = readme.partition(report.MARKS[0])
    results = before.split("## Results")[1] + rest.partition(report.MARKS[1])[2].split("\n## ")[0]
    assert not re.findall(r"\d\.\d\d", results)


def test_what_readme_says_follows_the_record(on_record):
    made, _ = on_record
    readme = (ROOT / "README.md").read_text()
    fewer = made.reading()
    fewer.record = copy.copy(made.record)
    fewer.record.runs = dict(list(made.record.runs.items())[1:])
    assert report.fill_readme(readme, report.judge(fewer.claims, fewer), fewer) != readme
    assert report.fill_readme(readme.replace(report.MARKS[1], ""), {}, fewer) == readme.replace(report.MARKS[1], "")
