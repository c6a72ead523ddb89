"""Draw the diagrams of docs/layouts.md from the model itself: every box is a slot or a matrix,
labelled with its parts.

    python docs/scripts/draw_layouts.py [FOLDER]   # writes a .png for each name in FAMILIES

A panel is a row of a table of that page, with the flags that it has there, and is named in
FAMILIES. The model is built on the meta device, where nothing is computed, and read slot by slot.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure
from layers.linear import Linear, SigmaReparam
from layers.network import init_factor
from layers.slot import Slot
from model import GPT, GPTConfig
from nanodnt.settings import TrainConfig

DOCS = Path(__file__).resolve().parents[1]
# {figure: rows of tables of docs/layouts.md, by their first cells}
FAMILIES = {
    "placement": "Pre-LN = S1; S2; S3; S4; S5 = DNT; Sandwich norm; Post-LN; Mix-LN, block 1; "
    "Mix-LN; Group-LN; Peri-LN; OLMo-2; HybridNorm; Keel, block 1; Keel",
    "depth": "LNS; LNS before the norm; LNS on the branch; LNS on the sum; scaled init; "
    "depth-scaled init; DeepNorm; Admin; LayerScale; SkipInit",
    "normfree": "Pre-LN = S1; embedding scalar; β; σReparam; Fixup",
    "scale_vectors": "none; shared; OR; ER; HG; DP; DNP; unified",
}
FURTHER = {"scale_vectors": ["mlp=swiglu"]}  # flags of all panels
BOXES = {  # {content of a box: its colour, and the words of the key}
    "norm": ("#cfe0f4", "norm; /n: in n groups"),
    "gain": ("#fbe0bd", "learned: γ vector, s scalar, b bias; (a): a at first"),
    "const": ("#d3ead0", "constant"),
    "matrix": ("#ececec", "matrix; ×a: of its initial std"),
    "sigma": ("#e3d8f0", "γ W/σ(W), γ scalar"),
    "text": ("white", "what has no parameters"),
}
NORMS = {"rmsnorm": "RMS", "layernorm": "LN", "none": ""}
INK, LINE = "#1d2733", "#5b6775"
# (x, width) of a column of boxes, in a panel of width 1
STREAM, BRANCH = (0.17, 0.32), (0.65, 0.55)
COLUMNS, WIDTH, ROW = 5, 10, 0.21  # panels side by side; inches of a figure, of a row of boxes


def read(part) -> tuple:
    """(text, key of BOXES) of a matrix, or of a slot as "const · gain · norm(const_in · x) + b"
    without the parts that it does not have; ("", None) of a slot that does nothing. A gain is γ for
    a vector, s for a scalar, and β·α̂ or eᵇ·α̂ for a vector of magnitude and direction."""
    if isinstance(part, str):
        return part, "text"
    if not isinstance(part, Slot):
        text = part.label + (f" ×{part.init_factor:.2g}" if part.init_factor != 1.0 else "")
        return text, "sigma" if isinstance(part, SigmaReparam) else "matrix"
    gain = "" if part.gain is None else "s" if part.param_roles["gain"] == "scalar" else "γ"
    if part.direction is not None:
        gain = "β·α̂" if part.gain_param == "magdir" else "eᵇ·α̂"
    gain += f" ({part.init_gain:.3g})" if gain and part.init_gain != 1.0 else ""
    norm = f"{part.squash}(αx)" if part.norm_kind == "dyt" else NORMS[part.norm_kind]
    norm += (f"/{part.groups}" if part.groups > 1 else "") + (
        f"({part.const_in:.3g}x)" if part.const_in != 1 else ""
    )
    const = f"{part.const:.3g}" if part.const != 1.0 else ""
    text = "·".join(filter(None, (const, gain, norm))) + (" + b" if part.bias is not None else "")
    learned = gain or part.bias is not None
    if part.norm_kind != "none":
        return text, "norm"
    if learned:
        return text, "gain"
    return text, "const" if text else None


def draw_panel(ax, model: GPT, block: int, taken: set) -> float:
    """Draw a model from the embedding up, with one of its blocks; returns the height of the
    drawing, in rows. `taken`: the rows in which something happens, in any panel of the family;
    those of this one are added."""
    y, row_number, style = 0.0, 0, dict(ha="center", va="center", color=INK, zorder=4)
    for name, module in model.named_modules():
        module.label = name.split(".")[-1]
        if isinstance(module, Linear):
            module.init_factor = init_factor(model.config, module)

    def stack(column, *rows):
        """Rows of slots, matrices and texts above each other; a row that is not taken has no
        place."""
        nonlocal y, row_number
        x, width = column
        for row in rows:
            pitch, boxes = width / max(1, len(row)), list(map(read, row))
            for i, (text, key) in enumerate(boxes):
                if key:
                    left = x - width / 2 + i * pitch
                    ax.barh(
                        y, pitch - 0.015, 0.72, left, color=BOXES[key][0], ec=LINE, lw=0.7, zorder=3
                    )
                    # a character is 0.6 of the size wide
                    size = min(7.4, 98 * pitch * WIDTH / COLUMNS / len(text))
                    ax.text(left + pitch / 2, y - 0.03, text, fontsize=size, **style)
            row_number += 1
            taken.update([row_number] * any(key for _, key in boxes))
            y += row_number in taken

    stack(STREAM, ["embedding"], [model.embed_scale], [model.input_norm], ["other blocks"])
    for name, residual in (
        ("attention", model.blocks[block - 1].attn),
        ("FFN", model.blocks[block - 1].mlp),
    ):
        f, start = residual.f, y
        if name == "attention":
            first, last, between = (
                [f.q, f.k, f.v],
                f.o,
                ([f.q_norm, f.k_norm, f.v_norm], ["softmax(q·k) v"]),
            )
        else:
            first, last, between = (
                [w for w in (f.gate, f.up) if w is not None],
                f.down,
                ([model.config.mlp],),
            )
        y += 0.8
        stack(BRANCH, [residual.pre])
        bottom = y - 0.5
        stack(
            BRANCH,
            [w.pre for w in first],
            first,
            [w.out for w in first],
            *between,
            [last.pre],
            [last],
            [last.out],
        )
        ax.axhspan(bottom, y - 0.5, 0.36, 0.94, fc="#f8f8f8", ec="#c4c9cf", lw=0.7)
        ax.text(0.97, (bottom + y - 0.5) / 2, name, rotation=90, fontsize=6.8, **style)
        stack(BRANCH, [residual.mid])
        end, y = y, (start + y) / 2
        stack(STREAM, [residual.skip])
        ax.plot(
            [STREAM[0], BRANCH[0], BRANCH[0], STREAM[0]],
            [start, start, end, end],
            color=LINE,
            lw=1,
            zorder=1,
        )
        ax.text(
            STREAM[0],
            end,
            "+",
            bbox=dict(boxstyle="circle,pad=0.1", fc="white", ec=LINE),
            fontsize=7,
            **style,
        )
        y = end + 1
        stack(STREAM, [residual.post])
    stack(STREAM, ["other blocks"], [model.final_norm], ["output head"])
    ax.plot([STREAM[0]] * 2, [0, y - 1], color=INK, lw=1.8, zorder=2)
    return y


def draw(family: str, path: Path):
    """Draw all panels of one family into a PNG."""
    page = (DOCS / "layouts.md").read_text(encoding="utf-8")
    rows = [line.replace("*", "").split(" | ") for line in page.splitlines()]
    flags = {row[0].removeprefix("| "): row[2].strip("`").split() for row in rows if len(row) > 3}
    names = FAMILIES[family].split("; ")
    lines, models, taken = -(-len(names) // COLUMNS), {}, set()
    fig, axes = plt.subplots(lines, COLUMNS, squeeze=False, layout="constrained")
    for name in names:
        scheme, _, block = name.partition(", block ")
        words = [
            f"--{flag}"
            for flag in ["vocab_size=50257", *FURTHER.get(family, ()), *flags[scheme]]
            if "=" in flag
        ]
        with torch.device("meta"):
            model = GPT(configure(GPTConfig, TrainConfig, argv=words, description="")[0][0])
        models[name] = model, int(block or 4), taken
        draw_panel(axes.flat[0], *models[name])  # only to see which rows are taken
    axes.flat[0].clear()
    for ax, name in zip(axes.flat, names, strict=False):
        height = draw_panel(ax, *models[name])
        ax.text(0.5, height, name, ha="center", fontsize=9, color=INK, weight="bold")
    for ax in axes.flat:
        ax.set(xlim=(0, 1), ylim=(-0.5, height + 1))
        ax.axis("off")
    fig.set_size_inches(WIDTH, lines * ROW * (height + 1.5) + 0.3)
    key = [Patch(fc=colour, ec=LINE, lw=0.7, label=words) for colour, words in BOXES.values()]
    fig.legend(handles=key, loc="outside lower center", ncols=len(key), fontsize=7, frameon=False)
    fig.savefig(path, dpi=150)
    plt.close(fig)
    # 256 colours: a small file
    Image.open(path).convert("RGB").quantize().save(path, optimize=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "layouts"
    for family in FAMILIES:
        draw(family, folder / f"{family}.png")
