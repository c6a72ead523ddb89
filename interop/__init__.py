"""The way to the rest of the world: models and tokenizers of Hugging Face, evaluation, conversations."""
