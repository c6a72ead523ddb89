"""The runs that test the claims, as data: scales, and arms.

An `Arm` is a configuration: config files and flags that follow the base of its family. The scale chooses the bases.
"""

from itertools import product
from typing import NamedTuple

TUNING_SEED = 0  # learning rates are tuned with this seed, and no number is reported with it
SEEDS = (1, 2, 3, 4, 6, 7, 8, 9)  # that numbers are reported with; by 0 and 5 initial weights are chosen (init.md)


class Scale(NamedTuple):
    title: str
    bases: dict  # family: config files and flags that come first
    rates: dict = {}  # optimizer: the middle of the grid of learning rates; {}: the configs' own rates, without tuning
    own: dict = {}  # arm: the papers' own config files and flags, in place of the base and of the arm's; all floors of
    #   rates are then those of the config files, and runs are on all GPUs by torchrun, one at a time
    side_seeds: int = 2  # of arms that no primary number needs
    on: str = ""  # the data, said with every verdict
    note: str = ""  # the second paragraph of the page


class Arm(NamedTuple):
    family: str  # of Scale.bases
    files: str = ""  # config files and flags; a file of config/init/ takes the place of the base's
    rate: str = "adamw"  # of Scale.rates
    of: str = ""  # take the best learning rate of this arm, without tuning
    times: float = 1.0  # multiply it by this
    lr: float | None = None  # a given learning rate, without tuning
    tries: tuple = ()  # further files or flags, "" for none: one is chosen with the tuning seed, after the rate
    points: int = 5  # of the grid of learning rates
    around: str = ""  # the arm whose best learning rate is the grid's middle; "": the scale's
    seeds: int = 0  # at least so many, though no primary number needs them
    keep: bool = False  # keep ten checkpoints, for what is measured over training: also of other arms with this command


GPT = "config/claims/mini_gpt.py config/init/width_128.py"
LLAMA, LLAMA_120M = "config/claims/mini_llama.py", "config/scale_vectors/llama_120m.py"
LNS = "--beta2=0.999 --grad_clip=0 --weight_decay=0"  # as in the scripts of the LNS paper's authors
VIT = "config/claims/mini_vit.py"
SMALL = "--n_embd=256 --block_size=256 --batch_size=32 --max_iters=1000 --warmup_iters=100 --eval_interval=200"
SMALL += " --init_std=0.035 --eval_tokens=500000 --dtype=auto"

# layout on the GPT: config files and flags. S1 is Pre-LN; LNS needs the initial weights without 1/√(2L).
LAYOUTS = {
    **{f"S{i}": f"config/dnt/s{i}.py" for i in range(1, 6)},
    "LNS": "--lns=norm --residual_init=plain",
    "DyT": "config/dyt/dyt.py",
    "unified": "config/scale_vectors/unified.py",
}
S1 = LAYOUTS["S1"]
LEFT_OUT = ("QK", "pre", "mid", "input")  # App. F of DNT: Adam without warm-up, and one norm left out of S4
STRESS, STRESS_RATE = "--warmup_iters=0 --weight_decay=0", 0.3
STRESSED = {f"S4 without {norm}, stress": f"config/dnt/no_{norm.lower()}_norm.py" for norm in LEFT_OUT}
STRESSED["S4, stress"] = LAYOUTS["S4"]

# Blockwise LR: arms that have more than one rate for all, and files of config/blockwise/; of Table 1, and of Fig. 8
TABLE_1 = {"all blocks": "blockwise", "all blocks, tuned": "blockwise", "after warm-up": "warmup_end", "Emb": "emb"}
TABLE_1 |= {"Emb, FFN": "emb_ffn", "Norm ×2": "norm_double", "Adam-mini, one rate": "adam_mini"}
TABLE_1 |= {"Adam-mini, blocks": "adam_mini_blockwise"}
FIG_8 = {"Fig. 8, 6 4 3 2": "rejected_6432", "Fig. 8, 8 6 4 3": "rejected_8643", "Fig. 8, 10 8 6 4": "blockwise"}
# DyT's baseline, and DyT: files and flags. The paper's smallest language model has 7B; the smaller shape is ours [I]
DYT_SMALL = [f"config/dyt/small.py config/dyt/{x}.py config/decay/dyt.py --schedule=dyt" for x in ("rmsnorm", "dyt")]
DYT_7B = ["config/dyt/7b.py config/dyt/rmsnorm.py", "config/dyt/7b.py"]


