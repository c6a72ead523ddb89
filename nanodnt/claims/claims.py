"""The papers' claims as data: what a paper says, which runs and which number test it, and what the number must be.

`reproduce.py` trains the runs, measures, judges and writes docs/results/claims.md. Marks: [I] our inference or choice,
[U] not published where we could read it.

An `Arm` is a configuration: config files and flags that follow the base of its family. The scale chooses the bases. A
`Row` is one number and the values of it that confirm the claim. Its `value` is a sum of arms such as "A - B", each
measured by `measure`. It is computed seed by seed: arms with the same seed see the same data, so they are paired. A
`Claim` holds if all its rows do.
"""

from typing import NamedTuple


class Scale(NamedTuple):
    title: str
    bases: dict  # family: config files and flags that come first
    grids: dict  # optimizer: (learning rates, the one to begin with); (None,): the config's own
    distributed: bool = False  # torchrun over all GPUs, one run at a time
    changes: dict = {}  # arm: config files and flags added to its own at this scale


class Arm(NamedTuple):
    family: str  # of Scale.bases
    files: str = ""  # config files and flags
    grid: str = "adamw"  # of Scale.grids
    lr: str | float | None = None  # None: the best of the grid; a number: itself; a text: the best LR of that arm
    keep: bool = False  # keep ten checkpoints, for what is measured over training


class Row(NamedTuple):
    says: str
    value: str  # "arm", "arm - arm", …; for quantities.CONFIG_MEASURES config files and flags
    expect: str  # "< x", "> x" or "within x" (of 0)
    measure: str = "loss"


class Claim(NamedTuple):
    id: str
    paper: str
    statement: str
    published: str  # the paper's numbers, and where they are
    rows: list
    note: str = ""  # how our test differs from the paper's
    scales: tuple = ("tiny", "small", "124m", "paper")  # the scales that can test it


TINY_LRS = tuple(0.25e-3 * 2**k for k in range(9))  # to 0.064
SGD_LRS = tuple(0.025 * 2**k for k in range(9))  # to 6.4
BIG_LRS = tuple(0.125e-3 * 2**k for k in range(9))  # to 0.032

SCALES = {
    "tiny": Scale(
        "0.3M parameters, 0.2M bytes of Python source; CPU",
        bases={
            "dnt": "config/claims/tiny_gpt.py",
            "blockwise": "config/claims/tiny_llama.py",
            "gains": "config/claims/tiny_llama.py",
            "dyt": "config/claims/tiny_llama.py --init_std=0.125",
            "lns": "config/claims/tiny_llama.py --n_layer=12",
        },
        grids={
            "adamw": (TINY_LRS, 4e-3),
            "blockwise": (TINY_LRS, 1e-3),
            "muon": (TINY_LRS, 8e-3),
            "msgdw": (SGD_LRS, 0.2),
        },
    ),
    "small": Scale(
        "6M parameters, 8M bytes of Python source; one GPU",
        bases={
            "dnt": "config/claims/small_gpt.py",
            "blockwise": "config/claims/small_llama.py",
            "gains": "config/claims/small_llama.py",
            "dyt": "config/claims/small_llama.py --init_std=0.0625",
            "lns": "config/claims/small_llama.py --n_layer=16",
        },
        grids={
            "adamw": (BIG_LRS, 2e-3),
            "blockwise": (BIG_LRS, 5e-4),
            "muon": (BIG_LRS, 4e-3),
            "msgdw": (SGD_LRS, 0.4),
        },
    ),
    "124m": Scale(
        "0.12B parameters, the papers' recipes, but each arm's LR from a grid around theirs [I]; GPUs",
        bases={
            "dnt": "config/gpt2_small.py",
            "blockwise": "config/blockwise/gpt2_124m.py",
            "gains": "config/scale_vectors/llama_120m.py",
            "dyt": "config/dyt/small.py",
            "lns": "config/lns/130m.py",
        },
        grids={
            "adamw": ((1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3), 6e-4),
            "blockwise": ((1.5e-4, 3e-4, 6e-4, 1.2e-3), 6e-4),
            "muon": ((5e-5, 1e-4, 2e-4, 4e-4, 8e-4), 1e-4),
            "msgdw": ((0.25, 0.5, 1.0, 2.0), 1.0),
        },
        distributed=True,
        changes=dict.fromkeys(("S1 Muon", "S5 Muon"), "config/optimizers/muon_dnt.py"),
    ),
    "paper": Scale(
        "the papers' largest language models within a node's reach, at their own LRs; GPUs",
        bases={
            "dnt": "config/gpt2_xl.py",
            "blockwise": "config/blockwise/llama_237m.py",
            "gains": "config/scale_vectors/llama_120m.py",
            "dyt": "config/dyt/7b.py config/dyt/rmsnorm.py",
            "lns": "config/lns/1b.py",
        },
        grids=dict.fromkeys(("adamw", "blockwise", "muon", "msgdw"), ((None,), None)),
        distributed=True,
        changes={
            **dict.fromkeys(("S1 Muon", "S5 Muon"), "config/optimizers/muon_dnt.py"),
            "S5 AdamW": "--learning_rate=6e-4 --min_lr=6e-5",  # the baseline's is 1.5e-4
        },
    ),
}

