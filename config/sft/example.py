"""Fine-tune the quickstart's model on made conversations: minutes on 2 CPU cores.

    python data/sft/make_example.py
    python data/sft/prepare.py --input=data/sft/example.jsonl --tokenizer=bytes --name=sft_example
    python train.py config/sft/example.py
    python chat.py --out_dir=out/sft_example

The network is that of the run it starts from, its block_size too.
"""

init_from = "auto:out/quickstart"  # continue, or start from its best.pt; make quickstart trains it
out_dir = "out/sft_example"
dataset = "sft_example"
doc_mask = True  # the examples of a row do not see each other

batch_size = 16
max_iters = 600
warmup_iters = 30
learning_rate = 1e-3
min_lr = 0.0
weight_decay = 0.0

eval_interval = 100
eval_tokens = 0  # all
log_interval = 10
