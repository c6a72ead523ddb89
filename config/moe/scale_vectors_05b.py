"""A LLaMA of 0.5B with experts, for the scale vector paper's mixtures (arXiv 2605.26895). Its shape
is ours [I].

    torchrun --standalone --nproc_per_node=8 train.py config/moe/scale_vectors_05b.py
    torchrun --standalone --nproc_per_node=8 train.py config/moe/scale_vectors_05b.py \
        config/scale_vectors/qk_norm.py --out_dir=out/moe_05b_qk_norm
    torchrun --standalone --nproc_per_node=8 train.py config/moe/scale_vectors_05b.py \
        config/scale_vectors/unified.py --out_dir=out/moe_05b_unified
    torchrun --standalone --nproc_per_node=8 train.py config/moe/scale_vectors_05b.py \
        config/scale_vectors/unified.py config/optimizers/muon.py \
        --out_dir=out/moe_05b_unified_muon

The abstract: the unified variant lowers the loss of dense models and mixtures of 0.12B to 2B.
Secondary notes: by about 0.04, at 0.5B with Muon or WSD (config/optimizers/wsd.py) by 0.016 to
0.019. Not in the parts of the paper that we have [U]: whether the 0.5B are all parameters or the
active ones; the experts' number and width, shared ones, router, balance; data, batch, LR; whether
the baseline has QK-norm, which our DNP adds [I]: hence the second command. Ours [I]: 507M
parameters, 236M active; 8 experts, 2 active, as in Mixtral, together about as wide as a SwiGLU of
8d/3; softmax, balance by loss; untied head and GPT-2's vocabulary, which fit the LLaMA-1B of the
notes (llama_120m.py in config/scale_vectors explains it); LR of config/blockwise/llama_237m.py; 100
tokens for each active parameter.
"""

base = "../scale_vectors/llama_120m.py"
out_dir = "out/moe_05b"

n_layer = 10
n_head = 16
n_embd = 1024
n_expert = 8
n_expert_active = 2
n_ff = 1472  # width of one expert
learning_rate = 8e-4
max_iters = 48_000  # 23.6B tokens
