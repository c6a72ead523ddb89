"""DNP: the output of the matrices is normalised, then scaled (arXiv 2605.26895). Put it after any
Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/dnp.py --out_dir=out/scale_vectors_120m_dnp
    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/dnp.py --gain=branch --out_dir=out/scale_vectors_120m_dnp_hg
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/dnp.py \
        --out_dir=out/quick_dnp

γ · norm(W(γ'x)), according to secondary notes. The parts of the paper that we have lack which
matrices have it and how many channels the norm covers [U]. We normalise q and k by head, so that it
is QK-norm with a gain per channel, and v, gate and up over their whole width [I]. Whether the
paper's baseline has QK-norm is not known [U]: compare with config/scale_vectors/qk_norm.py too. The
second command (--gain=branch) has one scale vector per matrix on the input side. The abstract: a
better placement helps by itself; the parts that we have lack how much DNP does [U].
"""

base = "shared.py"
gain_out = "norm"  # q and k by head; v, gate and up over their whole width
