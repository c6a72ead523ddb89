"""Settings of the optimizers (defaults, refusals, notes), schedules and blockwise learning rates,
computed by hand."""

import math

import pytest

from model import GPT, GPTConfig
from nanodnt.optim import fill_defaults, lr_at, make_optimizer, notes
from nanodnt.settings import TrainConfig
from support.optimizers import filled as settings

NAMES = ["adamw", "adam_mini", "msgdw", "muon", "soap"]

# ----------------------------------------------------------------------------------------- defaults

MUON = dict(learning_rate=6e-4, weight_decay=0.1, momentum=0.95, nesterov=True, muon_steps=5)
MUON |= dict(muon_adjust_lr="match_rms_adamw", adamw_learning_rate=6e-4, adamw_weight_decay=0.1)
MUON |= dict(muon_coefficients="jordan", muon_row_norm=False, cautious_decay=False, adam_eps=1e-8)
ORIGINAL = dict(muon_adjust_lr="original")
SOAP = dict(learning_rate=3e-3, weight_decay=0.01, soap_frequency=10)
SOAP |= dict(adamw_learning_rate=3e-3, adamw_weight_decay=0.01, adam_eps=1e-8)


DEFAULTS = [
    # the DNT paper's language models
    (
        dict(optimizer="adamw"),
        dict(learning_rate=6e-4, weight_decay=0.1, adam_eps=1e-8, cautious_decay=False),
    ),
    (dict(optimizer="adam_mini"), dict(learning_rate=6e-4, weight_decay=0.1, adam_eps=1e-8)),
    (
        dict(optimizer="msgdw"),
        dict(learning_rate=1.0, weight_decay=1e-4, momentum=0.9, dampening=0.0, nesterov=False),
    ),
    # updates as large as AdamW's, so AdamW's settings; the rest has the same
    (dict(optimizer="muon"), MUON),
    (
        dict(optimizer="muon", learning_rate=1e-3),
        MUON | dict(learning_rate=1e-3, adamw_learning_rate=1e-3),
    ),
    (dict(optimizer="muon", adamw_weight_decay=0.0), MUON | dict(adamw_weight_decay=0.0)),
    # Keller Jordan's LR, for another scale of updates, so the rest has AdamW's
    (
        dict(optimizer="muon", **ORIGINAL),
        MUON | ORIGINAL | dict(learning_rate=0.02, weight_decay=0.01),
    ),
    # those of its authors' code, in which one LR and decay are for all parameters
    (dict(optimizer="soap"), SOAP),
]


@pytest.mark.parametrize("given, filled", DEFAULTS, ids=str)
def test_defaults(given, filled):
    config = settings(**given)
    assert {name: getattr(config, name) for name in filled} == filled
    unused = {"momentum", "dampening", "nesterov", "muon_adjust_lr", "muon_steps"} | {
        "adamw_learning_rate"
    }
    unused |= {"adamw_weight_decay", "wsd_decay", "wsd_decay_iters", "muon_coefficients"}
    unused |= {"muon_row_norm", "cautious_decay", "adam_eps", "soap_frequency"}
    assert all(getattr(config, name) is None for name in unused - filled.keys())
    assert config.min_lr == pytest.approx(config.learning_rate / 10)
    assert config.lr_decay_iters == config.max_iters == 200_000
    again = TrainConfig(**vars(config))
    fill_defaults(again)  # does not change what is filled in already
    assert again == config


def test_defaults_of_wsd():
    """A linear decay over the last fifth; a shorter one if warm-up leaves less."""
    config = settings(schedule="wsd", max_iters=1000, warmup_iters=100)
    assert (config.wsd_decay, config.wsd_decay_iters) == ("linear", 200)
    assert settings(schedule="wsd", max_iters=1000, warmup_iters=900).wsd_decay_iters == 100
    assert settings(schedule="wsd", max_iters=1000, warmup_iters=1500).wsd_decay_iters == 0
    assert settings(schedule="wsd", wsd_decay="sqrt", wsd_decay_iters=0).wsd_decay_iters == 0


