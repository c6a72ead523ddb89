"""bench.py: it times train.py's step, on text and images, its figures agree, and bad input gets one
line.

No test asserts a time: where a figure is checked, the clock is a counter.
"""

import itertools
import json
import re
import statistics
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
from model import GPT, GPTConfig
from nanodnt import optim
from nanodnt.bench import __main__ as scripts
from nanodnt.bench import measure, profiling, settings, variants
from nanodnt.bench.settings import Setting
from nanodnt.bench.variants import Variant
from nanodnt.data.windows import PreparedText
from nanodnt.settings import TrainConfig
from support.devices import CPU, bench_setting
from support.images import encode, noise, write_dataset
from support.pages import keys_of
from support.runs import ROOT, call

SIZE = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)
TINY = SIZE | dict(batch_size=4, data="random", device="cpu", dtype="float32", compile=False)
TINY |= dict(repeats=2, steps=3, warmup=1)
VIT = dict(
    n_layer=2, n_head=2, n_embd=32, patch_size=4, image_size=8, channels=1, n_class=4, drop_path=0.2
)
VIT |= dict(
    vocab_size=None, block_size=None, label_smoothing=0.1, repeats=1, steps=1, dataset="nowhere"
)
S1, S5 = (str(ROOT / "config" / "dnt" / f"{name}.py") for name in ("s1", "s5"))


git_asked_once = cache(bench.run_record)


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(bench, "run_record", git_asked_once)


def run(*words, **changes) -> int:
    """bench.py in this process; the exit code. A change to None leaves the flag out."""
    flags = [f"--{name}={value}" for name, value in (TINY | changes).items() if value is not None]
    return call(bench.main, *words, *flags)


def results(tmp_path, *words, **changes) -> dict:
    """What --json writes."""
    path = tmp_path / "new" / "bench.json"
    assert run(*words, json=path, **changes) == 0
    return json.loads(path.read_text())


def make_setting(**changes) -> Setting:
    return bench_setting(
        **{name: value for name, value in (TINY | changes).items() if value is not None}
    )


@pytest.fixture
def images(tmp_path):
    """A dataset of images of 8 × 8 in 4 classes."""
    train, val = ([encode(pixels) for pixels in noise(n, 8, 8, seed=n)] for n in (40, 12))
    return write_dataset(tmp_path / "noise", train, val)


# ------------------------------------------------------------------------------------ what is timed


@pytest.mark.parametrize(
    "changes, rows, micro",
    [
        ({}, 4, 4),
        ({"micro_batch_size": 1}, 1, 1),
        ({"micro_batch_size": 1, "accumulation": 0}, 4, 1),
    ],
)
def test_it_times_the_training_step_of_train_py(monkeypatch, tmp_path, changes, rows, micro):
    calls, real = [], variants.training_step

    def spy(trainer, batch):
        before = [p.clone() for p in trainer.model.parameters()]
        real(trainer, batch)
        moved = any(
            not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)
        )
        calls.append(
            (tuple(batch[0].shape), trainer.micro, trainer.optimizer.param_groups[0]["lr"], moved)
        )

    monkeypatch.setattr(variants, "training_step", spy)
    (row,) = results(tmp_path, **changes)["variants"]
    # the first, warm-up, rounds, each after an untimed one, parts
    assert len(calls) == 1 + (1 + 1) + 2 * (1 + 3) + 3
    assert {call[:2] for call in calls} == {((rows, 16), micro)}
    # warm-up
    assert [call[2] for call in calls] == pytest.approx(
        [6e-4 * (i + 1) / 2000 for i in range(len(calls))]
    )
    assert all(call[3] for call in calls)
    assert row["step_tokens"] == rows * 16


def test_random_batches(monkeypatch):
    monkeypatch.setattr(settings, "load_meta", lambda *a, **k: pytest.fail("asked for a dataset"))
    assert make_setting(vocab_size=0).model_config.vocab_size == 50257
    setting = make_setting()
    x, y = setting.fetch_batch(7)
    assert (
        x.shape == y.shape == (4, 16) and x.dtype == torch.int64 and x.min() >= 0 and x.max() < 50
    )
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(setting.fetch_batch(7)[0], x)
    assert not torch.equal(setting.fetch_batch(8)[0], x)


def test_batches_of_a_dataset(dataset, tmp_path):
    setting = make_setting(data="dataset", dataset=str(dataset), vocab_size=0)
    for got, want in zip(
        setting.fetch_batch(3), PreparedText(str(dataset), 16).batch(3, 4), strict=True
    ):
        assert np.array_equal(got.numpy(), want)
    flags = dict(data="dataset", dataset=dataset, vocab_size=None, dtype="bfloat16")
    found = results(tmp_path, against="nanogpt", **flags)
    names = [(v["name"], v["dtype"], v["reference"]) for v in found["variants"]]
    assert names == [("nanogpt", "float32", "nanogpt"), ("ours", "bfloat16", "nanogpt")]
    assert all(
        v["step_tokens"] == 64 and v["parts_s"].keys() == set(measure.PARTS)
        for v in found["variants"]
    )


