"""`bench.py --report` at toy size: every section runs, the page says what the JSON says, a fault makes a check fail, a
report that was stopped goes on.

Sections run in this process here, but for the run that is killed; compiled code is traced, not compiled. The deep test
starts it as a user does, and kills it."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch

import bench
import sample
import train
from configurator import configure
from model import GPTConfig
from nanodnt.bench import timing, variants
from nanodnt.bench.checks import CHECKS, numerics, products, runs
from nanodnt.bench.checks.verdict import describe_checks, verdict
from nanodnt.bench.report import page, runner
from nanodnt.bench.report.page import ERROR
from nanodnt.bench.report.sections import SECTIONS, arguments
from nanodnt.bench.settings import BenchConfig, Setting
from nanodnt.optim import OPTIMIZERS, RULES
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig
from support.runs import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
BY_NAME = {section.name: section for section in SECTIONS}
ENV = Env(0, 1, torch.device("cpu"), torch.float32, False)


def call(main, script: str, words: list) -> int:
    """A command's main() in this process; the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, words)])
        try:
            return main()
        except SystemExit as e:
            return e.code


def run_script_here(script: str, words: list) -> str:
    with redirect_stdout(StringIO()) as out:
        assert call({"train.py": train.main, "sample.py": sample.main}[script], script, words) == 0
    return out.getvalue()


def launch_here(words: list, log: Path, limit_s: float) -> int:
    with open(log, "w") as out, redirect_stdout(out), redirect_stderr(out):
        return call(bench.main, "bench.py", words)


def trace(model, config, example, env):
    """torch.compile without its backend, which is slow; everything else is real."""
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", dynamic=False)


@pytest.fixture(scope="module", autouse=True)
def here():
    """Everything but the run that is killed in this process, on one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(runner, "launch", launch_here)
        patch.setattr(runs, "run_script", run_script_here)
        patch.setattr(timing, "busy_cores", lambda: 0.0)  # the real one takes a second
        for module in (numerics, products, variants):
            patch.setattr(module, "compile_model", trace)
        patch.setattr(runs, "compile_step", partial(runs.compile_step, backend="eager"))
        patch.setattr("nanodnt.run.loss_curve.draw_loss", lambda *args: None)
        patch.setattr(numerics, "LAYOUTS", {name: numerics.LAYOUTS[name] for name in ("LNS, RoPE, SwiGLU",)})
        yield


def ended(pid: str, timeout_s: float = 10) -> bool:
    """Whether this process has ended, within some time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def report(folder: Path, *flags) -> int:
    return call(bench.main, "bench.py", [f"--report={folder}", "--report_size=toy", "--device=cpu", *flags])