def test_defaults_of_blockwise_lr():
    """The paper has ratios for AdamW and Adam-mini. The others get AdamW's, and a note says that
    this is ours. (Which they are: test_ratios_by_label.)"""
    for name in NAMES:
        said = notes(
            settings(optimizer=name, blockwise_lr=True, **ORIGINAL if name == "muon" else {}),
            model(),
        )
        assert len(said) == (name in ("msgdw", "muon", "soap"))
        if said:
            assert f"those for {name} are our choice" in said[0]
        assert notes(settings(optimizer=name), model()) == []
    assert settings(blockwise_lr=True, lr_ratio_emb=6.0).lr_ratio_emb == 6.0
    assert settings().lr_ratio_emb is None


BARE = dict(
    gain="none",
    gain_out="none",
    gain_param="direct",
    branch_scale="none",
    sigma_reparam=False,
    bias=False,
)


NOTED = [  # settings, the network, how the only note begins; None: there is none
    (
        dict(blockwise_lr=True, lr_ratio_head=2.0),
        dict(tie_weights=True),
        "lr_ratio_head has no effect",
    ),
    (
        dict(blockwise_lr=True, lr_ratio_head=1.0, lr_ratio_pos=1.0),
        dict(tie_weights=True, pos="rope"),
        None,
    ),
    (dict(decay_gains="all"), BARE, "decay_gains has no effect"),
    (dict(decay_scalars=True), BARE, "decay_scalars has no effect"),
    (dict(decay_gains="all", decay_scalars=True), {}, None),
    (dict(optimizer="msgdw", beta2=0.99), {}, "beta1 and beta2 have no effect on msgdw"),
    (dict(optimizer="muon", beta2=0.99), {}, None),
    (dict(schedule="constant", min_lr=0.0), {}, "min_lr and lr_decay_iters have no effect"),
    (dict(schedule="constant"), {}, None),
    (dict(lr_decay_iters=9, warmup_iters=10), {}, "warm-up (10 steps) outlasts lr_decay_iters=9"),
    (dict(lr_decay_iters=10, warmup_iters=10), {}, None),
]


@pytest.mark.parametrize("changes, flags, words", NOTED)
def test_a_note_names_what_has_no_effect(changes, flags, words):
    found = notes(settings(**changes), model(**flags))
    assert len(found) == (words is not None) and all(note.startswith(words) for note in found)


# ----------------------------------------------------------------------------------------- refusals

# flags that only some optimizers have: a value, and those that have it
FLAGS = dict(
    nesterov=(False, "msgdw or muon"),
    dampening=(0.0, "msgdw"),
    soap_frequency=(10, "soap"),
    adamw_learning_rate=(1e-3, "muon or soap"),
)
FLAGS |= dict(muon_coefficients=("jordan", "muon"), muon_row_norm=(False, "muon"))
FLAGS |= dict(
    cautious_decay=(False, "adamw or muon"), adam_eps=(1e-8, "adamw or adam_mini or muon or soap")
)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_without_effect_is_refused(flag):
    """Even at its default value: whoever sets it expects an effect."""
    value, users = FLAGS[flag]
    for name in set(NAMES) - set(users.split(" or ")):
        with pytest.raises(ValueError) as error:
            settings(optimizer=name, **{flag: value})
        assert (
            str(error.value)
            == f"{flag}={value} has no effect on {name}: leave it out, or choose {users}"
        )


