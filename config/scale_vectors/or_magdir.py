"""OR (original space): scale vectors as magnitude times direction (arXiv 2605.26895). Put it after
any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/or_magdir.py --out_dir=out/scale_vectors_120m_or_magdir
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/or_magdir.py \
        --out_dir=out/quick_or_magdir

Secondary notes: the direction is a unit vector, and the magnitude's LR becomes d times as large. In
our formula [I] the direction has RMS 1, so length √d: a step of SGD along it is d times as long, a
step of Adam is not. The direction never decays [I]. The abstract: such a reparameterization helps
by itself; the parts of the paper that we have lack how much OR does [U].
"""

base = "shared.py"
gain_param = "magdir"  # γ = β · α/rms(α), β = 1 and α = 1 at first
