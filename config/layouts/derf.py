"""Derf for every norm, the final one too: γ · erf(αx + s) + β, α and s scalars of each slot (arXiv
2512.10938, eq. 10). Layout only: put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/layouts/derf.py \
        --out_dir=out/derf
    python train.py config/quickstart.py config/layouts/derf.py --out_dir=out/quick_derf
    python train.py config/quickstart.py config/layouts/derf.py --dyt_alpha_attn=1.0 \
        --dyt_alpha_other=0.3 --out_dir=out/quick_derf_alpha

GPT-2 124M on OpenWebText, 300,000 steps, one seed (Table 12): validation loss 2.94 with LayerNorm
and Derf, 2.97 with DyT; training loss in evaluation mode (Table 13) 2.9478, 2.9702, 2.9822. Derf's
and DyT's α₀ were searched, {0.5, 1, 2, 4} in one place times {0.1, 0.3, 0.5, 1} elsewhere, and the
chosen one is not named [U]; LayerNorm had no such search. Compare with equal trials.

Text and code of the paper differ. α₀ is 0.5 everywhere in the text, and here; 1.0 in the code. The
place with an α₀ of its own is after attention in the text, before it in the code, and here. β is
there in both, also in language models, where DyT's code has none. The learned scalar on the
embedding, √d at first, is in the code alone; here a model of text has it.

Others report that at 1B after 1,000 steps Derf is 0.31 behind RMSNorm with AdamW, 0.97 with Muon;
α₀ = 0.3 recovers about 80% of that (arXiv 2604.01563, of which we have read the abstract alone).
"""

base = "../dnt/s1.py"
norm = "dyt"
dyt_squash = "erf"
dyt_shift = True
dyt_alpha_attn = 0.5  # before attention
dyt_alpha_other = 0.5
dyt_learn_alpha = True
dyt_bias = True
embed_scale = None  # a learned scalar in language models, none on images
