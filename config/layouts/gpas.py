"""GPAS on Pre-LN: after each sub-layer x ← x − SiLU(g) x, whose gradient passes as if there were no
factor; g is a learned scalar, 0 at first (arXiv 2506.22049). Layout only: put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/layouts/gpas.py \
        --out_dir=out/gpas
    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/lns.py \
        --gpas=True --out_dir=out/lns_130m_gpas
    python train.py config/quickstart.py config/layouts/gpas.py --out_dir=out/quick_gpas

--gpas=True adds it to any other layout. Under a post norm the gate is on the stream before the sum,
as in the authors' code. The paper has a gate for each sub-layer, and so do we; the code has one for
each block, which both sub-layers share. We could read the abstract and the code, not the paper.

A comment in the code names the perplexity of a 350M model: 20.49 for Pre-LN, 19.37 with GPAS, which
is 0.056 nats less. The code's models and gates are bf16, without decay and clipping; its embeddings
have a standard deviation of 0.632, but the usual one in that comparison. For Sandwich norm at 1B
and all layouts at 7B its README clips the gates' gradients at 0.01 by themselves, which is not
here. Our gates are fp32, like all gains.
"""

base = "../dnt/s1.py"
gpas = True
