"""A GPT on windows of a long text."""

import math
from typing import Any

import numpy as np

from model import GPT, GPTConfig
from nanodnt.data import PreparedData
from nanodnt.data.meta import Meta
from nanodnt.settings import TrainConfig
from nanodnt.tasks.task import Placeholder, Task

MEAN_DOCUMENT = 256  # tokens of a random document, for timing


class TextTask(Task):
    kind = "text"
    row_noun = "sequence"
    other_matrices = "head"
    loss_unit = "token"

    def network(self) -> type[GPT]:
        return GPT

    def fill_from_dataset(self, config: GPTConfig, meta: Meta, dataset: str) -> None:
        config.vocab_size = config.vocab_size or meta["vocab_size"]

    def left_to_dataset(self, config: GPTConfig) -> list[str]:
        return [] if config.vocab_size else ["vocab_size"]

    def placeholder_meta(self, config: GPTConfig) -> Placeholder:
        owner = "" if config.vocab_size else "GPT-2's"
        return Placeholder({"vocab_size": 50257}, owner)

    def meaning_of_none(self, uses_dyt: bool) -> dict[str, Any]:
        return dict(dyt_bias=False, embed_scale=uses_dyt)

    def describe_size(self, config: GPTConfig) -> tuple[str, str]:
        vocabulary = f"vocabulary {config.vocab_size}, padded to {config.padded_vocab_size}"
        return f"context {config.block_size}", vocabulary

    def check_trained_meta(self, meta: Meta, path: str) -> None:
        from nanodnt.data.tokenizer import check_tokenizer

        check_tokenizer(meta, path)

    def check_data(
        self, dataset: str, meta: Meta, saved_meta: Meta | None, config: GPTConfig
    ) -> None:
        from nanodnt.data.tokenizer import same_tokenizer

        trained = str(config.vocab_size)
        fits = meta["vocab_size"] <= config.vocab_size
        if saved_meta and not same_tokenizer(meta, saved_meta):
            trained = f"{saved_meta['tokenizer']}, {saved_meta['vocab_size']}"
            fits = False
        if not fits:
            raise ValueError(
                f"dataset {dataset!r} ({meta['tokenizer']}, {meta['vocab_size']} tokens) does not "
                f"fit the model's vocabulary ({trained} tokens): choose another dataset, prepare "
                "one with the model's tokenizer (data/local/prepare.py --tokenizer=FOLDER), or "
                "start from scratch"
            )

    def open_data(self, meta: Meta, config: TrainConfig, model_config: GPTConfig) -> PreparedData:
        from nanodnt.data.windows import PreparedText

        return PreparedText(
            config.dataset, model_config.block_size, config.seed, meta, config.doc_mask
        )

    def random_batch(
        self, config: TrainConfig, model_config: GPTConfig, rows: int, step: int
    ) -> tuple[np.ndarray, ...]:
        """Tokens, drawn uniformly; with doc_mask in documents of about 256 tokens."""
        random = np.random.default_rng(step)
        tokens = random.integers(model_config.vocab_size, size=(rows, model_config.block_size + 1))
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        if not config.doc_mask:
            return inputs, targets
        from nanodnt.data.windows import document_positions

        begins = random.random(inputs.shape) < 1 / MEAN_DOCUMENT
        return inputs, targets, document_positions(begins, True)

    def finish_scores(self, scores: dict[str, float], meta: Meta) -> dict[str, float]:
        """Adds val_bpb, bits per byte, from the mean bytes per token of the validation split.
        Examples, and datasets of an older version, have no count of bytes."""
        n_bytes = meta.get("val_text_bytes")
        if not n_bytes:
            return scores
        tokens = meta["splits"]["val"]["tokens"]
        return scores | {"val_bpb": scores["val_loss"] / math.log(2) * tokens / n_bytes}
