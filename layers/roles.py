"""Names of roles. Each module says in `param_roles` which role its parameters have, and
`Network.roles` collects them. Optimizers, weight decay and diagnostics go by roles, never by names
of parameters.
"""

BLOCK_ROLES = ("qk", "vo", "ffn")  # matrices inside the blocks, without routers; experts are ffn
# "pos" is also the role of an image's class token
MATRICES = ("emb", "patch", "pos", "head", *BLOCK_ROLES, "router")

# gain_in   scale vectors followed by a linear map
# gain_out  other scale vectors
# gain_dir  directions α of gains that are stored as magnitude and direction; they never decay
# scalar    single learned factors
# bias      biases
# balance   biases on the choice of experts, which no loss trains
ROLES = (*MATRICES, "gain_in", "gain_out", "gain_dir", "scalar", "bias", "balance")

# Gains that the scale vector paper calls neither input nor output: the flag `input_gains` decides.
# v and up stand after v and after SwiGLU's up, but o and down could absorb them. final is the gain
# of the final norm: a linear map follows, but a tied head could not absorb it.
OPEN_GAINS = ("v", "up", "final")
