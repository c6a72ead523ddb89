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
HEIGHTS = {"start": 0.5, "start f": 0.08, "end f": 0.15, "sum": 0.8, "text": 0.65, "gap": 0.7}  # of rows without boxes
INK, LINE = "#1d2733", "#5b6775"
STREAM, LEFT, RIGHT = 0.17, 0.36, 0.94  # x of the stream, and the edges of the branch, in a panel of width 1
ROW, INCH = 0.9, 0.255  # height of a row; inches per unit of height
WIDTH = 10  # of a figure, inches


def read(part) -> tuple:
    """(text, key in COLOURS) of a matrix, or of a slot as "const · gain · norm(const_in · x) + b" without the parts
    that it does not have; ("", None) of a slot that does nothing. A gain is γ for a vector, s for a scalar, and β·α̂ or
    eᵇ·α̂ for a vector of magnitude and direction."""
    if not isinstance(part, Slot):
        text = part.label + (f" ×{part.init_scale:.2g}" if part.init_scale != 1.0 else "")
        return text, "sigma" if isinstance(part, SigmaReparam) else "matrix"
    if part.direction is not None:
        gain = "β·α̂" if part.param == "magdir" else "eᵇ·α̂"
    else:
        gain = "" if part.gain is None else "s" if part.param_roles["gain"] == "scalar" else "γ"
    gain += f" ({part.init_gain:.3g})" if gain and part.init_gain != 1.0 else ""
    norm = f"{part.squash}(αx)" if part.norm == "dyt" else NORMS[part.norm]
    norm += (f"/{part.groups}" if part.groups > 1 else "") + (f"({part.const_in:.3g}x)" if part.const_in != 1 else "")
    const = f"{part.const:.3g}" if part.const != 1.0 else ""
    text = "·".join(filter(None, (const, gain, norm))) + (" + b" if part.bias is not None else "")
    learned = gain or part.bias is not None
    return text, "norm" if part.norm != "none" else "gain" if learned else "const" if text else None


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


def boxes(what: str, parts: list) -> list:
    """(x, width, text, colour's key) of every slot and matrix of a row that does something."""
    if what not in ("stream", "branch", "sum"):
        return []
    middle, width = (STREAM, 0.32) if what != "branch" else ((LEFT + RIGHT) / 2, (RIGHT - LEFT - 0.03) / len(parts))
    found = [(middle + (i - (len(parts) - 1) / 2) * width, *read(part)) for i, part in enumerate(parts)]
    return [(x, width - 0.015 * (what == "branch"), text, key) for x, text, key in found if key]


def draw_panel(ax, panel: list, heights: list, inches: float):
    """Draw one scheme, in a panel of this width. `heights` of the rows are the same in all panels of a family."""
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
        for x, width, text, key in boxes(what, parts):
            style = dict(fc=COLOURS[key], ec=LINE, lw=0.7, zorder=3)
            ax.add_patch(Rectangle((x - width / 2, centre - 0.34), width, 0.68, **style))
            size = min(7.4, 122 * width * inches / len(text))  # a character is about 0.6 of the font's size wide
            ax.text(x, centre - 0.03, text, **annotation | dict(fontsize=size, color=INK))
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
    found = [[box for what, parts in row for box in boxes(what, parts)] for row in zip(*panels.values(), strict=True)]
    heights = [HEIGHTS.get(row[0], ROW * bool(there)) for row, there in zip(panels[title], found, strict=True)]
    lines, panel = -(-len(panels) // columns), INCH * (sum(heights) + 1.2)
    inches = lines * (panel + 0.35) + 0.3
    fig, axes = plt.subplots(lines, columns, figsize=(WIDTH, inches), squeeze=False)
    fig.subplots_adjust(0.005, 0.32 / inches, 0.995, 1 - 0.3 / inches, wspace=0.04, hspace=0.35 / panel)
    for ax in axes.flat:
        ax.axis("off")
    for ax, title in zip(axes.flat, panels, strict=False):
        draw_panel(ax, panels[title], heights, WIDTH / columns)
        ax.set_title(title, fontsize=9, color=INK, pad=4, weight="bold")
    used = {key for row in found for *_, key in row}
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
