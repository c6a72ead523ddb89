"""Config errors and notes. A flag without any effect and a contradiction are refused; flags that
work, but do less than one may expect, get a note.

`config` is a GPTConfig; model.py imports this file, so its type is not named here. Each `check_`
function is about one subject and raises at the first error. A check relies on those before it.
"""

from dataclasses import fields, replace
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from layers.scaling import ALPHA, base

# Upper limits of whole numbers. A larger value is a typo, and would take minutes to fail for lack
# of memory. Routes sorts experts as int16.
MOST = dict(n_layer=10_000, n_expert=2**15, n_expert_shared=2**15)
MOST_OF_OTHERS = 2**24

# {kind of network: the flag that chooses it}; a network without such a flag reads text
CHOOSES = {"images": "patch_size"}
# flags that only some kinds of networks have, besides those in CHOOSES
KIND_FLAGS = {
    "text": ("pos", "rope_theta", "unit_rows", "vocab_size"),
    "images": ("image_size", "channels", "n_class", "pool"),
}
# sizes among them, which must be at least 1
KIND_SIZES = {"text": ("vocab_size",), "images": ("image_size", "channels", "n_class")}
# (flags of which one may be set, what each of them does)
RIVALS = (
    (("post_norm_blocks", "pre_norm_sublayers"), "says which norms the first blocks have"),
    (("deepnorm", "admin", "skip_scale", "tied_skip"), "scales the stream beside a branch"),
    (("gpas", "tied_skip"), "makes the stream smaller"),
)
# flags that only a mixture of experts has, besides n_expert
EXPERT_FLAGS = (
    "n_expert_active",
    "n_expert_shared",
    "router",
    "router_norm",
    "router_scale",
    "balance",
)


def check_config(config: Any) -> None:
    """Raises ValueError, one line that says what to change, for values that are wrong or contradict
    each other."""
    check_values(config)
    check_kind(config)
    check_image_size(config)
    check_sizes(config)
    check_positions(config)
    check_experts(config)
    check_rivals(config)
    check_norm_places(config)
    check_norm_groups(config)
    check_dyt(config)
    check_double_norms(config)
    check_norms_in_attention(config)
    check_lns(config)
    check_stream_scales(config)
    check_branch_scale(config)
    check_gains(config)


def refuse(message: str) -> NoReturn:
    raise ValueError(message)


def kind_of(config: Any) -> str:
    """Kind of network, a key of KIND_FLAGS; `config` may also be a dict of its fields, as a
    checkpoint holds them."""
    values = config if isinstance(config, dict) else vars(config)
    for kind, flag in CHOOSES.items():
        if values.get(flag):
            return kind
    return "text"


def assignments(config: Any, names: list[str]) -> str:
    """The fields with their values, as text: "a=1, b=2"."""
    return ", ".join(f"{name}={getattr(config, name)}" for name in names)


def changed(config: Any, *names: str) -> str:
    """`assignments` of the fields, among these names, that do not have their default value."""
    defaults = {field.name: field.default for field in fields(config)}
    return assignments(config, [name for name in names if getattr(config, name) != defaults[name]])


def branches_with_pre_norm(config: Any) -> list[str]:
    """The branches with a pre norm in the last block. Of the others only the first blocks differ:
    Mix-LN's have no pre norm, and those of `pre_norm_sublayers` may have more."""
    branches = ("attn", "mlp")
    return [b for b in branches if "pre" in config.norm_places(config.n_layer, b)]


# --------------------------------------------------------------------------------- values and sizes


