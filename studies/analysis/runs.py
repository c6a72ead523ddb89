"""A run's checkpoints, or a model of Hugging Face, and the validation data that they are measured
on."""

from pathlib import Path

import numpy as np
import torch

from interop.evaluation.inputs import open_text
from model import GPTConfig
from nanodnt.data import PreparedData, folder_of, load_meta
from nanodnt.run.checkpoints import fingerprint, load_checkpoint
from nanodnt.settings import TrainConfig
from nanodnt.tasks import open_data, task_of, task_of_data
from nanodnt.weights import load_pretrained, model_from_checkpoint

MICRO_TOKENS = 4096  # tokens of one forward and backward pass: bounds memory
LONGEST = 1024  # tokens of a window of a model of Hugging Face, whose context can be far longer [I]
# scatter and jacobian read so many tokens of a sequence; jacobian is of one of them, or of an image
# [I]
WINDOW = 128


class CheckpointedRun:
    """A run directory, or one checkpoint file in it, and the data it is measured on. `config`: an
    AnalyzeConfig."""

    def __init__(self, path: Path, name: str, config, device: torch.device):
        self.name, self.config, self.device = name, config, device
        self.folder = path if path.is_dir() else path.parent
        kept = {-1: path}
        if path.is_dir():
            kept = kept_steps(path)
            last = path / "last.pt"
            if last.exists():
                kept[load_checkpoint(last)["step"]] = last
            if not kept:
                there = ", ".join(sorted(fingerprint(path))) or "no checkpoint at all"
                raise ValueError(
                    f"{path} holds neither last.pt nor step_N.pt ({there}): name a run or a checkpoint"
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
                f"note: {name}: {dataset!r} has another validation split than the data of its training"
            )
        if self.train_config.get("doc_mask"):
            print(
                f"note: {name} was trained with doc_mask; here the documents of a row see each other"
            )

    def load(self, path: Path) -> tuple:
        """(model in eval mode, fp32, on the device; step)."""
        checkpoint = load_checkpoint(path)
        return model_from_checkpoint(checkpoint).eval().to(self.device), checkpoint["step"]

    def generator(self, device="cpu") -> torch.Generator:
        """A new random generator with the seed of the configuration."""
        return torch.Generator(device).manual_seed(self.config.seed)


def open_validation(dataset: str, config: GPTConfig, trained_on: dict, source) -> PreparedData:
    """The prepared dataset, for the model `source` of this config, trained on `trained_on`, a
    meta.json. ValueError where they do not fit."""
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

    def __init__(self, path: Path, name: str, config, device: torch.device):
        if not config.dataset:
            raise ValueError(
                "init_from needs --dataset=FILE: a text (UTF-8), or a dataset with the model's tokenizer"
            )
        self.name, self.config, self.device = name, config, device
        self.folder, self.snapshots, self.images = None, [path], False
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
        self.data = Windows(
            [its for its in examples if len(its.inputs) == self.block_size], self.block_size
        )
        if not self.data.n_val:
            few = f"{len(examples[0].targets)} tokens, too few"
            raise ValueError(
                f"{config.dataset} has {few} for a window of {self.block_size}: name a longer text"
            )

    def load(self, path: Path) -> tuple:
        return self.model.to(self.device), 0


class Windows(PreparedData):
    """`Example`s of interop of one length, for what a `PreparedData` reads from a dataset."""

    def __init__(self, examples: list, block_size: int):
        self.examples, self.block_size, self.n_val = examples, block_size, len(examples)

    def val_batch(self, chosen: np.ndarray, size: int) -> tuple:
        return tuple(
            np.stack([getattr(self.examples[i], part) for i in chosen])
            for part in ("inputs", "targets")
        )


class Batches:
    """At most `tokens` tokens of a run's validation data: evenly spread windows, of each the first
    `length` if given, or images; at least one. An iterable of (inputs, targets) on the run's
    device, of MICRO_TOKENS tokens or less, each read when it is its turn. `count`: how much it is,
    {"tokens": number}, or {"images": number}."""

    def __init__(self, run: CheckpointedRun, tokens: int, length: int = 0):
        whole = run.images or not length or length > run.block_size  # an image cannot be cut
        self.run, self.length = run, run.block_size if whole else length
        self.starts = run.data.validation(max(1, tokens // self.length) * run.block_size)
        self.count = (
            {"images": len(self.starts)}
            if run.images
            else {"tokens": len(self.starts) * self.length}
        )

    def __iter__(self):
        rows = max(1, MICRO_TOKENS // self.run.block_size)
        for first in range(0, len(self.starts), rows):
            chosen = self.starts[first : first + rows]
            batch = self.run.data.val_batch(chosen, len(chosen))
            inputs, targets = (torch.from_numpy(part).to(self.run.device) for part in batch)
            yield (
                (inputs, targets)
                if self.run.images
                else (inputs[:, : self.length], targets[:, : self.length])
            )


def target_shares(batches) -> list:
    """Each batch's share of all targets that are not ignored (-1). ValueError if all are."""
    counts = [int((targets != -1).sum()) for _, targets in batches]
    if not sum(counts):
        raise ValueError("every target is ignored (-1): give at least one that is not")
    return [count / sum(counts) for count in counts]


def kept_steps(folder: Path) -> dict:
    """{step: path} of the checkpoints step_N.pt, in their order."""
    found = {
        int(path.stem[5:]): path for path in folder.glob("step_*.pt") if path.stem[5:].isdigit()
    }
    return dict(sorted(found.items()))


def pick_evenly(items: list, most: int) -> list:
    """At most `most` of the items, evenly spread; always the last, and the first if `most` is at
    least 2."""
    if len(items) <= most:
        return items
    return (
        [items[-1]]
        if most == 1
        else [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
    )
