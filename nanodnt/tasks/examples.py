"""A GPT on conversations packed into rows, of which only the answers count in the loss."""

from model import GPTConfig
from nanodnt.data.examples import PreparedExamples
from nanodnt.data.meta import Meta
from nanodnt.settings import TrainConfig
from nanodnt.tasks.text import TextTask


class ExamplesTask(TextTask):
    kind = "examples"

    def open_data(
        self, meta: Meta, config: TrainConfig, model_config: GPTConfig
    ) -> PreparedExamples:
        return PreparedExamples(
            config.dataset, model_config.block_size, config.seed, meta, config.doc_mask
        )
