"""The layout track (docs/track.md): layouts against Pre-LN at 124M parameters on FineWeb, on GPUs,
for `python reproduce.py`.

    python reproduce.py --claims=studies/track.py --dry_run --only=dnt-muon    # the cost
    python data/fineweb/prepare.py --shards=27
    python reproduce.py --claims=studies/track.py --only=dnt-muon

A line in LAYOUTS is an entry, and gives a claim for each optimizer. What an entry may not change is
in FIXED: a run that differs there is refused.
"""

from studies.claims.study import Arm, Claim, Number, Setting, Study, Trials

# An optimizer's config file, and its trials: three rates at half of its steps
OPTIMIZERS = {
    "AdamW": (
        "config/track/adamw.py",
        Trials((1.8e-3, 3.6e-3, 7.2e-3), "--max_iters=2500 --warmup_iters=250"),
    ),
    "Muon": (
        "config/track/muon.py",
        Trials((0.0125, 0.025, 0.05), "--max_iters=1650 --warmup_iters=165"),
    ),
}
REFERENCE = "Pre-LN"
# The two variants that an entry tries at each rate: these, or flags of its own.
INITS = ("--residual_init=gpt2", "--residual_init=plain")
# {entry: its config file or flags, and its two variants}
LAYOUTS = {
    REFERENCE: ("config/dnt/s1.py", INITS),
    "DNT": ("config/dnt/s5.py", INITS),
    "Peri-LN": ("config/layouts/peri_ln.py", INITS),
    "Gemma 3": ("config/layouts/gemma3.py", INITS),
    "Qwen3": ("config/layouts/qwen3.py", INITS),
    "OLMo-2": ("config/layouts/olmo2.py", INITS),
    "HybridNorm": ("config/layouts/hybrid_norm.py", INITS),
    "HybridNorm*": ("config/layouts/hybrid_norm_star.py", INITS),
    "Keel": ("config/layouts/keel.py", INITS),
    "Derf": ("config/layouts/derf.py", INITS),
    "GPAS": ("config/layouts/gpas.py", INITS),
}
SEEDS = 8
SMALLEST = 0.004  # nats: the smallest difference that matters, three times Muon's spread over seeds
TARGET = 3.28  # nats: the loss to be reached

RULES = "docs/track.md"
FIXED = {
    "dataset": "fineweb",
    "batch_size": 512,
    "block_size": 1024,
    "doc_mask": False,
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_kv_head": 0,
    "head_size": 0,
    "n_ff": 0,
    "n_expert": 0,
    "mlp": "gelu",
    "pos": "rope",
    "tie_weights": False,
    "bias": False,
    "dropout": 0.0,
    "drop_path": 0.0,
    "beta1": 0.9,
    "beta2": 0.95,
    "decay_emb": True,
    "decay_gains": "none",
    "decay_scalars": False,
    "blockwise_lr": False,
    "grad_clip": 1.0,
    "schedule": "linear",
    "warm-up / steps": 0.1,
    "min_lr / rate": 0.0,
    "eval_rows": "first",
    "eval_tokens": 10_485_760,
    "target_val_loss": 0.0,
    "learning_rate": "tuned",
}
FIXED_BY_OPTIMIZER = {
    "AdamW": {"optimizer": "adamw", "max_iters": 5000, "weight_decay": 0.1},
    "Muon": {
        "optimizer": "muon",
        "max_iters": 3300,
        "weight_decay": 0.05,
        "momentum": 0.95,
        "muon_adjust_lr": "original",
        "adamw_learning_rate": 3.2e-3,
        "adamw_weight_decay": 0.1,
    },
}


def make_claim(layout: str, optimizer: str) -> Claim:
    """The claim that an entry is better than Pre-LN under an optimizer."""
    entry = f"{layout} under {optimizer}"
    reference = f"{REFERENCE} under {optimizer}"
    fixed = FIXED | FIXED_BY_OPTIMIZER[optimizer]
    return Claim(
        f"{layout}-{optimizer}".lower().replace(" ", "-").replace("*", "-star"),
        f"{layout} has a lower loss than {REFERENCE} under {optimizer}",
        Number(f"{layout} minus {REFERENCE}", f"{entry} - {reference}"),
        smallest=SMALLEST,
        sides=(
            Number(f"{layout} minus {TARGET}", entry, target=TARGET),
            Number(f"{REFERENCE} minus {TARGET}", reference, target=TARGET),
        ),
        protocol=tuple(Setting(name, value, RULES) for name, value in fixed.items()),
        seeds=SEEDS,
    )


arms = {}
claims = []
for optimizer in OPTIMIZERS:
    for layout, (files, variants) in LAYOUTS.items():
        arms[f"{layout} under {optimizer}"] = Arm(optimizer, files, floor=0, tries=variants)
        if layout != REFERENCE:
            claims.append(make_claim(layout, optimizer))

study = Study(
    "The layout track: 162M parameters; 1.7e9 tokens of FineWeb a run (AdamW: 2.6e9); GPUs",
    bases={name: f"config/track/base.py {file}" for name, (file, _) in OPTIMIZERS.items()},
    arms=arms,
    claims=claims,
    trials={name: trials for name, (_, trials) in OPTIMIZERS.items()},
    digits=4,
    note="Expected, before the first run of an entry: nothing yet.",
)
