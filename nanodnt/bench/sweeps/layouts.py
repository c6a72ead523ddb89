"""What every layout costs: its step against plain Pre-LN's."""

from functools import partial

from layers.rules import OF_EXPERTS, OF_IMAGES
from model import GPTConfig
from nanodnt.bench.measure import free_memory
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import SPEEDS, describe_speed, figures, format_gb, format_ms
from nanodnt.bench.timing import build, bytes_at_start, measure_ceilings, time_variants
from nanodnt.bench.variants import our_variant
from nanodnt.tables import table

# Layouts as changes to plain Pre-LN with RMSNorm. A function takes the model's flags.
LAYOUTS = {
    "pre_ln (S1)": dict(),
    "S2": dict(qk_norm=True),
    "S3": dict(qk_norm=True, input_norm=True),
    "S4": dict(qk_norm=True, input_norm=True, mid_norm="both"),
    "S5 (DNT)": dict(qk_norm=True, input_norm=True, mid_norm="both", pre_norm="attn"),
    "lns": dict(lns="norm", residual_init="plain"),
    "dyt": dict(norm="dyt", embed_scale=None),
    "post_ln": dict(pre_norm="none", post_norm="both"),
    "mix_ln": dict(post_norm_blocks=lambda flags: max(1, flags.n_layer // 4)),
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
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "pos", "rope_theta", "n_kv_head", "mlp", "n_ff")
SIZES += ("head_size", "tie_weights", "bias", "dropout", "drop_path", "norm_eps", "init_std")
SIZES += ("n_expert", *OF_EXPERTS, "patch_size", *OF_IMAGES)


def plain_flags() -> dict:
    """Flags that turn a config of any layout into plain Pre-LN with RMSNorm, at its size."""
    return {k: v for k, v in vars(GPTConfig()).items() if k not in SIZES} | dict(decay_gains="none")


def resolve_layout(name: str, flags: GPTConfig) -> dict:
    """The flags of a layout for the model `flags`."""
    return {k: v(flags) if callable(v) else v for k, v in LAYOUTS[name].items()}


def time_layouts(setting: Setting) -> dict:
    """Time every layout in turns with Pre-LN, one pair after the other."""
    base, device, rows = setting.replace(**plain_flags()), setting.env.device, []
    ceilings, start = measure_ceilings(base, [base.env.dtype]), bytes_at_start(base)
    reference = build(lambda: our_variant("pre_ln", base), base, start)
    for name in LAYOUTS:
        flags = resolve_layout(name, base.flags)
        try:
            layout = base.replace(**flags)
            variant = build(partial(our_variant, name, layout), layout, start)
        except ValueError as e:  # for example Mix-LN of one block
            setting.env.print(f"{name}: left out ({e})")
            continue
        reference.rounds = []
        time_variants([reference, variant], base)
        rows.append(figures(variant, reference, layout, ceilings) | dict(flags=flags))
        setting.env.print(f"{name}: {format_ms(variant.seconds)} ms, {1 / rows[-1]['ratio'] - 1:+.1%}")
        del variant, layout
        free_memory(device)
    setting.env.print("\n".join(["", *describe_layouts(rows)]))
    return dict(layouts=rows, ceilings_flops_per_s=ceilings)


def describe_layouts(rows: list) -> list:
    """A table of the layouts."""
    speeds = SPEEDS[: len(describe_speed(rows[0]))] if rows else SPEEDS[:1]
    lines = [("layout", "ms/step", *speeds, "time against Pre-LN (rounds)", "memory")]
    for r in rows:
        price = "{:+.1%} ({:+.1%}…{:+.1%})".format(*(1 / r[key] - 1 for key in ("ratio", "ratio_max", "ratio_min")))
        lines.append((r["name"], format_ms(r["step_s"]), *describe_speed(r), price, format_gb(r["peak_mem_bytes"])))
    return table(lines)