def test_images(images, tmp_path, capsys):
    """Random ones have the size of the flags, or ImageNet's; a dataset decides its own."""
    sizes = dict(image_size=0, channels=0, n_class=0)
    c = make_setting(**VIT | sizes | dict(patch_size=16)).model_config
    assert (c.image_size, c.channels, c.n_class, c.block_size) == (224, 3, 1000, 197)
    setting = make_setting(**VIT | sizes | dict(data="dataset", dataset=images, crop_padding=1))
    assert (
        setting.model_config.image_size,
        setting.model_config.n_class,
        setting.model_config.block_size,
    ) == (8, 4, 5)
    for found, wanted in zip(setting.fetch_batch(3), setting.dataset.batch(3, 4), strict=True):
        assert torch.equal(found, torch.from_numpy(wanted))
    random = make_setting(**VIT).fetch_batch(7)
    assert random[0].shape == (4, 1, 8, 8) and set(random[1].tolist()) <= set(range(4))
    (row,) = results(tmp_path, **VIT, mixup=0.2, accumulation=0, micro_batch_size=2)["variants"]
    assert row["step_tokens"] == 20 and row["images_per_s"] == pytest.approx(
        row["tokens_per_s"] / 5
    )
    text = capsys.readouterr().out
    assert (
        "tokens/s  images/s" in text
        and "2 images of 5 tokens × 2 accumulation (the whole batch_size)" in text
    )


# ------------------------------------------------------------------------------------------ figures


def test_every_figure_is_there_and_they_agree(tmp_path, capsys):
    found = results(tmp_path, vary=f"{S1},{S5}", peak_flops=1e12)
    assert [v["name"] for v in found["variants"]] == ["s1", "s5"]
    assert {"torch", "python"} <= found["versions"].keys() and "git_commit" in found
    for v, path in zip(found["variants"], (S1, S5), strict=True):
        assert len(v["rounds_s"]) == 2 and v["step_s"] == pytest.approx(
            statistics.median(v["rounds_s"])
        )
        assert v["tokens_per_s"] == pytest.approx(64 / v["step_s"])
        model = GPT(GPTConfig(**SIZE, **keys_of(path)))
        assert v["flops_per_s"] == pytest.approx(model.flops_per_token() * v["tokens_per_s"])
        assert (
            v["mfu"] == pytest.approx(v["flops_per_s"] / 1e12)
            and v["parameters"] == model.num_params()
        )
        assert v["parts_s"].keys() == set(measure.PARTS) and all(
            t > 0 for t in v["parts_s"].values()
        )
        assert v["compile_s"] is None and v["peak_mem_bytes"] is None
        assert v["ratio_min"] <= v["ratio"] <= v["ratio_max"] and v["reference"] == "s1"
    assert found["variants"][0]["ratio"] == 1
    out = capsys.readouterr().out
    titles = "tokens/s,ms/step,rounds,MFU,memory,compile s,× s1,n/a,"
    titles += "data,forward+loss,backward,clip,optimizer,sum"
    assert [title for title in titles.split(",") if title not in out] == []
    facts = "device,threads,torch,attention,dtype,compile,step"
    assert [fact for fact in facts.split(",") if f"\n{fact}: " not in out] == []


def test_parts_and_rows_by_accumulation(monkeypatch, tmp_path):
    """The clock advances by one second each time it is read. batch_size is two micro batches."""
    monkeypatch.setattr(measure, "clock", itertools.count(0.0).__next__)
    found = results(tmp_path, vary="accumulation=2,4", micro_batch_size=2)
    for v, n in zip(found["variants"], (2, 4), strict=True):
        assert v["rounds_s"] == pytest.approx([1 / 3] * 2) and v["ratio"] == n / 2
        assert v["step_tokens"] == 32 * n
        assert v["parts_s"] == dict(data=1, forward=n, backward=n, clip=1, optimizer=1)


def test_a_ratio_pairs_the_rounds():
    a, b = (Variant(name, make_setting(), None, None, None, torch.float32) for name in "ab")
    a.rounds, b.rounds = [1.0, 2.0, 4.0], [2.0, 1.0, 4.0]
    assert measure.speed_ratios(b, a) == [0.5, 2.0, 1.0]


def test_variants_of_files_and_flags():
    """Flags win over files."""
    found = bench.read_variants([f"--vary={S1},{S5}", "--qk_norm=False", "--n_layer=1"])
    values = {name: (c.qk_norm, c.n_layer, c.input_norm) for name, (c, *_) in found.items()}
    assert values == {"s1": (False, 1, False), "s5": (False, 1, True)}
    found = bench.read_variants([S5, "--vary=mlp=gelu,swiglu"])
    values = {name: (c.mlp, c.mid_norm) for name, (c, *_) in found.items()}
    assert values == {"mlp=gelu": ("gelu", "both"), "mlp=swiglu": ("swiglu", "both")}


