"""Timing of the training step: what bench.py is made of."""
