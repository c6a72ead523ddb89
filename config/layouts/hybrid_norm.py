"""HybridNorm: norms on each head of q, k and v, and one on the sum after attention (arXiv
2503.04598, eqs. 5 and 6). Layout only: put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/layouts/hybrid_norm.py --out_dir=out/hybrid_norm
    python train.py config/quickstart.py config/layouts/hybrid_norm.py \
        --out_dir=out/quick_hybrid_norm

q, k and v read a stream without a norm. The norm on the sum is also the FFN's input, and the stream
beside the FFN; the last FFN is followed by the usual final norm. One gain of size head_dim each for
all heads of q, k, v, before RoPE (Alg. 1). The paper's init differs by arm, each its best (Table
5): o and down times 1/√(2L) for HybridNorm (--residual_init=gpt2), no factor for Pre-LN (plain);
std 1/√(2.5d), cut off at 3σ (we have no cut); norms decay, embeddings do not (--decay_gains=all
--decay_emb=False). Its losses at 550M, 400B tokens, one seed (Table 13): Pre-LN 2.751, HybridNorm
2.737, HybridNorm* 2.731. At 7B the code has one more norm, on attention's output, which the method
does not mention and which is not here.
"""

base = "../dnt/s1.py"
pre_norm = "none"
post_norm = "attn"
qk_norm = True
v_norm = True
