"""The papers' figures of runs, and comparisons of runs (`analyze.py`). pipeline.py measures, draws
and writes.

gradients.py, norms.py and streams.py work on any model: a GPT or a ViT in eval mode, computing in
fp32 or better. `batches` are read in turn, again each time: pairs (inputs, targets) on the model's
device. Inputs are token ids (B, T), and targets (B, T) the next ones, −1 = ignored; or images (B,
channels, S, S), and targets (B,) their classes. Results are Python floats, lists and dicts, or CPU
tensors; nan stands for what is not defined. Nothing changes the model. Parameters are sorted by the
module that holds them, never by their names.
"""
