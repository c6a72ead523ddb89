"""Muon's update, loaded when a run takes its first step: mathematics in newton_schulz.py, the step
in update.py, messages between processes in messages.py."""
