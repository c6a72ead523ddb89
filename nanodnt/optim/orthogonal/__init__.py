"""Muon's update, loaded when a run takes its first step: update.py, its mathematics and its
messages."""
