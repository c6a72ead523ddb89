"""The papers' own configurations at 0.12B parameters (0.24B for Blockwise LR), for `python
reproduce.py`, on GPUs.

Sizes, data and rates of scale vectors, and sizes of DyT, are ours [I], where the papers have none
so small.

    python reproduce.py --claims=studies/large.py --dry_run

Rates are the papers', or ours where we have none; nothing is tuned, and a run takes all GPUs, by
torchrun. `own` makes the study of other sizes: studies/xl.py.
"""

from studies.claims.study import Claim, Study
from studies.papers import LEFT_OUT, MSGDW, SCALED, STRESS, S
from studies.papers import study as papers

LLAMA = "config/blockwise/llama_237m.py"
GAINS = "config/scale_vectors/llama_120m.py"
SHORT = "--max_iters=600 --warmup_iters=12"  # twice the steps of papers.py


def own(
    title: str,
    gpt2: str,
    dnt: str,
    lns: str,
    rmsnorm: str,
    dyt: str,
    published: dict[str, float | None] | None = None,
) -> Study:
    """The study with these config files of DNT's baseline and of DNT, of LNS, of DyT's baseline and
    of DyT. published: the papers' values at this size, {claim: value}, of the claims that have
    another one at 0.12B."""
    files = dnt_files(gpt2, dnt) | other_files(lns)
    files["RMSNorm"] = rmsnorm
    files["DyT"] = dyt
    files["DyT, no embedding scalar"] = f"{dyt} --embed_scale=False"
    arms = {}
    for name, words in files.items():
        arms[name] = papers.arms[name]._replace(base="own", files=words, floor=0)
    claims = []
    for claim in papers.claims:
        if claim.id not in ("dnt-own", "blockwise-own"):  # these two claims are about tuned rates
            claims.append(at_own_size(claim, published))
    return papers._replace(
        title=title, bases={"own": ""}, arms=arms, claims=claims, tuned=False, records=(), note=""
    )


def dnt_files(gpt2: str, dnt: str) -> dict[str, str]:
    """{arm: files} of DNT's claims."""
    layouts = {"S1": gpt2, "S5": dnt}
    for s in ("S2", "S3", "S4"):
        layouts[s] = f"{dnt} {S[s]}"
    files = {f"{s} at 1.0": f"{layout} {MSGDW}" for s, layout in layouts.items()}
    for s in ("S1", "S5"):
        files[f"{s} AdamW"] = layouts[s]
        files[f"{s} AdamW, 8 × S1's rate"] = layouts[s]
        files[f"{s} mSGDW"] = f"{layouts[s]} {MSGDW}"
        files[f"{s} mSGDW, scaled"] = f"{layouts[s]} {MSGDW} {SCALED}"
        files[f"{s} Muon"] = f"{layouts[s]} config/optimizers/muon_dnt.py"
    files["S5 AdamW, S1's rate"] = dnt
    files["S5 AdamW, 8 × its rate"] = dnt
    for norm in LEFT_OUT:
        files[f"S4 without {norm}"] = f"{dnt} config/dnt/no_{norm.lower()}_norm.py {STRESS}"
    files["S4, whole"] = f"{dnt} {S['S4']} {STRESS}"
    files["S1, as S4"] = f"{gpt2} {STRESS}"
    return files


def other_files(lns: str) -> dict[str, str]:
    """{arm: files} of the claims of Blockwise LR, LNS and scale vectors, without tuned rates."""
    files = {}
    for name, arm in papers.arms.items():
        untuned = arm.files.partition(" --learning_rate")[0]
        if arm.base == "blockwise":
            files[name] = f"{LLAMA} {untuned.replace(SHORT, '--max_iters=100000')}"
        elif arm.base == "deep":
            files[name] = f"{lns} {untuned}"
        elif arm.base == "llama":
            files[name] = f"{GAINS} {arm.files}"
    return files


def at_own_size(claim: Claim, published: dict[str, float | None] | None) -> Claim:
    """A claim of papers.py for the papers' own configurations."""
    number = claim.number
    sides = tuple(side for side in claim.sides if not side.seeds)  # no earlier round is this large
    if published is not None:
        number = number._replace(published=published.get(claim.id, number.published))
        sides = tuple(side._replace(published=None) for side in sides)
    why = "the configuration of this size"
    return claim._replace(
        number=number,
        sides=sides,
        protocol=tuple(setting._replace(why=why) for setting in claim.protocol),
        smallest=claim.effect,
        note="Smallest effects as in papers.py [I]; a setting that no paper has is [U].",
        plain={},
        cannot="",
        withheld="",
        late="",
        seeds=0,
    )


DYT = "config/decay/dyt.py --schedule=dyt"
study = own(
    "0.12B parameters, 0.24B for Blockwise LR; the papers' own configurations and rates where we "
    "have them; GPUs",
    "config/gpt2_small.py",
    "config/dnt_small.py",
    "config/lns/130m.py",
    f"config/dyt/small.py config/dyt/rmsnorm.py {DYT}",
    f"config/dyt/small.py config/dyt/dyt.py {DYT}",
)
