"""A tiny base model for the papers' claims (`python reproduce.py`): a GPT of 0.3M parameters, half a minute of a core.

    python train.py config/claims/tiny_gpt.py --out_dir=out/tiny_gpt
    python train.py config/claims/tiny_gpt.py config/dnt/s5.py --out_dir=out/tiny_dnt

Bytes of the Python standard library's source; 400 steps of 512 tokens, so it stays far from converged. Many runs go
side by side, one on each core. The model is small enough to test every claim with several seeds, but too small to
show most of the effects.
"""

out_dir = "out/tiny_gpt"
dataset = "pystdlib"

n_layer = 6
n_head = 2
n_embd = 64
block_size = 64

batch_size = 8  # sequences a step
max_iters = 400
warmup_iters = 40
learning_rate = 4e-3

eval_interval = 100
eval_tokens = 25_000
log_interval = 20
compile = False
dtype = "float32"
