"""LLaMA 13B without norms: DyT (arXiv 2503.10622). See config/dyt/7b.py for the rest. Heads and
FFN: LLaMA-13B's [I].

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/13b.py
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/13b.py config/dyt/rmsnorm.py \
        --out_dir=out/rmsnorm_13b

Mean score on 15 tasks and training loss (Table 4): RMSNorm 0.529 and 1.53, DyT 0.529 and 1.54.
13.02B parameters with LLaMA's vocabulary of 32000. By --plan's count 41 GB on each of 8 GPUs,
without activation checkpointing 108.
"""

base = "7b.py"
out_dir = "out/dyt_13b"

n_layer = 40
n_head = 40
n_embd = 5120
n_ff = 13824
dyt_alpha_attn = 0.6  # α₀, Table 11
dyt_alpha_other = 0.15
micro_batch_size = 1
activation_checkpointing = True
