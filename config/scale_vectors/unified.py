"""The unified variant: HG, DNP, OR and IWD (arXiv 2605.26895). Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/unified.py --out_dir=out/scale_vectors_120m_unified
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/unified.py \
        --out_dir=out/quick_unified

The abstract: lower loss than tuned baselines from 0.12B to 2B, dense and MoE. Secondary notes:
these four parts; about 0.04; 1.22 to 1.25× in compute at 100 tokens a parameter; 4% more time, 1%
more memory. The headers of hg.py, dnp.py, or_magdir.py and iwd.py say where the parts are our
reading [I]. Our DNP adds QK-norm, which the paper's baseline may have too [U]: compare with
config/scale_vectors/qk_norm.py.
"""

base = "shared.py"
gain = "branch"  # HG
gain_out = "norm"  # DNP
gain_param = "magdir"  # OR
decay_gains = "input"  # IWD