def load(folder: Path) -> dict:
    return json.loads((folder / "gpu.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a whole report."""
    folder = tmp_path_factory.mktemp("report") / "new"
    assert report(folder) == 0, (folder / "gpu.md").read_text()
    return folder


def stub(monkeypatch, answer, names=("precision", "nanogpt", "plan")) -> list:
    """Sections that only call answer(words, log); returns the list that gets their names."""
    ran = []

    def launch(words, log, limit_s):
        ran.append(next(s.name for s in sections if s.files.split()[0] == words[0] and s.flags.items() <= flags(words)))
        log.touch()
        return answer(words, log)

    def flags(words):
        return {(k, v) for w in words for k, _, v in [w.lstrip("-").partition("=")]}

    sections = [BY_NAME[name]._replace(flags=dict(seed=str(i)), toy={}) for i, name in enumerate(names)]
    monkeypatch.setattr(runner, "SECTIONS", sections)
    monkeypatch.setattr(runner, "launch", launch)
    return ran


def write_result(words, checks=(), code=0) -> int:
    (path,) = (word.removeprefix("--json=") for word in words if word.startswith("--json="))
    result = dict(mode="precision", warnings=[], checks=[*checks, verdict("a", 0.25, 1)], why="reasons")
    Path(path).write_text(json.dumps(result))
    return code


# --------------------------------------------------------------------------------------------------- the whole report


def test_every_section_runs_and_passes(whole):
    found = load(whole)
    assert {name: s["status"] for name, s in found["sections"].items()} == dict.fromkeys(BY_NAME, "done")
    verified = {s["result"]["mode"] for s in found["sections"].values() if "checks" in s["result"]}
    assert verified == CHECKS.keys() == {s.flags["verify"] for s in SECTIONS if "verify" in s.flags}
    assert found["size"] == "toy" and found["torch"] == torch.__version__ and found["driver"] and found["python"]
    assert all(s["seconds"] > 0 and s["started"] and s["message"] == "" for s in found["sections"].values())
    kinds = [("verify" in s.flags) for s in SECTIONS]
    assert kinds == sorted(kinds, reverse=True)  # first whether it is right, then how fast it is


def test_the_page_says_what_the_json_says(whole):
    text, found = (whole / "gpu.md").read_text(), load(whole)
    assert text == page.make_page(found)
    assert "Toy sizes" in text and "Incomplete" not in text and "FAIL" not in text
    for fact in ("device", "torch", "driver", "started", "command"):
        assert found[fact] in text
    for name, s in found["sections"].items():
        assert f"| {s['title']} | done | {s['seconds']:.0f} | {BY_NAME[name].seconds} |" in text
        part = text.split(f"\n## {s['title']}\n")[1].split("\n## ")[0]
        assert f"```bash\n{s['command']}\n```" in part and s["git_commit"] in text
        result, numbers = s["result"], []
        for row in result.get("checks", ()):
            assert row["what"] in part
            numbers += [f"{row['found']:.3g}", f"{row['allowed']:.3g}"]
        for row in result.get("variants", result.get("micro_batches", ())):
            numbers += [f"{row['tokens_per_s']:,.0f}", f"{row['step_s'] * 1e3:,.2f}"] if row["step_s"] < 1 else []
        for row in result.get("micro_batches", ()):
            numbers += [f"{row['planned_bytes'] / 1e9:.3g} GB", f"{row['peak_mem_bytes'] / 1e9:.3g} GB"]
        numbers += [f"{row['optimizer_s'] * 1e3:.2f}" for row in result.get("optimizers", ()) if row["optimizer_s"] < 1]
        numbers += [f"{result[key]:.1f} s" for key in ("cold_s", "warm_s") if key in result]
        numbers += [f"{row['seconds'] * 1e3:.2f}" for row in result.get("norms", ()) if row["seconds"] < 1]
        assert numbers and [n for n in numbers if n not in part] == []


def test_what_it_took_is_what_was_asked_for(whole):
    """The commands on the page are those that ran: bench.py notes its own command line."""
    for s in load(whole)["sections"].values():
        ran = [word for word in s["result"]["command"] if not word.startswith("--json=")]
        assert " ".join(["python", *ran]) == s["command"]


def test_a_finished_report_runs_nothing_again(whole, monkeypatch, capsys):
    before = load(whole)
    monkeypatch.setattr(runner, "launch", lambda *args: pytest.fail("runs a section"))
    assert report(whole) == 0
    assert load(whole)["sections"] == before["sections"] and load(whole)["started"] == before["started"]
    assert "every section is done, every check passed" in capsys.readouterr().out


@pytest.mark.deep
def test_as_a_user_runs_it(tmp_path):
    """In processes, and killed. (All of it, with compilers, takes 20 minutes on 2 cores.)"""
    command = [sys.executable, str(ROOT / "bench.py"), f"--report={tmp_path}", "--report_size=toy", "--device=cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while '"done"' not in (tmp_path / "gpu.json").read_text() if (tmp_path / "gpu.json").exists() else True:
            assert process.poll() is None
            time.sleep(0.1)
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        process.send_signal(signal.SIGKILL)
    for section in listed.stdout.split():
        assert ended(section), "the section that was under way still runs"
    kept = [name for name, s in load(tmp_path)["sections"].items() if s["status"] == "done"]
    assert kept and "Incomplete" in (tmp_path / "gpu.md").read_text()


# ------------------------------------------------------------------------------------------------ what can go wrong


def test_a_failing_check_fails_the_report(tmp_path, monkeypatch, capsys):
    bad = verdict("gradients", float("nan"), 0.5)
    ran = stub(monkeypatch, lambda words, log: write_result(words, [bad] if "--seed=0" in words else [], code=1))
    assert report(tmp_path) == 1
    assert len(ran) == 3  # the others run all the same
    assert load(tmp_path)["sections"]["precision"]["status"] == "FAIL"
    text = (tmp_path / "gpu.md").read_text()
    assert f"**FAIL**: {BY_NAME['precision'].title}, gradients: nan, allowed 0.5" in text
    assert re.search(r"gradients +nan +0.5 +FAIL", text) and "Incomplete" not in text
    assert "FAIL gradients: nan, allowed 0.5" in capsys.readouterr().out
    again = stub(monkeypatch, lambda words, log: write_result(words))
    assert report(tmp_path) == 0 and len(again) == 1
    assert "FAIL" not in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize(
    "line, status, code",
    [("error: out of GPU memory: lower --micro_batch_size", "out of memory", 0), ("RuntimeError: oh", "error", 1)],
)
def test_a_section_that_ends_with_an_error(line, status, code, tmp_path, monkeypatch):
    def answer(words, log):
        if "--seed=1" not in words:
            return write_result(words)
        log.write_text(f"Traceback\n{line}\n")
        return 1

    stub(monkeypatch, answer)
    assert report(tmp_path) == code
    assert [s["status"] for s in load(tmp_path)["sections"].values()] == ["done", status, "done"]
    text = (tmp_path / "gpu.md").read_text()
    assert f"**{status}**: exit code 1: {line}" in text
    assert f"**Incomplete**: {BY_NAME['nanogpt'].title} ({status})" in text


def test_a_section_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    """That is a failure; the end of the report's own time is not."""
    stub(monkeypatch, lambda words, log: None if "--seed=0" in words else write_result(words))
    assert report(tmp_path) == 0
    assert f"{BY_NAME['precision'].title} (left out)" in (tmp_path / "gpu.md").read_text()
    monkeypatch.setattr(runner, "PATIENCE", -60)  # so the time of a section has passed before it begins
    monkeypatch.setattr(runner, "choose_device", lambda device: (torch.device("cuda"), ""))
    monkeypatch.setattr(runner, "device_name", lambda device: "a GPU")
    assert call(bench.main, "bench.py", [f"--report={tmp_path / 'gpu'}"]) == 1
    assert f"{BY_NAME['precision'].title} (out of time)" in (tmp_path / "gpu" / "gpu.md").read_text()


def test_launch_ends_what_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "bench.py").write_text(
        "import os, subprocess, sys, time\n"
        "if sys.argv[1:] == ['quick']: print('said'); sys.exit(7)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'group')!r}, 'w').write(str(os.getpgid(0)))\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    assert REAL_LAUNCH(["quick"], tmp_path / "log", 60) == 7 and (tmp_path / "log").read_text() == "said\n"
    assert REAL_LAUNCH([], tmp_path / "log", 3) is None
    group = (tmp_path / "group").read_text()
    alive = subprocess.run(["ps", "-o", "stat=", "-g", group], capture_output=True, text=True).stdout.split()
    assert [state for state in alive if not state.startswith("Z")] == []  # the child that it had started, too


REAL_LAUNCH = runner.launch


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can do this")
def test_a_process_ends_with_its_parent():
    """However that ends. The parent here starts a child, prints its id, and waits to be killed."""
    code = "import signal, subprocess, sys, time\nfrom nanodnt.bench.report.runner import end_with_parent\n"
    code += "child = subprocess.Popen(['sleep', '600'], preexec_fn=end_with_parent)\nprint(child.pid, flush=True)\n"
    code += "time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        child = parent.stdout.readline().strip()
        alive = subprocess.run(["ps", "-o", "comm=", "-p", child], capture_output=True, text=True).stdout.strip()
        parent.kill()
    assert alive == "sleep" and ended(child)


def test_a_report_that_is_killed_is_readable_and_goes_on(tmp_path, monkeypatch):
    def killed(words, log):
        if len(ran) == 3:
            raise KeyboardInterrupt
        return write_result(words)

    ran = stub(monkeypatch, killed)
    assert report(tmp_path) == 130
    text = (tmp_path / "gpu.md").read_text()
    assert text == page.make_page(load(tmp_path))
    assert f"**Incomplete**: {BY_NAME['plan'].title} (not yet run). The same command goes on" in text
    assert text.count("reasons") == 2
    ran = stub(monkeypatch, lambda words, log: write_result(words))
    assert report(tmp_path) == 0 and ran == ["plan"] and "Incomplete" not in (tmp_path / "gpu.md").read_text()


def test_what_does_not_fit_into_the_time_is_named_and_comes_first_next_time(tmp_path, monkeypatch, capsys):
    ran = stub(
        monkeypatch, lambda words, log: 1 if log.write_text("oh") and "--seed=2" in words else write_result(words)
    )
    planned = [BY_NAME[name].seconds for name in ("precision", "nanogpt", "plan")]
    assert planned[1] > planned[0] > planned[2]
    assert report(tmp_path, f"--report_minutes={(planned[1] - 5) / 60}") == 1
    assert ran == ["precision", "plan"]
    title = BY_NAME["nanogpt"].title
    assert f"**Incomplete**: {title} (left out); " in (tmp_path / "gpu.md").read_text()
    assert f"{title}, planned {planned[1]} s" in capsys.readouterr().out
    ran.clear()
    assert report(tmp_path) == 1 and ran == ["nanogpt", "plan"]
    assert sum(section.seconds for section in SECTIONS) <= 25 * 60


def test_a_failure_stays_on_record_if_there_is_no_time_to_repeat_it(tmp_path, monkeypatch):
    stub(monkeypatch, lambda words, log: 1)
    assert report(tmp_path) == 1
    before = load(tmp_path)["sections"]
    assert report(tmp_path, "--report_minutes=0") == 1
    assert load(tmp_path)["sections"] == before and ERROR in {s["status"] for s in before.values()}


def test_another_measurement_under_the_same_name_is_made_anew(tmp_path, monkeypatch):
    stub(monkeypatch, lambda words, log: write_result(words))
    assert report(tmp_path) == 0
    ran = stub(monkeypatch, lambda words, log: write_result(words), names=("nanogpt", "precision", "plan"))
    assert report(tmp_path) == 0 and ran == ["nanogpt", "precision"]  # "seed" is another one


# ----------------------------------------------------------------------------------------------- faults, put in here


def toy(name: str, **changes) -> Setting:
    """The Setting of a section at toy size."""
    words = arguments(BY_NAME[name], "toy", "cpu")
    found, _ = configure(GPTConfig, TrainConfig, BenchConfig, argv=words)
    return Setting(*found, ENV).replace(**changes)


def failed(result: dict) -> list:
    """What has failed; what is printed says so."""
    assert (" FAIL" in "\n".join(describe_checks(result))) == any(not c["passed"] for c in result["checks"])
    return [check["what"] for check in result["checks"] if not check["passed"]]


def test_a_wrong_gradient_fails_the_precision(monkeypatch):
    real = numerics.prepare_model

    def spoil(model, config, env):
        dict(model.named_parameters())["blocks.0.mlp.f.up.weight"].register_hook(lambda grad: 1.1 * grad)
        return real(model, config, env)

    monkeypatch.setattr(numerics, "prepare_model", spoil)
    found = failed(numerics.check_precision(toy("precision")))
    assert found == [f"{name}, {dtype}: gradients" for name in numerics.LAYOUTS for dtype in ("float32", "bfloat16")]


def test_wrong_compiled_code_fails(monkeypatch):
    monkeypatch.setattr(numerics, "compile_model", lambda model, *_: lambda *batch: (None, 1.001 * model(*batch)[1]))
    setting = toy("compiled_bf16")
    setting.env = replace(ENV, dtype=torch.bfloat16)
    assert failed(numerics.check_compiled(setting)) == [f"{name}: loss" for name in numerics.LAYOUTS]
    with pytest.raises(ValueError, match="needs a compiler, and compile=False leaves it out"):
        numerics.check_compiled(setting.replace(compile=False))


def test_an_optimizer_that_takes_an_infinite_gradient_fails(monkeypatch):
    rule = RULES["msgdw"]
    monkeypatch.setitem(RULES, "msgdw", rule._replace(step=lambda work, *others: rule.step(work, *others[:-1], None)))
    assert failed(numerics.check_updates(toy("updates"))) == ["msgdw: tensors changed by an infinite gradient"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_does_not_clip_fails(name, monkeypatch):
    rule = RULES[name]
    monkeypatch.setitem(RULES, name, rule._replace(step=lambda work, scale, inf: rule.step(work, None, inf)))
    assert any(line.startswith(f"{name}: 3 updates") for line in failed(numerics.check_updates(toy("updates"))))


def test_a_nan_is_the_worst_error():
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    ones = {name: torch.ones(2) for name in "abc"}
    assert numerics.worst_role(dict(a=ones["a"], b=zero, c=zero), ones) == (1.0, "b")
    error, role = numerics.worst_role(dict(a=zero, b=nan, c=zero), ones)
    assert role == "b" and not verdict("", error, 9)["passed"]
    difference = runs.largest_difference({1: 3.0, 2: float("nan"), 3: 1.0}, {1: 1.0, 2: 1.0, 3: 1.0})
    assert not verdict("", difference, 9)["passed"]


def test_an_optimizer_with_another_update_fails(monkeypatch):
    real = numerics.prepare_model

    def other_decay(model, config, env):
        config.weight_decay = 2 * config.weight_decay
        return real(model, config, env)

    monkeypatch.setattr(numerics, "prepare_model", other_decay)
    assert "adamw: 3 updates" in failed(numerics.check_updates(toy("updates")))


def lose_momentum(path: Path) -> None:
    """Zero the first moments in a checkpoint."""
    checkpoint = torch.load(path, weights_only=True)
    for state in checkpoint["optimizer"]["state"].values():
        if "exp_avg" in state:  # the routers' biases have none
            state["exp_avg"].zero_()
    path.unlink()
    torch.save(checkpoint, path)


def test_a_resume_that_loses_momentum_fails(monkeypatch):
    def interrupt(self, name):
        self.train(name)
        for file in ("last.pt", "prev.pt", "best.pt"):
            (self.path(name) / file).unlink()
        (self.path(name) / f"step_{self.steps // 3}.pt").rename(self.path(name) / "last.pt")
        lose_momentum(self.path(name) / "last.pt")
        return self.steps

    monkeypatch.setattr(runs.Runs, "train_and_kill", interrupt)
    found = failed(runs.check_resume(toy("resume")))
    assert found == ["training loss of each step", "weights and optimizer state at the end"]


@pytest.mark.deep
def test_a_move_that_loses_the_schedule_fails(monkeypatch):
    real = runs.Runs.train

    def train_faster(self, name, **changes):
        real(self, name, **changes | ({"learning_rate": 2e-2} if name == "here" else {}))

    monkeypatch.setattr(runs.Runs, "train", train_faster)
    found = failed(runs.check_devices(toy("devices")))
    assert "CPU to cpu, lr, all steps" in found and "CPU to cpu, train_loss, all steps" in found


def test_a_wrong_cache_fails_the_samples(monkeypatch):
    real = runs.generate

    def generate(*args, **how):
        text = real(*args, **how)
        text[:, 40:] = (text[:, 40:] + 1) % 200
        return text

    monkeypatch.setattr(runs, "generate", generate)
    result = runs.check_sampling(toy("sampling"))
    ways = ("with a cache and without", "compiled, with a cache, and without")
    assert failed(result) == [f"on cpu {way}" for way in ways]
    assert result["checks"][-1]["note"] == "the same up to token 40"


def test_a_run_that_cannot_be_killed_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="max_iters=5 must be between 6"):
        runs.Runs(toy("resume", max_iters=5), tmp_path)
    made = runs.Runs(toy("resume"), tmp_path)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    for code, why in (("raise SystemExit('no space')", "no space"), ("print(1)", "was too fast to be killed")):
        (tmp_path / "train.py").write_text(code)
        with pytest.raises(ValueError, match=f"which was to be killed after a checkpoint: {why}"):
            made.train_and_kill("killed")


# ------------------------------------------------------------------------------------------- real sizes, and mistakes


@pytest.mark.parametrize("name", BY_NAME)
def test_the_real_sections_are_possible(name):
    """Flags, files, batches: what bench.py would refuse, it must not refuse first on a rented GPU."""
    base, compared, profile = bench.split_words(arguments(BY_NAME[name], "gpu", "auto"))
    found, names = bench.read_settings(base, compared)
    assert bench.choose_mode(found[0][-1], compared, profile) in page.DESCRIBE
    for flags, config, settings in found:
        settings.check()
        setting = Setting(flags, config, settings, ENV)
        setting.flags.check()
        assert setting.config.batch_size % settings.first_micro_batch == 0
    assert len(names) == len(set(names))


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "gpu.json").write_text("{}")
    other, new = tmp_path / "other", f"--report={tmp_path / 'new'}"
    other.mkdir()
    for words, message in (
        (["--report"], "this machine has none" if not torch.cuda.is_available() else "leave out"),
        ([new, "config/dnt_small.py", "--n_layer=3"], "leave out micro_batch_size, n_layer"),
        ([new, "--report_size=toy", "--device=cpu", "--report_minutes=-1"], "report_minutes=-1.0 must be at least 0"),
        ([new, "--report_size=toy", "--steps=3"], "--report has configurations of its own: leave out steps"),
        ([f"--report={tmp_path / 'bad'}", "--report_size=toy", "--device=cpu"], "is not a report of this version"),
    ):
        assert call(bench.main, "bench.py", words) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and message.split(" micro")[0] in said, said
    assert not (tmp_path / "new").exists()


def test_a_folder_of_another_device_is_refused(tmp_path, monkeypatch, capsys):
    stub(monkeypatch, lambda words, log: write_result(words))
    assert report(tmp_path) == 0
    found = load(tmp_path) | dict(torch="1.0", driver="3")
    (tmp_path / "gpu.json").write_text(json.dumps(found))
    assert report(tmp_path) == 1
    assert "is a report with another driver, torch: choose another folder" in capsys.readouterr().err
    assert load(tmp_path) == found
