"""A GPT on a long text: the next token of each token of a window."""

from model import GPT, GPTConfig
from nanodnt.tasks.task import Task


class Text(Task):
    kind = reads = "text"
    rows, loss_unit = "sequences", "token"

    def network(self) -> type[GPT]:
        return GPT

    def fit(self, config: GPTConfig, meta: dict, dataset: str) -> None:
        """Fill in the vocabulary."""
        if meta.get("kind") == "images":
            raise ValueError(
                f"dataset {dataset!r} is of images, but patch_size=0 is for text: set patch_size (see config/vdnt/), "
                "or choose a dataset of text"
            )
        config.vocab_size = config.vocab_size or meta["vocab_size"]

    def left_to_dataset(self, config: GPTConfig) -> list:
        return [] if config.vocab_size else ["vocab_size"]

    def stand_in(self, config: GPTConfig) -> tuple:
        return dict(vocab_size=50257), "" if config.vocab_size else "GPT-2's"

    def meaning_of_none(self, uses_dyt: bool) -> dict:
        return dict(dyt_bias=False, embed_scale=uses_dyt)

    def describe_size(self, config: GPTConfig) -> tuple:
        words = f"vocabulary {config.vocab_size}, padded to {config.padded_vocab_size}"
        return f"context {config.block_size}", words

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
        if flags := config.image_flags():
            raise ValueError(
                f"{config.dataset!r} holds a text, and these flags are for images, leave them out: {' '.join(flags)}"
            )
        return self.dataset()(config.dataset, model_config.block_size, config.seed, meta, config.doc_mask)

    def dataset(self):
        """The class that reads a dataset."""
        from nanodnt.data.windows import PreparedText

        return PreparedText
