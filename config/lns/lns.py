"""LayerNorm Scaling (LNS, arXiv 2502.05795). Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/lns.py \
        --out_dir=out/lns_130m_lns
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/lns.py \
        --out_dir=out/lns_250m_lns
    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/lns.py \
        --out_dir=out/lns_branch --lns=branch
    # other positions: --lns=input, --lns=residual
    # one kind of sub-layer: --lns_branches=attn, --lns_branches=mlp
    # other exponents than a half: --lns_power=0.25, --lns_power=1 (0 is Pre-LN)
    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/lns.py \
        --out_dir=out/lns_learn --lns_learn=True
    python train.py config/quickstart.py config/dnt/s1.py config/lns/lns.py --out_dir=out/quick_lns

Perplexity in the images of the LNS repository (130M, 250M, 350M, 1B): 25.76, 20.35, 18.20, 15.71.
With 1/√(2L) on the initial weights too (--residual_init=gpt2), which the paper removes, it is 25.80
and 20.79 at 130M and 250M. With the factor after the residual sum, training diverges at 130M
(1358.11). Table 8 has other positions too, all of them worse than this one, but the text that we
have lacks its cells [U]. The gains of those runs are in bf16, which rounds away small steps near 1,
so Pre-LN could hardly learn such gains itself [I]. Hence --lns_learn=True, ours [I]: 1/√ℓ is the
start value of the gain instead of a constant.
"""

base = "pre_ln.py"
lns = "norm"  # 1/√ℓ on the output of both pre norms of block ℓ = 1 … L