def papers_own(gpt2: str, dnt: str, rmsnorm: str, dyt: str) -> dict:
    """`Scale.own` for files of DNT's baseline and of DNT, and of DyT's baseline and of DyT. Blockwise LR has its runs
    of 237M: Table 1 on OpenWebText, Fig. 8 on MiniPile."""
    optimizers = {"AdamW": "", "mSGDW": " config/optimizers/msgdw.py", "Muon": " config/optimizers/muon_dnt.py"}
    sizes = {"S1": gpt2, "S5": dnt, **{f"S{i}": f"{dnt} config/dnt/s{i}.py" for i in (2, 3, 4)}}
    llama = "config/blockwise/llama_237m.py"
    minipile = f"{llama} config/blockwise/minipile.py --learning_rate=7.5e-4 --min_lr=3.75e-5"
    return {
        **{f"{a} {b}": size + file for a, size in sizes.items() for b, file in optimizers.items()},
        **{name: f"{dnt} {file} {STRESS}" for name, file in STRESSED.items()},
        **dict.fromkeys(("one rate", "one rate, beside it", "sharpness"), llama),  # the last: Figs. 2 and 3
        **{name: f"{llama} config/blockwise/{file}.py" for name, file in TABLE_1.items()},
        "Fig. 8, one rate": minipile,
        **{name: f"{minipile} config/blockwise/{file}.py" for name, file in FIG_8.items()},
        "RMSNorm": rmsnorm,
        **dict.fromkeys(("DyT", "DyT, α₀ of the paper"), dyt),
    }


SCALES = {
    "mini": Scale(
        "2M parameters (4M for LNS, 16 blocks), 0.6M tokens of Python source a run; CPU cores",
        bases={"gpt": GPT, "llama": LLAMA, "deep": f"{LLAMA} --n_layer=16 {LNS}"},
        rates={"adamw": 4e-3, "adamw_s5": 32e-3, "adam_mini": 4e-3, "blockwise": 1e-3, "muon": 8e-3, "msgdw": 0.25},
        note="The claims about vision transformers are tested [on handwritten digits](claims_digits.md). The initial "
        "weights of the GPTs are those of [init.md](init.md) that suit small models, for all layouts [I]; the DNT "
        "paper's are “Xavier” (Table 5). The LR falls to a tenth; in Table 5 it falls to 6e-5 under AdamW and mSGDW.",
    ),
    "digits": Scale(
        "vision transformers of 0.3M parameters, 18 passes over 1,437 handwritten digits; CPU cores",
        bases={"vit": VIT},
        rates={"adamw": 2e-3, "msgdw": 0.02},
        side_seeds=4,
        on=" on digits",
        note="**This is not ImageNet.** An image is 8 × 8 pixels, in one of 10 classes, and 360 are held out, of the "
        "same writers; one image is 0.28 percentage points of top-1. The papers' vision transformers are ViT-S to "
        "ViT-H, of 632M parameters, with 1.28M photographs in 1,000 classes. A sign can show here, a size cannot: no "
        "published size is compared, and a verdict holds on digits alone. The claims about language models are on [a "
        "page of their own](claims.md); Holm's correction is over the claims of each page.",
    ),
    "small": Scale(
        "8M parameters, 8M tokens of Python source; one GPU",
        bases={
            "gpt": f"{GPT} {SMALL}",
            "llama": f"{LLAMA} {SMALL} --n_ff=688",
            "deep": f"{LLAMA} {SMALL} --n_ff=688 --n_layer=16 {LNS}",
        },
        rates={"adamw": 2e-3, "adamw_s5": 2e-3, "adam_mini": 2e-3, "blockwise": 5e-4, "muon": 4e-3, "msgdw": 0.5},
    ),
    "124m": Scale(
        "0.12B parameters, 0.24B for Blockwise LR; the papers' own configurations and rates where we have them; GPUs",
        bases={"gpt": "config/gpt2_small.py", "llama": LLAMA_120M, "deep": "config/lns/130m.py"},
        own=papers_own("config/gpt2_small.py", "config/dnt_small.py", *DYT_SMALL),
    ),
    "paper": Scale(
        "the papers' largest language models for some nodes; their own configurations where we have them; GPUs",
        bases={"gpt": "config/gpt2_xl.py", "llama": LLAMA_120M, "deep": "config/lns/1b.py"},
        own=papers_own("config/gpt2_xl.py", "config/dnt_xl.py", *DYT_7B),
    ),
}

