"""The papers' claims about language models at 8M parameters and 8M tokens a run, on one GPU, for
`python reproduce.py`.

python reproduce.py --claims=studies/small.py --jobs=4
"""

from studies.papers import study as papers

# flags of every base at this size
SMALL = (
    "--n_embd=256 --block_size=256 --batch_size=32 --max_iters=1000 --eval_interval=1000 "
    "--eval_tokens=500000 --dtype=auto"
)
LLAMA = "--init_std=0.035"  # what suits this width; the GPTs' Xavier has embeddings of 0.02
DEEP = "--n_ff=688 --max_iters=4000 --warmup_iters=400 --compile=auto"

bases = papers.bases
# without the runs that an earlier round adds at another size
arms = {name: arm for name, arm in papers.arms.items() if not name.endswith(" at 0.004")}
claims = []
for claim in papers.claims:
    sides = tuple(side for side in claim.sides if not side.seeds)
    # findings in plain words and verdicts withheld are those of another size
    claims.append(claim._replace(sides=sides, plain={}, withheld=""))
LONG = "one rate, twice the steps"
arms[LONG] = arms[LONG]._replace(files="--max_iters=2000 --warmup_iters=40")
study = papers._replace(
    title=(
        "Language models of 8M parameters, 8M tokens of Python source a run (33M for LNS); one GPU"
    ),
    bases={
        "gpt": f"{bases['gpt']} {SMALL} --warmup_iters=10",
        "llama": f"{bases['llama']} {SMALL} {LLAMA} --n_ff=688 --warmup_iters=100",
        "blockwise": f"{bases['blockwise']} {SMALL} {LLAMA} --n_ff=1024 --warmup_iters=20",
        "deep": f"{bases['deep']} {SMALL} {LLAMA} {DEEP}",
    },
    arms=arms,
    claims=claims,
    records=(),
    note="",
)
