"""Blockwise LR from the end of warm-up on, as the paper's text says. Put it after a config of any
size.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/warmup_end.py --out_dir=out/blockwise_llama_237m_warmup_end
    python train.py config/quickstart.py config/blockwise/warmup_end.py --learning_rate=1e-3 \
        --min_lr=5e-5 --out_dir=out/quick_blockwise_warmup_end

App. A.2 (arXiv 2502.19002): plain AdamW during warm-up, then the ratios. So the LR jumps there. The
authors' code warms up to the multiplied peak instead (config/blockwise/blockwise.py); its option
for the switch only prints a warning.
"""

base = "blockwise.py"
blockwise_start = "warmup_end"