# optimizer: (after a layout's files, of Scale.rates, the layouts run under it: fewer where another tells as much)
OPTIMIZERS = {
    "AdamW": ("", "adamw", LAYOUTS),
    "mSGDW": (" config/optimizers/msgdw.py", "msgdw", LAYOUTS),
    "Muon": (" config/optimizers/muon.py", "muon", ("S1", "S5", "LNS", "DyT", "unified")),
    "Adam-mini": (" config/optimizers/adam_mini.py", "adam_mini", ("S1", "S5")),
}
CURVES = {f"{layout} {name}": (name, layout) for name, (*_, layouts) in OPTIMIZERS.items() for layout in layouts}
HEADLINES = {f"S{i} mSGDW" for i in range(1, 6)} | {f"{s} {o}" for s in ("S1", "S5") for o in ("AdamW", "Muon")}
FACTORS = (4, 8, 16)  # of the best learning rate, for robustness
# by train.py, at mini: weight decay would take a tenth of every matrix a step
REFUSED = {"S4 AdamW ×16", "S5 AdamW ×16"}
VISION_SGD = "config/optimizers/msgdw.py --grad_clip=0 --weight_decay=2e-4"  # V-DNT-Large's
FP32 = "--dtype=float32"  # of runs added on a CPU without bf16
LONG = "--max_iters=1600 --warmup_iters=160 --eval_interval=1600"  # four times a run of VIT
# What may decide how far momentum SGD is behind AdamW: {what: ({value: flags, "" for the base's}, AdamW varied too?)}.
# The initial weights are named after the embedding's std; without Xavier the matrices have it too.
SHORT = {str(n): f"--max_iters={n} --warmup_iters={n // 10}" for n in (75, 150)}
XAVIER = {"Xavier, 0.02": "config/init/xavier.py", "Xavier, 1": "config/init/xavier_unit.py"}
STUDY = {
    "batch, sequences": ({"4": "--batch_size=4", "16": ""}, True),
    "steps": ({**SHORT, "300": ""}, True),
    "initial weights": ({"0.02": "config/init/gpt2.py", "0.049": "", **XAVIER}, True),
    "warm-up, steps": ({"0": "--warmup_iters=0", "30": ""}, False),
    "clipping at": ({"1": "", "never": "--grad_clip=0"}, False),
    "momentum": ({"0.9": "", "0.98": "--momentum=0.98"}, False),
}


def arms_of_layouts() -> dict:
    """Every layout under every optimizer, at its best rate and at multiples of it."""
    arms = {}
    for name, (optimizer, layout) in CURVES.items():
        files, rate, _ = OPTIMIZERS[optimizer]
        arm = Arm("gpt", LAYOUTS[layout] + files, "adamw_s5" if name == "S5 AdamW" else rate)
        keep = name in ("S1 AdamW", "S5 AdamW")  # to measure gradients
        arms[name] = arm._replace(points=5 if name in HEADLINES else 3, keep=keep)
        arms |= {f"{name} ×{k}": arm._replace(of=name, times=k) for k in FACTORS if f"{name} ×{k}" not in REFUSED}
    return arms


def study(arms: dict) -> tuple:
    """(`arms` and those of STUDY, {what is varied: the gap "arm - arm"}). An arm that has the base's value, or AdamW
    where it is not varied, is the plain one."""
    gaps = {}
    for what, (values, both) in STUDY.items():
        for (value, flags), layout in product(values.items(), ("S1", "S5")):
            pair = {optimizer: f"{layout} {optimizer}" for optimizer in ("mSGDW", "AdamW")}
            for optimizer, plain in pair.items():
                if flags and (both or optimizer == "mSGDW"):
                    pair[optimizer] = f"{plain}, {what} {value}"
                    files = f"{arms[plain].files} {flags}"
                    arms[pair[optimizer]] = arms[plain]._replace(files=files, points=3, around=plain, keep=False)
            gaps[f"{layout}, {what} {value}"] = " - ".join(pair.values())
    return arms, gaps


def llama(file: str, **how) -> Arm:
    """An arm of the LLaMA family, by the name of its config file."""
    return Arm("llama", f"config/{file}", **how)


