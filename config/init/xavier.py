"""Xavier for matrices, our reading of the DNT paper's word (arXiv 2507.17501, Table 5), for GPT-2
and DNT alike. Put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/gpt2_124m.py \
        config/init/xavier.py --out_dir=out/xavier
    python train.py config/quickstart.py config/init/xavier.py --out_dir=out/init_xavier

The paper says no more than "Xavier". Ours [I]: the normal form, N(0, 2/(n_in + n_out)); no 1/√(2L)
on the last matrix of a branch; q, k and v are drawn apart, where nanoGPT has one fused matrix;
embeddings and head, tied or not, are N(0, 0.02), for Xavier's std would be 0.006 for 50,304 tokens
of width 768.
"""

init = "xavier"
init_std = 0.02
residual_init = "plain"
