"""Weight decay only on scale vectors that no linear map follows. Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/decay_output.py --out_dir=out/scale_vectors_120m_decay_output
    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/decay_output.py --mid_norm=both --out_dir=out/scale_vectors_120m_decay_output_mid
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/decay_output.py \
        --out_dir=out/quick_decay_output

All, input, output (config/scale_vectors/decay_all.py, iwd.py, decay_output.py) and none (qk_norm.py) differ in one
line. Without QK-norm a LLaMA has scale vectors before linear maps only, so all and input would be the same and output
empty: QK-norm is our choice [I]. The paper, from secondary notes, tests decay on Gemma-0.5B, with norms on branch
outputs too: --mid_norm=both. Its numbers are not published where we could read it [U].
"""

gain = "shared"
gain_out = "none"
gain_param = "direct"
qk_norm = True
decay_gains = "output"
