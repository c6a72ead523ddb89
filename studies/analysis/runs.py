"""A run's checkpoints, or a model of Hugging Face, and the validation data that they are measured
on."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from interop.evaluation.inputs import open_text
from interop.evaluation.scoring import Example
from model import GPTConfig, Transformer
from nanodnt.data import PreparedData, folder_of, load_meta
from nanodnt.run.checkpoints import fingerprint, load_checkpoint
from nanodnt.settings import TrainConfig
from nanodnt.tasks import open_data, task_of, task_of_data
from nanodnt.weights import load_pretrained, model_from_checkpoint
from studies.analysis.settings import AnalyzeConfig

MICRO_TOKENS = 4096  # tokens of one forward and backward pass: bounds memory
# Largest window, in tokens, for a model of Hugging Face: our choice. Its context can be far longer.
LONGEST = 1024
# Number of tokens that scatter and jacobian read of a sequence: our choice. The Jacobian is that of
# one of them, or of an image.
WINDOW = 128

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Snapshot(NamedTuple):
    model: Transformer  # in fp32 and eval mode, on the device
    step: int


class CheckpointedRun:
    """A run directory, or one checkpoint file in it, and the data that it is measured on."""

    def __init__(self, path: Path, name: str, config: AnalyzeConfig, device: torch.device) -> None:
        self.name = name
        self.config = config
        self.device = device
        self.folder = path if path.is_dir() else path.parent
        kept = {-1: path}
        if path.is_dir():
            kept = kept_steps(path)
            last = path / "last.pt"
            if last.exists():
                kept[load_checkpoint(last)["step"]] = last
            if not kept:
                others = ", ".join(sorted(fingerprint(path))) or "no checkpoint at all"
                raise ValueError(
                    f"{path} holds neither last.pt nor step_N.pt ({others}): name a run or a "
                    "checkpoint"
                )
        self.snapshots = pick_evenly([kept[step] for step in sorted(kept)], config.snapshots)
        checkpoint = load_checkpoint(self.snapshots[-1])
        trained_on = checkpoint["meta"]
        self.train_config = checkpoint["train_config"]
        self.model_config = GPTConfig(**checkpoint["model_config"])
        self.block_size = self.model_config.block_size
        self.images = bool(task_of(self.model_config).counted_row)
        dataset = config.dataset or self.train_config["dataset"]
        self.data = open_validation(dataset, self.model_config, trained_on, path)
        if self.data.splits["val"] != trained_on.get("splits", {}).get("val"):
            print(
                f"note: {name}: {dataset!r} has another validation split than the data of its "
                "training"
            )
        if self.train_config.get("doc_mask"):
            print(
                f"note: {name} was trained with doc_mask; here the documents of a row see each "
                "other"
            )

    def load(self, path: Path) -> Snapshot:
        checkpoint = load_checkpoint(path)
        model = model_from_checkpoint(checkpoint).to(self.device)
        return Snapshot(model, checkpoint["step"])

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A new random generator with the seed of the configuration."""
        return torch.Generator(device).manual_seed(self.config.seed)


def open_validation(
    dataset: str, config: GPTConfig, trained_on: dict[str, Any], source: Path | str
) -> PreparedData:
    """The prepared dataset, for the model `source` of this config, whose training data has the
    meta.json `trained_on`. ValueError where they do not fit."""
    task = task_of(config)
    meta = load_meta(dataset)
    reads = task_of_data(meta).reads
    if reads != task.reads:
        raise ValueError(
            f"dataset {dataset!r} is of {reads}, {source} of {task.reads}: choose another --dataset"
        )
    task.check_data(dataset, meta, trained_on, config)
    return open_data(TrainConfig(dataset=dataset), config, meta)