MSGDW, MUON = "config/optimizers/msgdw.py", "config/optimizers/muon.py"
SETTINGS = ("S1", "S2", "S3", "S4", "S5")
LEFT_OUT = {"QK": "no_qk_norm", "pre": "no_pre_norm", "mid": "no_mid_norm", "input": "no_input_norm"}
STRESS = {"AdamW 0.03": ("", 0.03), "AdamW 0.1": ("", 0.1), "mSGDW 3": (MSGDW, 3.0)}

ARMS = {
    # DNT
    **{f"{s} mSGDW": Arm("dnt", f"config/dnt/{s.lower()}.py {MSGDW}", "msgdw") for s in SETTINGS},
    **{f"{s} AdamW": Arm("dnt", f"config/dnt/{s.lower()}.py", keep=True) for s in ("S1", "S5")},
    **{f"{s} Muon": Arm("dnt", f"config/dnt/{s.lower()}.py {MUON}", "muon") for s in ("S1", "S5")},
    **{
        f"{name}, {stress}": Arm("dnt", f"config/dnt/{file}.py {optimizer} --warmup_iters=0", lr=lr)
        for stress, (optimizer, lr) in STRESS.items()
        for name, file in {"S4": "s4", **{f"S4 without {k}": v for k, v in LEFT_OUT.items()}}.items()
    },
    # blockwise LR
    "one LR": Arm("blockwise", keep=True),
    "all blocks": Arm("blockwise", "config/blockwise/blockwise.py", "blockwise"),
    "Emb": Arm("blockwise", "config/blockwise/emb.py", "blockwise"),
    "Emb, FFN": Arm("blockwise", "config/blockwise/emb_ffn.py", "blockwise"),
    "Norm ×2": Arm("blockwise", "config/blockwise/norm_double.py", lr="one LR"),
    "Adam-mini": Arm("blockwise", "config/blockwise/adam_mini.py"),
    "Adam-mini, blocks": Arm("blockwise", "config/blockwise/adam_mini_blockwise.py", "blockwise"),
    # DyT
    "RMSNorm": Arm("dyt"),
    "DyT": Arm("dyt", "config/dyt/dyt.py"),
    "hardtanh": Arm("dyt", "config/dyt/hardtanh.py", lr="DyT"),
    "sigmoid": Arm("dyt", "config/dyt/sigmoid.py", lr="DyT"),
    "identity": Arm("dyt", "config/dyt/identity.py", lr="DyT"),
    "tanh, no α": Arm("dyt", "config/dyt/no_alpha.py", lr="DyT"),
    "hardtanh, no α": Arm("dyt", "config/dyt/no_alpha.py --dyt_squash=hardtanh", lr="DyT"),
    "sigmoid, no α": Arm("dyt", "config/dyt/no_alpha.py --dyt_squash=sigmoid", lr="DyT"),
    "no embedding scalar": Arm("dyt", "config/dyt/no_embed_scale.py", lr="DyT"),
    **{
        f"α₀ {a:g}/{o:g}": Arm("dyt", f"config/dyt/dyt.py --dyt_alpha_attn={a} --dyt_alpha_other={o}", lr="DyT")
        for a in (0.5, 1.0, 2.0)
        for o in (0.5, 1.0, 2.0)
        if (a, o) != (1.0, 1.0)
    },
    # LNS
    "Pre-LN": Arm("lns", "config/lns/pre_ln.py"),
    "scaled init": Arm("lns", "config/lns/scaled_init.py"),
    "LNS": Arm("lns", "config/lns/lns.py"),
    "on the branch": Arm("lns", "config/lns/lns.py --lns=branch", lr="LNS"),
    "after the residual sum": Arm("lns", "config/lns/lns.py --lns=residual", lr="LNS"),
    "before the norm": Arm("lns", "config/lns/lns.py --lns=input", lr="LNS"),
    "attention only": Arm("lns", "config/lns/lns.py --lns_branches=attn", lr="LNS"),
    "FFN only": Arm("lns", "config/lns/lns.py --lns_branches=mlp", lr="LNS"),
    "Pre-LN, LR 0.001": Arm("lns", "config/lns/pre_ln.py", lr=1e-3),
    # scale vectors
    "shared": Arm("gains", "config/scale_vectors/shared.py"),
    "none": Arm("gains", "config/scale_vectors/none.py"),
    "none, LR of shared": Arm("gains", "config/scale_vectors/none.py", lr="shared"),
    "QK-norm": Arm("gains", "config/scale_vectors/qk_norm.py"),
    "unified": Arm("gains", "config/scale_vectors/unified.py"),
    **{
        name: Arm("gains", f"config/scale_vectors/{file}.py", lr=lr)
        for name, file, lr in (
            ("HG", "hg", "shared"),
            ("DP", "dp", "shared"),
            ("OR", "or_magdir", "shared"),
            ("ER", "er_magdir", "shared"),
            ("DNP", "dnp", "QK-norm"),
            ("decay all", "decay_all", "QK-norm"),
            ("decay output", "decay_output", "QK-norm"),
            ("IWD", "iwd", "QK-norm"),
        )
    },
}


