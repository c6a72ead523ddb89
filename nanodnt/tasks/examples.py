"""A GPT on examples: conversations packed into rows, of which the answers alone count in the loss."""

from nanodnt.tasks.text import TextTask


class ExamplesTask(TextTask):
    def dataset(self):
        from nanodnt.data.examples import PreparedExamples

        return PreparedExamples
