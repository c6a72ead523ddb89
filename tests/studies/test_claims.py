"""The claims files: well formed, with the papers' numbers and settings, and each arm the
configuration it is called. And what is on record: the pages are made from it, and README says its
verdicts."""

import math
import re
import shutil
from dataclasses import asdict

import pytest

from studies.calibration import WORDS
from studies.claims import experiment
from studies.claims.experiment import TUNING_SEEDS, choose_claims, first_seeds
from studies.claims.page import write_page
from studies.claims.study import Setting, arms_in, compare_protocol, settings_of
from studies.sweep.runner import TrainingRun, resolve_configs
from support.claims import make_experiment
from support.pages import complete
from support.runs import ROOT

STUDIES = ["calibration", "crossing", "digits", "dnt", "large", "papers", "small", "xl"]
N_CLAIMS = dict(calibration=6, crossing=2, digits=6, dnt=7, large=23, papers=25, small=25, xl=23)

# The papers' numbers, from their tables: {claim: the value of its primary number}; the others have
# none
PUBLISHED = {
    "dnt-common": 2.849 - 2.906,
    "dnt-own": 2.849 - 2.906,
    "dnt-par": 2.849 - 2.863,
    "dnt-gap": (2.849 - 2.863) - (2.906 - 2.867),
    "blockwise-loss": 2.784 - 2.834,
    "blockwise-adam-mini": -0.044,
    "blockwise-order": math.log10(3.1e-5 / 8.6e-7),
    "dyt-rmsnorm": 1.60 - 1.59,
    "lns-loss": math.log(25.76 / 26.04),
    "lns-crossing": math.log(25.76 / 26.04),
    "blockwise-crossing": 2.784 - 2.834,
    "lns-variance": math.log10(25 / 175),
    "vdnt-gradients": math.log10(1e-5 / 1e-4),
    "gains-removal": 0.028,
    "gains-unified": -0.04,
    **dict.fromkeys(WORDS, 2.863 - 2.867),
}


def load(name: str, folder):
    return make_experiment(folder, f"studies/{name}.py", judge_only=True)


@pytest.mark.house
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_well_formed(name, tmp_path):
    made = load(name, tmp_path)  # which refuses what `find_problems` finds
    assert len(made.study.claims) == N_CLAIMS[name]
    used = arms_in(number for claim in made.study.claims for number in claim.numbers)
    used += [arm.of for arm in made.study.arms.values()]
    assert name in ("large", "xl") or set(made.study.arms) <= set(used)  # every arm is looked at
    for claim in made.study.claims:
        if name in ("small", "large", "xl"):  # runs of an earlier round are of another size
            assert not any(side.seeds for side in claim.sides)
        assert (
            claim.paper
            and claim.published
            and (claim.protocol or "[U]" in claim.note or claim.cannot)
        )
        made.protocol(claim)  # what differs from the paper has a reason
        made.check_arms(claim)  # those compared differ
        assert claim.number.published or "[I]" in claim.note or claim.cannot, claim.id


def test_the_published_values_are_the_papers(tmp_path):
    names = ("calibration", "crossing", "digits", "dnt", "papers")
    for claim in (claim for name in names for claim in load(name, tmp_path).study.claims):
        if claim.id not in PUBLISHED:  # ours, and said to be
            assert claim.number.published is None and claim.smallest
            continue
        assert claim.number.published == pytest.approx(PUBLISHED[claim.id], abs=1e-3), claim.id
        if claim.expect in ("equal", "not above"):
            assert abs(claim.number.published) < claim.effect
        else:
            assert claim.effect == pytest.approx(abs(claim.number.published) / 2, rel=1e-3), (
                claim.id
            )
            assert (claim.number.published < 0) == (claim.expect == "below"), claim.id


@pytest.mark.parametrize("name", ["papers", "digits"])
def test_a_reason_is_given_where_a_setting_differs_and_only_there(name, tmp_path):
    made = load(name, tmp_path)
    for claim in made.study.claims:
        for setting, paper, _, ours, why in made.protocol(claim):
            differs = [value for value in ours if value != pytest.approx(paper)]
            assert bool(why) == bool(differs), f"{claim.id}: {setting}"


