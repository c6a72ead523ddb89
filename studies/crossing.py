"""Do the effects that the papers place late in training come in longer runs? LNS against scaled
initialisation, and blockwise rates against one rate, for `python reproduce.py`:

    python data/pystdlib/prepare.py --tokenizer=gpt2_4096
    python reproduce.py --claims=studies/crossing.py

`note` has what was expected before the first run.
"""

from studies.claims.study import Arm, Claim, Number, Study
from studies.papers import AT_SWITCH, BLOCKWISE, LNS
from studies.papers import study as papers

STEPS = 4800
LONG = f"--max_iters={STEPS} --eval_interval=300 --compile=True"
SHORTER = "--max_iters=1200 --warmup_iters=24"
BASES = {
    "deep": f"{papers.bases['deep']} {LONG} --warmup_iters={STEPS // 10}",
    "blockwise": f"{papers.bases['blockwise']} {LONG} --warmup_iters={STEPS // 50}",
    "blockwise, 1,200 steps": f"{papers.bases['blockwise']} {LONG} {SHORTER}",
    "blockwise, 300 steps": papers.bases["blockwise"],
}
OWN = "each its own, of runs of 1,200 steps"
OWN_RATES = tuple(s._replace(why=OWN) if s.name == "learning_rate" else s for s in LNS)
# {measure: the step after which it is taken}
WAY = {
    "loss at a sixteenth": STEPS // 16,
    "loss at an eighth": STEPS // 8,
    "loss at a quarter": STEPS // 4,
    "loss at a half": STEPS // 2,
}
WITH_HEAD = "config/blockwise/warmup_end.py --lr_ratio_head=10"
ARMS = {
    "LNS": Arm("deep", "config/lns/lns.py", lr=4e-3),
    "scaled init": Arm("deep", "config/lns/scaled_init.py", lr=2e-3),
    "Pre-LN": Arm("deep", "config/lns/pre_ln.py", lr=2e-3),
}
for base in ("blockwise", "blockwise, 1,200 steps", "blockwise, 300 steps"):
    length = base.removeprefix("blockwise")
    ARMS[f"one rate{length}"] = Arm(base, lr=2e-3, floor=0.05)
    ARMS[f"blocks{length}"] = Arm(base, WITH_HEAD, lr=2.5e-4, floor=0.05)


def on_the_way(value: str) -> tuple[Number, ...]:
    """This sum of arms on the way, as side numbers."""
    numbers = []
    for measure, steps in WAY.items():
        says = f"{value.replace(' - ', ' minus ')} after {steps:,} steps"
        numbers.append(Number(says, value, None, measure, steps))
    return tuple(numbers)


CLAIMS = [
    Claim(
        "lns-crossing",
        "LNS instead of scaled initialisation, each at its own rate, is ahead at the end of a run",
        Number("LNS minus scaled init at the end", "LNS - scaled init", -0.011, steps=STEPS),
        sides=(
            *on_the_way("LNS - scaled init"),
            Number("LNS minus Pre-LN at the end", "LNS - Pre-LN", -0.037, steps=STEPS),
            *on_the_way("LNS - Pre-LN"),
        ),
        seeds=4,
        paper="LNS",
        published="130M, 20,000 steps: LNS 25.76, Pre-LN 26.73 (sec. 6 [243]); scaled init 26.04 "
        "(Table 6, in an image of its authors' repository)",
        protocol=OWN_RATES,
        note="The rates are those of runs of 1,200 steps [I]: 0.004 for LNS, 0.002 for scaled "
        "init; Pre-LN has scaled init's, since its own was not tuned.",
    ),
    Claim(
        "blockwise-crossing",
        "Blockwise rates with the head's, each at its own base rate, beat one rate in a long run",
        Number(
            "blockwise rates minus one rate at the end", "blocks - one rate", -0.050, steps=STEPS
        ),
        sides=(
            *on_the_way("blocks - one rate"),
            Number(
                "at the end of runs of 1,200 steps",
                "blocks, 1,200 steps - one rate, 1,200 steps",
            ),
            Number(
                "at the end of runs of 300 steps",
                "blocks, 300 steps - one rate, 300 steps",
            ),
        ),
        seeds=4,
        paper="Blockwise LR",
        published="0.25B, 50,000 steps: 2.784 and 2.834 (Table 1 [270, 273]), at one base rate and "
        "without a ratio for the head",
        protocol=(*BLOCKWISE, AT_SWITCH),
        note="A ratio of 10 for the head too [I], without which the head is slow in a short run. "
        "The base rates are those tuned in runs of 300 steps [I], 0.002 and 0.00025.",
    ),
]

study = Study(
    "LLaMAs of 3M parameters, 4,800 steps, 9.8M tokens of Python source a run; CPU cores",
    bases=BASES,
    arms=ARMS,
    claims=CLAIMS,
    records=("docs/results/papers/record.json",),
    note=(
        "The papers place these effects late in training, and runs of 300 and 1,200 steps "
        "were too early to say.\n\n"
        "**Expected before the first run**: at one rate for both, LNS minus scaled init was "
        "+0.118 after 300 of 1,200 steps and +0.040 at their end; a line through the two in "
        "the logarithm of the steps is zero near 2,400 and −0.04 at 4,800. At own rates, as "
        "here, it was +0.008 (−0.009 to +0.025) at 1,200 steps, so zero may come earlier. "
        "Blockwise rates with the head's were −0.060 (−0.158 to +0.037) at 300 steps; between "
        "−0.10 and +0.05 is expected at 4,800. Differences of LNS have a standard deviation "
        "of 0.01 over seeds at 1,200 steps: four seeds show one of 0.02 with a chance of 0.6 "
        "to 0.7, and one of 0.03 nearly always."
    ),
)
