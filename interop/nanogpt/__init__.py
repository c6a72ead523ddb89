"""What nanoGPT has written: token ids in tokens.py, checkpoints in weights.py."""
