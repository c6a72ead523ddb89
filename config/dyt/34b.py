"""LLaMA 34B without norms: DyT (arXiv 2503.10622). See config/dyt/7b.py for the rest.

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=node0:29400 \
        train.py config/dyt/34b.py
    # RMSNorm: config/dyt/rmsnorm.py --out_dir=out/rmsnorm_34b after that

Mean score on 15 tasks and training loss (Table 4): 0.536 and 1.50, RMSNorm and DyT alike. The
paper's LR is 1.5e-4. Heads and FFN are CodeLLaMA-34B's, with LLaMA's rope_theta [I]. 33.74B
parameters with LLaMA's vocabulary of 32000; 60 GB a GPU, by --plan.
"""

base = "7b.py"
out_dir = "out/dyt_34b"

n_layer = 48
n_head = 64
n_kv_head = 8
n_embd = 8192  # Table 11 has 8196
n_ff = 22016
dyt_alpha_attn = 0.2  # α₀, Table 11
dyt_alpha_other = 0.05
learning_rate = 1.5e-4
micro_batch_size = 1
activation_checkpointing = True
