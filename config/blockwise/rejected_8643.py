"""Blockwise ratios 8, 6, 4, 3: a rejected candidate of the paper's tuning (arXiv 2502.19002). Put
it after a size.

    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_237m.py \
        config/blockwise/minipile.py config/blockwise/rejected_8643.py --learning_rate=7.5e-4 \
        --min_lr=3.75e-5 --out_dir=out/blockwise_llama_237m_rejected_8643
    python train.py config/quickstart.py config/blockwise/rejected_8643.py --learning_rate=1e-3 \
        --min_lr=5e-5 --out_dir=out/quick_rejected_8643

App. A.2: embedding 8, query and key 6, FFN 4, value and output 3, in the run that tuned the ratios,
LLaMA 237M on MiniPile. Fig. 8: all three candidates beat one LR, and 10, 8, 6, 4
(config/blockwise/blockwise.py) most; its losses and number of steps are not in the text [U]. The
ratios hold from the first step on, as in the authors' code [I]; the paper says that its runs switch
at the end of warm-up (A.2): --blockwise_start=warmup_end. Which of the two made its numbers is not
known [U].
"""

base = "blockwise.py"
lr_ratio_emb = 8.0
lr_ratio_qk = 6.0
lr_ratio_ffn = 4.0
lr_ratio_vo = 3.0
