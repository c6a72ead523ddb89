"""What a task answers for, and what text answers: a GPT on windows of a long text, or on packed
examples."""

import math

import numpy as np
import torch

from model import GPT, GPTConfig, Transformer
from nanodnt.data.windows import PreparedText, document_positions


class Task:
    """Everything that depends on what a model is trained on. It holds no state. Another task than
    text is a subclass: it must answer all of this for itself, but for the last two methods."""

    reads = "text"  # what its network reads: a dataset fits a network if both read the same
    row_noun = "sequences"  # what a batch has
    counted_row = ""  # a row, where they are counted beside tokens: "image"
    other_matrices = "head"  # the matrices of the network besides those of the blocks, in words
    loss_unit = "token"  # what a loss is the mean over

    def network(self) -> type[Transformer]:
        """The class of network."""
        return GPT

    def fill_from_dataset(self, config: GPTConfig, meta: dict, dataset: str) -> None:
        """Fill in what a config leaves to a dataset of what the network reads. ValueError where
        they do not fit."""
        config.vocab_size = config.vocab_size or meta["vocab_size"]

    def left_to_dataset(self, config: GPTConfig) -> list:
        """The fields that `fill_from_dataset` will fill in."""
        return [] if config.vocab_size else ["vocab_size"]

    def placeholder_meta(self, config: GPTConfig) -> tuple:
        """(what `fill_from_dataset` reads of a meta.json, where there is no dataset; whose values
        these are, in words, or "" where the config says all of them itself)."""
        return dict(vocab_size=50257), "" if config.vocab_size else "GPT-2's"

    def meaning_of_none(self, uses_dyt: bool) -> dict:
        """What None means in a config of this task: {field: value}."""
        return dict(dyt_bias=False, embed_scale=uses_dyt)

    def describe_size(self, config: GPTConfig) -> tuple:
        """(the size of a row, what the network reads), in words."""
        words = f"vocabulary {config.vocab_size}, padded to {config.padded_vocab_size}"
        return f"context {config.block_size}", words

    def check_trained_meta(self, meta: dict, path) -> None:
        """ValueError unless a checkpoint's copy of a meta.json, at `path`, says what the model
        reads."""
        from nanodnt.data.tokenizer import check_tokenizer

        check_tokenizer(meta, path)

    def check_data(
        self, dataset: str, meta: dict, saved_meta: dict | None, config: GPTConfig
    ) -> None:
        """ValueError unless the dataset (meta) means what a model was trained on (saved_meta, where
        that is known)."""
        from nanodnt.data.tokenizer import same_tokenizer

        different = saved_meta and not same_tokenizer(meta, saved_meta)
        if different or meta["vocab_size"] > config.vocab_size:
            trained = (
                f"{saved_meta['tokenizer']}, {saved_meta['vocab_size']}"
                if different
                else config.vocab_size
            )
            what = f"dataset {dataset!r} ({meta['tokenizer']}, {meta['vocab_size']} tokens) does not fit the model's"
            other = "another dataset, prepare one with the model's tokenizer (data/local/prepare.py --tokenizer=FOLDER)"
            raise ValueError(
                f"{what} vocabulary ({trained} tokens): choose {other}, or start from scratch"
            )

    def open_data(self, meta: dict, config, model_config: GPTConfig):
        """The dataset of a TrainConfig, a `PreparedData`, whose rows the model reads."""
        kind = PreparedText
        # conversations packed into rows, of which the answers alone count
        if meta.get("kind") == "examples":
            from nanodnt.data.examples import PreparedExamples as kind
        return kind(config.dataset, model_config.block_size, config.seed, meta, config.doc_mask)

    def random_batch(self, config, model_config: GPTConfig, rows: int, step: int) -> tuple:
        """What a dataset's `batch` returns, drawn at random, for timing; with doc_mask in documents
        of about 256."""
        random = np.random.default_rng(step)
        tokens = random.integers(model_config.vocab_size, size=(rows, model_config.block_size + 1))
        batch = tokens[:, :-1], tokens[:, 1:]
        if not config.doc_mask:
            return batch
        return *batch, document_positions(random.random(batch[0].shape) < 1 / 256, True)

    # ------------------------------------------------------------------------------------ what subclasses may leave

    def step_counts(self, batch_size: int) -> dict:
        """{field of metrics.jsonl that is a speed: what a step has of it}, besides tokens."""
        return {}

    def count_scores(self, logits, loss, targets) -> tuple:
        """(how many targets count, {score: its sum over them}) of one batch, tensors. `evaluate`
        adds and divides. One score is val_loss, and lower is better."""
        count, wide = (
            (targets != -1).sum(),
            torch.float32 if loss.device.type == "mps" else torch.float64,
        )
        return count, {"val_loss": loss.to(wide) * count}  # mps has no fp64

    def finish_scores(self, scores: dict, meta: dict) -> dict:
        """Mean scores, and what follows from them: of a text val_bpb, bits per byte, by the mean
        bytes of a token of the whole validation split. Datasets of an older version, and examples,
        say nothing of bytes."""
        if not (n_bytes := meta.get("val_text_bytes")):
            return scores
        tokens = meta["splits"]["val"]["tokens"]
        return scores | {"val_bpb": scores["val_loss"] / math.log(2) * tokens / n_bytes}
