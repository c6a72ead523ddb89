"""nanoGPT's network and its initial weights: Pre-LN with LayerNorm, the exact GELU, learned
positions, a tied head, no biases. Put it after a config of any size.

    python train.py config/gpt2_small.py config/nanogpt/network.py --out_dir=out/gpt2_small_nanogpt
    python train.py config/quickstart.py config/nanogpt/network.py --out_dir=out/quick_nanogpt

From nanoGPT's model.py (commit 3adf61e). Sizes and dropout are those of the file before it. Biases
are a flag there too, bias=False in its train.py. Initial weights: N(0, 0.02²), times 1/√(2L) on the
last matrix of a branch, gains 1, biases 0. What differs: GPT-2's vocabulary is padded to 50304, as
there, but others are padded to a multiple of 64 too.
"""

norm = "layernorm"
norm_eps = 1e-5
mlp = "gelu_erf"
pos = "learned"
tie_weights = True
bias = False

init = "normal"
init_std = 0.02
residual_init = "gpt2"

# Off: what nanoGPT does not have.
n_kv_head = 0
head_size = 0
n_ff = 0
drop_path = 0.0
rope_theta = 10000.0
patch_size = 0
n_expert = 0
n_expert_active = 2
n_expert_shared = 0
router = "softmax"
router_norm = True
router_scale = 1.0
balance = "loss"
norm_groups = 1
pre_norm = "both"
mid_norm = "none"
post_norm = "none"
post_norm_blocks = 0
pre_norm_sublayers = 0
input_norm = False
qk_norm = False
qk_norm_over = "head"
v_norm = False
dyt_alpha_attn = None
dyt_alpha_other = None
dyt_learn_alpha = True
dyt_squash = "tanh"
dyt_shift = False
dyt_bias = None
embed_scale = False
skip_scale = 1.0
tied_skip = False
gpas = False
unit_rows = False
lns = "off"
lns_power = 0.5
lns_branches = "both"
lns_learn = False
deepnorm = False
admin = False
branch_scale = "none"
branch_scale_init = None
fixup = False
sigma_reparam = False
gain = "shared"
gain_out = "none"
gain_param = "direct"
parametrization = "standard"
base_n_embd = 0
base_n_layer = 0
base_head_size = 0
