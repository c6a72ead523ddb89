"""What a GPTConfig refuses, and what is allowed but should be known.

The refusals are one table: each line `yield condition, message` is a row. Rows are read in order,
and each may rely on those before it. A condition that is text names the flags that are wrong, and
the message goes on from there.
"""

from dataclasses import fields
from itertools import chain
from typing import Literal, get_args, get_origin, get_type_hints

from layers.scaling import ALPHA, base

# More than this is a typo, and would take minutes to fail for lack of memory. Routes sorts experts
# as int16.
MOST = dict(n_layer=10_000, n_expert=2**15, n_expert_shared=2**15)
MOST_OF_OTHERS = 2**24

# the flag that chooses a kind of network; without one it reads text
CHOOSES = {"images": "patch_size"}
# Flags that not every kind of network has, besides those that choose it, and which of them are
# sizes.
OF = {
    "text": ("pos", "rope_theta", "vocab_size"),
    "images": ("image_size", "channels", "n_class", "pool"),
}
SIZES = {"text": ("vocab_size",), "images": ("image_size", "channels", "n_class")}
# Flags that only a mixture of experts has, besides n_expert.
OF_EXPERTS = (
    "n_expert_active",
    "n_expert_shared",
    "router",
    "router_norm",
    "router_scale",
    "balance",
)


def check_config(config) -> None:
    """ValueError, in one line that says what to change, for values that are wrong or contradict
    each other."""
    for wrong, message in chain(
        *(rules(config) for rules in (values, images, sizes, experts, norms, scales))
    ):
        if wrong:
            raise ValueError(wrong + message if isinstance(wrong, str) else message)


def kind_of(c) -> str:
    """The network's key in OF: of a GPTConfig, or of its fields, as a checkpoint holds them."""
    given = c if isinstance(c, dict) else vars(c)
    return next((kind for kind, flag in CHOOSES.items() if given.get(flag)), "text")


def where(c, names, wrong) -> str:
    """NAME=VALUE of those of these flags for which wrong(name, value)."""
    return ", ".join(
        f"{name}={getattr(c, name)}" for name in names if wrong(name, getattr(c, name))
    )


def changed(c, *names) -> str:
    """NAME=VALUE of those of these flags that are not the default."""
    defaults = {f.name: f.default for f in fields(c)}
    return where(c, names, lambda name, value: value != defaults[name])


def values(c):
    """Each field's type and allowed values."""
    for name, hint in get_type_hints(type(c)).items():
        # a Literal's values, a union's types, or the type
        value, allowed = getattr(c, name), get_args(hint) or (hint,)
        if get_origin(hint) is Literal:
            yield (
                value not in allowed,
                f"{name}={value!r:.60} is unknown: allowed are {', '.join(allowed)}",
            )
            continue
        fits = type(value) in allowed or (float in allowed and type(value) is int)
        yield (
            not fits,
            f"{name}={value!r:.60} must be of type {' or '.join(t.__name__ for t in allowed)}",
        )
        if int in allowed:
            most = MOST.get(name, MOST_OF_OTHERS)
            yield (
                not 0 <= value <= most,
                f"{name}={value!s:.20} must be a whole number from 0 to {most:,}",
            )
        infinite = float in allowed and value is not None and not abs(value) < 1e300
        yield infinite, f"{name}={value!s:.20} must be a finite number below 1e300"


def images(c):
    kind = kind_of(c)
    for other in OF.keys() - {kind}:
        flag = CHOOSES[kind if kind in CHOOSES else other]
        own = [name for name in OF[other] if name not in OF[kind]]
        yield (
            changed(c, *own),
            f": {flag}={getattr(c, flag)} makes this a model of {kind}: leave it out, or set {flag}",
        )
    rest = c.patch_size and c.image_size % c.patch_size
    yield rest, f"image_size={c.image_size} must be a multiple of patch_size={c.patch_size}"
    tokens = c.image_tokens if c.patch_size and c.image_size else c.block_size
    wrong = c.block_size != tokens
    yield (
        wrong,
        f"block_size={c.block_size}: an image of {c.image_size} pixels has {tokens} tokens: leave it out",
    )


