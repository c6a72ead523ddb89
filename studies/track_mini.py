"""The layout track in miniature (docs/track.md), on CPU cores, for `python reproduce.py`:

    python data/pystdlib/prepare.py --tokenizer=gpt2_4096
    python reproduce.py --claims=studies/track_mini.py

To enter a layout add a line to LAYOUTS. `note` has what was expected before the first run.
"""

from studies.claims.study import Arm, Claim, Number, Study, Trials

OPTIMIZERS = {
    "AdamW": "",
    "Muon": "config/optimizers/muon.py",
    "Muon of 2026": "config/optimizers/muon_2026.py",
}
REFERENCE = "Pre-LN"
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
SMALLEST = 0.03  # nats: the smallest difference that matters

arms = {}
claims = []
for optimizer in OPTIMIZERS:
    reference = f"{REFERENCE} under {optimizer}"
    for layout, file in LAYOUTS.items():
        name = f"{layout} under {optimizer}"
        arms[name] = Arm(optimizer, file, floor=0)
        if layout == REFERENCE:
            continue
        claims.append(
            Claim(
                f"{layout}-{optimizer}".lower().replace(" ", "-").replace("*", "-star"),
                f"{layout} has a lower loss than {REFERENCE} under {optimizer}",
                Number(f"{layout} minus {REFERENCE}", f"{name} - {reference}"),
                smallest=SMALLEST,
                seeds=4,
            )
        )

study = Study(
    "The layout track in miniature: 2.2M parameters, 0.5M tokens of Python source a run; CPU cores",
    bases={name: f"config/track/mini.py {file}".strip() for name, file in OPTIMIZERS.items()},
    arms=arms,
    claims=claims,
    trials=dict.fromkeys(
        OPTIMIZERS,
        Trials(
            rates=(4e-3, 8e-3, 16e-3, 32e-3),
            flags="--max_iters=125 --warmup_iters=12 --eval_interval=125",
        ),
    ),
    note=(
        "Expected before the first run: at 0.2 tokens a parameter and four seeds only differences "
        "of some 0.03 nats and more can be seen, which is above what the papers report at their "
        "own scale (0.00 to 0.02). So most pairs will be undecided or without effect. Layouts with "
        "QK-norm (Qwen3, Gemma 3, OLMo-2, both HybridNorms, DNT) will be ahead of Pre-LN under "
        "AdamW, by 0.02 to 0.1, because they bear higher rates in so short a run; under Muon the "
        "layouts will lie closer together. Derf will be behind, by more under Muon (α₀ is not "
        "searched here), and Keel behind, since it is for deep models and long runs. GPAS starts "
        "as Pre-LN and will stay within 0.02 of it. Muon will be ahead of AdamW in every layout, "
        "by 0.2 or more; Muon of 2026 will be within 0.03 of Muon."
    ),
)
