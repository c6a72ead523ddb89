"""ER (exponential space): OR with exp(b) as the magnitude (arXiv 2605.26895). Put it after any
Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/er_magdir.py --out_dir=out/scale_vectors_120m_er_magdir
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/er_magdir.py \
        --out_dir=out/quick_er_magdir

ER is from secondary notes. Whether the direction is exponentiated too is in none of our sources
[U]; the formula is ours [I]. If weight decay were on, it would pull the magnitude to 1, not to 0.
The abstract: such a reparameterization helps by itself; the parts of the paper that we have lack
how much ER does [U].
"""

base = "shared.py"
gain_param = "expmagdir"  # γ = exp(b) · α/rms(α), b = 0 and α = 1 at first
