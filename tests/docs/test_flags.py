"""docs/{layouts,optimizers,moe,images}.md say what the code does: flags on them build, are noted or
refused, every refusal has a row, and their tables are those of the config files."""

import importlib.util
import inspect
import re

import pytest

from layers import rules
from layers.roles import ROLES
from nanodnt.optim import OPTIMIZERS, defaults, fill_defaults, groups, make_optimizer
from nanodnt.settings import TrainConfig
from support.models import places_of, refusals
from support.pages import FLAGS, ROOT, keys_of, load, outline, rows_with

pytestmark = pytest.mark.house
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("layouts", "optimizers", "moe", "images")
}
LAYOUTS, OPTIMIZER_PAGE = PAGES["layouts"], PAGES["optimizers"]
# functions that refuse: of layers.rules, and others
RULES = {
    "layouts": [
        rules.check_norm_places,
        rules.check_norm_groups,
        rules.check_dyt,
        rules.check_double_norms,
        rules.check_norms_in_attention,
        rules.check_lns,
        rules.check_stream_scales,
        rules.check_branch_scale,
        rules.check_gains,
    ],
    "moe": [rules.check_experts],
    "images": [rules.check_kind, rules.check_image_size],
}
CHECKS = {"moe": [groups.check_penalties], "optimizers": [groups.decayed_roles]}
CHECKS["optimizers"] += [
    function
    for _, function in inspect.getmembers(defaults, inspect.isfunction)
    if function.__module__ == defaults.__name__
]


def in_column(page, title) -> list:
    """All flags (`a=b c=d` in backticks) of the tables' columns of that title."""
    return [text for row in rows_with(PAGES[page], title) for text in FLAGS.findall(row[title])]


REFUSED = {page: in_column(page, "refused flags") for page in PAGES}
SCHEMES, NOTED = in_column("layouts", "flags"), in_column("layouts", "noted flags")
METHODS = [row["flags"].strip("`") for row in rows_with(PAGES["moe"], "as in")]
ACCEPTED = sorted(
    {text for page in ("layouts", "optimizers") for text in FLAGS.findall(PAGES[page])}
)
ACCEPTED = [
    text for text in ACCEPTED if text not in REFUSED["layouts"] + REFUSED["optimizers"]
] + METHODS
DIAGRAMS = ("depth", "normfree", "placement", "scale_vectors")
RECIPES = rows_with(OPTIMIZER_PAGE, "`train.py` with")


def read(text):
    """[GPTConfig, TrainConfig] of flags `a=b c=d`, read as train.py reads them."""
    model, config = load(*(f"--{flag}" for flag in text.split()))
    model.vocab_size = model.vocab_size or (0 if model.patch_size else 64)
    return model, config


def start(text):
    """What a run does with these flags before its first step."""
    model, config = read(text)
    model.check()
    config.check()
    fill_defaults(config)
    make_optimizer(outline(model), config)
    return model


def test_the_flags_are_found():
    assert (
        len(SCHEMES) > 45
        and len(ACCEPTED) > 70
        and len(NOTED) > 7
        and len(METHODS) > 5
        and len(RECIPES) > 20
    )
    assert {page: len(texts) > 8 for page, texts in REFUSED.items()} == dict.fromkeys(PAGES, True)


@pytest.mark.parametrize("text", ACCEPTED)
def test_flags_build(text):
    start(text)


def test_noted_flags_print_a_note_and_the_other_schemes_none():
    assert [text for text in NOTED if not rules.notes(read(text)[0])] == []
    assert [
        text for text in SCHEMES + METHODS if rules.notes(read(text)[0]) and text not in NOTED
    ] == []


@pytest.mark.parametrize("page", PAGES)
def test_refused_flags_are_refused_and_every_refusal_is_in_the_table(page):
    wanted = refusals(*RULES.get(page, ()), *CHECKS.get(page, ()))
    reached = set()
    for text in REFUSED[page]:
        with pytest.raises(ValueError) as caught:
            start(text)
        assert len(str(caught.value).splitlines()) == 1
        reached |= places_of(caught)
    assert wanted and wanted - reached == set(), "a refusal without a row"


