"""The sets of variants that bench.py --vary knows by name."""

from layers.rules import CHOOSES, OF, OF_EXPERTS
from model import GPTConfig
from nanodnt.bench.settings import Setting
from nanodnt.optim import OPTIMIZERS, RATIOS
from nanodnt.settings import TrainConfig

# Layouts as changes to plain Pre-LN with RMSNorm. A function takes the GPTConfig.
LAYOUTS = {
    "pre_ln (S1)": dict(),
    "S2": dict(qk_norm=True),
    "S3": dict(qk_norm=True, input_norm=True),
    "S4": dict(qk_norm=True, input_norm=True, mid_norm="both"),
    "S5 (DNT)": dict(qk_norm=True, input_norm=True, mid_norm="both", pre_norm="attn"),
    "lns": dict(lns="norm", residual_init="plain"),
    "dyt": dict(norm="dyt", embed_scale=None),
    "post_ln": dict(pre_norm="none", post_norm="both"),
    "mix_ln": dict(post_norm_blocks=lambda c: max(1, c.n_layer // 4)),
    "deepnorm": dict(pre_norm="none", post_norm="both", deepnorm=True, init="xavier", residual_init="plain"),
    "sandwich": dict(mid_norm="both"),
    "layernorm": dict(norm="layernorm"),
    "no norm": dict(norm="none"),
    "layerscale": dict(branch_scale="layerscale"),
    "skipinit": dict(branch_scale="skipinit"),
    "sigma_reparam": dict(norm="none", sigma_reparam=True),
    "hg": dict(gain="branch"),
    "dp": dict(gain_out="scale"),
    "dnp": dict(gain_out="norm"),
    "or_magdir": dict(gain_param="magdir"),
    "unified": dict(gain="branch", gain_out="norm", gain_param="magdir", decay_gains="input"),
}
# Flags that keep the config's value in every layout.
KEPT = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "pos", "rope_theta", "n_kv_head", "mlp", "n_ff")
KEPT += ("head_size", "tie_weights", "bias", "dropout", "drop_path", "norm_eps", "init_std")
KEPT += ("n_expert", *OF_EXPERTS, *CHOOSES.values(), *OF["images"])
# Turns a config of any layout into plain Pre-LN with RMSNorm, at its size.
PLAIN = {k: v for k, v in vars(GPTConfig()).items() if k not in KEPT} | dict(decay_gains="none")
PENALTIES = ("balance_coef", "balance_rate", "z_coef", "lr_ratio_router")  # flags of training that need experts


def layout_flags(name: str, model_config: GPTConfig) -> dict:
    """What a layout changes in plain Pre-LN of the size of `model_config`."""
    return {k: v(model_config) if callable(v) else v for k, v in LAYOUTS[name].items()}


def vary_layouts(setting: Setting) -> dict:
    """Every layout beside plain Pre-LN."""
    return {"pre_ln": PLAIN} | {name: PLAIN | layout_flags(name, setting.model_config) for name in LAYOUTS}


def vary_experts(setting: Setting) -> dict:
    """A mixture of experts beside the dense model in which a token meets as many parameters: one FFN as wide as all
    experts that a token goes to. ValueError without experts."""
    c = setting.model_config
    if not c.n_expert:
        raise ValueError("vary=experts times a mixture of experts beside a dense model: set n_expert, 8 for example")
    dense = {name: getattr(GPTConfig, name) for name in ("n_expert", *OF_EXPERTS)}
    dense |= {name: getattr(TrainConfig, name) for name in PENALTIES}
    dense |= dict(n_ff=c.ffn_width * (c.n_expert_active + c.n_expert_shared))
    return {"dense": dense, "experts": {}}


def vary_optimizers(setting: Setting) -> dict:
    """Every optimizer, at its defaults; the config's own keeps its values."""
    unset = dict.fromkeys({flag for optimizer in OPTIMIZERS.values() for flag in optimizer.defaults})
    unset |= dict.fromkeys(["min_lr", *(f"lr_ratio_{block}" for block in RATIOS)])
    own = setting.config.optimizer
    return {name: {} if name == own else unset | dict(optimizer=name) for name in OPTIMIZERS}


# Each lists {name: changed flags}, the first is the reference.
SETS = {"layouts": vary_layouts, "experts": vary_experts, "optimizers": vary_optimizers}
