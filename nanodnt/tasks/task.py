"""What a task answers for."""

import torch

from model import GPTConfig, Transformer


class Task:
    """Everything that depends on what a model is trained on. It holds no state."""

    kind: str  # of its datasets, in meta.json
    reads: str  # what its network reads: a dataset fits a network if both read the same
    rows: str  # what a batch has: "sequences", say
    loss_unit: str  # what a loss is the mean over: "token", say

    # ---------------------------------------------------------------------------------------------------- network

    def network(self) -> type[Transformer]:
        """The class of network."""
        raise NotImplementedError

    def fit(self, config: GPTConfig, meta: dict, dataset: str) -> None:
        """Fill in what a config leaves to the dataset, in place. ValueError where they do not fit each other."""
        raise NotImplementedError

    def left_to_dataset(self, config: GPTConfig) -> list:
        """The fields that `fit` will fill in."""
        raise NotImplementedError

    def stand_in(self, config: GPTConfig) -> tuple:
        """(a meta for `fit` where there is no dataset, whose values these are). What the config says itself, stays."""
        raise NotImplementedError

    def meaning_of_none(self, uses_dyt: bool) -> dict:
        """What None means in a config of this task: {field: value}."""
        raise NotImplementedError

    def describe_size(self, config: GPTConfig) -> tuple:
        """(the size of a row, what the network reads), in words."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- data

    def check_data(self, dataset: str, meta: dict, saved_meta: dict | None, config: GPTConfig) -> None:
        """ValueError unless the dataset (meta) means what a model was trained on (saved_meta, where that is known)."""
        raise NotImplementedError

    def open_data(self, meta: dict, config, model_config: GPTConfig):
        """The dataset of a TrainConfig, cut into what the model reads at once. ValueError for settings of another
        task."""
        raise NotImplementedError

    def step_rows(self, batch_size: int) -> dict:
        """{field of a row of metrics.jsonl that is a speed: what a step has of it}, besides tokens."""
        return {}

    # ------------------------------------------------------------------------------------------------- evaluation

    def count_scores(self, logits, loss, targets) -> tuple:
        """(how many targets count, {score: its sum over them}) of one batch, tensors. `evaluate` adds and divides."""
        count, wide = (targets != -1).sum(), torch.float32 if loss.device.type == "mps" else torch.float64
        return count, {"val_loss": loss.to(wide) * count}  # mps has no fp64
