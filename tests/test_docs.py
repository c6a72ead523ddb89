"""README, docs/optimizers.md, configs and Makefile say what the code does: commands start, tables hold, diffs apply."""

import inspect
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import claims_report
import optim
import summary
from analyze import AnalyzeConfig
from claims import CLAIMS
from configurator import read_arguments, read_file, read_knobs
from model import GPT, GPTConfig
from optim import describe_groups, fill_defaults, make_optimizer
from plan import PlanConfig
from reproduce import ReproduceConfig, chosen
from sample import SampleConfig
from train import TrainConfig, split_batch

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted(p.relative_to(ROOT) for p in (ROOT / "config").rglob("*.py"))
SCHEMAS = {"train.py": (GPTConfig, TrainConfig)}
TOOLS = {"sample.py": SampleConfig, "analyze.py": AnalyzeConfig, "reproduce.py": ReproduceConfig}
OPTIMIZERS_MD = (ROOT / "docs" / "optimizers.md").read_text()


def load(*argv):
    """(GPTConfig, TrainConfig) of a command line."""
    given = read_arguments(list(argv), read_knobs(*SCHEMAS["train.py"]))
    values = {name: value for name, (value, _) in given.items()}
    return [s(**{f: values[f] for f in s.__dataclass_fields__ if f in values}) for s in SCHEMAS["train.py"]]


def commands():
    """(tool, arguments, processes) of every command of ours in README, docs/optimizers.md, headers, Makefile."""
    pattern = r"(?:^|[\s&])(\S*python|torchrun [^\n]*?) ((?:train|sample|optim|model|analyze|reproduce)\.py)([^\n`'|]*)"
    pages = [
        "README.md",
        "Makefile",
        "docs/optimizers.md",
        "docs/analysis.md",
        "docs/scale.md",
        "docs/reliability.md",
        "docs/results/plan.md",
        "docs/results/claims.md",
    ]
    pages += ["train.py", "optim.py", "summary.py", "plan.py", "analyze.py", "reproduce.py", *CONFIGS]
    for path in [ROOT / page for page in pages]:
        text = path.read_text().replace("\\\n", " ")
        for launcher, tool, rest in re.findall(pattern, text):
            if "CONFIG" in rest or "RUN" in rest:  # "python model.py CONFIG": any file
                continue
            processes = math.prod(map(int, re.findall(r"(?:nproc_per_node|nnodes)=(\d+)", launcher)))
            argv = shlex.split(rest, comments=True)
            yield pytest.param(tool, argv, processes, id=f"{path.name}:{tool}{rest.strip()[:60]}")


@pytest.mark.parametrize("tool, argv, processes", commands())
def test_every_command_would_start(tool, argv, processes, monkeypatch):
    """All of it but the data and the machine: files, flags, their values, the batch over the processes."""
    monkeypatch.chdir(ROOT)
    # --help, --plot, and the README's own additions, which are tried below
    argv = [a for a in argv if not a.startswith(("--help", "--plot", "--skip_scale", "--optimizer=lion"))]
    if tool in TOOLS:
        given = read_arguments(argv, read_knobs(TOOLS[tool]), positional="run")
        assert given.pop("run") or tool != "analyze.py"
        config = TOOLS[tool](**{name: value for name, (value, _) in given.items()})
        if tool != "analyze.py":  # which checks itself as it is made
            config.check()
        assert tool != "reproduce.py" or chosen(config.only)
        return
    if "--plan" in argv:
        given = read_arguments([a for a in argv if a != "--plan"], read_knobs(GPTConfig, TrainConfig, PlanConfig))
        assert PlanConfig(**{f.name: given[f.name][0] for f in fields(PlanConfig) if f.name in given}).check() is None
        argv = [a for a in argv if a.partition("=")[0] not in ("--plan", *(f"--{f.name}" for f in fields(PlanConfig)))]
    flags, config = load(*argv)
    flags.vocab_size = 50257
    flags.check()
    config.check()
    fill_defaults(config)
    split_batch(config.batch_size, config.micro_batch_size, processes)