def test_optimizers(tmp_path):
    found = results(tmp_path, vary=f"optimizer={','.join(optim.OPTIMIZERS)}", micro_batch_size=1)[
        "variants"
    ]
    assert [row["name"] for row in found] == [f"optimizer={name}" for name in optim.OPTIMIZERS]
    for row, name in zip(found, optim.OPTIMIZERS, strict=True):
        config = TrainConfig(optimizer=name)
        optim.fill_defaults(config)
        assert row["state_bytes"] == optim.state_bytes(GPT(GPTConfig(**SIZE)), config)


def test_many_networks_are_compiled(tmp_path, monkeypatch):
    """One process, many networks: torch silently stops compiling code that it has compiled up to a
    limit."""

    def trace(model, config, example, env):  # without a backend, which is slow
        return torch.compile(model, backend="eager", dynamic=False)

    torch._dynamo.reset()
    monkeypatch.setattr(variants, "compile_model", trace)
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setattr(torch._dynamo.config, name, 1)
    torch._dynamo.utils.counters.clear()
    rows = results(tmp_path, vary=f"{S1},{S5}", compile=True, n_layer=1, repeats=1, steps=1)[
        "variants"
    ]
    assert all(row["compile_s"] is not None for row in rows)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_norms(tmp_path, capsys):
    """Weights and the stream in bf16, as in the paper."""
    half = dict(dtype="bfloat16", stream_dtype="bfloat16", steps=2)
    rows = results(tmp_path, vary="norms", norm="dyt", dyt_alpha_attn=0.5, **half)["norms"]
    wanted = {
        (norm, case) for norm in ("rmsnorm", "dyt", "none") for case in ("inference", "training")
    }
    assert {(r["norm"], r["case"]) for r in rows} == wanted and {r["way"] for r in rows} == {
        "eager"
    }
    assert all(len(r["rounds_s"]) == 2 and r["seconds"] >= 0 for r in rows)
    assert "− identity" in capsys.readouterr().out


def test_a_busy_machine(monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 0.0, 0.0))
    assert run() == 0
    assert capsys.readouterr().out.count("warning: 1.5 CPU cores were busy") == 2


def test_profile(tmp_path, capsys):
    found = results(tmp_path, profile=True, out_dir=tmp_path / "out")
    assert Path(found["trace"]) == tmp_path / "out" / "bench" / "trace.json"
    names = {
        event.get("name")
        for event in json.loads(Path(found["trace"]).read_text(encoding="utf-8"))["traceEvents"]
    }
    assert {"aten::mm", "aten::_fused_adamw_"} <= names
    kinds = {row["name"]: row["seconds"] for row in found["kinds"]}
    assert {"products", "attention", "optimizer", "copies"} <= kinds.keys() and sum(
        kinds.values()
    ) <= found["step_s"]
    assert "Self CPU" in capsys.readouterr().out


def test_kinds_of_kernels():
    """Names as on an H100, each of a second in a step of ten."""
    names = {
        "products": [
            "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT",
            "sm90_xmma_gemm_bf16",
            "triton_tem_fused_mm_7",
        ],
        "Triton, elementwise": [
            "triton_red_fused__scaled_dot_product_cudnn_attention_backward__to_copy_mm_2"
        ],
        "copies": [
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
        ],
        "attention": ["cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16"],
        "optimizer": ["void at::native::multi_tensor_apply_kernel<LpNormFunctor>"],
        "other": ["void at::native::indexFuncLargeIndex<float>"],
    }
    kernels = [(name, 1.0) for own in names.values() for name in own]
    found = {
        row["name"]: row["share"] for row in profiling.sum_by_kind(kernels, step_s=10.0, idle=True)
    }
    assert found == {kind: len(own) / 10 for kind, own in names.items()} | {"no kernel runs": 0.2}


# ---------------------------------------------------------------------------------------- bad input