def leave_one_out(stress: str) -> list:
    """The rows that test which norm is missed most under a `STRESS`."""
    worse = [("QK", "pre"), ("QK", "mid"), ("pre", "input"), ("mid", "input")]
    without = {name: f"S4 without {name}, {stress}" for name in LEFT_OUT}
    return [
        *(Row(f"{stress}: {a} left out is worse than S4", f"{without[a]} - S4, {stress}", "> 0") for a in LEFT_OUT),
        *(Row(f"{stress}: {a} left out is worse than {b}", f"{without[a]} - {without[b]}", "> 0") for a, b in worse),
    ]


BORROWED = "All use the best LR of {}, which favours it."

CLAIMS = [
    Claim(
        "dnt-settings",
        "DNT",
        "Under momentum SGD S1 and S2 are worst, S3 is better, S4 and S5 are best",
        "Fig. 6, 124M",
        [
            Row("S2 is as S1", "S2 mSGDW - S1 mSGDW", "within 0.03"),
            Row("S3 is better than S1", "S3 mSGDW - S1 mSGDW", "< 0"),
            Row("S4 is better than S3", "S4 mSGDW - S3 mSGDW", "< 0"),
            Row("S5 is as S4", "S5 mSGDW - S4 mSGDW", "within 0.03"),
        ],
        "The margin of 0.03 nats for “as” is ours [I].",
    ),
    Claim(
        "dnt-gap",
        "DNT",
        "DNT closes momentum SGD's gap to AdamW",
        "124M, AdamW then mSGDW: baseline 2.867, 2.906; DNT 2.863, 2.849 (Table 1)",
        [
            Row("DNT helps mSGDW", "S5 mSGDW - S1 mSGDW", "< 0"),
            Row("DNT helps AdamW", "S5 AdamW - S1 AdamW", "< 0"),
            Row("the gap is smaller with DNT", "S5 mSGDW - S5 AdamW - S1 mSGDW + S1 AdamW", "< 0"),
            Row("DNT under mSGDW is at least as good as under AdamW", "S5 mSGDW - S5 AdamW", "< 0.01"),
        ],
        "Each arm has its own LR; the margin of 0.01 nats is ours [I].",
    ),
    Claim(
        "dnt-gradients",
        "DNT",
        "DNT's gradient entries are more concentrated than Pre-LN's",
        "Fig. 1, ViT, early checkpoint: entries up to 1e-4 and up to 1e-5",
        [
            Row("smaller: log10 of the RMS", "S5 AdamW - S1 AdamW", "< 0", "log10 gradient RMS"),
            Row("lighter tail: log10 of the kurtosis", "S5 AdamW - S1 AdamW", "< 0", "log10 gradient kurtosis"),
        ],
        "On language models, at the first checkpoint after warm-up, the mean over q, k, v, o, w1, w2 [I]. Ranges of "
        "entries confound scale with the shape of the tail, so we measure both [I].",
    ),
    Claim(
        "dnt-stress",
        "DNT",
        "At a high LR without warm-up every norm is needed: QK most, then pre and mid, then input",
        "App. F, “Adam, lr 0.3”: no QK-norm collapses within steps, no pre norm from 4K, no mid norm oscillates, no "
        "input norm converges",
        [row for stress in STRESS if "AdamW" in stress for row in leave_one_out(stress)],
        "Norms are left out of S4, since App. F lists two pre norms [I]. Adam at 0.3 is implausible, so we take lower "
        "LRs [I]. Judged by the final loss instead of the step of divergence, since a run need not diverge. That "
        "leaving out the input norm costs anything is our reading of the ranking [I].",
    ),
    Claim(
        "dnt-stress-sgd",
        "DNT",
        "The same under momentum SGD [I]",
        "not in the paper; App. F's optimizer is in doubt",
        leave_one_out("mSGDW 3"),
        "Another reading of App. F: momentum SGD, the paper's own optimizer [I].",
    ),
    Claim(
        "dnt-muon",
        "DNT",
        "Under Muon DNT is stable, and better than under AdamW",
        "App. F.1",
        [
            Row("DNT: Muon is better than AdamW", "S5 Muon - S5 AdamW", "< 0"),
            Row("DNT does not rise: last minus lowest loss", "S5 Muon", "< 0.005", "rise"),
        ],
        "The margin of 0.005 nats is ours [I].",
    ),
    Claim(
        "dnt-muon-gpt2",
        "DNT",
        "Under Muon GPT-2's validation loss rises again",
        "App. F.1: after 50K steps",
        [Row("last minus lowest loss", "S1 Muon", "> 0.005", "rise")],
        "The margin of 0.005 nats is ours [I]. A run of some hundred steps with a tuned LR cannot show this.",
    ),
    Claim(
        "dnt-memory",
        "DNT",
        "Momentum SGD halves the optimizer's memory",
        "1.4B: 11.5 and 5.7 GB of state",
        [
            Row("AdamW's, GB over 11.5", "config/dnt_xl.py --optimizer=adamw - 11.5", "within 0.1", "state GB"),
            Row("mSGDW's, GB over 5.7", "config/dnt_xl.py --optimizer=msgdw - 5.7", "within 0.1", "state GB"),
        ],
        "Counted on the paper's model at every scale, so there are no seeds. Measured totals (67 and 61 GB): "
        "[plan.md](plan.md).",
    ),
    Claim(
        "blockwise-order",
        "Blockwise LR",
        "Sharpness is ordered Emb < QK < FFN < VO < Norm, from early in training on, but not at its start",
        "Figs. 1–3; LLaMA 0.25B at 40K steps about 8.6e-7, 1.5e-6, 2.9e-6, 5.4e-6, 3.1e-5 (read off a chart in the "
        "authors' repository)",
        [
            Row("log10 QK over Emb at the end", "one LR", "> 0", "log10 sharpness qk/emb"),
            Row("log10 FFN over QK at the end", "one LR", "> 0", "log10 sharpness ffn/qk"),
            Row("log10 VO over FFN at the end", "one LR", "> 0", "log10 sharpness vo/ffn"),
            Row("log10 Norm over VO at the end", "one LR", "> 0", "log10 sharpness norm/vo"),
            Row("share of the run after which the order stays", "one LR", "< 0.25", "onset of the order"),
            Row("1 if the order is there at the start, else 0", "one LR", "< 0.5", "order at the start"),
        ],
        "Arithmetic means. The mean over an embedding falls as the vocabulary grows, since a text uses few of its "
        "entries: with our 257 bytes it is far larger than with the paper's 50304 tokens [I]. That “early” is the "
        "first quarter of the run is ours [I]; the share is 1 if the order does not hold at the end.",
    ),
    Claim(
        "blockwise-adamw",
        "Blockwise LR",
        "Blockwise LRs beat AdamW at one LR",
        "0.25B: 2.784 and 2.834 (Table 1); 2× fewer steps",
        [Row("all four ratios", "all blocks - one LR", "< 0")],
        "Each arm has its own LR; the paper takes the baseline's for both.",
    ),
    Claim(
        "blockwise-each",
        "Blockwise LR",
        "Each block's ratio adds to it",
        "0.25B: one LR 2.834, Emb 2.818, Emb and FFN 2.791, all four 2.784 (Table 1)",
        [
            Row("Emb", "Emb - one LR", "< 0"),
            Row("FFN after Emb", "Emb, FFN - Emb", "< 0"),
            Row("QK and VO after these", "all blocks - Emb, FFN", "< 0"),
        ],
        "Each arm has its own LR.",
    ),
    Claim(
        "blockwise-norm",
        "Blockwise LR",
        "Doubling the norms' LR hurts",
        "0.25B: 2.837 and 2.834 (Table 1)",
        [Row("Norm ×2", "Norm ×2 - one LR", "> 0")],
        BORROWED.format("one LR"),
    ),
    Claim(
        "blockwise-mini",
        "Blockwise LR",
        "Blockwise LRs help Adam-mini too",
        "0.25B: 0.044 lower (plots of the authors' repository)",
        [Row("Emb 4, QK 1, FFN 4, VO 4", "Adam-mini, blocks - Adam-mini", "< 0")],
    ),
    Claim(
        "dyt-rmsnorm",
        "DyT",
        "DyT matches RMSNorm",
        "LLaMA 7B 1.60 and 1.59, 13B 1.54 and 1.53, 34B and 70B equal",
        [Row("DyT minus RMSNorm", "DyT - RMSNorm", "within 0.02")],
        "The margin of 0.02 nats is ours [I]. On narrow models both have init_std·√n_embd = 1, because DyT does not "
        "scale up a small signal as a norm does.",
    ),
    Claim(
        "dyt-norms",
        "DyT",
        "Norms act like tanh, and DyT's α follows 1/std of its input",
        "Figs. 2, 4 and 8: S-shaped maps in trained LayerNorms, α close to 1/std",
        [
            Row("norms: R² of y ≈ A·tanh(ax), mean over slots", "RMSNorm", "> 0.9", "tanh fit"),
            Row("and more than the straight line explains", "RMSNorm", "> 0.01", "tanh fit over linear"),
            Row("Pearson's r of α and 1/std over slots", "DyT", "> 0.5", "alpha and 1/std"),
        ],
        "The limits are ours [I]; the paper shows plots.",
    ),
    Claim(
        "dyt-squash",
        "DyT",
        "A bounded squash is needed, and tanh is the best",
        "ViT-B: tanh 82.5, hardtanh 82.2, sigmoid 81.6, identity diverges (Table 8)",
        [
            Row("hardtanh minus tanh", "hardtanh - DyT", "> 0"),
            Row("sigmoid minus tanh", "sigmoid - DyT", "> 0"),
            Row("identity minus tanh", "identity - DyT", "> 0"),
        ],
        BORROWED.format("tanh"),
    ),
    Claim(
        "dyt-alpha",
        "DyT",
        "Every squash is worse without α",
        "ViT-B: tanh 81.1, hardtanh 80.7, sigmoid 80.7, with α 82.5, 82.2, 81.6 (Table 9)",
        [
            Row("tanh", "tanh, no α - DyT", "> 0"),
            Row("hardtanh", "hardtanh, no α - hardtanh", "> 0"),
            Row("sigmoid", "sigmoid, no α - sigmoid", "> 0"),
        ],
        BORROWED.format("tanh with α"),
    ),
    Claim(
        "dyt-grid",
        "DyT",
        "At small widths α₀ = 1 before attention and 1 elsewhere is best",
        "width 1024: 1.0 and 1.0; wider models want less, most of all outside attention",
        [Row(f"{arm} minus 1/1", f"{arm} - DyT", "> 0") for arm in ARMS if arm.startswith("α₀")],
        "The paper's narrowest model is 1024 wide; ours are narrower and are tested with its value [I]. "
        + BORROWED.format("1/1"),
        scales=("tiny", "small", "124m"),
    ),
    Claim(
        "dyt-scalar",
        "DyT",
        "The scalar on the embedding helps language models",
        "part of its LLaMA recipe; how much it gains: [U]",
        [Row("without minus with", "no embedding scalar - DyT", "> 0")],
        BORROWED.format("the one with it"),
    ),
    Claim(
        "lns-loss",
        "LNS",
        "LNS has a lower loss than Pre-LN",
        "0.037 (130M) to 0.080 (1B) lower, from perplexities in images of the authors' repository",
        [Row("LNS minus Pre-LN", "LNS - Pre-LN", "< 0")],
        "Weights in fp32; the paper's are bf16, see bf16-gains.",
    ),
    Claim(
        "lns-scaled",
        "LNS",
        "LNS has a lower loss than Pre-LN with scaled initialisation",
        "0.011 (130M) and 0.031 (250M) lower (same source)",
        [Row("LNS minus scaled init", "LNS - scaled init", "< 0")],
    ),
    Claim(
        "lns-position",
        "LNS",
        "The factor belongs after the norm, in both branches",
        "after the residual sum it diverges (1358.11); the other positions: [U]",
        [
            Row(f"{arm} minus LNS", f"{arm} - LNS", "> 0")
            for arm in ("after the residual sum", "on the branch", "before the norm", "attention only", "FFN only")
        ],
        BORROWED.format("LNS"),
    ),
    Claim(
        "lns-variance",
        "LNS",
        "LNS bounds the growth of the output variance with depth",
        "last layer about 175 and 25",
        [
            Row(
                "log10 of the growth from the first to the last block, LNS minus Pre-LN",
                "LNS - Pre-LN",
                "< 0",
                "log10 variance growth",
            )
        ],
    ),
    Claim(
        "lns-angular",
        "LNS",
        "Under Pre-LN deep blocks hardly turn the stream; under LNS they turn it more",
        "Figs. 2–5 (maps)",
        [
            Row("Pre-LN: deeper over shallower half", "Pre-LN", "< 1", "angular ratio"),
            Row("deeper half, LNS minus Pre-LN", "LNS - Pre-LN", "> 0", "angular deep"),
        ],
        "Mean angular distance between the inputs of a block and the next [I].",
    ),
    Claim(
        "lns-removal",
        "LNS",
        "Deep blocks can be removed at little cost under Pre-LN, at more under LNS",
        "Figs. 2–5 (accuracy lost for each block removed)",
        [
            Row("Pre-LN: deeper over shallower half", "Pre-LN", "< 1", "removal ratio"),
            Row("deeper half, nats, LNS minus Pre-LN", "LNS - Pre-LN", "> 0", "removal deep"),
        ],
        "Rise of the validation loss, mean over the blocks of a half, instead of accuracy on tasks [I].",
    ),
    Claim(
        "bf16-gains",
        "LNS",
        "Gains stored in bf16 stay at 1 at an LR of 1e-3, so that Pre-LN cannot learn them [I]",
        "ours [I]: the LNS paper's runs were in bf16; it does not say this",
        [
            Row("share of gains still exactly 1, bf16 weights", "Pre-LN, LR 0.001", "> 0.9", "frozen gains in bf16"),
            Row("the same, fp32 weights", "Pre-LN, LR 0.001", "< 0.1", "frozen gains"),
        ],
        "The bf16 run uses torch's AdamW on a model cast to bf16, with the data and LR of the fp32 run. It is trained "
        "as part of the measurement, in one process, so only at the small scales.",
        scales=("tiny", "small"),
    ),
    Claim(
        "gains-removal",
        "scale vectors",
        "Removing the scale vectors hurts",
        "0.12B: +0.028, after tuning the LR again +0.015 [from secondary notes]",
        [
            Row("at one LR", "none, LR of shared - shared", "> 0"),
            Row("LR tuned again", "none - shared", "> 0"),
        ],
    ),
    Claim(
        "gains-iwd",
        "scale vectors",
        "Only gains that a linear map follows should be decayed (IWD)",
        "how much it gains: [U]",
        [
            Row("IWD minus no decay", "IWD - QK-norm", "< 0"),
            Row("IWD minus decay on all", "IWD - decay all", "< 0"),
            Row("IWD minus decay on output gains", "IWD - decay output", "< 0"),
        ],
        "With QK-norm, so that there are output gains [I]. In a short run decay has little effect.",
    ),
    Claim(
        "gains-hg",
        "scale vectors",
        "Separate gains for q, k, v, gate and up (HG) help",
        "how much it gains alone: [U]",
        [Row("HG minus shared", "HG - shared", "< 0")],
    ),
    Claim(
        "gains-dp",
        "scale vectors",
        "A gain on the output side (DP), and a norm with it (DNP), help",
        "how much they gain alone: [U]",
        [
            Row("DP minus shared", "DP - shared", "< 0"),
            Row("DNP minus QK-norm", "DNP - QK-norm", "< 0"),
        ],
        "DNP contains QK-norm, so that is its baseline.",
    ),
    Claim(
        "gains-or",
        "scale vectors",
        "Separate magnitude and direction (OR, ER) help",
        "how much they gain alone: [U]",
        [Row("OR minus shared", "OR - shared", "< 0"), Row("ER minus shared", "ER - shared", "< 0")],
        "The formulas are ours [I].",
    ),
    Claim(
        "gains-unified",
        "scale vectors",
        "The unified variant (HG, DNP, OR, IWD) has a lower loss",
        "about 0.04 lower, 0.12B to 2B [from secondary notes]",
        [
            Row("unified minus shared", "unified - shared", "< 0"),
            Row("unified minus QK-norm", "unified - QK-norm", "< 0"),
        ],
        "DNP adds QK-norm, so there are two baselines [I].",
    ),
]
