"""A GPT on a long text: the next token of each token of a window."""

import numpy as np

from model import GPT, GPTConfig
from nanodnt.tasks.task import Task


class TextTask(Task):
    reads, how_chosen = "text", "leave patch_size out"
    row_noun, loss_unit = "sequences", "token"

    def network(self) -> type[GPT]:
        return GPT

    def fill_from_dataset(self, config: GPTConfig, meta: dict, dataset: str) -> None:
        """Fill in the vocabulary."""
        config.vocab_size = config.vocab_size or meta["vocab_size"]

    def left_to_dataset(self, config: GPTConfig) -> list:
        return [] if config.vocab_size else ["vocab_size"]

    def placeholder_meta(self, config: GPTConfig) -> tuple:
        return dict(vocab_size=50257), "" if config.vocab_size else "GPT-2's"

    def meaning_of_none(self, uses_dyt: bool) -> dict:
        return dict(dyt_bias=False, embed_scale=uses_dyt)

    def describe_size(self, config: GPTConfig) -> tuple:
        words = f"vocabulary {config.vocab_size}, padded to {config.padded_vocab_size}"
        return f"context {config.block_size}", words

    def check_trained_meta(self, meta: dict, path) -> None:
        from nanodnt.data.tokenizer import check_tokenizer

        check_tokenizer(meta, path)

    def check_data(self, dataset: str, meta: dict, saved_meta: dict | None, config: GPTConfig) -> None:
        from nanodnt.data.tokenizer import same_tokenizer

        different = saved_meta and not same_tokenizer(meta, saved_meta)
        if different or meta["vocab_size"] > config.vocab_size:
            trained = f"{saved_meta['tokenizer']}, {saved_meta['vocab_size']}" if different else config.vocab_size
            raise ValueError(
                f"dataset {dataset!r} ({meta['tokenizer']}, {meta['vocab_size']} tokens) does not fit the model's "
                f"vocabulary ({trained} tokens): choose another dataset, prepare one with the model's tokenizer "
                "(data/local/prepare.py --tokenizer=FOLDER), or start from scratch"
            )

    def open_data(self, meta: dict, config, model_config: GPTConfig):
        return self.dataset()(config.dataset, model_config.block_size, config.seed, meta, config.doc_mask)

    def random_batch(self, config, model_config: GPTConfig, rows: int, step: int) -> tuple:
        """With doc_mask in documents of 256 tokens on average."""
        from nanodnt.data.windows import document_positions

        random = np.random.default_rng(step)
        tokens = random.integers(model_config.vocab_size, size=(rows, model_config.block_size + 1))
        batch = tokens[:, :-1], tokens[:, 1:]
        if not config.doc_mask:
            return batch
        return *batch, document_positions(random.random(batch[0].shape) < 1 / 256, True)

    def dataset(self):
        """The class that reads a dataset."""
        from nanodnt.data.windows import PreparedText

        return PreparedText
