"""What a report consists of: one line a section, each of them a command of bench.py that anyone can repeat."""

from typing import NamedTuple


class Section(NamedTuple):
    """One command of bench.py, and the table that it makes."""

    name: str
    seconds: int  # that it will take on an H200, with room to spare [I]; the page says what it took
    title: str
    files: str  # config files and words, as on the command line
    flags: dict
    toy: dict = {}  # flags that replace others at toy size, besides TOY


# Tiny models, eager: every section in seconds on a CPU.
TOY = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, compile=False, warmup=1, repeats=1, steps=1)
SMALL, DNT = "config/gpt2_small.py", "config/dnt_small.py"
ONE = dict(batch_size=32, micro_batch_size=32)  # what the 124M models are compared with
TOY_ONE = dict(batch_size=4, micro_batch_size=4)
MIXTURE = dict(n_expert=8, n_ff=1536, mlp="swiglu")  # a token meets as many parameters as in gelu's n_ff = 4608
RUN = dict(max_iters=120, warmup_iters=10, compile=False, track_interval=0)  # of train.py
TOY_RUN = dict(block_size=32, vocab_size=0, batch_size=4, max_iters=30, warmup_iters=2)
TOY_SWEEP = dict(first_micro_batch=1, micro_batch_size=1, batch_size=2)

SECTIONS = [
    Section(
        *("precision", 50, "Loss and gradients against float64", SMALL),
        dict(verify="precision", n_layer=4, block_size=512, batch_size=2, micro_batch_size=2),
        dict(TOY_ONE, n_layer=1),
    ),
    Section(
        *("compiled_bf16", 50, "Compiled against eager code, bf16", SMALL),
        dict(verify="compiled", n_layer=2, batch_size=4, micro_batch_size=4, dtype="bfloat16"),
        dict(TOY_ONE, n_layer=1, compile=True),
    ),
    Section(
        *("compiled_fp32", 50, "Compiled against eager code, fp32", SMALL),
        dict(verify="compiled", n_layer=2, batch_size=4, micro_batch_size=4, dtype="float32"),
        dict(TOY_ONE, n_layer=1, compile=True),
    ),
    Section(
        *("compiled_documents", 30, "Compiled against eager code, documents kept apart, bf16", SMALL),
        dict(verify="compiled", n_layer=2, batch_size=4, micro_batch_size=4, dtype="bfloat16", doc_mask=True),
        dict(TOY_ONE, n_layer=1, compile=True),
    ),
    Section(
        *("products", 40, "Experts: their product, and 124M models of them, against float64", SMALL),
        dict(MIXTURE, verify="products", n_layer=4, block_size=512, batch_size=2, micro_batch_size=2),
        dict(TOY_ONE, n_layer=1, n_ff=32),
    ),
    Section(
        *("updates", 20, "Optimizers against float64", DNT),
        dict(verify="updates", n_layer=2),
        dict(n_layer=1),
    ),
    Section(
        *("resume", 50, "A run of experts killed by SIGKILL and resumed", "config/quickstart.py"),
        dict(verify="resume", n_expert=4, n_ff=384, balance="bias", **RUN),
        dict(TOY_RUN, n_ff=32),
    ),
    Section(
        *("devices", 45, "A checkpoint of the CPU continued here, and back", "config/quickstart.py"),
        dict(verify="devices", **RUN),
        TOY_RUN,
    ),
    Section(
        *("sampling", 45, "Sampling here and on the CPU, with a cache and without", "config/quickstart.py"),
        dict(verify="sampling", **RUN),
        TOY_RUN,
    ),
    Section(
        *("nanogpt", 80, "124M GPT-2 beside nanoGPT", SMALL),
        dict(variant="nanogpt", **ONE, steps=5),
        dict(TOY_ONE, variant="nanogpt-eager"),
    ),
    Section(
        *("nanogpt_dnt", 60, "124M DNT beside nanoGPT", DNT),
        dict(variant="nanogpt", **ONE, steps=5),
        dict(TOY_ONE, variant="nanogpt-eager"),
    ),
    Section(
        *("nanogpt_dnt_stream", 60, "124M DNT beside nanoGPT, stream in bf16", DNT),
        dict(variant="nanogpt", stream_dtype="bfloat16", **ONE, steps=5),
        dict(TOY_ONE, variant="nanogpt-eager"),
    ),
    Section(
        *("124m_gpt2", 120, "124M GPT-2 by micro batch", SMALL),
        dict(sweep="micro_batch", first_micro_batch=16, micro_batch_size=16, batch_size=128, repeats=3, steps=5),
        TOY_SWEEP,
    ),
    Section(
        *("124m_dnt", 90, "124M DNT by micro batch", DNT),
        dict(sweep="micro_batch", first_micro_batch=32, micro_batch_size=32, batch_size=128, repeats=3, steps=5),
        TOY_SWEEP,
    ),
    Section(
        *("774m_dnt", 150, "774M DNT by micro batch", "config/dnt_large.py"),
        dict(sweep="micro_batch", first_micro_batch=16, micro_batch_size=16, batch_size=64, repeats=3, steps=3),
        TOY_SWEEP,
    ),
    Section(
        *("1436m_dnt", 190, "1.4B DNT by micro batch", "config/dnt_xl.py"),
        dict(sweep="micro_batch", first_micro_batch=8, micro_batch_size=8, batch_size=32, repeats=3, steps=3),
        TOY_SWEEP,
    ),
    Section(
        *("layouts", 90, "Layouts against Pre-LN, 124M"),
        f"{SMALL} config/dnt/s1.py --compare config/dnt/s1.py config/dnt/s5.py config/dyt/dyt.py "
        "config/scale_vectors/unified.py",
        dict(**ONE, steps=5),
        TOY_ONE,
    ),
    Section(
        *("experts", 60, "2 of 8 experts beside the dense model of as many active parameters, 124M", DNT),
        dict(MIXTURE, sweep="experts", **ONE, steps=5),
        dict(TOY_ONE, n_ff=32),
    ),
    Section(
        *("norms", 80, "Norms as layers, and in 2 blocks of LLaMA 7B (DyT's Table 7)", "config/dyt/7b.py"),
        dict(sweep="norms", n_layer=2, vocab_size=8192, batch_size=1, micro_batch_size=1, repeats=3, steps=5),
        dict(TOY_ONE, n_ff=0),
    ),
    Section(
        *("optimizers", 50, "Optimizers, 124M", DNT),
        dict(sweep="optimizers", batch_size=512, micro_batch_size=32, repeats=3, steps=5),
        TOY_ONE,
    ),
    Section(
        *("plan", 30, "Memory of the eager step against --plan, 124M", DNT),
        dict(
            sweep="micro_batch",
            compile=False,
            first_micro_batch=4,
            micro_batch_size=4,
            batch_size=32,
            repeats=1,
            steps=2,
        ),
        TOY_SWEEP,
    ),
    Section(
        *("compile_times", 60, "Compile times, 124M", DNT),
        dict(compile_times=True, **ONE),
        dict(TOY_ONE, n_layer=1),
    ),
]


def arguments(section: Section, size: str, device: str) -> list:
    """The arguments of bench.py for a section. `size`: gpu or toy."""
    flags = section.flags | (TOY | section.toy if size == "toy" else {}) | dict(data="random")
    if device != "auto":
        flags["device"] = device
    return [*section.files.split(), *(f"--{key}={value}" for key, value in flags.items())]
