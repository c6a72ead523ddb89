"""Draw the diagrams of docs/layouts.md from the model itself: every box is a slot or a matrix, labelled with its parts.

    python docs/scripts/draw_layouts.py [FOLDER]        # writes placement, depth, normfree and scale_vectors .png

A scheme is a row of FAMILIES: its flags, and the block to draw if that is not BLOCK. The model is built on the meta
device, where nothing is computed, and read slot by slot. A new scheme is a new row.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from layers.linear import SigmaReparam
from layers.slot import Slot
from model import GPT, GPTConfig

BLOCK = 4  # the block that is drawn, of 12: there 1/√ℓ is 0.5
POST = dict(pre_norm="none", post_norm="both")
S4 = dict(input_norm=True, qk_norm=True, mid_norm="both")
PLAIN, GATED = dict(residual_init="plain"), dict(mlp="swiglu")
HG = dict(GATED, gain="branch")

# family: {title of the panel: flags of GPTConfig, and perhaps "block"}
FAMILIES = {
    "placement": {
        "S1 = Pre-LN": dict(),
        "S2": dict(qk_norm=True),
        "S3": dict(qk_norm=True, input_norm=True),
        "S4": S4,
        "S5 = DNT": dict(S4, pre_norm="attn"),
        "Sandwich": dict(mid_norm="both"),
        "Post-LN": dict(POST, norm="layernorm"),
        "Mix-LN (3), block 1": dict(post_norm_blocks=3, block=1),
        "Mix-LN (3), block 4": dict(post_norm_blocks=3),
        "Group-LN (32)": dict(norm="layernorm", norm_groups=32),
    },
    "depth": {
        "LNS": dict(PLAIN, lns="norm"),
        "LNS on the norm's input": dict(PLAIN, lns="input"),
        "LNS on the branch": dict(PLAIN, lns="branch"),
        "LNS on the residual sum": dict(PLAIN, lns="residual"),
        "scaled init = default": dict(),
        "depth-scaled init": dict(residual_init="depth"),
        "DeepNorm": dict(PLAIN, **POST, deepnorm=True),
        "Admin": dict(PLAIN, **POST, admin=True),
        "LayerScale": dict(PLAIN, branch_scale="layerscale"),
        "SkipInit": dict(PLAIN, branch_scale="skipinit"),
    },
    "normfree": {
        "Pre-LN, to compare": dict(PLAIN),
        "DyT, as for LLaMA": dict(PLAIN, norm="dyt", embed_scale=True),
        "DyT with β": dict(PLAIN, norm="dyt", dyt_bias=True),
        "σReparam": dict(PLAIN, norm="none", sigma_reparam=True),
        "Fixup": dict(PLAIN, norm="none", fixup=True),
    },
    "scale_vectors": {
        "none": dict(GATED, gain="none"),
        "shared = default": GATED,
        "shared, OR": dict(GATED, gain_param="magdir"),
        "shared, ER": dict(GATED, gain_param="expmagdir"),
        "HG": HG,
        "HG + DP": dict(HG, gain_out="scale"),
        "HG + DNP": dict(HG, gain_out="norm"),
        "unified: HG + DNP + OR": dict(HG, gain_out="norm", gain_param="magdir"),
    },
}
COLUMNS = {"scale_vectors": 4}  # panels side by side; 5 where not given
COLOURS = {"norm": "#cfe0f4", "gain": "#fbe0bd", "const": "#d3ead0", "matrix": "#ececec", "sigma": "#e3d8f0"}
KEY = {"norm": "norm; /n: in n groups", "gain": "learned: γ vector, s scalar, b bias; (a): a at first"}
KEY |= {"const": "constant", "matrix": "matrix; ×a: of its initial std", "sigma": "γ W/σ(W), γ scalar"}
NORMS = {"rmsnorm": "RMS", "layernorm": "LN", "none": ""}
INK, LINE = "#1d2733", "#5b6775"
STREAM, LEFT, RIGHT = 0.17, 0.36, 0.94  # x of the stream, and the edges of the branch, in a panel of width 1
ROW, SECOND, INCH = 0.9, 0.45, 0.255  # height of a row, what a second line adds; inches per unit of height
CHARACTERS = 170  # that fit side by side into a figure of full width


def kind(part) -> str | None:
    """The key in COLOURS of a slot or matrix; None for a slot that does nothing."""
    if not isinstance(part, Slot):
        return "sigma" if isinstance(part, SigmaReparam) else "matrix"
    learned, constant = gain(part) or part.bias is not None, part.const != 1.0 or part.const_in != 1.0
    return "norm" if part.norm != "none" else "gain" if learned else "const" if constant else None


def gain(slot: Slot) -> str:
    """γ for a vector, s for a scalar, β·α̂ or eᵇ·α̂ for a vector of magnitude and direction; "" for no gain."""
    if slot.direction is not None:
        text = "β·α̂" if slot.param == "magdir" else "eᵇ·α̂"
    else:
        text = "" if slot.gain is None else "s" if slot.param_roles["gain"] == "scalar" else "γ"
    return f"{text} ({slot.init_gain:.3g})" if text and slot.init_gain != 1.0 else text


def label(part) -> str:
    """A slot's parts as "const · gain · norm(const_in · x) + b", without those it does not have; a matrix's name."""
    if not isinstance(part, Slot):
        return part.label + (f" ×{part.init_scale:.2g}" if part.init_scale != 1.0 else "")
    norm = f"{part.squash}(αx)" if part.norm == "dyt" else NORMS[part.norm]
    norm += (f"/{part.groups}" if part.groups > 1 else "") + (f"({part.const_in:.3g}x)" if part.const_in != 1 else "")
    const = f"{part.const:.3g}" if part.const != 1.0 else ""
    text = "·".join(t for t in (const, gain(part), norm) if t)
    return text if part.bias is None else f"{text} + b".strip()


def wrap(text: str, width: float, columns: int) -> str:
    """`text`, split into two lines if it does not fit into a box of this width."""
    if len(text) <= width * CHARACTERS / columns:
        return text
    cuts = [i for i, letter in enumerate(text) if letter in "· " and not text[i:].startswith(" b")]
    cut = min(cuts, key=lambda i: abs(i - len(text) / 2 - 1), default=len(text))
    return text[:cut] + "\n" + text[cut:].strip()


def rows(model: GPT, block: int) -> list:
    """The rows of a panel, from the embedding to the head: (what, its slots and matrices, or its text)."""
    for name, module in model.named_modules():
        module.label = name.split(".")[-1]
    found = [("stream", [model.embed_scale]), ("stream", [model.input_norm]), ("gap", "")]
    for name, residual in (("attention", model.blocks[block - 1].attn), ("FFN", model.blocks[block - 1].mlp)):
        f, attention = residual.f, name == "attention"
        first = [f.q, f.k, f.v] if attention else [w for w in (f.gate, f.up) if w is not None]
        last = f.o if attention else f.down
        found += [("start", ""), ("branch", [residual.pre]), ("start f", "")]
        found += [("branch", [w.pre for w in first]), ("branch", first), ("branch", [w.out for w in first])]
        found += [("branch", [f.q_norm, f.k_norm, Slot()])] if attention else []
        found += [("text", "softmax(q·k) v" if attention else model.config.mlp), ("branch", [last.pre])]
        found += [("branch", [last]), ("branch", [last.out]), ("end f", name), ("branch", [residual.mid])]
        found += [("sum", [residual.skip]), ("stream", [residual.post])]
    return [*found, ("gap", ""), ("stream", [model.final_norm])]


def boxes(what: str, parts: list, columns: int) -> list:
    """(x, width, text, kind) of every slot and matrix of a row that does something."""
    if what not in ("stream", "branch", "sum"):
        return []
    middle, width = (STREAM, 0.32) if what != "branch" else ((LEFT + RIGHT) / 2, (RIGHT - LEFT - 0.03) / len(parts))
    xs = [middle + (i - (len(parts) - 1) / 2) * width for i in range(len(parts))]
    width -= 0.015 * (what == "branch")
    return [(x, width, wrap(label(p), width, columns), kind(p)) for x, p in zip(xs, parts, strict=True) if kind(p)]


def draw_panel(ax, panel: list, heights: list, columns: int):
    """Draw one scheme. `heights` of the rows are the same in all panels of a family; 0 if no panel needs the row."""
    y, middle, line = 0.0, (LEFT + RIGHT) / 2, dict(color=LINE, linewidth=1.0, zorder=1)
    annotation = dict(ha="center", va="center", fontsize=6.8, color=LINE, zorder=4)
    for (what, parts), height in zip(panel, heights, strict=True):
        centre = y + height / 2
        if what == "start":
            bottom = y + 0.25
        elif what == "start f":
            f_bottom = y
        elif what == "end f":
            size = (RIGHT - LEFT, y - f_bottom + 0.1)
            ax.add_patch(Rectangle((LEFT, f_bottom), *size, fc="#f8f8f8", ec="#c4c9cf", lw=0.7))
            ax.text(RIGHT + 0.04, (y + f_bottom) / 2, parts, rotation=90, **annotation)
        elif what == "text":
            ax.text(middle, centre, parts, bbox=dict(fc="#f8f8f8", ec="none", pad=1.5), **annotation)
        elif what == "gap":  # the other blocks
            ax.plot([STREAM] * 2, [y + 0.1, y + 0.6], color="white", linewidth=3, zorder=2.5)
            ax.plot([STREAM] * 2, [y + 0.15, y + 0.6], ":", color=INK, linewidth=1.8, zorder=2.6)
        elif what == "sum":
            ax.plot([STREAM, middle, middle, STREAM], [bottom, bottom, centre, centre], **line)
            ax.plot(STREAM, centre, "o", ms=9, mfc="white", mec=LINE, mew=1, zorder=3)
            ax.text(STREAM, centre - 0.02, "+", **annotation | dict(fontsize=9, color=INK))
            centre = (bottom + centre) / 2  # the skip's slot
        for x, width, text, colour in boxes(what, parts, columns):
            tall = 0.68 + SECOND * ("\n" in text)
            style = dict(fc=COLOURS[colour], ec=LINE, lw=0.7, zorder=3)
            ax.add_patch(Rectangle((x - width / 2, centre - tall / 2), width, tall, **style))
            style = dict(fontsize=7.4 if width > 0.2 else 6.4, color=INK, linespacing=1.05)
            ax.text(x, centre - 0.03, text, **annotation | style)
        y += height
    ax.plot([STREAM, STREAM], [-0.4, y + 0.1], color=INK, linewidth=1.8, zorder=2)
    ax.annotate("", (STREAM, y + 0.6), (STREAM, y), arrowprops=dict(arrowstyle="-|>", color=INK, lw=1.8))
    ax.text(STREAM + 0.04, -0.25, "embedding", **annotation | dict(ha="left"))
    ax.text(STREAM + 0.04, y + 0.35, "output head", **annotation | dict(ha="left"))
    ax.set(xlim=(0, 1), ylim=(-0.5, y + 0.7))


def draw(family: str, path: Path):
    """Draw all panels of one family into a PNG."""
    panels, columns = {}, COLUMNS.get(family, 5)
    for title, flags in FAMILIES[family].items():
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab_size=50257, **{k: v for k, v in flags.items() if k != "block"}))
        panels[title] = rows(model, flags.get("block", BLOCK))
    fixed = {"start": 0.5, "start f": 0.08, "end f": 0.15, "sum": 0.8, "text": 0.65, "gap": 0.7}
    heights, used = [], set()
    for row in zip(*panels.values(), strict=True):
        found = [b for what, parts in row for b in boxes(what, parts, columns)]
        used |= {colour for *_, colour in found}
        second = SECOND * any("\n" in text for _, _, text, _ in found)
        heights.append(fixed.get(row[0][0], (ROW + second) * bool(found)))
    lines, panel = -(-len(panels) // columns), INCH * (sum(heights) + 1.2)
    inches = lines * (panel + 0.35) + 0.3
    fig, axes = plt.subplots(lines, columns, figsize=(10, inches), squeeze=False)
    fig.subplots_adjust(0.005, 0.32 / inches, 0.995, 1 - 0.3 / inches, wspace=0.04, hspace=0.35 / panel)
    for ax in axes.flat:
        ax.axis("off")
    for ax, title in zip(axes.flat, panels, strict=False):
        draw_panel(ax, panels[title], heights, columns)
        ax.set_title(title, fontsize=9, color=INK, pad=4, weight="bold")
    key = {text: Rectangle((0, 0), 1, 1, fc=COLOURS[k], ec=LINE, lw=0.7) for k, text in KEY.items() if k in used}
    fig.legend(key.values(), key.keys(), loc="lower center", ncols=len(key), fontsize=7.6, frameon=False, borderpad=0.2)
    fig.set_dpi(180)
    fig.canvas.draw()
    image = Image.fromarray(np.asarray(fig.canvas.buffer_rgba())).convert("RGB")
    image.quantize(64).save(path, optimize=True)  # 64 colours: a small file
    plt.close(fig)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "layouts"
    folder.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        draw(family, folder / f"{family}.png")
