"""LLaMA 70B without norms: DyT (arXiv 2503.10622). See config/dyt/7b.py for the rest.

    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=node0:29400 \
        train.py config/dyt/70b.py
    # RMSNorm: config/dyt/rmsnorm.py --out_dir=out/rmsnorm_70b after that

Mean score on 15 tasks and training loss (Table 4): 0.549 and 1.45, RMSNorm and DyT alike. Heads and
FFN are LLaMA-2-70B's [I]. 68.98B parameters with LLaMA's vocabulary of 32000; 68 GB a GPU, by
--plan.
"""

base = "34b.py"
out_dir = "out/dyt_70b"

n_layer = 80
n_ff = 28672
