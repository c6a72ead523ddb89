"""Blockwise LR with an untied head at the embedding's ratio, 10. Put it after a config with an
untied head.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/head_10.py --out_dir=out/blockwise_llama_237m_head_10
    python train.py config/quickstart.py config/blockwise/head_10.py --tie_weights=False \
        --learning_rate=1e-3 --min_lr=5e-5 --out_dir=out/quick_blockwise_head_10

The principle of the blockwise LR paper (arXiv 2502.19002) does not cover an untied head, and its
code leaves it at ratio 1 (config/blockwise/blockwise.py). This ablation is ours [I]. A tied head
has the embedding's ratio in both files. Ratios from the first step on, as there.
"""

base = "blockwise.py"
lr_ratio_head = 10.0
