"""No scale vectors at all (arXiv 2605.26895). Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/none.py --out_dir=out/scale_vectors_120m_none
    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/none.py --learning_rate=2e-3 \
        --out_dir=out/scale_vectors_120m_none_2e-3
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/none.py \
        --out_dir=out/quick_none

The abstract: this harms pre-training substantially. Secondary notes: the loss of a 0.12B LLaMA
rises by 0.028 (worth 1.4× the tokens), by 0.015 with the LR tuned again. So sweep the LR, as in the
second command.
"""

base = "shared.py"
gain = "none"
