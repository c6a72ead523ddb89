"""A GPT on examples: conversations packed into rows, of which the answers alone count in the loss."""

from nanodnt.tasks.text import Text


class Examples(Text):
    kind = "examples"

    def dataset(self):
        from nanodnt.data.examples import PreparedExamples

        return PreparedExamples
