"""DNP: the output of the matrices is normalised, then scaled. Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/dnp.py --out_dir=out/scale_vectors_120m_dnp
    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/dnp.py --gain=branch --out_dir=out/scale_vectors_120m_dnp_hg
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/dnp.py --out_dir=out/quick_dnp

γ · norm(W(γ'x)), as secondary notes say. On which matrices, and over how many channels, is not published where we
could read it [U]: q and k by head, so that it is QK-norm with a gain a channel, v, gate and up over their whole
width, is ours [I]. Compare with config/scale_vectors/qk_norm.py. One scale vector a matrix on the input side:
--gain=branch, the second line. What it gains alone is not published where we could read it [U].
"""

gain = "shared"
gain_out = "norm"  # q and k by head; v, gate and up over their whole width
gain_param = "direct"
qk_norm = False
decay_gains = "none"
