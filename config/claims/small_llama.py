"""The base model for claims about LLaMAs on one GPU (`python reproduce.py --scale=small`): 6M parameters.

    python train.py config/claims/small_llama.py --out_dir=out/small_llama
    python train.py config/claims/small_llama.py config/lns/lns.py --n_layer=16 --out_dir=out/small_lns

Like config/claims/small_gpt.py, but with RoPE, SwiGLU, an untied head, and without 1/√(2L) on the initial weights.
"""

out_dir = "out/small_llama"
dataset = "pystdlib"

n_layer = 8
n_head = 4
n_embd = 256
n_ff = 688
block_size = 256
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

batch_size = 32  # sequences a step
max_iters = 1000
warmup_iters = 100
learning_rate = 2e-3

eval_interval = 200
eval_tokens = 500_000
log_interval = 20
compile = False
