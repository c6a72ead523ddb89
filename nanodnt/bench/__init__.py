"""Timing of the training step, for bench.py."""
