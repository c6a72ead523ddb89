"""DP: a second scale vector, on the output side of the matrices (arXiv 2605.26895). Put it after
any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/dp.py --out_dir=out/scale_vectors_120m_dp
    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/dp.py --gain=branch --out_dir=out/scale_vectors_120m_dp_hg
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/dp.py \
        --out_dir=out/quick_dp

diag(u) W diag(v), according to secondary notes. Which matrices have it is our choice [I]. So is one
v per norm [I]: the notes write one per matrix, which is --gain=branch, the second command. The
abstract: a better placement helps by itself; the parts of the paper that we have lack how much DP
does [U].
"""

base = "shared.py"
gain_out = "scale"  # on the outputs of q, k, v, gate and up
