"""Roles of parameters. Optimizers, weight decay and diagnostics go by these, never by parameter names."""

# gain_in: scale vectors followed by a linear map; gain_out: the others; gain_dir: the directions
# α of gains stored as magnitude and direction, which never decay.
ROLES = ("emb", "pos", "head", "qk", "vo", "ffn", "gain_in", "gain_out", "gain_dir", "scalar", "bias")
MATRICES = ("emb", "pos", "head", "qk", "vo", "ffn")  # roles of matrices
HIDDEN = ("qk", "vo", "ffn")  # roles of the matrices inside the blocks