def test_a_protocol_that_contradicts_its_paper_fails(tmp_path):
    made = load("papers", tmp_path)
    (claim,) = (claim for claim in made.study.claims if claim.id == "dnt-common")
    settings = settings_of(*resolve_configs(made.run_of("S1 at 1.0", 1.0, 0).args))
    assert len(compare_protocol(claim, [settings])) == len(claim.protocol)
    for changed in (dict(init="normal"), {"warm-up / steps": 0.1}, dict(learning_rate="tuned")):
        with pytest.raises(
            ValueError, match=r"claim dnt-common: .* in the paper \(.*\): give the arms the paper's"
        ):
            compare_protocol(claim, [settings, settings | changed])
    wrong = claim._replace(protocol=(Setting("n_embd", 768, "Table 3"),))
    with pytest.raises(ValueError, match=r"n_embd is 128, and 768 in the paper \(Table 3\)"):
        compare_protocol(wrong, [settings])


def test_some_claims_or_those_of_a_paper_can_be_chosen(tmp_path):
    study = load("digits", tmp_path).study
    assert [claim.id for claim in choose_claims("DyT", study)] == ["dyt-vit", "dyt-squash"]
    assert [claim.id for claim in choose_claims("dyt-vit, vdnt-sgd", study)] == [
        "vdnt-sgd",
        "dyt-vit",
    ]
    assert choose_claims("", study) == study.claims
    words = "only=dnt-own is neither a claim nor a paper of the study: it has DNT, DyT, d"
    with pytest.raises(ValueError, match=words):
        choose_claims("dnt-own", study)


def resolved(run) -> tuple:
    return complete(*resolve_configs(run.args))


@pytest.mark.house
@pytest.mark.parametrize("name", ["track", "track_mini"])
def test_an_entry_of_a_track_keeps_its_recipe(name, tmp_path):
    made = load(name, tmp_path)
    for claim in made.study.claims:
        made.protocol(claim)  # which refuses an arm, or a variant, with another setting
        made.check_arms(claim)
    for name, arm in made.study.arms.items():
        for variant in arm.tries or ("",):  # it builds
            resolved(made.run_of(name, None, 1, f"{arm.files} {variant}"))


@pytest.mark.house
def test_the_recipe_of_the_track(tmp_path):
    """That of docs/track.md, whose numbers are written here once more."""
    made = load("track", tmp_path)
    for optimizer, rates, steps in (
        ("AdamW", (0.9e-3, 1.8e-3, 3.6e-3, 7.2e-3, 14.4e-3), 5000),
        ("Muon", (0.00625, 0.0125, 0.025, 0.05, 0.1), 3300),
    ):
        trials = made.study.trials[optimizer]
        name = f"Pre-LN under {optimizer}"
        model, train = resolved(made.run_of(name, None, 1))
        wanted = dict(max_iters=steps, min_lr=0, learning_rate=rates[2], schedule="linear")
        wanted |= dict(dataset="fineweb", batch_size=512, block_size=1024, tie_weights=False)
        wanted |= dict(eval_rows="first", eval_tokens=10_485_760, warmup_iters=steps / 10)
        found = asdict(model) | asdict(train)
        assert {key: found[key] for key in wanted} == wanted
        _, half = resolved(made.run_of(name, rates[2], 0, trials.flags))
        assert 2 * half.max_iters == steps and half.max_iters == 10 * half.warmup_iters
        assert trials.rates == rates
    other = tmp_path / "other.py"
    source = (ROOT / "studies" / "track.py").read_text()
    refused = "claim dnt-adamw: {} is {}, and {} in the protocol"
    for old, new, setting in (
        ('s5.py"', 's5.py --grad_clip=0"', ("grad_clip", 0.0, 1.0)),
        ('s5.py"', 's5.py --adam_eps=1e-9"', ("adam_eps", 1e-9, 1e-8)),
        ('s5.py"', 's5.py --rope_theta=500"', ("rope_theta", 500.0, 10000.0)),
        ('["nGPT"]', '["DNT"] = ("", "--beta1=0.8")\nTRIES["nGPT"]', ("beta1", 0.8, 0.9)),
    ):
        other.write_text(source.replace(old, new))
        with pytest.raises(ValueError, match=refused.format(*setting)):
            make_experiment(tmp_path, other, dry_run=True).check()


