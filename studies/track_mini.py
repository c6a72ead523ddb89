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
ADAMW = Trials((1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3))
MUON = Trials((2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3))

study = make_study(
    "The layout track in miniature: 2.2M parameters, 82K tokens of Python source a run; CPU cores",
    BASES,
    smallest=0.03,  # nats
    seeds=4,
    tries={},
    trials={"AdamW": ADAMW, "Muon": MUON, "Muon of 2026": MUON},
    note=(
        "Expected before the first run: at 0.04 tokens a parameter the loss shows who learns "
        "fastest in 80 steps, and four seeds decide only differences of about 0.1 nats, far above "
        "what papers report at their own scale (0.00 to 0.02). Under AdamW, DNT, Peri-LN, Gemma 3 "
        "and Keel will be ahead of Pre-LN by 0.05 or more, since they bear higher rates; Qwen3, "
        "GPAS and nGPT within 0.05 of it; OLMo-2 and both HybridNorms behind by 0.1 or more, and "
        "Derf by more than 0.5 (α₀ is not searched here). Under Muon all but Derf will lie within "
        "0.1 of Pre-LN. Muon will be ahead of AdamW in every layout, by 0.1 or more; Muon of 2026 "
        "will be within 0.03 of Muon. What is said of AdamW was seen in an earlier version of "
        "this miniature, of 250 steps of 2,048 tokens: its 219 runs took 6.8 core-hours, some in "
        "bf16 and some in fp32, and the 225 that were left would have taken three minutes each on "
        "CPUs without bf16. Two findings of it shape this one: trials of half the steps chose "
        "rates at which whole runs end 0.08 higher, so trials are whole runs; and of four rates "
        "the best was often the lowest or the highest. Changed after 76 runs under AdamW: five "
        "rates from 0.002 on became six from 0.001 on, since Pre-LN and four others were best at "
        "0.002; before the first run under Muon 0.064 was added there."
    ),
)
