"""The base model for claims on one GPU (`python reproduce.py --scale=small`): a GPT of 6M parameters.

    python train.py config/claims/small_gpt.py --out_dir=out/small_gpt
    python train.py config/claims/small_gpt.py config/dnt/s5.py --out_dir=out/small_dnt

Bytes of the Python standard library's source; 1000 steps of 8192 tokens. Several runs share the GPU. None is
compiled, so a run starts within seconds. Its time on a GPU has not been measured.
"""

out_dir = "out/small_gpt"
dataset = "pystdlib"

n_layer = 8
n_head = 4
n_embd = 256
block_size = 256

batch_size = 32  # sequences a step
max_iters = 1000
warmup_iters = 100
learning_rate = 2e-3

eval_interval = 200
eval_tokens = 500_000
log_interval = 20
compile = False
