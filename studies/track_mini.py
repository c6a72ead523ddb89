"""The layout track in miniature (docs/track.md), on CPU cores, for `python reproduce.py`:

    python data/pystdlib/prepare.py --tokenizer=gpt2_4096
    python reproduce.py --claims=studies/track_mini.py

Its entries are those of studies/track.py. `note` has what was expected before the first run.
"""

from studies.claims.study import Trials
from studies.track import make_study

BASES = {
    "AdamW": "config/track/mini.py",
    "Muon": "config/track/mini.py config/optimizers/muon.py",
    "Muon of 2026": "config/track/mini.py config/optimizers/muon_2026.py",
}
FIVE = Trials((2e-3, 4e-3, 8e-3, 16e-3, 32e-3))

study = make_study(
    "The layout track in miniature: 2.2M parameters, 0.5M tokens of Python source a run; CPU cores",
    BASES,
    smallest=0.03,  # nats
    seeds=4,
    tries={},
    trials=dict.fromkeys(BASES, FIVE),
    note=(
        "Expected before the first run: at 0.2 tokens a parameter and four seeds only differences "
        "of some 0.03 nats and more can be seen, which is above what the papers report at their "
        "own scale (0.00 to 0.02). So most pairs will be undecided or without effect. Layouts with "
        "QK-norm (Qwen3, Gemma 3, OLMo-2, both HybridNorms, DNT) will be ahead of Pre-LN under "
        "AdamW, by 0.02 to 0.1, because they bear higher rates in so short a run; under Muon the "
        "layouts will lie closer together. Derf will be behind, by more under Muon (α₀ is not "
        "searched here), and Keel behind, since it is for deep models and long runs. GPAS starts "
        "as Pre-LN and will stay within 0.02 of it. Muon will be ahead of AdamW in every layout, "
        "by 0.2 or more; Muon of 2026 will be within 0.03 of Muon. Of nGPT, entered later, nothing "
        "was expected. Changed after 149 runs: trials had half of the steps, and first four rates, "
        "0.004 to 0.032. Of four the best was often the lowest or the highest. And half of the "
        "steps chose 0.002 for Pre-LN and Qwen3 under AdamW, where whole runs at 0.004 end 0.08 "
        "lower. So trials are whole runs now, at five rates: 0.064 was left out again after 181 "
        "runs, to save time; none of the three layouts with all trials had its best there. "
        "Products are in bf16 on CPUs that have it, in fp32 on others: docs/track.md compares them."
    ),
)
