"""DNT's claims about language models, with the initial weights that pass the control of
studies/calibration.py, for `python reproduce.py`:

    python data/pystdlib/prepare.py --tokenizer=gpt2_4096
    python reproduce.py --claims=studies/dnt.py

The claims are those of studies/papers.py, which has them with Xavier. `note` has what was known and
expected before the new runs.
"""

from studies.claims.study import Arm, Claim, Study, arms_in
from studies.papers import DNT
from studies.papers import study as papers

WEIGHTS = "config/claims/mini_gpt.py config/init/width_128.py"
# {arm: its learning rate} of the earlier round, where one seed chose it
EARLIER_RATES = {
    "S1 AdamW": 4e-3,
    "S5 AdamW": 64e-3,
    "S1 AdamW, 8 × S1's rate": 32e-3,
    "S5 AdamW, 8 × its rate": 512e-3,
    "S1 mSGDW": 0.125,
    "S5 mSGDW": 1.0,
    "S1 Muon": 16e-3,
    "S5 Muon": 8e-3,
}
# {arm: its learning rate} of those that are run anew
NEW_RATES = {"S5 AdamW, S1's rate": 4e-3, "S5 AdamW, 8 × S1's rate": 32e-3}
CONTROL = "that of the control"
WHY = {
    **dict.fromkeys(("init", "init_std", "residual_init", "warm-up / steps"), CONTROL),
    "min_lr": "a tenth of the rate, where the runs are of the earlier round",
}
SEEDS = {"dnt-own": 8, "dnt-gap": 8, "dnt-muon": 8}  # 4 for the others
# {claim: {class of the verdict: the finding in plain words}}
PLAIN = {
    "dnt-own": {
        "undecided": "Under momentum SGD, each at its own rate, DNT is below Pre-LN by what is "
        "published, but seeds differ too much to be sure of the sign"
    },
    "dnt-muon": {"same direction": "Muon instead of AdamW lowers DNT's loss, and Pre-LN's as much"},
}
SIZES = "The smallest effect that matters is that of studies/papers.py [I]."


def move(name: str) -> Arm:
    """An arm of studies/papers.py with these initial weights."""
    arm = papers.arms[name]
    if name in EARLIER_RATES:
        return Arm("earlier", arm.files, lr=EARLIER_RATES[name])
    return arm._replace(base="new", lr=NEW_RATES.get(name, arm.lr), of="", times=1)


def judge_here(claim: Claim) -> Claim:
    """A claim of studies/papers.py, to be judged with these initial weights."""
    protocol = tuple(s._replace(why=WHY.get(s.name, s.why)) for s in claim.protocol)
    withheld = ""
    if claim.id == "dnt-gap":
        withheld = "it contains the number of dnt-par, for which these runs are too short"
    sides = [side for side in claim.sides if "scaled" not in side.value]
    return claim._replace(
        protocol=protocol,
        sides=tuple(sides),
        withheld=withheld,
        seeds=SEEDS.get(claim.id, 4),
        plain=PLAIN.get(claim.id, {}),
        note=SIZES,
    )


claims = [judge_here(claim) for claim in DNT if not claim.cannot]
study = Study(
    "GPTs of 2M parameters, 0.6M tokens of Python source a run; CPU cores",
    bases={"earlier": WEIGHTS, "new": f"{WEIGHTS} --dtype=float32"},
    arms={name: move(name) for name in arms_in(n for claim in claims for n in claim.numbers)},
    claims=claims,
    records=("docs/results/claims/mini.json", "docs/results/calibration/record.json"),
    note=(
        "The initial weights and the warm-up are those with which [the control](calibration.md) "
        "passes: GPT-2's, 2.4 times as large to suit the width, and 30 steps. Runs under AdamW, "
        "mSGDW and Muon at their own rates are of the earlier round of 2026-11-22 to 24, in bf16; "
        "so dnt-own, dnt-gap and dnt-muon have no new run. Known when this page was written: these "
        "numbers, and at 1.0, from that round and with another last rate, S5 minus S1 of −0.77 and "
        "−0.56 and S5 minus S3 of +0.22 and +0.66 (seeds 1, 2). Expected of the new runs, in fp32: "
        "at 1.0 DNT is 0.5 to 0.8 below Pre-LN, of whose own rate 1.0 is eight times; S5 is above "
        "S3; DNT's rise from Pre-LN's rate to eight times it is 0.5 to 1 less than Pre-LN's; "
        "without QK-norm DNT at 0.3 rises by less than 0.5, as with Xavier."
    ),
)
