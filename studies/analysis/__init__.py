"""The papers' figures from runs, and runs compared (`analyze.py`).

    settings.py    the knobs of analyze.py, and what each figure shows
    gradients.py   gradient tails and sharpness          streams.py   residual stream, Jacobian, attention logits
    norms.py       norms, DyT's α and scale vectors      measures.py  what is measured on a run's checkpoints
    figures.py     measured numbers → figures            pipeline.py  measure, draw and write all that was asked for
    compare.py     runs side by side: table, losses      page.py      report.html

gradients.py, streams.py and norms.py hold the definitions; they work on any model, on any device. In all three, `model`
is a GPT or a ViT in eval mode, of any layout, computing in fp32 or better. `inputs` are token ids (B, T), and targets
(B, T) the next ones, −1 = ignored; or images (B, channels, S, S), and targets (B,) their classes: all on the model's
device. Where `inputs` has no type, batches of them do too, and memory does not grow with their number (`parts_of`). The
tokens of an image are its patches and the class token. Results are Python floats, lists and dicts, or CPU tensors; nan
stands for what is not defined, such as the kurtosis of zeros. Nothing changes the model. Parameters are sorted by the
module that holds them, never by their names. Marks: [I] our inference or choice, [U] not published where we could read
it.
"""