STUDIED, VARIED = study(arms_of_layouts())
ARMS = {
    **STUDIED,
    "S5 mSGDW, half": STUDIED["S5 mSGDW"]._replace(of="S5 mSGDW", times=0.5, seeds=4),
    **{name: Arm("gpt", f"{file} {STRESS}", lr=STRESS_RATE) for name, file in STRESSED.items()},
    # blockwise learning rates, on S1
    **{name: Arm("gpt", f"{S1} config/blockwise/{file}.py", of="one rate") for name, file in TABLE_1.items()},
    "one rate": Arm("gpt", S1),
    "after warm-up": Arm("gpt", f"{S1} config/blockwise/warmup_end.py {FP32}", of="one rate", seeds=4),
    "one rate, beside it": Arm("gpt", f"{S1} {FP32}", of="one rate", seeds=4),
    "all blocks, tuned": Arm("gpt", f"{S1} config/blockwise/blockwise.py", "blockwise", seeds=4),
    "Adam-mini, one rate": Arm("gpt", f"{S1} config/optimizers/adam_mini.py", "adam_mini", points=3),
    "Adam-mini, blocks": Arm("gpt", f"{S1} config/blockwise/adam_mini_blockwise.py", of="Adam-mini, one rate"),
    **{name: Arm("gpt", f"{S1} config/blockwise/{file}.py", of="Fig. 8, one rate") for name, file in FIG_8.items()},
    "Fig. 8, one rate": Arm("gpt", S1),
    "sharpness": llama("scale_vectors/shared.py", keep=True),
    # scale vectors
    "shared": llama("scale_vectors/shared.py"),
    "none": llama("scale_vectors/none.py"),
    "none, rate of shared": llama("scale_vectors/none.py", of="shared"),
    "QK-norm": llama("scale_vectors/qk_norm.py", points=3),
    "unified": llama("scale_vectors/unified.py", points=3),
    **{name: llama(f"scale_vectors/{name.lower()}.py", of="shared") for name in ("HG", "DP")},
    **{name: llama(f"scale_vectors/{name.lower()}_magdir.py", of="shared") for name in ("OR", "ER")},
    **{name: llama(f"scale_vectors/{name.lower()}.py", of="QK-norm") for name in ("DNP", "IWD")},
    **{f"decay {gains}": llama(f"scale_vectors/decay_{gains}.py", of="QK-norm") for gains in ("all", "output")},
    # DyT
    "RMSNorm": llama("scale_vectors/shared.py"),
    "DyT": llama("dyt/dyt.py", tries=("", *(f"--dyt_alpha_attn={a} --dyt_alpha_other={a}" for a in ("0.5", "2", "4")))),
    "DyT, α₀ of the paper": llama("dyt/dyt.py", of="DyT"),
    **{name: llama(f"dyt/{name}.py", of="DyT") for name in ("hardtanh", "sigmoid", "identity")},
    "tanh, no α": llama("dyt/no_alpha.py", of="DyT"),
    **{f"{s}, no α": llama(f"dyt/no_alpha.py --dyt_squash={s}", of="DyT") for s in ("hardtanh", "sigmoid")},
    "no embedding scalar": llama("dyt/no_embed_scale.py", of="DyT"),
    # LNS
    "Pre-LN": Arm("deep", "config/lns/pre_ln.py"),
    "scaled init": Arm("deep", "config/lns/scaled_init.py", seeds=4),
    "LNS": Arm("deep", "config/lns/lns.py"),
    "LNS, rate of Pre-LN": Arm("deep", "config/lns/lns.py", of="Pre-LN"),
    "on the branch": Arm("deep", "config/lns/lns.py --lns=branch", of="LNS"),
    "after the residual sum": Arm("deep", "config/lns/lns.py --lns=residual", of="LNS"),
    "before the norm": Arm("deep", "config/lns/lns.py --lns=input", of="LNS"),
    # images
    **{f"ViT S{i} mSGDW": Arm("vit", f"config/dnt/s{i}.py {VISION_SGD}", "msgdw") for i in range(1, 6)},
    "ViT LayerNorm": Arm("vit", "config/dyt/vit_layernorm.py"),
    "ViT DyT": Arm("vit", "config/dyt/vit_dyt.py"),
    "ViT identity": Arm("vit", "config/dyt/vit_dyt.py --dyt_squash=identity", of="ViT DyT"),
    "ViT LayerNorm, long": Arm("vit", f"config/dyt/vit_layernorm.py {LONG}", of="ViT LayerNorm"),
    "ViT DyT, long": Arm("vit", f"config/dyt/vit_dyt.py {LONG}", of="ViT DyT"),
}