SGD = dict(optimizer="msgdw")
MU = dict(optimizer="muon")
WSD = dict(schedule="wsd")
BLOCKWISE = dict(blockwise_lr=True)
REFUSED = [
    (dict(learning_rate=-1.0), "learning_rate=-1.0 must not be negative"),
    (dict(MU, adamw_weight_decay=-1.0), "adamw_weight_decay=-1.0 must not be negative"),
    (dict(grad_clip=-1.0), "grad_clip=-1.0 must not be negative"),
    (dict(BLOCKWISE, lr_ratio_vo=-4.0), "lr_ratio_vo=-4.0 must not be negative"),
    (dict(beta2=-0.1), "beta2=-0.1 must be at least 0 and below 1"),
    (dict(SGD, momentum=1.0), "momentum=1.0 must be at least 0 and below 1"),
    (dict(MU, muon_steps=0), "muon_steps=0 must be between 1 and 20"),
    (dict(optimizer="soap", soap_frequency=0), "soap_frequency=0 must be at least 1"),
    (dict(MU, muon_coefficients="polar", muon_steps=6), "muon_coefficients=polar has 5: lower"),
    (dict(adam_eps=0.0), "adam_eps=0.0 must be"),
    (dict(SGD, nesterov=True, dampening=0.1), "nesterov needs momentum and no dampening"),
    (dict(SGD, nesterov=True, momentum=0.0), "nesterov needs momentum and no dampening"),
    (dict(min_lr=0.1), "min_lr=0.1 is above learning_rate=0.0006: lower min_lr"),
    (
        dict(MU, cautious_decay=True, weight_decay=0.0),
        "cautious_decay=True decays by weight_decay, which is 0",
    ),
    # under Muon AdamW updates gains and scalars
    (
        dict(SGD, decay_scalars=True, weight_decay=0.0),
        "decay_scalars=True decays by weight_decay, which is 0",
    ),
    (dict(input_gains="v"), "input_gains=v needs decay_gains=input or output, not none"),
    (
        dict(MU, decay_gains="all", adamw_weight_decay=0.0),
        "decay_gains=all decays by adamw_weight_decay, which is 0",
    ),
    # schedules
    (dict(wsd_decay="sqrt"), "wsd_decay needs schedule=wsd, but schedule=cosine: leave it out"),
    (
        dict(WSD, max_iters=100, warmup_iters=10, wsd_decay_iters=91),
        "wsd_decay_iters=91 must be at most the 90 steps after warm-up (lr_dec",
    ),
    (dict(WSD, wsd_decay_iters=-1), "wsd_decay_iters=-1 must not be negative"),
    # blockwise
    (
        dict(blockwise_decay="unscaled", lr_ratio_pos=1.0),
        "lr_ratio_pos, blockwise_decay: needs blockwise_lr=True",
    ),
    (
        dict(BLOCKWISE, lr_ratio_norm=0.05, min_lr=1e-4),
        "lr_ratio_norm=0.05 puts the peak below min_lr=0.0001, which",
    ),
    # decay in one step
    (
        dict(learning_rate=1.0, weight_decay=0.1),
        "ratio) = 0.1 would shrink every matrix by 10% a step",
    ),
    (dict(MU, **ORIGINAL, adamw_learning_rate=2.0), "20% a step: lower adamw_weight_decay"),
    (dict(BLOCKWISE, learning_rate=0.1, min_lr=0.0), "0.1 would shrink every"),
    (dict(BLOCKWISE, learning_rate=1.0, blockwise_decay="unscaled"), "0.1 would shrink"),
]


@pytest.mark.parametrize("changes, words", REFUSED)
def test_impossible_settings_are_refused(changes, words):
    with pytest.raises(ValueError) as error:
        settings(**changes)
    assert words in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------- schedules

PLAIN = dict(learning_rate=1e-2, min_lr=1e-3, warmup_iters=10, max_iters=110)


def rates(updates, group=None, **changes):
    """LRs of these updates, counted from 1."""
    config = settings(**PLAIN | changes)
    return [lr_at(t - 1, config, group) for t in updates]


def test_schedule_edges():
    assert rates([1], warmup_iters=0)[0] < 1e-2  # without warm-up the cosine starts at once
    assert rates([1], warmup_iters=1)[0] == 1e-2
    # the decay ends at lr_decay_iters, not at the end of the run
    found = rates((20, 30, 40, 60, 61), schedule="wsd", wsd_decay_iters=40, lr_decay_iters=60)
    assert found == pytest.approx([1e-2, 1e-3 + 9e-3 * 0.75, 5.5e-3, 1e-3, 1e-3], rel=1e-12)
    assert rates([71], schedule="constant", lr_decay_iters=10)[0] == 1e-2
    assert rates([5], schedule="constant", lr_decay_iters=10)[0] == pytest.approx(5e-3)
    for schedule in ("cosine", "linear", "wsd"):  # the decay ends before warm-up does: no crash
        found = rates([20, 50, 51, 201], schedule=schedule, warmup_iters=50, lr_decay_iters=20)
        assert found == pytest.approx([4e-3, 1e-2, 1e-3, 1e-3])
    assert rates([1, 50], learning_rate=0.0, min_lr=None) == [0.0, 0.0]
    assert rates([11, 50, 200], schedule="cosine", min_lr=1e-2) == [1e-2] * 3