def test_a_dry_run_of_the_track_counts_all_of_its_runs(tmp_path):
    """Without FineWeb: trials of half the steps, then the seeds; 0.855e9 FLOPs a token."""
    made = make_experiment(tmp_path, "studies/track.py", dry_run=True, only="dnt-muon", jobs=1)
    made.check()
    runs, later, cost, *commands = made.forecast()
    tokens = (20 * 1650 + 16 * 3300) * 512 * 1024
    assert runs == f"36 runs are known now: 85,800 steps, {tokens:,} tokens"
    assert later == "16 of them at the rates that the others choose"
    hours = tokens * 0.855e9 / (0.4 * 989e12) / 3600
    assert cost == f"{hours:.0f} hours of an H100 at 40% of its peak"
    assert len(commands) == 20 and not list(tmp_path.iterdir())


@pytest.mark.house
@pytest.mark.parametrize("name", STUDIES)
def test_a_folder_is_of_one_command(name, tmp_path):
    made, commands = load(name, tmp_path), {}
    for arm in made.study.arms:
        for lr, seed in ((1e-3, 1), (1e-3, 2), (2e-3, 1)):
            run = made.run_of(arm, lr, seed)
            args = [arg for arg in run.args if not arg.startswith("--keep_every")]
            assert commands.setdefault(run.path, args) == args


# The papers' own runs: {arm: files after config/ and flags in large.py, in xl.py if they differ};
# {s}: small or xl
OWN = {
    "S4 at 1.0": ["dnt_{s} dnt/s4 optimizers/msgdw"],
    "S5 AdamW, 8 × S1's rate": [
        "dnt_small --learning_rate=4.8e-3",
        "dnt_xl --learning_rate=1.2e-3",
    ],
    "one rate, twice the steps": ["blockwise/llama_237m --max_iters=100000"],
    "RMSNorm": ["dyt/small dyt/rmsnorm decay/dyt --schedule=dyt", "dyt/7b dyt/rmsnorm"],
    "scaled init": ["lns/130m lns/scaled_init", "lns/1b lns/scaled_init"],
    "unified": ["scale_vectors/llama_120m scale_vectors/unified"],
}


@pytest.mark.parametrize("study", ["large", "xl"])
@pytest.mark.parametrize("name", OWN)
def test_large_studies_run_the_papers_own_configurations(name, study, tmp_path, monkeypatch):
    made = load(study, tmp_path)
    monkeypatch.setattr(made, "measure", lambda measure, run: pytest.fail("tunes a rate"))
    words = (
        OWN[name][-1 if study == "xl" else 0]
        .format(s="small" if study == "large" else "xl")
        .split()
    )
    own = [word if word.startswith("--") else f"config/{word}.py" for word in words]
    found, expected = (
        resolved(TrainingRun(tmp_path, tuple(args)))
        for args in (made.reported(name, [1])[0].args, own)
    )
    changes = dict(seed=1, keep_every=found[1].keep_every)
    if "8 ×" in name:
        changes["min_lr"] = found[1].min_lr  # of the rate, or the config's
    assert (found[0], asdict(found[1])) == (expected[0], asdict(expected[1]) | changes)


# What an arm is, beyond its base
MEANING = {
    "S5 at 1.0": dict(
        pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True, optimizer="msgdw"
    ),
    "S4 without mid": dict(pre_norm="both", mid_norm="none", input_norm=True, warmup_iters=0),
    "Emb": dict(
        blockwise_start="warmup_end", lr_ratio_emb=10, lr_ratio_ffn=1, lr_ratio_qk=1, lr_ratio_vo=1
    ),
    "LNS": dict(
        lns="norm", n_layer=12, beta2=0.999, grad_clip=0, weight_decay=0, residual_init="plain"
    ),
    "IWD": dict(qk_norm=True, decay_gains="input"),
    "DyT, no embedding scalar": dict(norm="dyt", embed_scale=False),
    "S1 at S1's rate": dict(
        optimizer="msgdw", min_lr=1e-8, warmup_iters=160, max_iters=400, keep_every=40
    ),
}


