"""Fine-tune LLaMA-250M on Commonsense170K, the fine-tuning data of the LNS paper (arXiv 2502.05795,
sec. 5.2).

    python data/commonsense170k/prepare.py --tokenizer=gpt2 --max_tokens=256
    torchrun --standalone --nproc_per_node=8 train.py config/sft/commonsense170k.py
    python evaluate.py --out_dir=out/commonsense_250m --tasks=answers \
        --input=data/commonsense170k/raw/test

It starts from config/lns/250m.py, which must be trained before. For LNS train that with
config/lns/lns.py, and add here --init_from=auto:out/lns_250m_lns
--out_dir=out/commonsense_250m_lns. The paper fine-tunes its 250M and 1B on it and reports eight
tasks; at 250M LNS is 1.80% above Mix-LN on average. It names one task, ARC-e; our eight are those
of the data's authors [I]. All else is as in Mix-LN's paper, which we could not read [U]: which
weights are trained, LR, batch, epochs, context. Here [I]: all weights; three epochs of about 16
examples a step, at most 256 tokens each, packed, so a step has 8 rows; the loss on answers alone;
LR, warm-up, the linear schedule, beta2, no decay. Tune the LR for each layout before you compare
them.
"""

init_from = "auto:out/lns_250m"
out_dir = "out/commonsense_250m"
dataset = "commonsense170k"
doc_mask = True

batch_size = 8
learning_rate = 5e-5
min_lr = 0.0
schedule = "linear"
beta2 = 0.999
weight_decay = 0.0
max_iters = 32_000
warmup_iters = 1000
eval_interval = 1000
eval_tokens = 0  # all: about 120 examples are held out