def check_values(config: Any) -> None:
    """Types and allowed values of all fields."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            check_choice(name, value, get_args(hint))
        else:
            check_type(name, value, get_args(hint) or (hint,))


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        refuse(f"{name}={value!r:.60} is unknown: allowed are {', '.join(choices)}")


def check_type(name: str, value: Any, types: tuple[type, ...]) -> None:
    """The type, one of `types` (a float may be written as a whole number), and the range of
    numbers."""
    is_float = float in types and type(value) in (int, float)
    if type(value) not in types and not is_float:
        allowed = " or ".join(t.__name__ for t in types)
        refuse(f"{name}={value!r:.60} must be of type {allowed}")
    most = MOST.get(name, MOST_OF_OTHERS)
    if int in types and not 0 <= value <= most:
        refuse(f"{name}={value!s:.20} must be a whole number from 0 to {most:,}")
    if is_float and not abs(value) < 1e300:
        refuse(f"{name}={value!s:.20} must be a finite number below 1e300")


def check_kind(config: Any) -> None:
    """Flags that only other kinds of networks have."""
    kind = kind_of(config)
    for other in KIND_FLAGS.keys() - {kind}:
        flag = CHOOSES.get(kind) or CHOOSES[other]
        foreign = [name for name in KIND_FLAGS[other] if name not in KIND_FLAGS[kind]]
        wrong = changed(config, *foreign)
        if wrong:
            refuse(
                f"{wrong}: {flag}={getattr(config, flag)} makes this a model of {kind}: "
                f"leave it out, or set {flag}"
            )


def check_image_size(config: Any) -> None:
    patch = config.patch_size
    image = config.image_size
    if not patch:
        return  # a model of text
    if image % patch:
        refuse(f"image_size={image} must be a multiple of patch_size={patch}")
    tokens = config.image_tokens
    if image and config.block_size != tokens:
        refuse(
            f"block_size={config.block_size}: an image of {image} pixels has {tokens} tokens: "
            "leave it out"
        )


def check_sizes(config: Any) -> None:
    """Ranges of sizes and plain numbers, and sizes that must divide each other."""
    sizes = ("n_layer", "n_head", "n_embd", "block_size", *KIND_SIZES[kind_of(config)])
    wrong = [name for name in sizes if getattr(config, name) < 1]
    if wrong:
        refuse(f"{assignments(config, wrong)}: must be at least 1")
    wrong = [name for name in ("norm_eps", "skip_scale") if getattr(config, name) < 0]
    if wrong:
        refuse(f"{assignments(config, wrong)} must not be negative")
    positive = ("rope_theta", "init_std", "router_scale")
    wrong = [name for name in positive if getattr(config, name) <= 0]
    if wrong:
        refuse(f"{assignments(config, wrong)} must be positive")
    rates = ("dropout", "drop_path")
    wrong = [name for name in rates if not 0 <= getattr(config, name) < 1]
    if wrong:
        refuse(f"{assignments(config, wrong)} must be at least 0 and below 1")
    heads = config.n_head
    if not config.head_size and config.n_embd % heads:
        refuse(
            f"n_embd={config.n_embd} must be a multiple of n_head={heads}, "
            "unless head_size is given"
        )
    if config.n_kv_head and heads % config.n_kv_head:
        refuse(f"n_head={heads} must be a multiple of n_kv_head={config.n_kv_head}")


def check_positions(config: Any) -> None:
    if config.pos == "rope" and config.head_dim % 2:
        refuse(
            f"pos=rope needs an even head size, but it is {config.head_dim}: "
            "change n_embd, n_head or head_size"
        )
    wrong = changed(config, "rope_theta")
    if config.pos != "rope" and wrong:
        refuse(f"{wrong}: needs pos=rope: set that, or leave it out")


def check_experts(config: Any) -> None:
    n_expert = config.n_expert
    active = config.n_expert_active
    if n_expert == 0:
        wrong = changed(config, *EXPERT_FLAGS)
        if wrong:
            refuse(f"{wrong}: needs experts, set n_expert (8, for example), or leave it out")
        return
    if active < 1:
        refuse(f"n_expert_active={active} must be at least 1")
    if active > n_expert:
        refuse(
            f"n_expert_active={active} is more than n_expert={n_expert}: "
            f"set it to at most {n_expert}, or raise n_expert"
        )
    if config.sigma_reparam:
        refuse(
            "sigma_reparam is for single matrices, not for stacks of experts: leave one of them out"
        )


def check_rivals(config: Any) -> None:
    for names, what in RIVALS:
        given = [name for name in names if changed(config, name)]
        if len(given) > 1:
            refuse(f"{assignments(config, given)}: each {what}: leave one of them out")


# -------------------------------------------------------------------------------------------- norms


def check_norm_places(config: Any) -> None:
    most = dict(post_norm_blocks=config.n_layer, pre_norm_sublayers=2 * config.n_layer)
    wrong = changed(config, "mid_norm", "post_norm", "input_norm", *most)
    if config.norm == "none" and wrong:
        refuse(f"{wrong}: contradicts norm=none: leave it out, or choose a norm")
    wrong = [name for name in most if getattr(config, name) > most[name]]
    if wrong:
        refuse(
            f"{assignments(config, wrong)} is more than n_layer={config.n_layer} blocks of two "
            "sub-layers have: lower it"
        )
    n = config.pre_norm_sublayers
    others = replace(config, pre_norm_sublayers=0)
    if n and all(others.norm_places(1, branch) == {"pre"} for branch in ("attn", "mlp")[:n]):
        refuse(
            f"pre_norm_sublayers={n} has no effect: the others have pre norms alone, too: "
            "set mid_norm or post_norm, or leave it out"
        )


def check_norm_groups(config: Any) -> None:
    groups = config.norm_groups
    if groups < 1 or config.n_embd % groups:
        refuse(f"norm_groups={groups} must divide n_embd={config.n_embd} (1 = no groups)")
    if groups > 1 and config.norm not in ("rmsnorm", "layernorm"):
        refuse(f"norm_groups={groups} needs norm=rmsnorm or layernorm, but norm={config.norm}")
    if config.norm == "layernorm" and groups == config.n_embd:
        refuse(
            f"norm_groups={groups} leaves LayerNorm groups of one channel, which are always 0: "
            "lower norm_groups"
        )


def check_dyt(config: Any) -> None:
    names = [field.name for field in fields(config) if field.name.startswith("dyt_")]
    if config.dyt_bias is False:  # same as None, and older checkpoints have it
        names.remove("dyt_bias")
    wrong = changed(config, *names)
    if config.norm != "dyt" and wrong:
        refuse(f"{wrong}: needs norm=dyt, but norm={config.norm}: set that, or leave it out")
    zero = [name for name in ("dyt_alpha_attn", "dyt_alpha_other") if getattr(config, name) == 0]
    if zero:
        refuse(f"{assignments(config, zero)} would make the slot constant: choose another α₀")


def check_norms_in_attention(config: Any) -> None:
    """QK-norm and the norm on v."""
    full = changed(config, "qk_norm_over")
    if full and not config.qk_norm:
        refuse(f"{full} needs qk_norm=True: set that, or leave it out")
    same = {"norm": changed(config, "qk_norm", "v_norm"), "scale": full}  # {gain_out: flags}
    wrong = same.get(config.gain_out)
    if wrong:
        refuse(f"{wrong}: gain_out={config.gain_out} has its own there: leave one of them out")


def check_double_norms(config: Any) -> None:
    """Norms that leave another flag without effect, or that another flag may let divide by 0."""
    if config.norm_eps == 0 and config.mid_norm != "none" and config.dropout > 0:
        refuse(
            f"norm_eps=0 divides by 0 where dropout={config.dropout} leaves nothing of a branch: "
            "set dropout=0, or norm_eps=1e-6"
        )
    if config.embed_scale and config.input_norm and config.norm != "dyt":
        refuse(
            "embed_scale has no effect under input_norm, which divides it out again: "
            "leave one of them out"
        )


# ------------------------------------------------------------- constants, learned scales and gains


def has_post_norms(config: Any, layer: int) -> bool:
    """Whether both branches of this block, from 1, have a post norm."""
    return all("post" in config.norm_places(layer, branch) for branch in ("attn", "mlp"))


def how_to_get_a_pre_norm(config: Any) -> str:
    return f"choose a norm, set pre_norm=both and post_norm_blocks below n_layer={config.n_layer}"


def check_lns(config: Any) -> None:
    acts_on = branches_with_pre_norm(config)
    if config.lns_branches != "both":
        acts_on = [branch for branch in acts_on if branch == config.lns_branches]
    if config.lns in ("norm", "input") and not acts_on:
        fix = how_to_get_a_pre_norm(config)
        refuse(f"lns={config.lns} needs a pre norm to act on: {fix}, or lns=branch or residual")
    wrong = changed(config, "lns_power", "lns_branches")
    if config.lns == "off" and wrong:
        refuse(f"{wrong}: needs lns, for example lns=norm")
    if config.lns_learn and (config.lns != "norm" or config.gain == "none"):
        refuse(
            "lns_learn needs lns=norm and gains (gain=shared or branch), "
            "whose initial value it sets"
        )


def check_stream_scales(config: Any) -> None:
    """DeepNorm, Admin and `skip_scale`, which scale the residual stream, layouts without a rule for
    the depth, and flags that contradict `unit_rows`."""
    wrong = changed(config, "deepnorm", "admin")
    first = 1  # the first block that they scale
    if config.skip_scale == 0:
        wrong = "skip_scale=0"
        first = 2
    blocks = range(first, config.n_layer + 1)
    if wrong and not all(has_post_norms(config, layer) for layer in blocks):
        fix = "lower pre_norm_sublayers" if config.post_norm == "both" else "set post_norm=both"
        refuse(f"{wrong} scales the stream before post norms: {fix}")
    wrong = changed(config, "skip_scale")
    if config.n_layer == 1 and wrong:
        refuse(f"{wrong} has no effect on the first block, and n_layer=1: leave it out")
    wrong = changed(
        config, "fixup", "gpas", "post_norm", "post_norm_blocks", "skip_scale", "tied_skip"
    )
    if not wrong and config.lns == "residual":
        wrong = "lns=residual"
    if config.parametrization in ALPHA and wrong:
        refuse(
            f"{wrong} has no rule for the depth under "
            f"parametrization={config.parametrization}: choose mup or standard"
        )
    names = ("init", "init_std", "residual_init", "parametrization", "sigma_reparam", "fixup")
    wrong = changed(config, *names, "deepnorm")
    if config.unit_rows and wrong:
        refuse(f"{wrong} contradicts unit_rows, which sets the size of all weights: keep defaults")


def check_branch_scale(config: Any) -> None:
    """Scales of a branch's output: LayerScale, SkipInit and Fixup."""
    if config.branch_scale == "none" and config.branch_scale_init is not None:
        refuse("branch_scale_init needs branch_scale: set branch_scale=layerscale or skipinit")
    if config.tied_skip and config.branch_scale != "layerscale":
        refuse("tied_skip needs the vector that it ties: set branch_scale=layerscale")
    if config.tied_skip and not (config.branch_scale_init or 0) > 0:
        refuse("tied_skip needs a positive branch_scale_init, which all steps go with: set 0.05")
    if not config.fixup:
        return
    if config.norm != "none":
        refuse(f"fixup replaces the norms, but norm={config.norm}: set norm=none")
    wrong = changed(config, "branch_scale", "sigma_reparam")
    if wrong:
        refuse(
            f"{wrong} contradicts fixup, which has its own multiplier on the branch, "
            "and matrices that start at zero"
        )


