"""DNT's claims about language models, with the initial weights that pass the control of
studies/calibration.py, for `python reproduce.py`:

    python data/pystdlib/prepare.py --tokenizer=gpt2_4096
    python reproduce.py --claims=studies/dnt.py

The claims are those of studies/papers.py, which has them with Xavier. `note` has what was known and
expected before the new runs.
"""

from studies.claims.study import Arm, Claim, Number, Study, arms_in, split_value
from studies.papers import DNT
from studies.papers import study as papers

WEIGHTS = "config/claims/mini_gpt.py config/init/width_128.py"
NEW = f"{WEIGHTS} --dtype=float32"
# the end of the names of arms with a warm-up of 3 steps instead of 30
SHORT = ", 3 steps of warm-up"
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
# arms that are run with the short warm-up too
SHORT_ARMS = {"S3 at 1.0", "S4 at 1.0", "S5 at 1.0"}
CONTROL = "that of the control"
WHY = {
    **dict.fromkeys(("init", "init_std", "residual_init", "warm-up / steps"), CONTROL),
    "min_lr": "a tenth of the rate, where the runs are of the earlier round",
    "learning_rate": "the paper's goes with its size and steps; one seed of the earlier round "
    "chose it",
}
SEEDS = {"dnt-own": 8, "dnt-gap": 8, "dnt-muon": 8}  # 4 for the others
# {claim: {class of the verdict: the finding in plain words}}
PLAIN = {
    "dnt-common": {
        "cannot be judged": "Under momentum SGD at the paper's rate of 1.0, eight times Pre-LN's "
        "own here, DNT ends below Pre-LN, whose loss is 0.6 higher there than at its own rate"
    },
    "dnt-order": {
        "cannot be judged": "Under momentum SGD at 1.0 it depends on warm-up and initial weights "
        "whether DNT (S4, S5) ends above S3, which has no mid norms: after 30 of 300 steps it "
        "does, after 3 in one of three seeds (the sum of the two differences); with plain Xavier "
        "and 3 steps it ends below, −0.731"
    },
    "dnt-robust": {
        "same direction": "Under AdamW, from Pre-LN's own learning rate to eight times it, "
        "Pre-LN's loss rises by a nat and DNT's does not rise (−0.422 with plain Xavier); if each "
        "starts at its own rate, DNT's rises by 0.785 less, with Xavier by 0.084"
    },
    "dnt-own": {
        "undecided": "Under momentum SGD, each at its own rate, no difference between DNT and "
        "Pre-LN is shown, as seeds differ by more than what is published; with plain Xavier it is "
        "−0.535"
    },
    "dnt-muon": {
        "same direction": "Muon instead of AdamW lowers DNT's loss, and Pre-LN's by a little more, "
        "−0.407"
    },
}
WITHHELD = {
    "dnt-common": "at Pre-LN's own rate its sign is not known: +0.08 at 0.125 (one seed), −0.06 at "
    "0.25 (two), where Pre-LN is as good",
    "dnt-order": "3 steps of warm-up, the share in the paper's text, turn its sign in two of three "
    "seeds",
    "dnt-gap": "it contains momentum SGD's gap to AdamW, which only a long run can show",
}
LAYER_NORM = "S1 has RMSNorm here, so that the layouts alone differ; GPT-2 has LayerNorm."
NOTES = {
    "dnt-common": f"{LAYER_NORM} The verdict was the same direction, −0.624, eleven times the "
    "published size: what that shows is that DNT bears a high rate, as in dnt-robust.",
    "dnt-order": "The verdict was opposite until the runs with 3 steps were there, in which S3 "
    "ends at 4.13, 4.12 and 3.27. So what is seen is that at 1.0 S3 bears a short warm-up less "
    "well than S4 and S5; lower rates were not run with 3 steps. Table 5 has no warm-up under "
    "momentum SGD [581], and App. C has 1% [537]. That the figure has Table 5's values is our "
    "reading [I]. With one seed of the earlier round S4 and S5 are above S3 at rates from 0.125 to "
    "1.0, and below it at 0.0625 and at 2.0; at 2.0 S3 ends 1.28 higher than at 1.0.",
    "dnt-own": LAYER_NORM,
    "dnt-robust": "At first the number was S5 minus S1 at eight times the rate; it was changed "
    "when runs of the earlier round and some with Xavier were known. At twice its rate "
    "Pre-LN has already risen by 0.43 (one seed). With embeddings of N(0, 1) the same difference "
    "from 0.004 to 0.032 was +0.05 (seed 0); but 0.032 is Pre-LN's own rate there, and with seeds "
    "1 and 2 its loss is 0.5 higher. With those embeddings, from 0.032 to 0.064, it was −0.85 "
    "(seed 0). DNT's loss does not rise because it starts at a sixteenth of its own rate. S1's "
    "runs are in bf16, S5's at these rates in fp32, a difference of −0.008 at S1's rate in the "
    "control.",
    "dnt-leave-out": "The paper says that it starts from S5 but lists two pre norms [624], which "
    "is S4 [I].",
    "dnt-muon": "A lower last loss is our reading [I]. Decay, floor and the place of embeddings "
    "are [U].",
}
SIZES = "The smallest effect that matters is that of studies/papers.py [I]."