class PretrainedModel(CheckpointedRun):
    """A folder or name of Hugging Face in place of a run: it has one checkpoint, and no record of
    its training. It is measured on the text file `config.dataset`, or on a prepared dataset with
    its tokenizer, in windows of its context, at most LONGEST tokens."""

    train_config = {}

    def __init__(self, path: Path, name: str, config: AnalyzeConfig, device: torch.device) -> None:
        if not config.dataset:
            raise ValueError(
                "init_from needs --dataset=FILE: a text (UTF-8), or a dataset with the model's "
                "tokenizer"
            )
        self.name = name
        self.config = config
        self.device = device
        self.folder = None
        self.snapshots = [path]
        self.images = False
        trained = load_pretrained(config.init_from, LONGEST)
        self.model = trained.model
        self.block_size = trained.model.config.block_size
        path = Path(config.dataset)
        if not path.is_file() and (folder_of(config.dataset).is_dir() or path.is_dir()):
            self.data = open_validation(
                config.dataset, trained.model.config, trained.meta, config.init_from
            )
            return
        examples = open_text(config.dataset, 0, trained).examples
        windows = [example for example in examples if len(example.inputs) == self.block_size]
        self.data = Windows(windows, self.block_size)
        if not windows:
            few = f"{len(examples[0].targets)} tokens, too few"
            raise ValueError(
                f"{config.dataset} has {few} for a window of {self.block_size}: name a longer text"
            )

    def load(self, path: Path) -> Snapshot:
        return Snapshot(self.model.to(self.device), 0)


class Windows(PreparedData):
    """Examples of one length in memory, in place of the windows of a prepared dataset."""

    def __init__(self, examples: list[Example], block_size: int) -> None:
        self.examples = examples
        self.block_size = block_size
        self.n_val = len(examples)

    def val_batch(self, chosen: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.stack([self.examples[i].inputs for i in chosen])
        targets = np.stack([self.examples[i].targets for i in chosen])
        return inputs, targets


class Batches:
    """At most `tokens` tokens of a run's validation data, and at least one sequence: evenly spread
    windows, each cut to its first `length` tokens if that is given, or images.

    An iterable of (inputs, targets) on the run's device, of MICRO_TOKENS tokens or less, each read
    when it is its turn. `count`: {"tokens": number}, or {"images": number}."""

    def __init__(self, run: CheckpointedRun, tokens: int, length: int = 0) -> None:
        if run.images or not length:  # an image cannot be cut
            length = run.block_size
        self.run = run
        self.length = min(length, run.block_size)
        self.starts = run.data.validation(max(1, tokens // self.length) * run.block_size)
        if run.images:
            self.count = {"images": len(self.starts)}
        else:
            self.count = {"tokens": len(self.starts) * self.length}

    def __iter__(self) -> Iterator[Batch]:
        rows = max(1, MICRO_TOKENS // self.run.block_size)
        for first in range(0, len(self.starts), rows):
            chosen = self.starts[first : first + rows]
            batch = self.run.data.val_batch(chosen, len(chosen))
            inputs, targets = (torch.from_numpy(part).to(self.run.device) for part in batch)
            if not self.run.images:
                inputs = inputs[:, : self.length]
                targets = targets[:, : self.length]
            yield inputs, targets


def target_shares(batches: Iterable[Batch]) -> list[float]:
    """Each batch's share of all targets that are not ignored (-1). ValueError if all are."""
    counts = [int((targets != -1).sum()) for _, targets in batches]
    total = sum(counts)
    if not total:
        raise ValueError("every target is ignored (-1): give at least one that is not")
    return [count / total for count in counts]


def kept_steps(folder: Path) -> dict[int, Path]:
    """{step: path} of the checkpoints step_N.pt, in their order."""
    kept = {}
    for path in folder.glob("step_*.pt"):
        number = path.stem.removeprefix("step_")
        if number.isdigit():
            kept[int(number)] = path
    return dict(sorted(kept.items()))


def pick_evenly(items: Sequence, most: int) -> Sequence:
    """At most `most` of the items, evenly spread; always the last, and the first if `most` is at
    least 2."""
    if len(items) <= most:
        return items
    if most == 1:
        return [items[-1]]
    stride = (len(items) - 1) / (most - 1)
    return [items[round(i * stride)] for i in range(most)]
