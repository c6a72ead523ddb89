"""Flags: what is refused, and by which message; what is allowed with a note; and that all else
builds and trains."""

import io
import math
import re
from dataclasses import asdict, fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layers import rules
from model import GPT, GPTConfig
from nanodnt.optim import make_optimizer
from nanodnt.tasks import task_of
from nanodnt.weights import model_from_checkpoint, profile_admin
from support.hypotheses import drawn
from support.models import FIXUP, POST, SCHEMES, places_of, refusals
from support.optimizers import settings as step_settings

TINY = dict(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=17)

PATCHES = dict(patch_size=2, image_size=6, channels=3, n_class=7, block_size=10, vocab_size=0)
TIED = dict(branch_scale="layerscale", tied_skip=True)
LAYERSCALE_ER = dict(branch_scale="layerscale", gain_param="expmagdir")

# flags on top of TINY, and words of the message that refuses them
REFUSED = (
    (dict(norm="rms"), "norm 'rms' rmsnorm layernorm dyt none"),
    (dict(n_head=True), "n_head=True int"),
    (dict(lns="norm", lns_power=math.inf), "lns_power finite"),
    (dict(n_layer=10_001), "n_layer=10001 10,000"),
    (dict(n_expert=-1), "n_expert=-1 from 0"),
    # images
    (dict(PATCHES, patch_size=4), "image_size=6 multiple patch_size=4"),
    (dict(PATCHES, pos="rope"), "pos=rope patch_size=2 images leave it out"),
    (dict(PATCHES, block_size=9), "block_size=9 6 pixels 10 tokens"),
    (dict(PATCHES, n_class=0), "n_class=0 at least 1"),
    (dict(image_size=8, channels=3), "image_size=8, channels=3 patch_size=0 text set patch_size"),
    # sizes and numbers
    (dict(n_layer=0, vocab_size=0), "n_layer=0 vocab_size=0 at least 1"),
    (dict(norm_eps=-1e-6, skip_scale=-1.0), "norm_eps=-1e-06 skip_scale=-1.0 negative"),
    (dict(init_std=0.0), "init_std=0.0 positive"),
    (dict(dropout=1.0, drop_path=-0.1), "dropout=1.0 drop_path=-0.1 below 1"),
    (dict(n_embd=9), "n_embd=9 n_head=2"),
    (dict(n_kv_head=3), "n_head=2 n_kv_head=3"),
    (dict(pos="rope", n_embd=6), "pos=rope even 3 head_size"),
    (dict(rope_theta=500.0), "rope_theta pos=rope"),
    # experts
    (dict(router="sigmoid", n_expert_active=3), "n_expert_active=3 router=sigmoid n_expert"),
    (dict(n_expert=2, n_expert_active=0), "n_expert_active=0 at least 1"),
    (dict(n_expert=2, n_expert_active=3), "n_expert_active=3 n_expert=2 at most 2"),
    (dict(n_expert=2, sigma_reparam=True), "sigma_reparam experts"),
    # norms
    (
        dict(norm="none", mid_norm="attn", input_norm=True),
        "norm=none mid_norm=attn input_norm=True",
    ),
    (dict(post_norm_blocks=3), "post_norm_blocks=3 n_layer=2 lower"),
    (dict(POST, pre_norm_sublayers=5), "pre_norm_sublayers=5 n_layer=2 lower"),
    (
        dict(POST, pre_norm_sublayers=1, post_norm_blocks=1),
        "post_norm_blocks=1 pre_norm_sublayers=1 leave one",
    ),
    (dict(pre_norm="attn", pre_norm_sublayers=1), "pre_norm_sublayers=1 no effect mid_norm"),
    (dict(norm_groups=3), "norm_groups=3 n_embd=8"),
    (dict(norm_groups=2, norm="dyt"), "norm_groups=2 norm=rmsnorm layernorm norm=dyt"),
    (dict(norm="layernorm", norm_groups=8), "norm_groups=8 LayerNorm lower"),
    (
        dict(norm="dyt", dyt_alpha_attn=0.0, dyt_alpha_other=0),
        "dyt_alpha_attn=0.0 dyt_alpha_other=0",
    ),
    (
        dict(dyt_learn_alpha=False, dyt_bias=True, norm="none"),
        "dyt_learn_alpha dyt_bias norm=dyt norm=none",
    ),
    (dict(embed_scale=True, input_norm=True), "embed_scale input_norm"),
    (dict(norm_eps=0.0, mid_norm="mlp", dropout=0.1), "norm_eps=0 dropout=0.1 norm_eps=1e-6"),
    (dict(qk_norm_over="full"), "qk_norm_over=full qk_norm=True"),
    (dict(qk_norm=True, qk_norm_over="full", gain_out="scale"), "gain_out=scale qk_norm_over=full"),
    (dict(v_norm=True, qk_norm=True, gain_out="norm"), "gain_out=norm qk_norm v_norm"),
    # constants, learned scales and scale vectors
    (dict(lns="norm", pre_norm="none"), "lns=norm pre_norm"),
    (dict(lns_branches="attn", lns_power=0.0), "lns_power lns_branches lns=norm"),
    (dict(lns_learn=True, lns="norm", gain="none"), "lns_learn gain=shared"),
    (dict(deepnorm=True, post_norm="attn"), "deepnorm post_norm=both"),
    (dict(POST, admin=True, deepnorm=True), "deepnorm admin"),
    (dict(gpas=True, tied_skip=True), "gpas tied_skip"),
    (dict(tied_skip=True), "tied_skip branch_scale=layerscale"),
    (dict(TIED, branch_scale_init=0.0), "tied_skip positive branch_scale_init"),
    (TIED, "tied_skip positive branch_scale_init"),
    (dict(unit_rows=True, init_std=0.1, sigma_reparam=True), "unit_rows init_std sigma_reparam"),
    (dict(POST, unit_rows=True, deepnorm=True), "unit_rows deepnorm"),
    (dict(POST, admin=True, skip_scale=2.0, tied_skip=True), "admin skip_scale=2.0 tied_skip"),
    (dict(n_layer=1, skip_scale=2.0), "skip_scale=2.0 n_layer=1"),
    (dict(post_norm="attn", skip_scale=0.0), "skip_scale=0 post_norm=both"),
    (dict(POST, skip_scale=0.0, pre_norm_sublayers=3), "skip_scale=0 pre_norm_sublayers"),
    (dict(POST, deepnorm=True, pre_norm_sublayers=1), "deepnorm pre_norm_sublayers"),
    (dict(branch_scale_init=0.1), "branch_scale_init branch_scale=layerscale skipinit"),
    (dict(fixup=True), "fixup norm=rmsnorm norm=none"),
    (dict(FIXUP, parametrization="depth_mup"), "fixup parametrization=depth_mup"),
    (dict(lns="residual", parametrization="depth_mup"), "lns=residual parametrization=depth_mup"),
    (dict(gpas=True, skip_scale=0.9, parametrization="depth_mup"), "gpas skip_scale=0.9 depth_mup"),
    (
        dict(FIXUP, branch_scale="skipinit", sigma_reparam=True),
        "fixup branch_scale=skipinit sigma_reparam",
    ),
    (dict(post_norm_blocks=2, gain="branch"), "gain=branch pre_norm post_norm_blocks n_layer=2"),
    (
        dict(gain="none", gain_out="scale", gain_param="magdir"),
        "gain_out=scale gain_param=magdir gain=none",
    ),
    (
        dict(LAYERSCALE_ER, branch_scale_init=0.0),
        "gain_param=expmagdir branch_scale_init=0.0 positive",
    ),
)
CHECKS = [function for name, function in vars(rules).items() if name.startswith("check_")]