def move(name: str) -> Arm:
    """An arm of studies/papers.py with these initial weights."""
    if name.endswith(SHORT):
        name = name.removesuffix(SHORT)
        return papers.arms[name]._replace(base="short")
    arm = papers.arms[name]
    if name in EARLIER_RATES:
        return Arm("earlier", arm.files, lr=EARLIER_RATES[name])
    return arm._replace(base="new", lr=NEW_RATES.get(name, arm.lr), of="", times=1)


def shorten(number: Number) -> Number:
    """A number of arms with the short warm-up."""
    words = [f"{'+' if sign > 0 else '-'} {arm}{SHORT}" for sign, arm in split_value(number.value)]
    value = " ".join(words).removeprefix("+ ")
    return Number(f"{number.says}, with 3 steps of warm-up", value, number.published, seeds=3)


def judge_here(claim: Claim) -> Claim:
    """A claim of studies/papers.py, to be judged with these initial weights."""
    protocol = tuple(s._replace(why=WHY.get(s.name, s.why)) for s in claim.protocol)
    seeds = SEEDS.get(claim.id, 0)
    sides = [side._replace(seeds=seeds) for side in claim.sides if "scaled" not in side.value]
    if set(arms_in([claim.number])) <= SHORT_ARMS:
        sides.append(shorten(claim.number))
    return claim._replace(
        protocol=protocol,
        sides=tuple(sides),
        withheld=WITHHELD.get(claim.id, ""),
        seeds=SEEDS.get(claim.id, 4),
        plain=PLAIN.get(claim.id, {}),
        note=f"{NOTES.get(claim.id, '')} {SIZES}".strip(),
    )


claims = [judge_here(claim) for claim in DNT if not claim.cannot]
study = Study(
    "GPTs of 2M parameters, 0.6M tokens of Python source a run; CPU cores",
    bases={"earlier": WEIGHTS, "new": NEW, "short": f"{NEW} --warmup_iters=3"},
    arms={name: move(name) for name in arms_in(n for claim in claims for n in claim.numbers)},
    claims=claims,
    records=("docs/results/claims/mini.json", "docs/results/calibration/record.json"),
    note=(
        "The initial weights and the warm-up are those with which [the "
        "control](calibration.md) passes: GPT-2's, 2.4 times as large to suit the width, and "
        "30 of 300 steps. The claims and their smallest effects are those of "
        "[papers.md](papers.md), which has them with Xavier.\n\n"
        "**Known when this page was written**, and not written down before: runs under AdamW, "
        "mSGDW and Muon at their own rates are of the earlier round of 2026-11-22 to 24, in "
        "bf16, where one seed chose the rates; so dnt-own, dnt-gap and dnt-muon have no new "
        "run. S5's rate under mSGDW, 1.0, is not the best with seeds 0 and 5 together, 0.5 "
        "(3.308 and 3.321); there S5 minus S1 is −0.076 on seeds 1 to 4, and at 1.0 −0.036. "
        "Of dnt-robust seed 0, −0.95, and the number at own rates, −0.785 (−0.952 to −0.619). "
        "At 1.0, with another last rate, S5 minus S1 of −0.77 and −0.56 and S5 minus S3 of "
        "+0.22 and +0.66 (seeds 1, 2).\n\n"
        "**Expected of the new runs**, in fp32: at 1.0 DNT is 0.5 to 0.8 below Pre-LN, of "
        "whose own rate 1.0 is eight times; S5 is above S3; DNT's rise from Pre-LN's rate to "
        "eight times it is 0.5 to 1 less than Pre-LN's; without QK-norm DNT at 0.3 rises by "
        "less than 0.5, as with Xavier.\n\n"
        "**With 3 steps of warm-up** the control's mean passes too, −0.016, at 0.001, S1's rate by "
        "our rule for cliffs; at 0.002, where S1 is better, its mean of two seeds is −0.056, just "
        "outside. Claims at own rates are not judged there: they would need new tuning. dnt-order "
        "has a side number there; those planned for dnt-common and dnt-robust were not run, for "
        "want of time. At own rates the control's number is −0.089, so dnt-own, dnt-gap and "
        "dnt-muon rest on weights that pass only where both layouts have the same rate. Expected "
        "before the runs with 3 steps: S4 and S5 are above S3 on average, by less than the seeds "
        "differ. **Seen**: their sum is −0.85, −0.74 and +0.90, so the verdict on dnt-order was "
        "taken back. A review then asked the same of the other claims, and at Pre-LN's own rate "
        "the sign of dnt-common is not known: that verdict was taken back too.\n\n"
        "dnt-leave-out, 24 runs, is left out; [papers.md](papers.md) has it with Xavier."
    ),
)
