"""SOAP (arXiv 2409.11321) on the matrices of the blocks, AdamW on the rest. Put it after a config
of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/soap.py --out_dir=out/dnt_small_soap
    python train.py config/quickstart.py config/optimizers/soap.py --out_dir=out/quick_soap

LR, decay, betas and frequency are the defaults of the authors' code, where they are for all
parameters. The betas have to be set, since the defaults of all optimizers here are 0.9 and 0.95.
Both LRs fall to a tenth [I]. Embedding, head and vectors are on AdamW [I]; in that code the short
sides of embedding and head have a basis too. Warm-up stays that of the config before it. To change
the LR of embeddings, head and gains alone: --adamw_learning_rate=6e-4. Under torchrun every step
sends the state: docs/optimizers.md says how much.
"""

optimizer = "soap"
learning_rate = 3e-3
min_lr = 3e-4
weight_decay = 0.01
beta1 = 0.95
beta2 = 0.95
soap_frequency = 10