# ---------------------------------------------------------------------------------------- blockwise

PAPER = dict(emb=10, qk=8, ffn=6, vo=4, gain_in=1, gain_out=1, head=1, pos=1)
PAPER |= dict(
    bias_qk=8, bias_ffn=6, bias_vo=4, scalar_qk=8, scalar_ffn=6, scalar_vo=4, scalar=1, gain_dir=1
)
MINI = PAPER | dict(emb=4, qk=1, bias_qk=1, scalar_qk=1, ffn=4, bias_ffn=4, scalar_ffn=4)
# under Muon on AdamW
REST = ("emb", "pos", "head", "gain_in", "gain_out", "gain_dir", "scalar", "bias")


def model(**flags):
    """Every kind of parameter: biases and σReparam's scalars, scalars of the stream, gains with
    directions."""
    sizes = dict(
        n_layer=1,
        n_head=2,
        n_embd=16,
        block_size=8,
        vocab_size=31,
        mid_norm="both",
        branch_scale="skipinit",
    )
    sizes |= dict(
        bias=True, sigma_reparam=True, tie_weights=False, gain_out="norm", gain_param="magdir"
    )
    return GPT(GPTConfig(**sizes | flags))


def groups(network=None, **changes):
    """{label: group} and the settings."""
    config = settings(**PLAIN | dict(blockwise_lr=True) | changes)
    return {g["label"]: g for g in make_optimizer(network or model(), config).param_groups}, config


@pytest.mark.parametrize("name", NAMES)
def test_ratios_by_label(name):
    """A bias and σReparam's scalar go with their matrix, all other scalars and gains with the
    norms; a tied head is the embedding."""
    found, _ = groups(optimizer=name)
    ratios = MINI if name == "adam_mini" else PAPER
    assert {label: g["lr_ratio"] for label, g in found.items()} == ratios
    by_name = {n: label for label, g in found.items() for n in g["param_names"]}
    assert (
        by_name["blocks.0.attn.f.k.bias"] == "bias_qk"
        and by_name["blocks.0.attn.f.o.bias"] == "bias_vo"
    )
    assert (
        by_name["blocks.0.mlp.f.up.sigma"] == "scalar_ffn"
        and by_name["blocks.0.mlp.mid.gain"] == "scalar"
    )
    tied, _ = groups(model(tie_weights=True), optimizer=name)
    assert "head" not in tied and tied["emb"]["lr_ratio"] == ratios["emb"]
    plain, _ = groups(optimizer=name, blockwise_lr=False)
    assert {g["lr_ratio"] for g in plain.values()} == {1.0}
    assert plain.keys() == {
        label.split("_")[0] if label.startswith(("bias", "sca")) else label for label in ratios
    }


# The part of the way from peak to minimum that is left at updates W + 1 = 11, 60, 109, T = 110 and
# later.
LEFT = {
    "cosine": (
        0.5 * (1 + math.cos(0.01 * math.pi)),
        0.5,
        0.5 * (1 + math.cos(0.99 * math.pi)),
        0,
        0,
        0,
    ),
    "linear": (0.99, 0.5, 0.01, 0, 0, 0),
    "constant": (1, 1, 1, 1, 1, 1),
    "wsd linear": (1, 0.625, 1 / 80, 0, 0, 0),  # decays in the last 80 steps; 30 of them are over
    "wsd sqrt": (1, 1 - 0.375**0.5, 1 - (79 / 80) ** 0.5, 0, 0, 0),
    "wsd cosine": (
        1,
        0.5 * (1 + math.cos(0.375 * math.pi)),
        0.5 * (1 + math.cos(79 / 80 * math.pi)),
        0,
        0,
        0,
    ),
}


