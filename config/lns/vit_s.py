"""ViT-S on ImageNet-1k with LayerNorm Scaling as in the LNS paper (arXiv 2502.05795): 1/√ℓ on the
branch outputs.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/vit_s.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/vit_s.py --lns=off \
        --out_dir=out/vit_s_pre_ln
    torchrun --standalone --nproc_per_node=8 train.py config/lns/vit_s.py --lns=norm \
        --out_dir=out/vit_s_lns_norm
    python train.py config/vdnt/digits.py config/dnt/s1.py --lns=branch --out_dir=out/digits_lns

Prepare the data once: python data/imagenet1k/prepare.py
(needs an account that has accepted ImageNet's terms)
The paper: for a ViT the best place of the factor is after attention and FFN (lns=branch; --lns=norm
is that of its language models), without LayerScale in all arms. The variance of the blocks' outputs
passes 3,000 by step 30,000 with Pre-LN and stays below 150 with LNS (Fig. 8): `track_interval`
notes it. Table 5 has the accuracies, but the text that we have lacks its cells [U]. It has no
recipe [U]; ours is that of config/dyt/vit_b.py [I]. Shape, patches, class token, norm, biases and
the initial weights N(0, 0.02) without 1/√(2L) are ours [I].
"""

base = "../dyt/vit_b.py"
out_dir = "out/vit_s_lns"

n_head = 6
n_embd = 384
lns = "branch"
