"""The papers' claims as data, written down before the runs: what a paper says, and the one number that decides.

A `Number` is a sum of arms such as "A - B" (studies/claims/arms.py), each measured by `measure`, seed by seed: arms of
the same seed see the same data. A `Claim` is judged by its primary number alone (docs/claims.md); the others are shown.
"""

from typing import NamedTuple

from studies.claims.arms import LEFT_OUT, STRESS_RATE, VARIED

PAPERS = dict(dnt="DNT", vdnt="DNT", blockwise="Blockwise LR", dyt="DyT", lns="LNS", gains="scale vectors")


class Number(NamedTuple):
    says: str
    value: str  # "arm", "arm - arm + arm …"
    published: float | None = None  # the paper's value
    measure: str = "loss"
    left_out: tuple = ()  # the scales where it is not measured


class Claim(NamedTuple):
    id: str  # begins with a key of PAPERS
    statement: str
    published: str  # the paper's numbers, and where they are
    why: str  # why the scales of `adequate` can show the effect, and others cannot
    note: str  # how our test differs from the paper's
    numbers: tuple  # the primary one first
    expect: str = "below"  # or "above" 0; or "equal", "not above": within ±, below + the smallest effect of interest
    adequate: tuple = ("mini", "small", "124m", "paper")  # whose regime can show the effect, the smallest first
    smallest: float | None = None  # the smallest effect of interest; None: half of the published one
    beside: str = ""  # the further number that is shown with the verdict
    few_seeds: bool = False  # half of the seeds: the effect is far larger than their spread
    at_paper: float | None = None  # the published value at scale paper, where it is another

    @property
    def paper(self) -> str:
        return PAPERS[self.id.partition("-")[0]]

    def numbers_at(self, scale: str) -> list:
        """The numbers that a scale measures, the primary one first, with the value published for it."""
        primary, *sides = self.numbers
        primary = primary._replace(published=self.effect(scale)[0])
        return [primary, *(number for number in sides if scale not in number.left_out)]

    def toward(self) -> int:
        """What turns the paper's sign into +."""
        return -1 if self.expect in ("below", "not above") else 1

    def effect(self, scale: str) -> tuple:
        """(published value of the primary number or None, smallest effect of interest) at a scale."""
        at_paper = scale == "paper" and self.at_paper is not None
        published = self.at_paper if at_paper else self.numbers[0].published
        return published, abs(published) / 2 if self.smallest is None else self.smallest


def claim(id: str, statement: str, published: str, why: str, note: str, *numbers: Number, **how) -> Claim:
    return Claim(id, statement, published, why, note, numbers, **how)


def minus(baseline: str, *arms: str, left_out: tuple = (), optimizer: str = "") -> list:
    """A `Number` for each arm: how far its loss is above the baseline's. `optimizer` is added to the arms' names."""
    pairs = {f"{arm} minus {baseline}": f"{arm}{optimizer} - {baseline}{optimizer}" for arm in arms}
    return [Number(says, value, left_out=left_out) for says, value in pairs.items()]


DYT_VARIANTS = ("hardtanh", "sigmoid", "identity", "tanh, no α", "no embedding scalar")
STRESSED = f"Adam at {STRESS_RATE:g}, no warm-up"
MINI, LARGE, NOT_SMALL = ("mini",), ("124m", "paper"), ("mini", "124m", "paper")