@pytest.mark.parametrize("min_lr", ["shared", "proportional"])
@pytest.mark.parametrize("start", ["start", "warmup_end"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_rates(name, start, min_lr):
    """LR(t) = r·peak·t/W up to W (without r for warmup_end), then from r·peak to the minimum. The
    rest of Muon has its own peak, and a minimum in proportion to it. Without a group: ratio 1."""
    network = model()
    for schedule, left in LEFT.items():
        changes = dict(
            optimizer=name,
            schedule=schedule.split()[0],
            blockwise_start=start,
            blockwise_min_lr=min_lr,
        )
        changes |= (
            dict(wsd_decay=schedule.split()[1], wsd_decay_iters=80) if "wsd" in schedule else {}
        )
        found, config = groups(
            network, **changes, **dict(adamw_learning_rate=4e-3) if name == "muon" else {}
        )
        assert found.keys() == PAPER.keys()
        for label, group in (found | {None: None}).items():
            r = PAPER.get(label, 1)
            base = 1e-2
            floor = 1e-3
            if group and name == "muon" and (label in REST or label.split("_")[0] in REST):
                base = 4e-3
                floor = 4e-4
            first = base if start == "warmup_end" else r * base
            floor *= r if min_lr == "proportional" else 1
            want = [
                first / 10,
                first / 2,
                first,
                *(floor + part * (r * base - floor) for part in left),
            ]
            lrs = [lr_at(t - 1, config, group) for t in (1, 5, 10, 11, 60, 109, 110, 111, 5000)]
            assert lrs == pytest.approx(want, rel=1e-12), (schedule, label)


@pytest.mark.parametrize("min_lr", ["shared", "proportional"])
@pytest.mark.parametrize("start", ["start", "warmup_end"])
def test_the_recipe_of_dyt(start, min_lr):
    """min( peak · (1 − (1 − t/w)²), a cosine from the peak at 0 to the minimum at T ). Without a
    group: ratio 1."""
    for w, T, low in (
        (10, 110, 1e-3),
        (200, 4000, 1e-3),
        (50, 60, 1e-3),
        (10, 110, 0.0),
        (0, 110, 1e-3),
    ):
        how = dict(
            blockwise_start=start, blockwise_min_lr=min_lr, warmup_iters=w, max_iters=T, min_lr=low
        )
        found, config = groups(schedule="dyt", **how)
        for label, group in (found | {None: None}).items():
            r = PAPER.get(label, 1)
            floor = low * (r if min_lr == "proportional" else 1)
            for t in {1, w // 2 + 1, w, w + 1, (w + T) // 2, T - 1, T, T + 1, 5000} - {0}:
                peak = 1e-2 * (1 if start == "warmup_end" and t <= w else r)
                rising = peak * (1 - (1 - t / w) ** 2) if t < w else peak
                want = min(
                    rising, floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(t, T) / T))
                )
                assert lr_at(t - 1, config, group) == pytest.approx(want, rel=1e-12), (
                    w,
                    T,
                    label,
                    t,
                )


@pytest.mark.parametrize("decay", ["scaled", "unscaled"])
@pytest.mark.parametrize("name", NAMES)
def test_decay_of_a_step_grows_with_the_ratio_or_not(name, decay):
    """LR times decay at the peak. Muon's rest has its own LR and its own decay."""
    rest = dict(adamw_learning_rate=4e-3, adamw_weight_decay=0.05) if name == "muon" else {}
    found, config = groups(optimizer=name, weight_decay=0.02, blockwise_decay=decay, **rest)
    ratios = MINI if name == "adam_mini" else PAPER
    for label in ("emb", "pos", "head", "qk", "vo", "ffn"):
        product = 4e-3 * 0.05 if rest and label in REST else 1e-2 * 0.02
        want = product * (ratios[label] if decay == "scaled" else 1)
        assert lr_at(9, config, found[label]) * found[label]["weight_decay"] == pytest.approx(
            want, rel=1e-12
        ), label
    assert all(
        g["weight_decay"] == 0
        for label, g in found.items()
        if label.startswith(("gain", "bias", "scalar"))
    )
