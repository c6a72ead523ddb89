"""The way to the rest of the world: models and tokenizers of Hugging Face, evaluation,
conversations."""

import nanodnt  # noqa: F401  # says in one line what this machine lacks
