"""Whole runs on this device: killed and resumed, moved between CPU and device, sampled from.

train.py and sample.py are started as a user starts them, in processes of their own. The text is this project's own
source, prepared in a temporary folder; images are those of the configuration's dataset. The configuration is
bench.py's."""

import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from model import GPTConfig
from nanodnt.bench.checks.verdict import verdict, worst
from nanodnt.bench.settings import Setting
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.generate import compile_step, generate
from nanodnt.prepare.text import build
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.run.metrics import read_metrics
from nanodnt.settings import TrainConfig
from nanodnt.weights import model_from_checkpoint

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 300  # for a process to come as far as it must
PROMPT = "def "
NEW_TOKENS = 64


def run_script(script: str, words: list) -> str:
    """What a command of this project prints. ValueError, with its last line, if it fails or takes too long."""
    words = [sys.executable, str(ROOT / script), *words]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{script} took longer than {WAIT_S} s, too long for a check") from None
    if done.returncode:
        raise ValueError(f"{script} ended with exit code {done.returncode}: {last_line(done.stderr)}")
    return done.stdout


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]


class Runs:
    """Runs of one configuration below `folder`, with checkpoints after each third of their steps."""

    def __init__(self, setting: Setting, folder: Path):
        self.setting, self.folder, self.device = setting, folder, str(setting.env.device)
        self.steps = setting.config.max_iters // 3 * 3
        if not 6 <= self.steps <= 10_000:
            raise ValueError(f"max_iters={setting.config.max_iters} must be between 6 and 10000 to verify whole runs")
        if setting.flags.patch_size:
            if setting.bench.data == "random":
                raise ValueError(f"verify={setting.bench.verify} trains on a dataset's images: leave out data=random")
            self.data = setting.config.dataset
            return
        self.data = folder / "text"
        files = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] in ("layers", "nanodnt"))
        texts = [path.read_text(encoding="utf-8") for path in files]
        with redirect_stdout(StringIO()):
            splits = {"train": [texts[:-8]], "val": [texts[-8:]]}
            build(self.data, "this project's source", Tokenizer.meta_for("bytes"), splits)

    def path(self, name: str) -> Path:
        return self.folder / name

    def words(self, name: str, **changes) -> list:
        """The arguments of train.py for the run `name`: the configuration, in fp32 so that devices can be compared."""
        given = {**asdict(self.setting.flags), **asdict(self.setting.config)}
        plain = {**asdict(GPTConfig()), **asdict(TrainConfig())}
        flags = {k: v for k, v in given.items() if v != plain[k] and v is not None and k != "vocab_size"}
        flags |= dict(dataset=self.data, out_dir=self.path(name), device=self.device, dtype="float32")
        flags |= dict(max_iters=self.steps, lr_decay_iters=self.steps, eval_interval=self.steps // 3, log_interval=1)
        flags |= dict(eval_tokens=4 * self.setting.flags.block_size, keep_every=self.steps // 3)
        return [f"--{key}={value}" for key, value in {**flags, **changes}.items()]

    def train(self, name: str, **changes) -> None:
        """Run train.py to its end."""
        run_script("train.py", self.words(name, **changes))

    def train_and_kill(self, name: str) -> int:
        """Start train.py, and end it by SIGKILL when it has saved after a third of its steps and gone on. Returns the
        last step that it had logged. ValueError if it ends by itself."""
        log, killed, saved = self.path(f"{name}.log"), False, self.path(name) / f"step_{self.steps // 3}.pt"
        with open(log, "w") as out:
            words = [sys.executable, str(ROOT / "train.py"), *self.words(name)]
            process = subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
            deadline = time.monotonic() + WAIT_S
            try:
                while process.poll() is None and time.monotonic() < deadline and not killed:
                    time.sleep(0.001)
                    killed = saved.exists() and self.last_step(name) > self.steps // 3
            finally:
                process.kill()
                process.wait()
        if process.returncode != -signal.SIGKILL or not killed:
            why = "was too fast to be killed" if process.returncode == 0 else last_line(log.read_text())
            raise ValueError(f"train.py, which was to be killed after a checkpoint: {why}")
        return self.last_step(name)

    def last_step(self, name: str) -> int:
        return max((row["step"] for row in read_metrics(self.path(name))), default=0)

    def continue_elsewhere(self, name: str, source: str, step: int, device: str) -> None:
        """Start the run `name` from checkpoint `step` of the run `source`, on `device`, and train it to its end."""
        self.path(name).mkdir()
        shutil.copyfile(self.path(source) / f"step_{step}.pt", self.path(name) / "last.pt")
        self.train(name, init_from="resume", device=device)

    def column(self, name: str, key: str, after: int = 0) -> dict:
        """{step: value} of a field of metrics.jsonl, of steps above `after`."""
        return {row["step"]: row[key] for row in read_metrics(self.path(name)) if key in row and row["step"] > after}

    def checkpoint(self, name: str) -> dict:
        return load_checkpoint(self.path(name) / "last.pt")


@contextmanager
def temporary_runs(setting: Setting):
    with TemporaryDirectory(prefix="nanodnt-") as folder:
        yield Runs(setting, Path(folder))


def largest_difference(found: dict, wanted: dict) -> float:
    """The largest relative difference of two {step: value}; infinite if they are not of the same steps."""
    if found.keys() != wanted.keys() or not wanted:
        return float("inf")
    return worst({step: abs(found[step] - wanted[step]) / abs(wanted[step]) for step in wanted})[0]


def distance(a: dict, b: dict) -> float:
    """The largest |a − b| / |b| of the tensors of two checkpoints: weights and optimizer state."""

    def tensors(checkpoint):
        states = checkpoint["optimizer"]["state"]
        named = {f"{i}.{key}": t for i, state in states.items() for key, t in state.items() if torch.is_tensor(t)}
        return {name: t.double() for name, t in (checkpoint["model"] | named).items()}

    a, b = tensors(a), tensors(b)
    return worst({name: ((a[name] - t).norm() / t.norm().clamp(min=1e-30)).item() for name, t in b.items()})[0]


def check_resume(setting: Setting) -> dict:
    """A run that is killed by SIGKILL and resumed, against one that is not. On a GPU, where sums are not made in the
    same order each time, a third run shows how far two undisturbed ones are apart."""
    with temporary_runs(setting) as runs:
        runs.train("whole")
        killed_at = runs.train_and_kill("killed")
        runs.train("killed", init_from="resume")
        if setting.env.device.type != "cpu":
            runs.train("again")
        whole, steps = runs.checkpoint("whole"), runs.steps

        def apart(name):
            loss = largest_difference(runs.column(name, "train_loss"), runs.column("whole", "train_loss"))
            return loss, distance(runs.checkpoint(name), whole)

        noise = (0.0, 0.0) if setting.env.device.type == "cpu" else apart("again")
        allowed = [0.0 if n == 0 else max(10 * n, 1e-5) for n in noise]
        found, rates = apart("killed"), largest_difference(runs.column("killed", "lr"), runs.column("whole", "lr"))
    note = [
        "bitwise the same" if f == 0 else f"two undisturbed runs: {n:.2g}" for f, n in zip(found, noise, strict=True)
    ]
    lines = [
        verdict("learning rate of each step, each step once", rates, 0, f"killed after step {killed_at} of {steps}"),
        verdict("training loss of each step", found[0], allowed[0], note[0]),
        verdict("weights and optimizer state at the end", found[1], allowed[1], note[1]),
    ]
    why = "largest relative differences; none where undisturbed runs repeat bit by bit, else ten times theirs"
    return dict(checks=lines, why=why)


def check_devices(setting: Setting) -> dict:
    """A run of the CPU whose checkpoint goes on here, and whose checkpoint then goes back, against the CPU alone."""
    with temporary_runs(setting) as runs:
        third = runs.steps // 3
        runs.train("cpu", device="cpu")
        runs.continue_elsewhere("here", "cpu", third, runs.device)
        runs.continue_elsewhere("back", "here", 2 * third, "cpu")
        lines = []
        for name, step, way in (("here", third, f"CPU to {runs.device}"), ("back", 2 * third, f"{runs.device} to CPU")):
            for key, after, allowed in (("lr", "all steps", 0), ("train_loss", "all steps", 0.02)):
                found, wanted = (runs.column(run, key, step) for run in (name, "cpu"))
                lines.append(verdict(f"{way}, {key}, {after}", largest_difference(found, wanted), allowed))
        first = [runs.column(name, "train_loss", third)[third + 1] for name in ("here", "cpu")]
        norm = [runs.column(name, "grad_norm", third)[third + 1] for name in ("here", "cpu")]
        for key, (found, wanted) in (("train_loss", first), ("grad_norm", norm)):
            lines.append(verdict(f"CPU to {runs.device}, {key}, first step", abs(found - wanted) / wanted, 5e-3))
    why = "relative differences; products in TF32 round by 2⁻¹¹, and later steps start from weights that differ"
    return dict(checks=lines, why=why)


def check_sampling(setting: Setting) -> dict:
    """The most likely continuation, by a model trained here: of sample.py on this device and on the CPU, and of
    `generate` here with its cache, eager and compiled, and without one."""
    with temporary_runs(setting) as runs:
        runs.train("run")
        checkpoint, words = runs.checkpoint("run"), [f"--out_dir={runs.path('run')}", "--checkpoint=last.pt"]
        words += [f"--start={PROMPT}", "--num_samples=1", f"--max_new_tokens={NEW_TOKENS}", "--temperature=0"]
        words += ["--dtype=float32"]
        texts = [run_script("sample.py", [*words, f"--device={device}"]) for device in (runs.device, "cpu")]
    tokenizer, exact = Tokenizer(checkpoint["meta"]), model_from_checkpoint(checkpoint).eval().double()
    tokens = [tokenizer.encode(text.rsplit("\n" + "-" * 80, 1)[0]) for text in texts]
    model = model_from_checkpoint(checkpoint).eval().to(setting.env.device)
    prompt = torch.tensor([tokenizer.encode(PROMPT)], device=setting.env.device)
    cached, compiled = (
        generate(model, prompt, NEW_TOKENS, temperature=0, stop=tokenizer.eot, step=step)[0].tolist()
        for step in (None, compile_step())
    )
    whole = without_cache(model, prompt, NEW_TOKENS, tokenizer.eot)
    lines = [
        compare_texts(f"sample.py on {runs.device} and on the CPU", *tokens, exact),
        compare_texts(f"on {runs.device} with a cache and without", cached, whole, exact),
        compare_texts(f"on {runs.device} compiled, with a cache, and without", compiled, whole, exact),
    ]
    why = (
        "the difference of two logits, in float64 on the CPU: where texts part, rounding must decide between two tokens"
    )
    return dict(checks=lines, why=why)


@torch.no_grad()
def without_cache(model, idx, new: int, stop: int) -> list:
    """The token ids of `idx` (1, T) and its most likely continuation, each token from a pass over all before it."""
    for _ in range(new):
        recent = idx[:, -model.config.block_size :]
        idx = torch.cat((idx, model(recent)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
        if idx[0, -1] == stop:
            break
    return idx[0].tolist()


@torch.no_grad()
def compare_texts(what: str, a: list, b: list, exact) -> dict:
    """A line: how far apart the logits of the two tokens are where texts a and b part; 0 if they are the same."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        gap = 0.0 if len(a) == len(b) else float("inf")
        return verdict(what, gap, 0.02, f"the same {len(a)} tokens" if gap == 0 else f"{len(a)} and {len(b)} tokens")
    if at == 0:
        return verdict(what, float("inf"), 0.02, "not even the prompt is the same")
    context = torch.tensor([b[max(0, at - exact.config.block_size) : at]])
    logits = exact(context)[0][0, -1]
    return verdict(what, (logits[a[at]] - logits[b[at]]).abs().item(), 0.02, f"the same up to token {at}")
