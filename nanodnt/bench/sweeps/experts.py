"""What a mixture of experts costs: its step beside the dense model's in which a token meets as many parameters."""

from functools import partial

from layers.rules import OF_EXPERTS
from model import GPTConfig
from nanodnt.bench.compare import compare_variants
from nanodnt.bench.settings import Setting
from nanodnt.bench.variants import our_variant
from nanodnt.settings import TrainConfig

PENALTIES = ("balance_coef", "balance_rate", "z_coef", "lr_ratio_router")  # flags of training that need experts


def dense_setting(setting: Setting) -> Setting:
    """The setting with one FFN as wide as all experts that a token goes to. ValueError without experts."""
    flags = setting.flags
    if not flags.n_expert:
        raise ValueError("sweep=experts times a mixture of experts beside a dense model: set n_expert, 8 for example")
    plain = {name: getattr(GPTConfig, name) for name in ("n_expert", *OF_EXPERTS)} | {
        k: getattr(TrainConfig, k) for k in PENALTIES
    }
    return setting.replace(**plain, n_ff=flags.hidden * (flags.n_expert_active + flags.n_expert_shared))


def time_experts(setting: Setting) -> dict:
    """Time the configuration's step in turns with the dense model's, the reference."""
    settings = {"dense": dense_setting(setting), "experts": setting}
    return compare_variants([partial(our_variant, name, one) for name, one in settings.items()], setting)
