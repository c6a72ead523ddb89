"""The layout track (docs/track.md): layouts against Pre-LN at 124M parameters on FineWeb, on GPUs,
for `python reproduce.py`.

    python reproduce.py --claims=studies/track.py --dry_run --only=dnt-muon    # the cost
    python data/fineweb/prepare.py --shards=27
    python reproduce.py --claims=studies/track.py --only=dnt-muon

A line in LAYOUTS is an entry, and gives a claim for each optimizer. An entry that changes what the
files of BASES set is refused.
"""

from configurator import configure
from model import GPTConfig
from nanodnt.settings import TrainConfig
from studies.claims.study import Arm, Claim, Number, Setting, Study, Trials, settings_of
from studies.sweep.runner import ROOT

BASES = {
    "AdamW": "config/track/base.py config/track/adamw.py",
    "Muon": "config/track/base.py config/track/muon.py",
}
# Three rates, at half of the optimizer's steps
TRIALS = {
    "AdamW": Trials((1.8e-3, 3.6e-3, 7.2e-3), "--max_iters=2500 --warmup_iters=250"),
    "Muon": Trials((0.0125, 0.025, 0.05), "--max_iters=1650 --warmup_iters=165"),
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
# Settings of the config files that an entry may change; it keeps all others.
FREE = ("out_dir", "learning_rate", "eval_interval", "save_interval")


def read_rules(files: str) -> tuple[Setting, ...]:
    """What these config files set, and an entry keeps."""
    (model_config, config), given = configure(
        GPTConfig, TrainConfig, argv=[str(ROOT / file) for file in files.split()]
    )
    settings = settings_of(model_config, config)
    return tuple(Setting(name, settings[name], RULES) for name in given if name not in FREE)


def make_claim(layout: str, optimizer: str) -> Claim:
    """The claim that an entry is better than Pre-LN under an optimizer."""
    entry = f"{layout} under {optimizer}"
    reference = f"{REFERENCE} under {optimizer}"
    return Claim(
        f"{layout}-{optimizer}".lower().replace(" ", "-").replace("*", "-star"),
        f"{layout} has a lower loss than {REFERENCE} under {optimizer}",
        Number(f"{layout} minus {REFERENCE}", f"{entry} - {reference}"),
        smallest=SMALLEST,
        sides=(
            Number(f"{layout} minus {TARGET}", entry, target=TARGET),
            Number(f"{REFERENCE} minus {TARGET}", reference, target=TARGET),
        ),
        protocol=read_rules(BASES[optimizer]),
        seeds=SEEDS,
    )


arms = {}
claims = []
for optimizer in BASES:
    for layout, (files, variants) in LAYOUTS.items():
        arms[f"{layout} under {optimizer}"] = Arm(optimizer, files, floor=0, tries=variants)
        if layout != REFERENCE:
            claims.append(make_claim(layout, optimizer))

study = Study(
    "The layout track: 162M parameters; 1.7e9 tokens of FineWeb a run (AdamW: 2.6e9); GPUs",
    bases=BASES,
    arms=arms,
    claims=claims,
    trials=TRIALS,
    digits=4,
    note="Expected, before the first run of an entry: nothing yet.",
)