def test_every_optimizer_and_every_role_has_a_row():
    rows = {row["`optimizer`"]: row for row in rows_with(OPTIMIZER_PAGE, "defaults: LR, decay")}
    assert set(rows) == {f"`{name}`" for name in OPTIMIZERS}
    for name, entry in OPTIMIZERS.items():
        if not entry.defaults_for(TrainConfig(optimizer=name)):
            cell = rows[f"`{name}`"]["defaults: LR, decay"].partition(";")[0].rpartition(":")[2]
            wanted = [entry.defaults["learning_rate"], entry.defaults["weight_decay"]]
            assert [float(x) for x in cell.split(",")] == wanted
    rows = [row for row in rows_with(OPTIMIZER_PAGE, "role") if "blockwise ratio" in row]
    assert sorted(role for row in rows for role in re.findall(r"`(\w+)`", row["role"])) == sorted(
        ROLES
    )


# ------------------------------------------------------------------------------------- config files


def test_dnt_settings_are_the_config_files():
    rows = {row["scheme"]: row["flags"] for row in rows_with(LAYOUTS, "scheme") if "flags" in row}
    for scheme, name in {
        "Pre-LN = S1": "s1",
        "S2": "s2",
        "S3": "s3",
        "S4": "s4",
        "S5 = **DNT**": "s5",
    }.items():
        flags = FLAGS.findall(rows[scheme])
        given = load(str(ROOT / f"config/dnt/{name}.py"))[0]
        given.vocab_size = 64
        assert read(flags[0] if flags else "")[0] == given, scheme


def number(cell):
    """Of a cell: 200K, or 47,684 [I], or 2e-3."""
    text = cell.removesuffix("[I]").strip().replace(",", "")
    return float(text[:-1]) * 1000 if text.endswith("K") else float(text)


@pytest.mark.parametrize("row", RECIPES, ids=lambda row: f"{row['optimizer']}: {row['run'][:30]}")
def test_recipes_are_the_config_files(row, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = re.findall(r"`([^`]+)`", row["`train.py` with"])
    names = {
        "AdamW": "adamw",
        "Adam": "adamw",
        "mSGDW": "msgdw",
        "Muon": "muon",
        "Adam-mini": "adam_mini",
    }
    assert files
    for arguments in files:
        c = load(*arguments.split())[1]
        fill_defaults(c)
        assert c.optimizer == names[row["optimizer"]], arguments
        values = (
            c.learning_rate,
            c.weight_decay,
            c.warmup_iters,
            c.min_lr,
            c.max_iters,
            c.lr_decay_iters,
        )
        steps = number(row["steps"])
        wanted = (
            *(number(row[key]) for key in ("peak LR", "decay", "warm-up", "min LR")),
            steps,
            steps,
        )
        assert values == pytest.approx(wanted), arguments
        betas = [float(beta) for beta in row["betas or momentum"].removesuffix("[I]").split(",")]
        assert betas == ([c.beta1, c.beta2] if c.momentum is None else [c.momentum]), arguments
        rest = re.search(r"the rest at (\S+)", row["run"])
        assert c.adamw_learning_rate == (
            float(rest[1]) if rest else c.learning_rate if c.momentum == 0.95 else None
        )


def test_blockwise_ratios_are_the_config_files():
    rows = [row for row in rows_with(OPTIMIZER_PAGE, "overlay") if "qk" in row]
    assert len(rows) == 8
    for row in rows:
        path = re.fullmatch(r"\[\w+\]\(\.\./(config/blockwise/\w+\.py)\)", row["overlay"])[1]
        keys = keys_of(ROOT / path)
        for block in ("emb", "qk", "ffn", "vo", "norm", "head"):
            assert keys[f"lr_ratio_{block}"] == float(row[block]), (path, block)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.deep] * (n != "normfree")) for n in DIAGRAMS]
)
def test_a_diagram_is_drawn(name, tmp_path):
    spec = importlib.util.spec_from_file_location(
        "draw_layouts", ROOT / "docs/scripts/draw_layouts.py"
    )
    spec.loader.exec_module(script := importlib.util.module_from_spec(spec))
    script.draw(name, tmp_path / "drawn.png")
    assert (
        f"(layouts/{name}.png)" in LAYOUTS
        and 10_000 < (tmp_path / "drawn.png").stat().st_size < 150_000
    )