@pytest.mark.parametrize("flags, words", REFUSED, ids=str)
def test_bad_flags_are_refused_in_one_line_that_names_them(flags, words):
    with pytest.raises(ValueError) as caught:
        GPT.empty(GPTConfig(**TINY | flags))
    message = str(caught.value)
    assert "\n" not in message
    for word in words.split():
        assert word in message, message


def test_every_rule_refuses_something():
    """So that a rule that is lost, or turned around, makes a test fail."""
    reached = set()
    for flags, _ in REFUSED:
        with pytest.raises(ValueError) as caught:
            rules.check_config(GPTConfig(**TINY | flags))
        reached |= places_of(caught)
    wanted = refusals(*CHECKS)
    assert len(wanted) > 30 and wanted - reached == set()


@pytest.mark.parametrize(
    "flags",
    (
        dict(branch_scale="layerscale", branch_scale_init=-1.0, gain_param="magdir"),
        dict(lns="residual", pre_norm="none", lns_branches="attn"),
        dict(post_norm_blocks=2, lns="branch"),
        dict(pre_norm="attn", pre_norm_sublayers=2),
        dict(lns="norm", pre_norm="attn", lns_branches="attn", lns_power=-1),
        dict(embed_scale=True, norm="dyt", input_norm=True),  # γ tanh(α s x) keeps s
        dict(dropout=0, norm="dyt", dyt_alpha_attn=1),  # whole numbers are floats, too
    ),
    ids=str,
)
def test_near_misses_are_allowed(flags):
    GPT(GPTConfig(**TINY | flags))


PLAIN = dict(residual_init="plain")


