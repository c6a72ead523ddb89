"""Blockwise LR for Adam-mini (arXiv 2502.19002, A.3): 4, 1, 4, 4. Put it after a config of any
size.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/adam_mini_blockwise.py --out_dir=out/blockwise_llama_237m_adam_mini_lr
    python train.py config/quickstart.py config/blockwise/adam_mini_blockwise.py \
        --learning_rate=1e-3 --min_lr=5e-5 --out_dir=out/quick_blockwise_adam_mini_lr

Embedding 4, query and key 1, FFN 4, value and output 4; no decay of norms, as in the authors' code.
Ratios from the first step on, as there [I]. The paper says that its AdamW runs switch at the end of
warm-up (A.2): --blockwise_start=warmup_end. Of these runs it does not say [U]. Loss gap and
speed-up in steps, read off plots in the authors' repository: 0.044 for 237M on OpenWebText, 0.047
for 522M on MiniPile, 1.97× for both. The baseline is config/blockwise/adam_mini.py.
"""

base = "blockwise.py"
optimizer = "adam_mini"
decay_gains = "none"
lr_ratio_emb = 4.0
lr_ratio_qk = 1.0
lr_ratio_ffn = 4.0
lr_ratio_vo = 4.0
