"""The parts of a network. No file here imports model.py."""
