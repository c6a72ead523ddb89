"""A tiny base model for claims about LLaMA-like models (`python reproduce.py`): 0.3M parameters, half a minute.

    python train.py config/claims/tiny_llama.py --out_dir=out/tiny_llama
    python train.py config/claims/tiny_llama.py config/lns/lns.py --n_layer=12 --out_dir=out/tiny_lns

Like config/claims/tiny_gpt.py, but with RoPE, SwiGLU, an untied head, and without 1/√(2L) on the initial weights.
"""

out_dir = "out/tiny_llama"
dataset = "pystdlib"

n_layer = 6
n_head = 2
n_embd = 64
n_ff = 176
block_size = 64
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

batch_size = 8  # sequences a step
max_iters = 400
warmup_iters = 40
learning_rate = 4e-3

eval_interval = 100
eval_tokens = 25_000
log_interval = 20
compile = False
dtype = "float32"
