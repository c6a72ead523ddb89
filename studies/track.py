"""The layout track (docs/track.md): layouts against Pre-LN at 124M parameters on FineWeb, on GPUs,
for `python reproduce.py`.

    python reproduce.py --claims=studies/track.py --dry_run --only=dnt-muon    # the cost
    python data/fineweb/prepare.py --shards=27
    python reproduce.py --claims=studies/track.py --only=dnt-muon

A line in LAYOUTS is an entry, here and in studies/track_mini.py, and gives a claim for each
optimizer. One that changes the network or the training, but for `FREE`, is refused.
"""

from dataclasses import fields

from model import GPTConfig
from nanodnt.settings import TrainConfig
from studies.claims.study import Arm, Claim, Number, Setting, Study, Trials, settings_of
from studies.sweep.runner import resolve_configs

REFERENCE = "Pre-LN"
# {entry: its config file or flags}
LAYOUTS = {
    REFERENCE: "config/dnt/s1.py",
    "DNT": "config/dnt/s5.py",
    "Peri-LN": "config/layouts/peri_ln.py",
    "Gemma 3": "config/layouts/gemma3.py",
    "Qwen3": "config/layouts/qwen3.py",
    "OLMo-2": "config/layouts/olmo2.py",
    "HybridNorm": "config/layouts/hybrid_norm.py",
    "HybridNorm*": "config/layouts/hybrid_norm_star.py",
    "Keel": "config/layouts/keel.py",
    "Derf": "config/layouts/derf.py",
    "GPAS": "config/layouts/gpas.py",
    "nGPT": "config/layouts/ngpt.py",
}
# Flags of train.py that an entry may change. Those of the second line change no loss.
FREE = {"learning_rate", "seed"}
FREE |= {"compile", "eval_interval", "log_interval", "micro_batch_size", "save_interval"}


def read_rules(files: str) -> tuple[Setting, ...]:
    """What an entry keeps of these config files, and of the defaults: all flags of train.py but
    FREE, and those of GPTConfig before its norms, the parts and sizes of the network."""
    settings = settings_of(*resolve_configs(files.split()))
    network = [field.name for field in fields(GPTConfig)]
    network = network[: network.index("norm")]
    training = [field.name for field in fields(TrainConfig) if field.name not in FREE]
    kept = network + training
    return tuple(Setting(name, settings[name], "docs/track.md") for name in kept)


def make_study(
    title: str,
    bases: dict[str, str],
    smallest: float,
    seeds: int,
    tries: dict[str, tuple[str, ...]],
    **about: object,
) -> Study:
    """The study with an arm for each layout and base, an optimizer, and a claim for each entry: its
    loss is lower than Pre-LN's. tries: {layout: its variants}; about: further fields of `Study`."""
    arms = {}
    claims = []
    for optimizer, files in bases.items():
        rules = read_rules(files)
        for layout, own in LAYOUTS.items():
            name = f"{layout} under {optimizer}"
            arms[name] = Arm(optimizer, own, floor=0, tries=tries.get(layout, ()))
            if layout == REFERENCE:
                continue
            short = f"{layout}-{optimizer}".lower().replace(" ", "-").replace("*", "-star")
            says = f"{layout} has a lower loss than {REFERENCE} under {optimizer}"
            value = f"{name} - {REFERENCE} under {optimizer}"
            number = Number(f"{layout} minus {REFERENCE}", value)
            claim = Claim(short, says, number, smallest=smallest, protocol=rules, seeds=seeds)
            claims.append(claim)
    return Study(title, bases, arms, claims, **about)


def around(rate: float) -> tuple[float, ...]:
    """Five rates by factors of two, this one in the middle."""
    return tuple(rate * 2.0**k for k in (-2, -1, 0, 1, 2))


# Two variants of each entry: two initial weights, or flags of its own
INITS = ("--residual_init=gpt2", "--residual_init=plain")
TRIES = dict.fromkeys(LAYOUTS, INITS)
TRIES["nGPT"] = ("--branch_scale_init=0.05", "--branch_scale_init=0.1")

study = make_study(
    "The layout track: 162M parameters; 1.7e9 tokens of FineWeb a run (AdamW: 2.6e9); GPUs",
    bases={
        "AdamW": "config/track/base.py config/track/adamw.py",
        "Muon": "config/track/base.py config/track/muon.py",
    },
    smallest=0.004,  # nats: three times Muon's spread over seeds
    seeds=8,
    tries=TRIES,
    trials={  # at half of the optimizer's steps
        "AdamW": Trials(around(3.6e-3), "--max_iters=2500 --warmup_iters=250"),
        "Muon": Trials(around(0.025), "--max_iters=1650 --warmup_iters=165"),
    },
    target=3.28,
    digits=4,
    note="Expected, before the first run of an entry: nothing yet.",
)
