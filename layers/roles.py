"""Roles of parameters. Optimizers, weight decay and diagnostics go by these, never by parameter
names."""

BLOCK_ROLES = ("qk", "vo", "ffn")  # the matrices inside the blocks but routers; experts are ffn
# pos: the class token of images too
MATRICES = ("emb", "patch", "pos", "head", *BLOCK_ROLES, "router")
# gain_in: scale vectors followed by a linear map; gain_out: the others; gain_dir: the directions α
# of gains stored as magnitude and direction, which never decay; balance: the biases on the choice
# of experts, which no loss trains
ROLES = (*MATRICES, "gain_in", "gain_out", "gain_dir", "scalar", "bias", "balance")
# gains that the scale vector paper does not call input or output: those after v and SwiGLU's up,
# which o and down could absorb, and the final norm's, which a tied head could not
OPEN_GAINS = ("v", "up", "final")