REFUSED = {
    "vocabulary": (
        dict(data="dataset", vocab_size=10),
        1,
        "50 tokens) does not fit the model's vocabulary",
    ),
    "a set": (
        dict(vary="layouts"),
        1,
        "give FLAG=VALUE,VALUE,… or FILE,FILE,…, such as optimizer=adamw,muon or",
    ),
    "no such flag": (
        dict(vary="n_layers=1,2"),
        2,
        "unknown flag --n_layers (did you mean --n_layer?)",
    ),
    "missing file": (dict(vary=f"{S1},nowhere.py"), 2, "cannot read config file 'nowhere.py'"),
    "against": (dict(against="nanogpt-eager"), 2, "nanogpt-bf16"),
    "steps": (dict(steps=-1), 1, "steps=-1 must be at least 0"),
    "json": (dict(json=ROOT), 1, "is a folder: name a file"),
    "micro batch": (dict(micro_batch_size=3), 1, "use"),
    "no dataset": (
        dict(data="dataset", dataset="nowhere"),
        1,
        "or time on random text: --data=random",
    ),
    "two modes": (
        dict(profile=True, against="nanogpt"),
        1,
        "--against and --profile are different benchmarks",
    ),
    "images, nanoGPT": (VIT | dict(against="nanogpt"), 1, "nanoGPT reads text"),
    "images, chunks": (
        VIT | dict(vary="loss_chunks=1,2"),
        1,
        "for text: leave out --loss_chunks=1",
    ),
    "images from text": (
        VIT | dict(data="dataset", dataset="text"),
        1,
        "patch_size=4 is for images: leave",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_one_line(case, dataset, capsys):
    given, code, words = REFUSED[case]
    where = given.get("dataset", "text")
    assert run(**given | dict(dataset=dataset if where == "text" else where)) == code
    said = capsys.readouterr()
    assert words in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert "tokens/s" not in said.out


def test_one_device_for_all(tmp_path, capsys):
    for name in ("cpu", "cuda"):
        (tmp_path / f"{name}.py").write_text(f"device = '{name}'")
    assert run(vary=f"{tmp_path / 'cpu.py'},{tmp_path / 'cuda.py'}", device=None) == 1
    assert "--vary needs one device, but the variants have cpu, cuda" in capsys.readouterr().err


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), MemoryError()])
def test_the_end_of_memory_names_the_variant(error, monkeypatch, capsys):
    def make(name, kind, setting):
        if setting.micro == 4:
            raise error
        return variants.our_variant(name, setting)

    monkeypatch.setattr(bench, "make_variant", make)
    assert run(vary="micro_batch_size=1,4") == 1
    assert capsys.readouterr().err.startswith(
        "error: micro_batch_size=4: out of memory, which variants share"
    )


# --------------------------------------------------------------------- scripts of several processes


@pytest.mark.parametrize("name", scripts.SCRIPTS)
def test_a_script_goes_on_after_what_fails_and_says_so(name, tmp_path, monkeypatch):
    """With a Python that only notes its arguments. bench.py must not refuse them first on a rented
    GPU: flags, files, batches."""
    python, parts = tmp_path / "python", scripts.SCRIPTS[name]
    first, second, *_ = parts
    calls = tmp_path / "calls"
    code = f'echo "$@" >> {calls}\ncase $(wc -l < {calls}) in 1) exit 3;; 2) sleep 9;; esac'
    python.write_text(f"#!/bin/sh\n{code}")
    python.chmod(0o755)
    monkeypatch.setattr(scripts.sys, "executable", str(python))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(parts, second, (0.1, parts[second][1]))
    with pytest.raises(
        SystemExit, match=rf"^failed: {first} \(exit code 3\), {second} \(not done in 0.1 s\)$"
    ):
        scripts.main([name, str(tmp_path / "new")])
    assert len(calls.read_text().splitlines()) == len(parts)
    for _, command in parts.values():
        program, *argv = command.split()
        found = bench.read_variants([*argv, "--data=random"]) if program == "bench.py" else {}
        for model_config, config, bench_config in found.values():
            bench_config.check()
            setting = Setting(model_config=model_config, config=config, bench=bench_config, env=CPU)
            setting.model_config.check()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["gpu-check", "gpu-profile", "gpu-papers"])
def test_every_part_of_a_script_runs(name, tmp_path):
    scripts.main([name, str(tmp_path), "--tiny"])
    figures = [json.loads(path.read_bytes()) for path in tmp_path.glob("*.json")]
    assert len(figures) == len(scripts.SCRIPTS[name]) - (name == "gpu-check")  # all but its tests


def test_medians_of_processes(tmp_path, capsys):
    """Of those that have left figures."""
    speeds = dict(
        small_nanogpt_1=10, small_nanogpt_3=20, small_ours_1=60, small_ours_2=120, small_ours_3=30
    )
    for part, speed in speeds.items():
        (tmp_path / f"{part}.json").write_text(
            json.dumps(dict(variants=[dict(tokens_per_s=speed)]))
        )
    scripts.print_medians(tmp_path)
    found = re.findall(r"small_(.*): (\d+) tokens/s, median of (\d)", capsys.readouterr().out)
    assert found == [("nanogpt", "15", "2"), ("ours", "60", "3")]


@pytest.mark.parametrize("name, error", [("gpu-check", "has no CUDA GPU"), ("gpu-chek", "usage: ")])
def test_a_script_that_cannot_run(name, error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=error):
        scripts.main([name, "out"])
