"""The README, the config files and the Makefile say what the code does: their commands parse, their diffs apply."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configurator import read_arguments, read_knobs
from model import GPT, GPTConfig
from optim import fill_defaults, make_optimizer
from sample import SampleConfig
from train import TrainConfig, split_batch

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted(p.relative_to(ROOT) for p in (ROOT / "config").rglob("*.py"))
SCHEMAS = {"train.py": (GPTConfig, TrainConfig), "sample.py": (SampleConfig,)}


def load(*argv):
    """(GPTConfig, TrainConfig) of a command line."""
    given = read_arguments(list(argv), read_knobs(*SCHEMAS["train.py"]))
    values = {name: value for name, (value, _) in given.items()}
    return [s(**{f: values[f] for f in s.__dataclass_fields__ if f in values}) for s in SCHEMAS["train.py"]]


def commands():
    """(tool, arguments, processes) of every train.py and sample.py command in the README, the headers, the Makefile."""
    pattern = r"(?:^|[\s&])(\S*python|torchrun [^\n]*?) ((?:train|sample)\.py)([^\n`'|]*)"
    for path in [ROOT / "README.md", ROOT / "Makefile", *(ROOT / c for c in CONFIGS), ROOT / "train.py"]:
        text = path.read_text().replace("\\\n", " ")
        for launcher, tool, rest in re.findall(pattern, text):
            processes = int((re.findall(r"nproc_per_node=(\d+)", launcher) or [1])[0])
            argv = shlex.split(rest, comments=True)
            yield pytest.param(tool, argv, processes, id=f"{path.name}:{tool}{rest.strip()[:60]}")


@pytest.mark.parametrize("tool, argv, processes", commands())
def test_every_command_would_start(tool, argv, processes, monkeypatch):
    """All of it but the data and the machine: files, flags, their values, the batch over the processes."""
    monkeypatch.chdir(ROOT)
    # --help, and the README's own additions, which are tried below
    argv = [a for a in argv if not a.startswith(("--help", "--skip_scale", "--optimizer=lion"))]
    if tool == "sample.py":
        assert read_arguments(argv, read_knobs(SampleConfig)).keys()
        return
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
    for name in ("model.py", "optim.py", "train.py", "loader.py", "rundir.py", "runtime.py", "configurator.py"):
        shutil.copy(ROOT / name, tmp_path / name)
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