def sizes(c):
    """Sizes and plain numbers."""
    names = ("n_layer", "n_head", "n_embd", "block_size", *SIZES[kind_of(c)])
    yield where(c, names, lambda _, v: v < 1), ": must be at least 1"
    yield where(c, ("norm_eps",), lambda _, v: v < 0), " must not be negative"
    yield (
        where(c, ("rope_theta", "init_std", "router_scale"), lambda _, v: v <= 0),
        " must be positive",
    )
    yield (
        where(c, ("dropout", "drop_path"), lambda _, p: not 0 <= p < 1),
        " must be at least 0 and below 1",
    )
    broken = not c.head_size and c.n_embd % c.n_head
    yield (
        broken,
        f"n_embd={c.n_embd} must be a multiple of n_head={c.n_head}, unless head_size is given",
    )
    yield (
        c.n_kv_head and c.n_head % c.n_kv_head,
        f"n_head={c.n_head} must be a multiple of n_kv_head={c.n_kv_head}",
    )
    odd = c.pos == "rope" and c.head_dim % 2
    yield (
        odd,
        f"pos=rope needs an even head size, but it is {c.head_dim}: change n_embd, n_head or head_size",
    )
    yield (
        c.pos != "rope" and changed(c, "rope_theta"),
        ": needs pos=rope: set that, or leave it out",
    )


def experts(c):
    E, k = c.n_expert, c.n_expert_active
    yield (
        E == 0 and changed(c, *OF_EXPERTS),
        ": needs experts, set n_expert (8, for example), or leave it out",
    )
    yield E and k < 1, f"n_expert_active={k} must be at least 1"
    yield (
        E and k > E,
        f"n_expert_active={k} is more than n_expert={E}: set it to at most {E}, or raise n_expert",
    )
    both = E and c.sigma_reparam
    yield (
        both,
        "sigma_reparam is for single matrices, not for stacks of experts: leave one of them out",
    )


def norms(c):
    """Norms, and where they stand."""
    placed = c.norm == "none" and changed(
        c, "mid_norm", "post_norm", "input_norm", "post_norm_blocks"
    )
    yield placed, ": contradicts norm=none: leave it out, or choose a norm"
    n, groups = c.post_norm_blocks, c.norm_groups
    yield not 0 <= n <= c.n_layer, f"post_norm_blocks={n} must be between 0 and n_layer={c.n_layer}"
    divides = groups >= 1 and c.n_embd % groups == 0
    yield not divides, f"norm_groups={groups} must divide n_embd={c.n_embd} (1 = no groups)"
    grouped = groups > 1 and c.norm not in ("rmsnorm", "layernorm")
    yield grouped, f"norm_groups={groups} needs norm=rmsnorm or layernorm, but norm={c.norm}"
    single = c.norm == "layernorm" and groups == c.n_embd
    yield (
        single,
        f"norm_groups={groups} leaves LayerNorm groups of one channel, which are always 0: lower norm_groups",
    )
    dyt = [f.name for f in fields(c) if f.name.startswith("dyt_")]
    if c.dyt_bias is False:  # as good as none, and older checkpoints have it
        dyt.remove("dyt_bias")
    yield c.norm != "dyt" and changed(c, *dyt), f": needs norm=dyt, but norm={c.norm}"
    zero = where(c, ("dyt_alpha_attn", "dyt_alpha_other"), lambda _, v: v == 0)
    yield zero, " would make the slot constant: choose another α₀"
    divided = c.embed_scale and c.input_norm and c.norm != "dyt"
    yield (
        divided,
        "embed_scale has no effect under input_norm, which divides it out again: leave one of them out",
    )
    yield (
        c.qk_norm and c.gain_out == "norm",
        "gain_out=norm already normalises each head of q and k: leave qk_norm out",
    )