def check_gains(config: Any) -> None:
    if config.gain == "branch" and not branches_with_pre_norm(config):
        fix = how_to_get_a_pre_norm(config)
        refuse(f"gain=branch needs a pre norm, whose gains it separates: {fix}")
    wrong = changed(config, "gain_out", "gain_param")
    if config.gain == "none" and config.gain_out != "sphere" and wrong:
        refuse(f"{wrong} contradicts gain=none: choose gain=shared or branch")
    init = config.branch_scale_init
    is_positive = init is None or init > 0
    is_layerscale = config.branch_scale == "layerscale"
    if config.gain_param == "expmagdir" and is_layerscale and not is_positive:
        refuse(
            f"gain_param=expmagdir keeps gains positive, but branch_scale_init={init}: "
            "choose a positive one"
        )


# -------------------------------------------------------------------------------------------- notes


def notes(config: Any) -> list[str]:
    """Remarks on flags that are allowed, one line each, printed when a run starts."""
    return lns_notes(config) + other_notes(config)


def lns_notes(config: Any) -> list[str]:
    """Remarks where LNS's factor has no effect, or less than expected."""
    if config.lns == "off":
        return []
    lines = []
    if config.residual_init != "plain":
        lines.append(
            f"lns with residual_init={config.residual_init}: the LNS paper removes such scaling "
            "of the initial weights; residual_init=plain is its setting"
        )
    wanted = [config.lns_branches]
    if config.lns_branches == "both":
        wanted = ["attn", "mlp"]
    acts_on = [branch for branch in branches_with_pre_norm(config) if branch in wanted]
    if config.lns in ("norm", "input") and acts_on != wanted:
        branches = " and ".join(acts_on)
        lines.append(f"lns={config.lns} acts on {branches} alone: the other branch has no pre norm")
    has_qk_norm = config.qk_norm and "attn" in acts_on
    has_v_norm = config.v_norm and "attn" in acts_on
    is_divided_out = has_qk_norm or has_v_norm or config.gain_out == "norm"
    keeps_size = config.bias or config.lns_learn  # LNS scales no bias; a learned factor is a gain
    if config.lns == "norm" and is_divided_out and not keeps_size:
        lines.append(
            "lns acts less than it seems: QK-norm divides its factor out of q and k, v_norm out of "
            "v, gain_out=norm out of all matrices"
        )
    if config.lns == "input" and config.norm in ("rmsnorm", "layernorm"):
        lines.append("lns=input does next to nothing here: the norm divides the factor out again")
    return lines


def other_notes(config: Any) -> list[str]:
    lines = []
    if (config.deepnorm or config.admin) and config.pre_norm != "none":
        lines.append(
            f"pre_norm={config.pre_norm} beside post norms: DeepNorm and Admin have pre_norm=none"
        )
    own_init = changed(config, "deepnorm", "fixup")
    if own_init and config.residual_init != "plain":
        lines.append(
            f"{own_init} has its own initialisation: "
            f"residual_init={config.residual_init} is not used"
        )
    if config.n_expert > 1 and config.n_expert_active == 1 and config.router_norm:
        lines.append(
            "router_norm=True makes the weight of a token's one expert 1, so the loss does not "
            "train the router: router_norm=False is Switch's setting"
        )
    size = config.init_std * base(config).n_embd ** 0.5
    is_normal = config.causal and config.init == "normal"
    if config.norm == "dyt" and is_normal and size < 0.5:
        lines.append(
            f"dyt does not enlarge small signals, and init_std·√n_embd = {size:.2f} makes them "
            "small; the paper's language models have 0.6 to 1.8 (1024 to 8192 wide, std 0.02 in "
            f"its code). init_std={config.n_embd**-0.5:.2g} gives 1"
        )
    return lines