CLAIMS = [
    claim(
        "dnt-sgd",
        "Under momentum SGD, DNT has a lower loss than Pre-LN",
        "124M: 2.849 and 2.906 (Table 1); Fig. 6: S1 is worst, S2 is similar, S3 is better, S4 and S5 are best",
        "The layouts' gradients differ from the first step on, and each has its own rate.",
        "The paper has one rate, 1.0, for both; tuning each is our choice. At 124m and paper S1 is Table 1's GPT-2, "
        "which we take to have LayerNorm. With Xavier DNT is far ahead: [init.md](init.md), and below. S3 is ahead of "
        "S4 and S5 here, against Fig. 6. S5's rate is next to one that fails: hence the last number, added after the "
        "first results.",
        Number("S5 minus S1 under mSGDW", "S5 mSGDW - S1 mSGDW", -0.057),
        *minus("S1", "S2", "S3", optimizer=" mSGDW"),
        *minus("S3", "S4", optimizer=" mSGDW"),
        *minus("S4", "S5", optimizer=" mSGDW"),
        Number("S5 at half its rate minus S1", "S5 mSGDW, half - S1 mSGDW"),
        beside="S5 at half its rate minus S1",
        at_paper=-0.064,
    ),
    claim(
        "dnt-gap",
        "DNT narrows momentum SGD's gap to AdamW",
        "124M, AdamW then mSGDW: baseline 2.867, 2.906; DNT 2.863, 2.849 (Table 1)",
        "In a short run the gap is large: its change can show, its end (“gap of S5”) cannot.",
        "What the gap depends on is below. After the first results the grid of S5 under AdamW was moved up by a "
        "factor of 8, for its loss was lower beyond its end, and the gaps of S4 and S3 were added.",
        Number("gap (mSGDW minus AdamW) of S5 minus that of S1", "S5 mSGDW - S5 AdamW - S1 mSGDW + S1 AdamW", -0.053),
        Number("gap of S1", "S1 mSGDW - S1 AdamW", 0.039),
        Number("gap of S5", "S5 mSGDW - S5 AdamW", -0.014),
        Number("S5 minus S1 under AdamW", "S5 AdamW - S1 AdamW", -0.004),
        Number("gap of S3", "S3 mSGDW - S3 AdamW"),
        Number("gap of S4", "S4 mSGDW - S4 AdamW"),
        at_paper=-0.025,
    ),
    claim(
        "dnt-gradients",
        "DNT's gradient entries are more concentrated than Pre-LN's",
        "Fig. 1, early: a ViT's entries almost even over [0, 1e-4], V-DNT's mainly in [0, 1e-5]; no number for the "
        "tail (sec. 4.1)",
        "The paper says the same of early and later checkpoints. We take 4,096 tokens to be enough for rare ones.",
        "A language model with the initial weights of [init.md](init.md), not the paper's ViT. Each at its tuned rate, "
        "and S5's is far higher. Our choices [I]: the first checkpoint after warm-up; the mean over q, k, v, o, w1, "
        "w2; the kurtosis, since ranges mix scale with the tail's shape; 0.1. We read a tenth of the range as a tenth "
        "of the RMS.",
        Number("log10 of the kurtosis, S5 minus S1", "S5 AdamW - S1 AdamW", measure="log10 gradient kurtosis"),
        Number("log10 of the RMS, S5 minus S1", "S5 AdamW - S1 AdamW", -1.0, "log10 gradient RMS"),
        smallest=0.1,
    ),
    claim(
        "dnt-robust",
        "Under AdamW, at eight times its tuned rate, DNT's loss rises less than Pre-LN's [I]",
        "no number; App. C: DNT is “robust to large learning rate”; App. F, Adam at 0.3 without warm-up: stability "
        "needs QK-norm most, then pre and mid norms, then the input norm",
        "Too high a rate shows within some hundred steps.",
        "Our choices [I]: App. C does not say what it compares, so eight times the tuned rate, Pre-LN beside it, and "
        "0.05 nats; App. F leaves one norm out of a model with two pre norms, which we take to be S4. Its numbers have "
        "its rate and warm-up, and no decay, as in Adam. After the first results S5's grid under AdamW was moved up by "
        "a factor of 8, and the seeds were halved.",
        Number(
            "rise from the tuned rate to eight times it under AdamW, S5 minus S1",
            "S5 AdamW ×8 - S5 AdamW - S1 AdamW ×8 + S1 AdamW",
        ),
        Number("under mSGDW, S5 minus S1", "S5 mSGDW ×8 - S5 mSGDW - S1 mSGDW ×8 + S1 mSGDW"),
        *(
            Number(f"{STRESSED}: S4 without {norm} minus S4", f"S4 without {norm}, stress - S4, stress", left_out=MINI)
            for norm in LEFT_OUT
        ),
        smallest=0.05,
        beside="under mSGDW, S5 minus S1",
        few_seeds=True,
    ),
    claim(
        "dnt-muon",
        "Under Muon, DNT has a lower loss than Pre-LN [I]",
        "no number; App. F.1: DNT converges faster than under AdamW, GPT-2's loss rises after 50K steps",
        "That DNT is ahead can show early; that GPT-2's loss rises after 50K steps cannot.",
        "App. F.1 compares GPT-2 late in training, and DNT with itself under AdamW: that DNT is below Pre-LN is our "
        "reading [I]; so are 0.02 nats, and one rate for matrices and the rest at mini. Of the paper's rates we take "
        "1e-4 to be of the matrices. Muon may not be the cause: the last number, added after the first results, is "
        "AdamW's.",
        Number("S5 minus S1 under Muon", "S5 Muon - S1 Muon"),
        Number("S5: Muon minus AdamW", "S5 Muon - S5 AdamW"),
        Number("S1: Muon minus AdamW", "S1 Muon - S1 AdamW"),
        Number("S5 minus S1 under AdamW", "S5 AdamW - S1 AdamW"),
        smallest=0.02,
        beside="S5 minus S1 under AdamW",
    ),
    claim(
        "blockwise-loss",
        "Blockwise rates beat one rate at the baseline's own rate",
        "0.25B: 2.784 and 2.834; Emb 2.818, Emb and FFN 2.791, Norm ×2 2.837 (Table 1)",
        "The paper's speed-up of nearly 2 (sec. 6.1) is worth more than 0.05 nats in a short run [I].",
        "The paper turns the ratios on at the end of warm-up (A.2), its authors' code at the first step, as does the "
        "number that decides; the second number, added after the first results, and at mini in fp32, follows the "
        "paper. The ratios scale the decay too. At mini: DNT's S1, so RMSNorm, no decay of gains (the authors' code "
        "decays them), a floor of a tenth (the paper: a twentieth), and a tied head, with the embedding's ratio as in "
        "the authors' code; the published values are a LLaMA's of 237M. Mini's best rate is next to rates that fail, "
        "and ratios of 4 to 10 go there. The paper's is tuned too, and the next rate of its grid is a quarter higher "
        "(A.1); how near to failing it was is [U]. So the number with a rate tuned for it, added after the first "
        "results, is the fairer one. The seeds were halved after the tuning seed had shown how large the effect is. "
        "The gaps of Adam-mini and of Fig. 8, which is on MiniPile, are read off plots in the authors' repository.",
        Number("all four ratios minus one rate", "all blocks - one rate", -0.050),
        Number("ratios from the end of warm-up, as in the paper", "after warm-up - one rate, beside it", -0.050),
        Number("with a rate tuned for it", "all blocks, tuned - one rate", left_out=LARGE),
        Number("Emb alone", "Emb - one rate", -0.016),
        Number("Emb and FFN", "Emb, FFN - one rate", -0.043),
        Number("Norm ×2", "Norm ×2 - one rate", 0.003),
        Number("under Adam-mini: Emb 4, QK 1, FFN 4, VO 4", "Adam-mini, blocks - Adam-mini, one rate", -0.044),
        Number("Fig. 8: 10 8 6 4 minus one rate", "Fig. 8, 10 8 6 4 - Fig. 8, one rate", -0.051, left_out=MINI),
        Number("Fig. 8: 8 6 4 3 minus one rate", "Fig. 8, 8 6 4 3 - Fig. 8, one rate", left_out=MINI),
        Number("Fig. 8: 6 4 3 2 minus one rate", "Fig. 8, 6 4 3 2 - Fig. 8, one rate", left_out=MINI),
        beside="with a rate tuned for it",
        few_seeds=True,
    ),
    claim(
        "blockwise-order",
        "Norms are far sharper than embeddings",
        "Emb < QK < FFN < VO < Norm (Principle 1, Figs. 1 to 3); LLaMA 0.25B at 40K steps about 8.6e-7, 1.5e-6, "
        "2.9e-6, 5.4e-6, 3.1e-5 (read off a chart in the authors' repository)",
        "An embedding's mean falls as the vocabulary grows, since a text uses few of its rows: with 4,096 tokens in "
        "place of 50,304 the paper's 1.557 would be about 0.47 [I]. (mini was held able to show it until the first "
        "results.)",
        "Arithmetic means (Eq. 4; App. A.1 computes averages on a logarithmic scale), on a LLaMA with an untied head. "
        "The share is 1 if the order does not hold at the end.",
        Number("log10 of Norm over Emb at the end", "sharpness", 1.557, "log10 sharpness norm/emb"),
        Number("log10 of QK over Emb", "sharpness", 0.242, "log10 sharpness qk/emb"),
        Number("log10 of FFN over QK", "sharpness", 0.286, "log10 sharpness ffn/qk"),
        Number("log10 of VO over FFN", "sharpness", 0.270, "log10 sharpness vo/ffn"),
        Number("log10 of Norm over VO", "sharpness", 0.759, "log10 sharpness norm/vo"),
        Number("share of the run after which the order stays", "sharpness", measure="onset of the order"),
        Number("1 if the order is there at the start, else 0", "sharpness", 0.0, "order at the start"),
        expect="above",
        adequate=LARGE,
        smallest=0.778,
    ),
    claim(
        "dyt-rmsnorm",
        "DyT matches RMSNorm",
        "LLaMA 7B 1.60 and 1.59, 13B 1.54 and 1.53, 34B and 70B equal",
        "The paper's models are 4096 wide and more, and train on 200B tokens; its α₀ begin at width 1024.",
        "0.02 nats is our choice [I]. α₀ is tuned at the rate that is best with the paper's α₀ for the narrowest "
        "width. At mini gains and α are not decayed; the authors' code decays them. At 124m the model is ours, with α₀ "
        "of width 1024; at paper it is the 7B. The paper's losses are of training (Table 4), ours of validation. A "
        "slope of 1 is a straight line; an S-shape has less (Figs. 2, 4). Variants are left out at mini to save time, "
        "and at 124m and paper because Tables 8 and 9 are of ViTs.",
        Number("DyT minus RMSNorm, with α₀ tuned where rates are", "DyT - RMSNorm", 0.01),
        *minus("DyT", "DyT, α₀ of the paper", left_out=NOT_SMALL),
        *minus("DyT, α₀ of the paper", *DYT_VARIANTS, left_out=NOT_SMALL),
        *minus("hardtanh", "hardtanh, no α", left_out=NOT_SMALL),
        *minus("sigmoid", "sigmoid, no α", left_out=NOT_SMALL),
        Number("Pearson's r of α and 1/std over slots", "DyT", measure="alpha and 1/std"),
        Number("slope of a norm's output on its input, largest 1% of entries", "RMSNorm", measure="tail slope"),
        expect="equal",
        adequate=LARGE,
        smallest=0.02,
    ),
    claim(
        "lns-loss",
        "LNS has a lower loss than Pre-LN",
        "0.037: perplexity 25.76 and 26.73 at 130M, 12 blocks (sec. 6); perplexity 1.31 lower at 1B (sec. 5.1); 0.074 "
        "at 250M, 24 blocks, and 0.011 against scaled initialisation, from images of the authors' repository",
        "The authors' shortest run has 2.2B tokens. A model must train until its deep blocks would matter.",
        "The paper has one rate for all methods, as the second number. Adam, as there; β₂ 0.999, no clipping and no "
        "decay, as in its authors' scripts. Weights are in fp32; theirs are in bf16, in which gains may freeze at 1 "
        "[I]. Other places for the factor are left out at mini to save time.",
        Number("LNS minus Pre-LN, each at its own rate", "LNS - Pre-LN", -0.037),
        Number("both at Pre-LN's rate", "LNS, rate of Pre-LN - Pre-LN", -0.037, left_out=LARGE),
        Number("LNS minus Pre-LN with scaled initialisation", "LNS - scaled init", -0.011),
        *minus("LNS", "after the residual sum", "on the branch", "before the norm", left_out=MINI),
        adequate=LARGE,
        beside="LNS minus Pre-LN with scaled initialisation",
        at_paper=-0.080,
    ),
    claim(
        "lns-variance",
        "LNS bounds the growth of the stream's variance with depth",
        "last layer of 130M: Pre-LN up to 175, also with scaled initialisation, LNS about 25 (sec. 5.4, Fig. 4)",
        "The factors act on the variance from the first step on.",
        "How the variance is estimated is [U]: here over a token's channels, mean over tokens [I]. The paper's ratio "
        "of last layers, 25/175, stands for the ratio of growths, from the first to the last block [I]. Before the "
        "first step the difference is larger still: the factors make it, and training makes it smaller. Scaled "
        "initialisation, 1/√(2L) on the initial o and down, is the fairer baseline [I]. These three numbers were added "
        "after the first results. Turn: the angle between the inputs of a block and the next; cost: the rise of the "
        "validation loss, mean over the blocks of a half [I]. The paper's point is that deep blocks do more under LNS; "
        "here they turn the stream less, and cost less to remove. Each arm has its own rate. Half of the seeds were "
        "planned; with them the verdict was “undecided”, and the others were added.",
        Number(
            "log10 of the growth over the blocks, LNS minus Pre-LN", "LNS - Pre-LN", -0.845, "log10 variance growth"
        ),
        Number("the same before the first step", "LNS - Pre-LN", measure="log10 variance growth at the start"),
        Number("the same against scaled initialisation", "LNS - scaled init", -0.845, "log10 variance growth"),
        Number("log10 of the last block's variance", "LNS - Pre-LN", -0.845, "log10 last variance"),
        Number("turn by a block, deeper over shallower half, Pre-LN", "Pre-LN", measure="angular ratio"),
        Number("turn by a block, deeper half, LNS minus Pre-LN", "LNS - Pre-LN", measure="angular deep"),
        Number("cost of removing a block, deeper over shallower half, Pre-LN", "Pre-LN", measure="removal ratio"),
        Number("the same in the deeper half, nats, LNS minus Pre-LN", "LNS - Pre-LN", measure="removal deep"),
        beside="the same against scaled initialisation",
    ),
    claim(
        "gains-removal",
        "Removing the scale vectors hurts, at one rate",
        "0.12B: +0.028, after tuning the rate again +0.015 [from secondary notes]",
        "Adam can move a gain by about the sum of its learning rates: at mini 0.7 at a rate of 4e-3.",
        "",
        Number("without minus with, at one rate", "none, rate of shared - shared", 0.028),
        Number("each at its own rate", "none - shared", 0.015, left_out=LARGE),
        expect="above",
    ),
    claim(
        "gains-unified",
        "The unified variant (HG, DNP, OR, IWD) has a lower loss than QK-norm alone",
        "lower than tuned baselines, 0.12B to 2B (abstract); about 0.04 [from secondary notes]; whether its baseline "
        "has QK-norm: [U]",
        "IWD's decay cannot show in a short run; the paper has “industrial-scale token budgets”.",
        "DNP adds QK-norm, so that is the baseline [I]. The formulas of OR and ER are ours [I]. Single parts are left "
        "out at mini: together they are worth 0.04, and two seeds cannot tell so little.",
        Number("unified minus QK-norm", "unified - QK-norm", -0.04),
        Number("unified minus shared", "unified - shared", -0.04),
        *minus("shared", "QK-norm"),
        *minus("shared", "HG", "DP", "OR", "ER", left_out=MINI),
        *minus("QK-norm", "DNP", "IWD", left_out=MINI),
        Number("IWD minus decay on all", "IWD - decay all", left_out=MINI),
        Number("IWD minus decay on output gains", "IWD - decay output", left_out=MINI),
        adequate=LARGE,
    ),
    claim(
        "vdnt-sgd",
        "Under momentum SGD, V-DNT has a lower loss than a Pre-LN ViT",
        "ImageNet, top-1: ViT-L 81.5 and 78.2, ViT-H 81.2 and 73.5 (Table 1); Fig. 6, 632M: S1 is much worst, S3 best, "
        "S4 and S5 “excellent” too",
        "A layout that momentum SGD cannot train would show on any data. But 6 blocks of width 64 may be too small for "
        "what the paper sees in 24 and 32 blocks, so “no effect” here would say little about it [I].",
        "The loss decides, since top-1 moves by whole images [I]; 0.02 nats is our choice [I]. Momentum, decay and no "
        "clipping are V-DNT-Large's (Table 4). Not the paper's: a warm-up of a tenth (there 60 of 150 epochs), an LR "
        "that falls to a tenth (there to 1e-8), and no augmentation, too much for 8 × 8 pixels [I].",
        Number("S5 minus S1 under mSGDW", "ViT S5 mSGDW - ViT S1 mSGDW"),
        *minus("ViT S1", "ViT S2", "ViT S3", "ViT S4", optimizer=" mSGDW"),
        *minus("ViT S3", "ViT S4", optimizer=" mSGDW"),
        *minus("ViT S4", "ViT S5", optimizer=" mSGDW"),
        Number("S5 minus S1, percentage points (paper's: ViT-H)", "ViT S5 mSGDW - ViT S1 mSGDW", 7.7, "top-1"),
        adequate=("digits",),
        smallest=0.02,
    ),
    claim(
        "dyt-vit",
        "In a ViT, DyT is as good as LayerNorm or better",
        "ImageNet, top-1, DyT and LayerNorm: ViT-B 82.5 and 82.3, ViT-L 83.6 and 83.1 (Table 1)",
        "The paper has one α₀, 0.5, for ViTs of all sizes, so a small one should do [I]. That DyT is worse could show "
        "here; that it is as good is weak evidence, for the task is easy: “identity minus DyT” tells whether this "
        "scale sees a layout that the paper found to fail.",
        "AdamW; α₀ is 0.5 and β is there, as in the paper's vision models. 0.02 nats is our choice [I]. Identity is "
        "DyT without tanh: γ·αx + β in place of every norm (Table 8: 61.0, then it diverges; tanh 82.5). The paper's "
        "recipe is ConvNeXt's. Added after the first results: four times the steps.",
        Number("DyT minus LayerNorm", "ViT DyT - ViT LayerNorm"),
        Number("DyT minus LayerNorm, percentage points (paper's: ViT-B)", "ViT DyT - ViT LayerNorm", 0.2, "top-1"),
        Number("identity minus DyT, both at DyT's rate", "ViT identity - ViT DyT"),
        Number("the same, percentage points (paper's: ViT-B)", "ViT identity - ViT DyT", -21.5, "top-1"),
        Number("DyT minus LayerNorm in four times the steps, at the same rates", "ViT DyT, long - ViT LayerNorm, long"),
        expect="not above",
        adequate=("digits",),
        smallest=0.02,
    ),
]

# How far momentum SGD is behind AdamW, with one thing varied: decides nothing
GAPS = [Number(says, value) for says, value in VARIED.items()]
