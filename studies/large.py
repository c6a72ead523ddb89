"""The papers' own configurations at 0.12B parameters (0.24B for Blockwise LR), for `python
reproduce.py`, on GPUs.

Sizes, data and rates of scale vectors, and sizes of DyT, are ours [I], where the papers have none
so small.

    python reproduce.py --claims=studies/large.py --dry_run

Rates are the papers', or ours where we have none; nothing is tuned, and a run takes all GPUs, by
torchrun. `own` makes the study of other sizes: studies/xl.py.
"""

from studies.papers import LEFT_OUT, MSGDW, SCALED, STRESS, S, Study
from studies.papers import study as papers


def own(
    title: str, gpt2: str, dnt: str, lns: str, rmsnorm: str, dyt: str, published: dict | None = None
) -> Study:
    """The study with these config files of DNT's baseline and of DNT, of LNS, of DyT's baseline and
    of DyT. published: the papers' values at this size, {claim: value}, of the claims that have
    another one at 0.12B."""
    layouts = {"S1": gpt2, "S5": dnt, **{s: f"{dnt} {S[s]}" for s in ("S2", "S3", "S4")}}
    llama, gains = "config/blockwise/llama_237m.py", "config/scale_vectors/llama_120m.py"
    files = {f"{s} at 1.0": f"{layout} {MSGDW}" for s, layout in layouts.items()}
    for s in ("S1", "S5"):
        files |= {f"{s} AdamW": layouts[s], f"{s} AdamW, 8 × S1's rate": layouts[s]}
        files |= {
            f"{s} mSGDW": f"{layouts[s]} {MSGDW}",
            f"{s} mSGDW, scaled": f"{layouts[s]} {MSGDW} {SCALED}",
        }
        files[f"{s} Muon"] = f"{layouts[s]} config/optimizers/muon_dnt.py"
    files["S5 AdamW, S1's rate"] = files["S5 AdamW, 8 × its rate"] = dnt
    files |= {
        f"S4 without {n}": f"{dnt} config/dnt/no_{n.lower()}_norm.py {STRESS}" for n in LEFT_OUT
    }
    files |= {"S4, whole": f"{dnt} {S['S4']} {STRESS}", "S1, as S4": f"{gpt2} {STRESS}"}
    for name, arm in papers.arms.items():
        if arm.base == "blockwise":
            its = arm.files.replace("--max_iters=600 --warmup_iters=12", "--max_iters=100000")
            files[name] = f"{llama} {its.partition(' --learning_rate')[0]}"
        elif arm.base == "deep":
            files[name] = f"{lns} {arm.files.partition(' --learning_rate')[0]}"
        elif arm.base == "llama":
            files[name] = f"{gains} {arm.files}"
    files |= {
        "RMSNorm": rmsnorm,
        "DyT": dyt,
        "DyT, no embedding scalar": f"{dyt} --embed_scale=False",
    }
    arms = {
        name: papers.arms[name]._replace(base="own", files=its, floor=0)
        for name, its in files.items()
    }
    claims = []
    # nothing is tuned
    for claim in (claim for claim in papers.claims if claim.id not in ("dnt-own", "blockwise-own")):
        protocol = tuple(s._replace(why="the configuration of this size") for s in claim.protocol)
        number, sides = claim.number, claim.sides
        if published is not None:
            number = number._replace(published=published.get(claim.id, number.published))
            sides = tuple(side._replace(published=None) for side in sides)
        how = dict(
            smallest=claim.effect,
            note="Smallest effects as in papers.py [I]; a setting that no paper has is [U].",
            plain={},
            cannot="",
            seeds=0,
        )
        claims.append(claim._replace(number=number, sides=sides, protocol=protocol, **how))
    return papers._replace(
        title=title, bases={"own": ""}, arms=arms, claims=claims, tuned=False, note=""
    )


DYT = [
    f"config/dyt/small.py config/dyt/{x}.py config/decay/dyt.py --schedule=dyt"
    for x in ("rmsnorm", "dyt")
]
study = own(
    "0.12B parameters, 0.24B for Blockwise LR; the papers' own configurations and rates where we "
    "have them; GPUs",
    "config/gpt2_small.py",
    "config/dnt_small.py",
    "config/lns/130m.py",
    *DYT,
)
