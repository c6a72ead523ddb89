"""A LLaMA of 0.12B, the smallest size of the scale vector paper (arXiv 2605.26895). Its shape is
ours [I].

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py
    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/unified.py --out_dir=out/scale_vectors_120m_unified
    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        --n_layer=22 --n_embd=1792 --n_head=14 --n_ff=4778 --micro_batch_size=6 \
        --out_dir=out/scale_vectors_1b

Prepare the data once: python data/openwebtext/prepare.py
The parts of the paper that we have lack shape, data, LR, batch and decay of the matrices [U].
According to secondary notes, its LLaMA-1B has 80,640 entries of scale vectors among 1,028,065,024
parameters. The third command fits both numbers exactly: a SwiGLU of ⌊8d/3⌋, an untied head and
GPT-2's vocabulary padded to 50304 [I]; its heads, LR and steps are guesses. The same recipe at
width 768 with 6 layers has 119.7M parameters: this model. Batch, LR and data are ours [I]. It
trains on 100 tokens a parameter: there, according to the notes, the unified variant saves a factor
of 1.22 to 1.25 in compute.
"""

out_dir = "out/scale_vectors_120m"
dataset = "openwebtext"

n_layer = 6
n_head = 12
n_embd = 768
n_ff = 2048
block_size = 1024
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

learning_rate = 1e-3
batch_size = 480  # sequences a step, over all GPUs
# Sequences on one GPU at a time. Lower it when memory runs out: accumulation makes up for it.
micro_batch_size = 30
max_iters = 24_400  # 12B tokens, 100 a parameter
warmup_iters = 1000
eval_tokens = 0  # all of val.bin
