"""Blockwise LR with weight decay divided by the ratios. Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/decay_unscaled.py --out_dir=out/blockwise_llama_237m_decay_unscaled
    python train.py config/quickstart.py config/blockwise/decay_unscaled.py --learning_rate=1e-3 \
        --min_lr=5e-5 --out_dir=out/quick_blockwise_decay_unscaled

A step shrinks a weight by LR times decay, so a ratio of 10 also means ten times the decay. Here
decay is divided by the ratio, so LR times decay is the same as at one LR, except in the last steps,
where all LRs approach the same min LR. This ablation is ours [I]; the blockwise LR paper (arXiv
2502.19002) has none. Ratios from the first step on, as in config/blockwise/blockwise.py.
"""

base = "blockwise.py"
blockwise_decay = "unscaled"