@pytest.mark.parametrize(
    "flags, words",
    (
        (dict(), []),
        (dict(PLAIN, lns="norm"), []),
        (dict(PLAIN, **FIXUP), []),
        (dict(lns="norm"), ["lns residual_init=gpt2 residual_init=plain"]),
        (dict(PLAIN, lns="norm", pre_norm="attn"), ["lns=norm attn alone"]),
        (dict(PLAIN, lns="norm", qk_norm=True), ["lns less QK-norm"]),
        (dict(PLAIN, lns="norm", qk_norm=True, lns_branches="mlp"), []),
        (dict(PLAIN, lns="norm", v_norm=True), ["lns less v_norm"]),
        (dict(PLAIN, lns="norm", gain_out="norm", lns_branches="mlp"), ["lns less gain_out=norm"]),
        # a bias keeps its size beside the factor
        (dict(PLAIN, lns="norm", qk_norm=True, bias=True), []),
        (dict(PLAIN, lns="input"), ["lns=input next to nothing"]),
        (dict(PLAIN, lns="input", norm="dyt", init="xavier"), []),
        (dict(norm="dyt"), ["dyt init_std·√n_embd = 0.06 init_std=0.35"]),  # 8 wide
        (dict(norm="dyt", n_embd=768), []),
        (dict(PLAIN, post_norm="both", deepnorm=True), ["pre_norm=both DeepNorm pre_norm=none"]),
        (dict(POST, deepnorm=True), ["deepnorm residual_init=gpt2 not used"]),
        (dict(n_expert=4, n_expert_active=1), ["router_norm=False"]),  # a weight that is always 1
        (dict(n_expert=4, n_expert_active=1, router_norm=False), []),
    ),
    ids=str,
)
def test_notes_say_what_should_be_known(flags, words):
    config = GPTConfig(**TINY | flags)
    config.check()
    notes = rules.notes(config)
    assert len(notes) == len(words), notes
    for note, wanted in zip(notes, words, strict=True):
        assert "\n" not in note
        for word in wanted.split():
            assert word in note, note


# ---------------------------------------------------------------------------------------- any flags

# Every number a flag may be given in the property below, right or wrong.
NUMBERS = dict(
    n_layer=(1, 3),
    n_head=(1, 4),
    n_embd=(4, 12),
    block_size=(5, 9),
    vocab_size=(1, 65),
    rope_theta=(7.0,),
)
NUMBERS |= dict(
    n_kv_head=(1, 2, 3), n_ff=(1, 12), dropout=(0.3,), norm_eps=(1e-2,), norm_groups=(2, 3, 4, 8)
)
NUMBERS |= dict(
    post_norm_blocks=(1, 2, 3),
    pre_norm_sublayers=(1, 2, 5),
    skip_scale=(0.0, 0.9, -1.0),
    dyt_alpha_attn=(0.0, 0.4),
    dyt_alpha_other=(0.3, -1.0),
    init_std=(0.5,),
)
NUMBERS |= dict(lns_power=(0.0, 1.0, -0.5), branch_scale_init=(0.0, 0.2, -0.1))
NUMBERS |= dict(
    n_expert=(1, 3, 4), n_expert_active=(1, 3), n_expert_shared=(1, 2), router_scale=(2.5, 0.0)
)


def choices(name, hint):
    if get_origin(hint) is Literal:
        return get_args(hint)
    return (False, True) if hint is bool else NUMBERS.get(name, (0.5,) if hint is float else (2,))


DEFAULTS = {f.name: f.default for f in fields(GPTConfig)} | TINY
CHOICES = {name: choices(name, hint) for name, hint in get_type_hints(GPTConfig).items()}
CHOICES = {name: [v for v in values if v != DEFAULTS[name]] for name, values in CHOICES.items()}
SOME_FLAGS = st.lists(st.sampled_from(sorted(CHOICES)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(CHOICES[name]) for name in names})
)
# start from a scheme, so that flags that need each other are drawn together
EXPERTS = dict(
    n_expert=4,
    n_expert_active=3,
    n_expert_shared=1,
    balance="bias",
    router="sigmoid",
    router_norm=False,
)
IMAGES = dict(patch_size=2, image_size=4, channels=1, n_class=3, block_size=5, vocab_size=0)
IMAGES = [dict(IMAGES, qk_norm=True), dict(IMAGES, pool="mean", block_size=4, drop_path=0.5)]
START_FLAGS = st.sampled_from(
    [{}, *(flags for flags, _ in SCHEMES.values()), dict(n_expert=3), EXPERTS, *IMAGES]
)


@given(START_FLAGS, SOME_FLAGS)
@drawn(60, 400)
def test_any_flags_are_refused_by_name_or_train_and_survive_a_checkpoint(scheme, some):
    config = GPTConfig(**{**TINY, **scheme, **some})
    try:
        model = task_of(config).network()(config)
    except ValueError as e:
        named = [name for name in {**scheme, **some} if re.search(rf"\b{name}\b", str(e))]
        assert named and "\n" not in str(e), str(e)
        return
    assert all(isinstance(note, str) for note in rules.notes(config))
    inputs, targets = model.example(2)
    profile_admin(model, inputs)
    optimizer = make_optimizer(model.train(), step_settings(learning_rate=1e-2))
    for _ in range(2):
        loss = model(inputs, targets)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.power_iteration()
        assert loss.isfinite()
    assert all(t.isfinite().all() for t in model.state_dict().values())
    file = io.BytesIO()
    torch.save(dict(model_config=asdict(config), model=model.state_dict()), file)
    file.seek(0)
    copy = model_from_checkpoint(torch.load(file, weights_only=True)).eval()
    for (key, a), b in zip(copy.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert torch.equal(copy(inputs)[0], model.eval()(inputs)[0])
