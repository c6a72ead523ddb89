"""What a task answers for."""

import torch

from model import GPTConfig, Transformer


class Task:
    """Everything that depends on what a model is trained on. It holds no state."""

    reads: str  # what its network reads: a dataset fits a network if both read the same
    how_chosen: str  # what a user does to get its network
    row_noun: str  # what a batch has: "sequences", say
    counted_row: str = ""  # a row, where they are counted beside tokens: "image"
    ends: str = "head"  # the matrices of the network besides those of the blocks, in words
    loss_unit: str  # what a loss is the mean over: "token", say

    # ---------------------------------------------------------------------------------------------------- network

    def network(self) -> type[Transformer]:
        """The class of network."""
        raise NotImplementedError

    def fill_from_dataset(self, config: GPTConfig, meta: dict, dataset: str) -> None:
        """Fill in what a config leaves to a dataset of what the network reads. ValueError where they do not fit."""
        raise NotImplementedError

    def left_to_dataset(self, config: GPTConfig) -> list:
        """The fields that `fill_from_dataset` will fill in."""
        raise NotImplementedError

    def placeholder_meta(self, config: GPTConfig) -> tuple:
        """(what `fill_from_dataset` reads of a meta.json, where there is no dataset; whose values these are, in words,
        or "" where the config says all of them itself)."""
        raise NotImplementedError

    def meaning_of_none(self, uses_dyt: bool) -> dict:
        """What None means in a config of this task: {field: value}."""
        raise NotImplementedError

    def describe_size(self, config: GPTConfig) -> tuple:
        """(the size of a row, what the network reads), in words."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- data

    def check_trained_meta(self, meta: dict, path) -> None:
        """ValueError unless a checkpoint's copy of a meta.json, at `path`, says what the model reads."""
        raise NotImplementedError

    def check_data(self, dataset: str, meta: dict, saved_meta: dict | None, config: GPTConfig) -> None:
        """ValueError unless the dataset (meta) means what a model was trained on (saved_meta, where that is known)."""
        raise NotImplementedError

    def open_data(self, meta: dict, config, model_config: GPTConfig):
        """The dataset of a TrainConfig, a `PreparedData`, whose rows the model reads."""
        raise NotImplementedError

    def random_batch(self, config, model_config: GPTConfig, rows: int, step: int) -> tuple:
        """What a dataset's `batch` returns, drawn at random by numpy: for timing where there is no dataset."""
        raise NotImplementedError

    def step_counts(self, batch_size: int) -> dict:
        """{field of metrics.jsonl that is a speed: what a step has of it}, besides tokens."""
        return {}

    # ------------------------------------------------------------------------------------------------- evaluation

    def count_scores(self, logits, loss, targets) -> tuple:
        """(how many targets count, {score: its sum over them}) of one batch, tensors. `evaluate` adds and divides. One
        score is val_loss, and lower is better."""
        count, wide = (targets != -1).sum(), torch.float32 if loss.device.type == "mps" else torch.float64
        return count, {"val_loss": loss.to(wide) * count}  # mps has no fp64
