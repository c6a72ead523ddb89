"""Evaluation of trained models (`evaluate.py`) on any text, and on the tasks of
lm-evaluation-harness; tables of several runs."""
