"""The papers' largest language models for some nodes, in their own configurations, for `python
reproduce.py`, on GPUs.

python reproduce.py --claims=studies/xl.py --dry_run
"""

from studies.large import own

study = own(
    "the papers' largest language models for some nodes; their own configurations where we have "
    "them; GPUs",
    "config/gpt2_xl.py",
    "config/dnt_xl.py",
    "config/lns/1b.py",
    "config/dyt/7b.py config/dyt/rmsnorm.py",
    "config/dyt/7b.py",
    # Table 1 of DNT at 1436M; LNS at 1B has no scaled init; Blockwise LR stays at 0.24B
    {"dnt-common": -0.064, "dnt-gap": -0.025, "dnt-par": 0.012, "lns-loss": None},
)
