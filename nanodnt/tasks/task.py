"""The contract of a task: everything that depends on the kind of training data."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from model import GPTConfig, Transformer
from nanodnt.data import PreparedData
from nanodnt.data.meta import KINDS, Meta
from nanodnt.settings import TrainConfig


class Placeholder(NamedTuple):
    """A stand-in for the meta.json of a dataset that is not prepared."""

    meta: Meta  # the entries that `fill_from_dataset` reads
    owner: str  # source of these values, such as "GPT-2's"; empty if the config sets them all


class Scores(NamedTuple):
    """Scores of one batch."""

    count: Tensor  # number of targets that count
    sums: dict[str, Tensor]  # sum of each score over them, by the name in metrics.jsonl


class Task:
    """A kind of dataset, and the network for it. It holds no state."""

    kind: str  # row of KINDS in nanodnt/data/meta.py
    row_noun: str  # a row of a batch, in words: "sequence"
    counted_row = ""  # a row, where rows are counted beside tokens: "image"
    other_matrices: str  # the network's matrices outside the blocks, in words: "head"
    loss_unit: str  # unit that the loss is a mean over: "token"

    @property
    def reads(self) -> str:
        """Input of the network: "text" or "images". A dataset fits a network if both read the
        same."""
        return KINDS[self.kind].reads

    def network(self) -> type[Transformer]:
        """The class of the network."""
        raise NotImplementedError

    def fill_from_dataset(self, config: GPTConfig, meta: Meta, dataset: str) -> None:
        """Set the fields that a config leaves to the dataset. ValueError where they do not fit."""
        raise NotImplementedError

    def left_to_dataset(self, config: GPTConfig) -> list[str]:
        """The fields that `fill_from_dataset` sets."""
        raise NotImplementedError

    def placeholder_meta(self, config: GPTConfig) -> Placeholder:
        """A meta.json for commands that need no dataset."""
        raise NotImplementedError

    def meaning_of_none(self, uses_dyt: bool) -> dict[str, Any]:
        """The values that fields of GPTConfig have where they are None."""
        raise NotImplementedError

    def describe_size(self, config: GPTConfig) -> tuple[str, str]:
        """The size of a row, and the vocabulary or images, in words."""
        raise NotImplementedError

    def check_trained_meta(self, meta: Meta, path: str) -> None:
        """ValueError unless a checkpoint's copy of a meta.json describes the model's input."""
        raise NotImplementedError

    def check_data(
        self, dataset: str, meta: Meta, saved_meta: Meta | None, config: GPTConfig
    ) -> None:
        """ValueError unless a dataset fits a trained model, and its own dataset (`saved_meta`, if
        that is known)."""
        raise NotImplementedError

    def open_data(self, meta: Meta, config: TrainConfig, model_config: GPTConfig) -> PreparedData:
        """The dataset of a TrainConfig, in rows for the model."""
        raise NotImplementedError

    def random_batch(
        self, config: TrainConfig, model_config: GPTConfig, rows: int, step: int
    ) -> tuple[np.ndarray, ...]:
        """Random arrays of the shapes of a dataset's `batch`, for timing."""
        raise NotImplementedError

    # Defaults that a task may keep.

    def step_counts(self, batch_size: int) -> dict[str, int]:
        """Counts of one step besides tokens, by the field of metrics.jsonl for their speed."""
        return {}

    def count_scores(self, logits: Tensor | None, loss: Tensor, targets: Tensor) -> Scores:
        """Scores of one batch, which `evaluate` adds up and divides by their count.

        `logits` is None where the network gives only the loss. One score is val_loss, the loss in
        nats; lower is better."""
        count = (targets != -1).sum()
        dtype = torch.float64
        if loss.device.type == "mps":  # has no fp64
            dtype = torch.float32
        return Scores(count, {"val_loss": loss.to(dtype) * count})

    def finish_scores(self, scores: dict[str, float], meta: Meta) -> dict[str, float]:
        """The mean scores, and others that follow from them."""
        return scores