@pytest.mark.parametrize("name", MEANING)
def test_arms_are_what_they_are_called(name, tmp_path):
    made = next(
        m for m in (load(s, tmp_path) for s in ("papers", "digits")) if name in m.study.arms
    )
    model, train = resolved(made.run_of(name, 1e-3, 1))
    found = asdict(model) | asdict(train)
    assert {key: found[key] for key in MEANING[name]} == MEANING[name]
    floor = made.study.arms[name].floor
    assert (train.learning_rate, train.seed) == (1e-3, 1) and (
        not floor or train.min_lr == pytest.approx(1e-3 * floor)
    )


def test_gpts_of_any_size_have_xaviers_embeddings_of_002(tmp_path):
    for name, init_std in (("S1 AdamW", 0.02), ("RMSNorm", 0.035)):
        model, _ = resolved(load("small", tmp_path).run_of(name, 1e-3, 1))
        assert model.init_std == init_std, name


def test_a_ratio_of_one_makes_no_other_run(tmp_path):
    """A record outlives the day on which another type of block gets a learning rate of its own."""
    run = load("papers", tmp_path).run_of("all blocks", 1e-3, 1)
    flags = [(), ("--dropout=0.0",), ("--lr_ratio_router=1",), ("--lr_ratio_router=2",)]
    plain, *same, other = (
        experiment.digest_settings(run._replace(args=run.args + more)) for more in flags
    )
    assert same == [plain] * 2 and plain != other


def test_seeds_that_choose_are_not_reported():
    assert TUNING_SEEDS == (0, 5)
    assert first_seeds(6) == [1, 2, 3, 4, 6, 7] and len(set(first_seeds(60)) - {0, 5}) == 60


PAGES = [
    name
    for name in (*STUDIES, "track_mini")
    if (ROOT / f"docs/results/{name}/record.json").exists()
]


@pytest.mark.house
@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_those_of_the_record(name, tmp_path, monkeypatch):
    results = tmp_path / "docs" / "results"
    (results / name).mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "results" / name / "record.json", results / name)
    made = load(name, tmp_path / "docs")
    monkeypatch.setattr("studies.claims.page.ROOT", tmp_path)  # for the link to docs/claims.md
    write_page(made, made.judge())
    page = (ROOT / f"docs/results/{name}.md").read_text()
    assert (results / f"{name}.md").read_text() == page


@pytest.mark.house
def test_readme_says_the_verdicts_of_the_record():
    results = (ROOT / "README.md").read_text().split("## Results")[1].split("\n## ")[0]
    row = r"^\| (.+) \| \[(.+)\]\(docs/results/(.+)\.md#(.+)\) \| (.+) \| (.+) \| (.+) \|$"
    said = re.findall(row, results, re.MULTILINE)
    found = []
    for page in PAGES:
        text = (ROOT / f"docs/results/{page}.md").read_text()
        row = r"^\| ([^|]+) \| \[(.+?)\]\(#(.+?)\) \| (.+?) \| (.+?) \| \*\*(.+?)\*\*.*\|$"
        for paper, words, *rest in re.findall(row, text, re.MULTILINE):
            found.append((paper, words, page, *rest))
    assert len(said) >= 3 and set(said) <= set(found)
    assert "p =" not in results  # p values are on the pages


@pytest.mark.house
def test_sizes_in_words_are_those_of_a_table():
    """README and the findings repeat numbers by hand: each stands in a table of a page."""
    pages = {name: (ROOT / f"docs/results/{name}.md").read_text() for name in PAGES}
    words = [(ROOT / "README.md").read_text().split("## Results")[1].split("\n## ")[0]]
    tables = []
    for page in pages.values():
        for line in page.splitlines():
            found = re.search(r"^\| [^|]+ \| \[.+?\]\(#.+?\) \|", line)
            if found:  # the row of a verdict: the finding, and numbers
                words.append(found[0])
                line = line.removeprefix(found[0])
            if line.startswith("|"):
                tables.append(line)
    sizes = {size for text in words for size in re.findall(r"[+−]?\d\.\d\d\d", text)}
    assert len(sizes) > 20
    assert {size for size in sizes if not any(size in line for line in tables)} == set()
