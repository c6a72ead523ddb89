"""Trained models evaluated (`evaluate.py`): any text, the tasks of lm-evaluation-harness, runs side
by side."""
