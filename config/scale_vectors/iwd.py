"""IWD: weight decay only on scale vectors that a linear map follows (arXiv 2605.26895). Put it
after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/iwd.py --out_dir=out/scale_vectors_120m_iwd
    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/iwd.py --mid_norm=both --out_dir=out/scale_vectors_120m_iwd_mid
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/iwd.py \
        --out_dir=out/quick_iwd

Four files differ only in which scale vectors decay: all (config/scale_vectors/decay_all.py), input
(iwd.py), output (decay_output.py), none (qk_norm.py). Without QK-norm a LLaMA has scale vectors
before linear maps only: all and input would be the same, output would be empty. So we add QK-norm
[I]. The abstract: decay helps Input-Norms (here: input) and harms Output-Norms. According to
secondary notes, the paper tests it on Gemma-0.5B, which has norms on branch outputs too:
--mid_norm=both. The parts of the paper that we have lack the numbers [U].
"""

base = "qk_norm.py"
decay_gains = "input"  # pre norms, and the final norm [I]
