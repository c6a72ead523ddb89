"""Tiny runs for tests: a dataset, a run in this process or in one of its own, and what a run leaves
behind."""

import hashlib
import json
import re
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

# A DNT (S5) of two layers, a few milliseconds a step.
TINY = dict(
    n_layer=2, n_head=2, n_embd=32, block_size=32, pre_norm="attn", mid_norm="both", input_norm=True
)
TINY |= dict(
    qk_norm=True, batch_size=8, learning_rate=1e-2, warmup_iters=5, max_iters=20, eval_interval=10
)
TINY |= dict(eval_tokens=512, log_interval=1, device="cpu", dtype="float32", compile=False)
RECORD = {
    "command": ["train.py"],
    "versions": {"torch": "2.13.0"},
    "git_commit": "c0ffee",
    "git_changed_files": [],
}
# of a row: what depends on the machine
MACHINE = (
    "tokens_per_s",
    "images_per_s",
    "peak_mem_bytes",
    "mfu",
    "tracking_s",
    "evaluating_s",
    "saving_s",
    "goodput",
)


def put_file(path: Path, raw: bytes) -> dict:
    """Write a file; its entry in meta.json."""
    path.write_bytes(raw)
    return {"file": path.name, "sha256": hashlib.sha256(raw).hexdigest()}


def write_ids(folder: Path, tokenizer: dict, splits: dict, **more) -> Path:
    """A prepared folder, written by the contract of meta.json alone. `splits`: {split: token ids,
    or (ids, its further entries in meta.json)}; `tokenizer`: the part of meta.json that describes
    it; `more`: further keys."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = (
        dict(format=1, dataset=folder.name, source="a test", **tokenizer, dtype="uint16", splits={})
        | more
    )
    for split, ids in splits.items():
        ids, entries = ids if isinstance(ids, tuple) else (ids, {})
        part = put_file(
            folder / f"{split}.bin",
            np.array(ids, np.dtype(meta["dtype"]).newbyteorder("<")).tobytes(),
        )
        meta["splits"][split] = part | {"tokens": len(ids), "max_id": int(np.max(ids))} | entries
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def make_dataset(folder: Path, alphabet: int = 50, seed: int = 0) -> Path:
    """A prepared random walk on `alphabet` characters, easy to learn."""
    rng = np.random.default_rng(seed)
    splits = {
        split: np.cumsum(rng.choice([1, 2, 5], n)) % alphabet
        for split, n in (("train", 20_000), ("val", 3_000))
    }
    chars = [chr(ord("A") + i) for i in range(alphabet)]
    return write_ids(
        folder, dict(tokenizer="chars", vocab_size=alphabet, eot=None, chars=chars), splits
    )


# --------------------------------------------------------------------------------------------- runs


def flags(**changes) -> list:
    """Command-line flags of a tiny run."""
    return [f"--{name}={value}" for name, value in (TINY | changes).items()]


def call(main, *argv) -> int:
    """The exit code of a command's `main` in this process, for this command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program.py", *map(str, argv)])
        try:
            return main()
        except SystemExit as e:
            return e.code


def run(**changes) -> int:
    """train.py in this process; the exit code. A dataset and an out_dir are wanted."""
    import train

    return call(train.main, *flags(**changes))


def resume(out_dir: Path, dataset: Path, **changes) -> int:
    """Continue a tiny run in this process, to step 30; the exit code."""
    return run(
        **dict(dict(out_dir=out_dir, dataset=dataset, max_iters=30, init_from="resume"), **changes)
    )


@contextmanager
def quick_runs():
    """Runs without what takes time and is not tested: the loss curve, asking git, the walk of the
    garbage collector through all that tests have left, and stacks that torch.manual_seed notes for
    absent GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        # pytest runs in the background of a shell's script
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        patch.setattr("train.draw_loss", lambda *_: None)
        patch.setattr(
            "train.gc",
            SimpleNamespace(**dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: None)),
        )
        patch.setattr("nanodnt.run.directory.run_record", RECORD.copy)
        patch.setattr("nanodnt.run.directory.copy_code", lambda target: None)
        for device in ("cuda", "xpu", "mtia") * (not torch.cuda.is_available()):
            patch.setattr(f"torch.{device}._is_in_bad_fork", lambda: True)
        yield


# -------------------------------------------------------------------------------- what a run leaves


def metrics(out_dir: Path) -> list:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def bare(row: dict) -> dict:
    """A row without what depends on the machine."""
    return {k: v for k, v in row.items() if k not in MACHINE}


def logged(out_dir: Path) -> list:
    """One (step, values that do not depend on the machine) a row."""
    return [(row["step"], bare(row)) for row in metrics(out_dir)]


def column(out_dir: Path, name: str) -> dict:
    """{step: value} of a field of metrics.jsonl."""
    return {row["step"]: row[name] for row in metrics(out_dir) if name in row}


def load(path: Path) -> dict:
    """A checkpoint, read without the code under test; of a sharded one, the rows of all processes
    are joined."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    about = isinstance(checkpoint, dict) and checkpoint.get("shards")
    if not about:
        return checkpoint

    def join(value, at, pieces):
        if isinstance(value, dict):
            return {key: join(part, f"{at}/{key}", pieces) for key, part in value.items()}
        if not torch.is_tensor(value):
            return value
        its = [shard[at] for shard in pieces if at in shard]
        return its[0] if at in about["whole"] else torch.cat(its)

    for part in ("model", "optimizer"):
        files = [
            path.parent / "shards" / f"{about['name']}.{rank}.{part}.pt"
            for rank in range(about["count"])
        ]
        pieces = [torch.load(file, weights_only=True)["tensors"] for file in files]
        checkpoint[part] = join(checkpoint[part], f"/{part}", pieces)
    return checkpoint


def tensors(value, name="") -> dict:
    """{path: tensor} of every tensor in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    return {k: t for key, part in pairs for k, t in tensors(part, f"{name}/{key}").items()}


def bits(value) -> dict:
    """{path: (dtype, shape, bytes)} of every tensor in nested dicts and lists."""
    return {
        name: (t.dtype, t.shape, t.detach().numpy().tobytes()) for name, t in tensors(value).items()
    }


def different(a, b) -> list:
    """Names of the tensors that are not the same, bit by bit, in both."""
    a, b = bits(a), bits(b)
    assert a or b
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


def assert_same_run(one: Path, other: Path) -> None:
    """Two run directories that hold the same run: parameters, optimizer state, counters, logged
    values."""
    a, b = load(one / "last.pt"), load(other / "last.pt")
    assert different(a["model"], b["model"]) == []
    assert different(a["optimizer"]["state"], b["optimizer"]["state"]) == []
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    for name in ("step", "tokens", "skipped", "best_val_loss", "evaluated", "scaler"):
        assert a[name] == b[name], name
    assert logged(one) == logged(other)


def evaluated(capsys) -> float:
    """The validation loss that was printed (to six digits)."""
    return float(re.search(r"validation loss ([\d.]+)", capsys.readouterr().out)[1])


def damage(path: Path, content: bytes = b"damaged") -> None:
    """Replace a file. What else is the same file, as best.pt may be, stays as it is."""
    path.unlink()
    path.write_bytes(content)


def contents(folder: Path, pattern: str = "**/*") -> dict:
    """{path in `folder`: bytes of a file, None of a folder} of what is there."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.glob(pattern))
    }