def scales(c):
    """Constants, learned scales and scale vectors."""
    pre = branches_with_pre_norm(c)
    fix = f"choose a norm, set pre_norm=both and post_norm_blocks below n_layer={c.n_layer}"
    without = c.lns in ("norm", "input") and not any(
        c.lns_branches in ("both", branch) for branch in pre
    )
    yield without, f"lns={c.lns} needs a pre norm to act on: {fix}, or lns=branch or residual"
    yield (
        c.lns == "off" and changed(c, "lns_power", "lns_branches"),
        ": needs lns, for example lns=norm",
    )
    learned = c.lns_learn and (c.lns != "norm" or c.gain == "none")
    yield (
        learned,
        "lns_learn needs lns=norm and gains (gain=shared or branch), whose initial value it sets",
    )
    scaled = c.post_norm != "both" and changed(c, "deepnorm", "admin")
    yield scaled, " scales the stream before post norms: set post_norm=both (and pre_norm=none)"
    unknown = changed(c, "fixup", "post_norm", "post_norm_blocks") or where(
        c, ("lns",), lambda _, v: v == "residual"
    )
    yield (
        c.parametrization in ALPHA and unknown,
        f" has no rule for the depth under parametrization={c.parametrization}: choose mup or standard",
    )
    yield c.deepnorm and c.admin, "deepnorm and admin both scale the stream: leave one of them out"
    scale, start = c.branch_scale, c.branch_scale_init
    without = scale == "none" and start is not None
    yield without, "branch_scale_init needs branch_scale: set branch_scale=layerscale or skipinit"
    yield (
        c.fixup and c.norm != "none",
        f"fixup replaces the norms, but norm={c.norm}: set norm=none",
    )
    other = c.fixup and changed(c, "branch_scale", "sigma_reparam")
    yield (
        other,
        " contradicts fixup, which has its own multiplier on the branch, and matrices that start at zero",
    )
    yield (
        c.gain == "branch" and not pre,
        f"gain=branch needs a pre norm, whose gains it separates: {fix}",
    )
    kinds = c.gain == "none" and changed(c, "gain_out", "gain_param")
    yield kinds, " contradicts gain=none: choose gain=shared or branch"
    negative = (
        c.gain_param == "expmagdir" and scale == "layerscale" and start is not None and start <= 0
    )
    yield (
        negative,
        f"gain_param=expmagdir keeps gains positive, but branch_scale_init={start}: choose a positive one",
    )


def branches_with_pre_norm(c) -> list:
    """The branches with a pre norm in some block. Mix-LN's first blocks have none, so the last
    block decides."""
    return [branch for branch in ("attn", "mlp") if "pre" in c.slots_with_norm(c.n_layer, branch)]


def notes(c) -> list:
    """What is allowed but should be known: one line each, printed when a run starts."""
    return [note for is_so, note in chain(lns_notes(c), other_notes(c)) if is_so]


def lns_notes(c):
    """Where LNS's factor has no effect, or less than one would think."""
    on = c.lns != "off"
    fix = "the LNS paper removes such scaling of the initial weights; residual_init=plain is its setting"
    yield on and c.residual_init != "plain", f"lns with residual_init={c.residual_init}: {fix}"
    wanted = ["attn", "mlp"] if c.lns_branches == "both" else [c.lns_branches]
    acted = [branch for branch in wanted if branch in branches_with_pre_norm(c)]
    alone = f"lns={c.lns} acts on {' and '.join(acted)} alone: the other branch has no pre norm"
    yield c.lns in ("norm", "input") and acted != wanted, alone
    remains = c.bias or c.lns_learn  # a bias is not scaled, and a learned factor is a gain
    normed = c.gain_out == "norm" or (c.qk_norm and "attn" in acted)
    text = "lns acts less than it seems: QK-norm divides its factor out of q and k, gain_out=norm out of all matrices"
    yield c.lns == "norm" and normed and not remains, text
    is_divided = c.lns == "input" and c.norm in ("rmsnorm", "layernorm")
    yield is_divided, "lns=input does next to nothing here: the norm divides the factor out again"


def other_notes(c):
    stream = (c.deepnorm or c.admin) and c.pre_norm != "none"
    yield stream, f"pre_norm={c.pre_norm} beside post norms: DeepNorm and Admin have pre_norm=none"
    own_init = changed(c, "deepnorm", "fixup")
    unused = own_init and c.residual_init != "plain"
    yield (
        unused,
        f"{own_init} has its own initialisation: residual_init={c.residual_init} is not used",
    )
    text = "router_norm=True makes the weight of a token's one expert 1, so the loss does not train the router: "
    yield (
        c.n_expert > 1 and c.n_expert_active == 1 and c.router_norm,
        text + "router_norm=False is Switch's setting",
    )
    size = c.init_std * base(c).n_embd ** 0.5
    small = c.norm == "dyt" and c.causal and c.init == "normal" and size < 0.5
    text = f"dyt does not enlarge small signals, and init_std·√n_embd = {size:.2f} makes them small; the paper's "
    text += "language models have 0.6 to 1.8 (1024 to 8192 wide, std 0.02 in its code). "
    yield small, text + f"init_std={c.n_embd**-0.5:.2g} gives 1"