def test_the_commands_are_found():
    found = [(p.values[0], len(p.values[1])) for p in commands()]
    assert len([f for f in found if f[0] == "train.py"]) >= 2 * len(CONFIGS) and ("sample.py", 2) in found
    assert {p.values[2] for p in commands()} >= {1, 4, 8}  # processes
    assert {tool for tool, _ in found} == {f"{t}.py" for t in "train sample optim model analyze reproduce".split()}


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_config_loads_builds_and_names_its_command(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    model, config = load(str(path))
    config.check()
    fill_defaults(config)
    model.vocab_size = 50257
    with torch.device("meta"):
        GPT(model)
    text = (ROOT / path).read_text()
    assert re.search(rf"train\.py .*{path}", text.replace("\\\n", " ")), "its launch line"
    assert text.count("\n") <= 40
    if path.parent.name == "config":
        assert config.out_dir == f"out/{path.stem}"
        for gpus in (1, 2, 4, 8) if "small" in path.stem or "large" in path.stem or "xl" in path.stem else (1,):
            split_batch(config.batch_size, config.micro_batch_size, gpus)


# The DNT paper's sizes: width, heads, depth, and its parameter count 12·d²·L + 50304·d in millions.
@pytest.mark.parametrize("family", ["dnt", "gpt2"])
@pytest.mark.parametrize(
    "size, d, heads, depth, millions",
    [("small", 768, 12, 12, 123.6), ("large", 1280, 20, 36, 772.2), ("xl", 1536, 24, 48, 1436.2)],
)
def test_sizes_are_the_papers(family, size, d, heads, depth, millions, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags, config = load(f"config/{family}_{size}.py")
    flags.vocab_size = 50257
    assert (flags.n_embd, flags.n_head, flags.n_layer, flags.block_size) == (d, heads, depth, 1024)
    assert (config.batch_size, config.max_iters, config.min_lr) == (480 if size == "small" else 512, 200_000, 6e-5)
    with torch.device("meta"):
        model = GPT(flags)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - 1024 * d
    assert round(matrices / 1e6, 1) == millions == round((12 * d * d * depth + 50304 * d) / 1e6, 1)


# DNT sec. 4.4: InputNorm, PreNorm attention, PreNorm FFN, QKNorm, MidNorm
@pytest.mark.parametrize(
    "setting, has",
    [("s1", "01100"), ("s2", "01110"), ("s3", "11110"), ("s4", "11111"), ("s5", "11011")],
)
def test_ablation_settings_have_the_papers_norms(setting, has, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags, _ = load("config/dnt_small.py", f"config/dnt/{setting}.py")
    flags.vocab_size, flags.n_layer = 50257, 2
    with torch.device("meta"):
        model = GPT(flags)
    slots = [model.input_norm]
    slots += [model.blocks[1].attn.pre, model.blocks[1].mlp.pre, model.blocks[1].attn.f.q_norm, model.blocks[1].mlp.mid]
    assert "".join(str(int(slot.norm == "rmsnorm")) for slot in slots) == has
    assert model.blocks[1].attn.mid.norm == model.blocks[1].mlp.mid.norm


def test_dnt_small_takes_a_step_at_full_size(monkeypatch):
    monkeypatch.chdir(ROOT)
    flags, config = load("config/dnt_small.py")
    fill_defaults(config)
    flags.vocab_size = 50257
    model = GPT(flags)
    optimizer = make_optimizer(model, config)
    idx = torch.randint(50257, (1, 65), generator=torch.Generator().manual_seed(0))
    before = model.wte.weight[:100].clone()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    loss.backward()
    assert 10 < loss.item() < 12  # ln 50257 = 10.8
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters()) and not torch.equal(before, model.wte.weight[:100])


def apply_readme_diffs(root):
    """Apply the README's diff blocks to the tree at `root`; each hunk begins with `--- FILE`."""
    for block in re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        for hunk in block.split("--- ")[1:]:
            name, *lines = hunk.rstrip("\n").split("\n")
            old = "\n".join(line[1:] for line in lines if line[0] in " -")
            new = "\n".join(line[1:] for line in lines if line[0] in " +")
            source = (root / name).read_text()
            assert source.count(old) == 1, f"README: the hunk for {name} does not apply:\n{old}"
            (root / name).write_text(source.replace(old, new))


def test_the_readmes_fork_examples_work(tmp_path):
    for name in "model optim train tracking loader rundir runtime configurator".split():
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    for name in ("tests", "docs", "config"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    apply_readme_diffs(tmp_path)
    sys.path.insert(0, str(ROOT / "tests"))
    from test_golden import write_dataset

    write_dataset(tmp_path / "data")
    tiny = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=8 --max_iters=40 --eval_interval=40"
    tiny += " --warmup_iters=2 --log_interval=20 --device=cpu --dtype=float32 --compile=False"
    flags = "--skip_scale=0.9 --optimizer=lion --learning_rate=3e-3 --min_lr=3e-4 --weight_decay=0.1"
    argv = [sys.executable, "train.py", "--dataset=data", "--out_dir=out", *tiny.split(), *flags.split()]
    argv[2] = f"--dataset={tmp_path / 'data'}"
    run = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"validation loss ([\d.]+)", run.stdout)]
    assert losses[-1] < losses[0] - 1 and "lion" in run.stdout
    row = [sys.executable, "-m", "pytest", "tests/test_layouts.py", "tests/test_layout_docs.py", "-k"]
    run = subprocess.run([*row, "forgetful or on_the_page"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and int(re.search(r"(\d+) passed", run.stdout)[1]) >= 11, run.stdout


# ------------------------------------------------------------------------------------------------ docs/optimizers.md

FLAGS = re.compile(r"`(\w+=[^\s`]+(?: \w+=[^\s`]+)*)`")


def rows_with(title):
    """Rows, {column's title: cell}, of the page's tables that have such a column."""
    for block in re.findall(r"(?:^\|.*\n)+", OPTIMIZERS_MD, re.MULTILINE):
        titles, _, *rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in block.splitlines()]
        assert {len(row) for row in rows} == {len(titles)}, f"a row of another length under {titles}"
        yield from (dict(zip(titles, row, strict=True)) for row in rows if title in titles)


REFUSED = [text for row in rows_with("refused flags") for text in FLAGS.findall(row["refused flags"])]
ACCEPTED = sorted(set(FLAGS.findall(OPTIMIZERS_MD)) - set(REFUSED))
RECIPES = list(rows_with("`train.py` with"))
SHOWN = re.findall(r"```\n\$ python ((?:train|optim|model)\.py) ([^\n]*)\n(.*?)```", OPTIMIZERS_MD, re.DOTALL)


def start(text):
    """What a run does with flags `a=b c=d` before its first step."""
    model, config = load(*(f"--{flag}" for flag in text.split()))
    model.vocab_size = 64
    config.check()
    fill_defaults(config)
    with torch.device("meta"):
        return make_optimizer(GPT(model), config)


def test_the_optimizer_pages_tables_are_found():
    assert len(REFUSED) > 15 and len(ACCEPTED) > 10 and len(RECIPES) > 20
    assert [tool for tool, _, _ in SHOWN] == ["train.py", "optim.py", "model.py"]


@pytest.mark.parametrize("text", ACCEPTED)
def test_flags_on_the_optimizer_page_are_accepted(text):
    start(text)


def test_refused_flags_are_refused_and_every_refusal_is_in_the_table():
    reached = set()
    for text in REFUSED:
        with pytest.raises(ValueError) as caught:
            start(text)
        assert len(str(caught.value).splitlines()) == 1
        reached |= {(entry.frame.code.name, entry.lineno + 1) for entry in caught.traceback}
    for check in (fill_defaults, optim._check_numbers, optim._check_schedule, optim._check_blockwise):
        lines, first = inspect.getsourcelines(check)
        raises = {number for number, line in enumerate(lines, first) if "raise ValueError" in line}
        found = {number for name, number in reached if name == check.__name__}
        assert raises and raises <= found, f"{check.__name__}: a refusal without a row, lines {raises - found}"


def test_every_training_flag_of_optimizers_and_schedules_is_on_the_page():
    names = [f.name for f in fields(TrainConfig)]
    names = names[names.index("optimizer") : names.index("eval_interval")]
    assert names[-1] == "blockwise_decay"
    assert [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", OPTIMIZERS_MD)] == []
    for name, knob in read_knobs(TrainConfig).items():
        if name in ("optimizer", "schedule", "muon_adjust_lr", "wsd_decay", "decay_gains", "blockwise_start"):
            choices = re.findall(r"'(\w+)'", str(knob.hint))
            missing = [c for c in choices if not re.search(rf"`(\w+=)?{c}`|={c}\b", OPTIMIZERS_MD)]
            assert missing in ([], ["none"], ["start"]), name  # the words for not doing it


def test_links_and_files_of_the_optimizer_page_exist():
    page = ROOT / "docs"
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", OPTIMIZERS_MD)
    assert "../config/decay/iwd.py" in links
    assert [link for link in links if not (page / link).exists()] == []
    headings = [re.sub(r"[^\w -]", "", h.lower()) for h in re.findall(r"^#+ (.*)$", OPTIMIZERS_MD, re.MULTILINE)]
    assert {h.replace(" ", "-") for h in headings} >= set(re.findall(r"\]\(#([^)]*)\)", OPTIMIZERS_MD))
    files = set(re.findall(r"config/[\w/]+\.py", OPTIMIZERS_MD))
    assert files <= {str(c) for c in CONFIGS}
    overlays = {str(c) for c in CONFIGS if c.parent.name in ("optimizers", "decay", "blockwise")}
    assert overlays <= files


def number(cell):
    """Of a cell: 200K, or 47,684 [I], or 2e-3."""
    text = cell.removesuffix("[I]").strip().replace(",", "")
    return float(text[:-1]) * 1000 if text.endswith("K") else float(text)


@pytest.mark.parametrize("row", RECIPES, ids=lambda row: f"{row['optimizer']}: {row['run'][:30]}")
def test_recipes_are_the_config_files(row, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = re.findall(r"`([^`]+)`", row["`train.py` with"])
    names = {"AdamW": "adamw", "Adam": "adamw", "mSGDW": "msgdw", "Muon": "muon", "Adam-mini": "adam_mini"}
    for arguments in files:
        _, c = load(*arguments.split())
        fill_defaults(c)
        assert c.optimizer == names[row["optimizer"]], arguments
        values = (c.learning_rate, c.weight_decay, c.warmup_iters, c.min_lr, c.max_iters, c.lr_decay_iters)
        steps = number(row["steps"])
        wanted = (*(number(row[key]) for key in ("peak LR", "decay", "warm-up", "min LR")), steps, steps)
        assert values == pytest.approx(wanted), arguments
        betas = [float(beta) for beta in row["betas or momentum"].removesuffix("[I]").split(",")]
        assert betas == ([c.beta1, c.beta2] if c.momentum is None else [c.momentum]), arguments
        rest = re.search(r"the rest at (\S+)", row["run"])
        assert c.adamw_learning_rate == (float(rest[1]) if rest else c.learning_rate if c.momentum == 0.95 else None)
        assert c.grad_clip == (0.0 if "config/lns" in arguments else 1.0)


def test_blockwise_ratios_are_the_config_files():
    rows = list(rows_with("overlay"))
    rows = [row for row in rows if "qk" in row]
    assert len(rows) == 8
    for row in rows:
        name, path = re.fullmatch(r"\[(\w+)\]\(\.\./(config/blockwise/\w+\.py)\)", row["overlay"]).groups()
        keys = read_file(str(ROOT / path))
        assert path.endswith(f"/{name}.py")
        for block in ("emb", "qk", "ffn", "vo", "norm", "head"):
            assert keys[f"lr_ratio_{block}"][0] == float(row[block]), (name, block)


@pytest.mark.parametrize("tool, arguments, shown", SHOWN, ids=[f"{tool} {rest}" for tool, rest, _ in SHOWN])
def test_output_on_the_optimizer_page_is_what_is_printed(tool, arguments, shown, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [tool, *arguments.split()])
    if tool == "train.py":  # prints the groups, then wants data
        model, optimizer, _, _ = summary.resolve("")
        printed = describe_groups(optimizer, model)
    else:
        assert {"optim.py": summary.optimizer_main, "model.py": summary.main}[tool]() == 0
        printed = capsys.readouterr().out
    assert shown.rstrip("\n") in printed


def test_the_readmes_results_are_those_on_record():
    table = claims_report.summary(claims_report.load(ROOT / "docs" / "results"), "tiny")
    assert "\n".join(table) in (ROOT / "README.md").read_text()
    record = json.loads((ROOT / "docs" / "results" / "claims" / "tiny.json").read_text())
    assert set(record) == {claim.id for claim in CLAIMS if "tiny" in claim.scales}
    rows = [row for claim in record.values() for row in claim["rows"] if row["measure"] != "state GB"]
    assert all(len(row["values"]) >= 3 for row in rows)  # seeds


def test_the_page_of_claims_is_that_of_its_record(tmp_path):
    shutil.copytree(ROOT / "docs" / "results" / "claims", tmp_path / "claims")
    assert claims_report.write(tmp_path).read_text() == (ROOT / "docs" / "results" / "claims.md").read_text()
