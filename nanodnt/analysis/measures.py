"""What each figure needs, measured on the checkpoints of a run: measure_FIGURE(run, model, tokens) → a dict for JSON.

A measure that does not apply to the run raises `NotApplicable` with the reason."""

import math
from pathlib import Path

import numpy as np
import torch

from nanodnt.analysis import gradients, norms, streams
from nanodnt.analysis.settings import AnalyzeConfig
from nanodnt.data import load_meta, open_dataset
from nanodnt.networks import kind_of_data
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.run.metrics import read_metrics
from nanodnt.weights import model_from_checkpoint

SCATTER_TOKENS, SCATTER_POINTS = 128, 3000  # few tokens, so that the points of one token can be told from the others
JACOBIAN_SEQUENCES, JACOBIAN_TOKENS = 16, 128  # one position of each sequence, or image [I]
# what must be the same in meta.json where a model reads another dataset than that of its training
READ = ("tokenizer", "vocab_size", "chars", "image_size", "channels", "classes")


class NotApplicable(Exception):
    """A figure does not apply to a run; the message is the reason."""


# -------------------------------------------------------------------------------------------------------- runs


class CheckpointedRun:
    """A run directory, or one checkpoint file in it: its snapshots and the batch that they are measured on."""

    def __init__(self, path: Path, name: str, config: AnalyzeConfig, device: torch.device):
        self.name, self.config, self.device, self.folder = name, config, device, path if path.is_dir() else path.parent
        kept = kept_checkpoints(path) if path.is_dir() else [path]
        self.snapshots = pick_evenly(kept, config.snapshots)
        checkpoint = load_checkpoint(kept[-1])
        self.block_size, trained_on = checkpoint["model_config"]["block_size"], checkpoint["meta"]
        dataset = config.dataset or checkpoint["train_config"]["dataset"]
        meta, image_size = load_meta(dataset), checkpoint["model_config"].get("image_size", 0)
        if any(meta.get(key) != trained_on.get(key) for key in READ):
            here, there = map(describe_data, (meta, trained_on))
            raise ValueError(
                f"dataset {dataset!r} ({here}) is not what {path} reads ({there}): choose another --dataset"
            )
        self.images = kind_of_data(meta) == "images"
        self.data = open_dataset(dataset, self.block_size, verify=False, image_size=image_size)
        if meta["splits"]["val"] != trained_on.get("splits", {}).get("val"):
            what = "images of {!r} are not the ones" if self.images else "text of {!r} is not the one"
            print(f"note: {name}: the validation {what.format(dataset)} of its training")
        if checkpoint["train_config"].get("doc_mask"):
            print(f"note: {name} was trained with doc_mask; here the documents of a row see each other")
        self.has_kept_one = len(kept) == 1 and path.is_dir()

    def load(self, path: Path) -> tuple:
        """(model in eval mode, fp32, on the device; step)."""
        checkpoint = load_checkpoint(path)
        return model_from_checkpoint(checkpoint).eval().to(self.device), checkpoint["step"]

    def count(self, inputs: torch.Tensor) -> dict:
        """How much was measured on these inputs: {"tokens": number}, or {"images": number}."""
        return {"images": len(inputs)} if self.images else {"tokens": inputs.numel()}

    def short(self, inputs: torch.Tensor, tokens: int) -> torch.Tensor:
        """The first `tokens` tokens of each sequence. An image cannot be cut: it stays whole."""
        return inputs if self.images else inputs[:, :tokens]

    def batch(self, most: int) -> tuple:
        """Inputs and targets of at most `most` tokens, limited also by config.tokens; at least one window, or image."""
        starts = self.data.validation(min(most, self.config.tokens))
        return tuple(torch.from_numpy(a).to(self.device) for a in self.data.val_batch(starts, len(starts)))

    def micro_batches(self, most: int) -> list:
        """`batch` in parts that fit into memory: [(inputs, targets), …]."""
        rows = max(1, gradients.MICRO_TOKENS // self.block_size)
        return list(zip(*(a.split(rows) for a in self.batch(most)), strict=True))

    def generator(self, device="cpu") -> torch.Generator:
        """A new random generator with the seed of the configuration."""
        return torch.Generator(device).manual_seed(self.config.seed)


def describe_data(meta: dict) -> str:
    """What READ says of a dataset, in words."""
    if kind_of_data(meta) == "images":
        size = "of several sizes" if meta["image_size"] is None else "of {0} × {0} pixels".format(meta["image_size"])
        return f"images {size}, channels {meta['channels']}, {len(meta['classes'])} classes"
    return f"{meta['tokenizer']}, {meta['vocab_size']} tokens"


def kept_checkpoints(folder: Path) -> list:
    """step_N.pt and last.pt, by step. ValueError if there is none."""
    steps = {int(p.stem[5:]): p for p in folder.glob("step_*.pt") if p.stem[5:].isdigit()}
    if (folder / "last.pt").exists():
        steps[load_checkpoint(folder / "last.pt")["step"]] = folder / "last.pt"
    if not steps:
        there = ", ".join(sorted(p.name for p in folder.glob("*.pt"))) or "no checkpoint at all"
        raise ValueError(
            f"{folder} holds neither last.pt nor step_N.pt ({there}): name a run directory or a checkpoint"
        )
    return [steps[step] for step in sorted(steps)]


def pick_evenly(items: list, most: int) -> list:
    """At most `most` of the items, evenly spread; always the last, and the first if `most` is at least 2."""
    if len(items) <= most:
        return items
    return [items[-1]] if most == 1 else [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


# -------------------------------------------------------------------------------------------------- the figures


def measure_gradients(run, model, tokens):
    batches, types = run.micro_batches(tokens), gradients.matrix_types(model)
    found = gradients.compute_gradients(model, batches)
    pooled = {}
    for kind in dict.fromkeys(gradients.MATRIX_TYPES.values()):
        g = torch.cat([found[name].flatten() for name, its in types.items() if its == kind])
        statistics = gradients.tail_statistics(g)
        histogram = gradients.log_histogram(g / (statistics["rms"] or 1), 80, 1e-6, 1e4)
        pooled[kind] = {**statistics, "histogram_of_g_over_rms": histogram}
    return {**run.count(run.batch(tokens)[0]), "types": pooled}


def measure_sharpness(run, model, tokens):
    inputs, types, draws = run.batch(tokens)[0], gradients.block_types(model), run.config.draws
    h = gradients.estimate_sharpness(model, inputs, draws, run.generator(run.device))
    h = gradients.drop_padding_rows(model, h)
    density = {
        kind: gradients.log10_density(torch.cat([t.flatten() for name, t in h.items() if types[name] == kind]), 60)
        for kind in dict.fromkeys(types[name] for name in h)
    }
    averages = {"types": gradients.average_by_type(h, types), "layers": gradients.average_by_block(model, h)}
    return {**run.count(inputs), "draws": draws, **averages, "log10_density": density}


def measure_norms(run, model, tokens):
    return {"types": gradients.parameter_norms(model)}


def measure_alpha(run, model, tokens):
    inputs = run.batch(tokens)[0]
    slots = norms.dyt_alphas(model, inputs)
    if not slots:
        raise NotApplicable("no DyT")
    alpha, inv_std = ([slot[key] for slot in slots] for key in ("alpha", "inv_std"))
    spread = min(np.ptp(alpha), np.ptp(inv_std)) if len(slots) > 2 else 0
    return {
        **run.count(inputs),
        "slots": slots,
        "pearson_r": float(np.corrcoef(alpha, inv_std)[0, 1]) if spread else math.nan,
    }


def measure_scatter(run, model, tokens):
    names = pick_evenly(list(norms.norm_slots(model)), 3)
    if not names:
        raise NotApplicable("no norm on the residual path")
    inputs = run.short(run.batch(tokens)[0], SCATTER_TOKENS)
    points = {name: norms.norm_scatter(model, inputs, name, SCATTER_POINTS, run.generator()) for name in names}
    kinds = {name: slot.norm for name, slot in norms.norm_slots(model).items()}
    return {**run.count(inputs), "slots": {name: {"norm": kinds[name], **points[name]} for name in names}}


def measure_variance(run, model, tokens):
    inputs = run.batch(tokens)[0]
    return {**run.count(inputs), **streams.stream_variance(model, inputs)}


def measure_angular(run, model, tokens):
    inputs = run.batch(tokens)[0]
    found = streams.collect_streams(model, inputs)
    return {**run.count(inputs), "distance": streams.angular_distance(found)}


def measure_removal(run, model, tokens):
    return {**run.count(run.batch(tokens)[0]), **streams.removal_drop(model, run.micro_batches(tokens))}


def measure_jacobian(run, model, tokens):
    inputs = run.batch(JACOBIAN_SEQUENCES * run.block_size)[0][:JACOBIAN_SEQUENCES]
    inputs = run.short(inputs, JACOBIAN_TOKENS)
    length = run.block_size if run.images else inputs.shape[1]  # tokens of an image, or of a sequence
    positions = torch.randint(length, (len(inputs),), generator=run.generator()).tolist()
    width, blocks = model.config.n_embd, len(model.blocks)
    channels = [i * width // min(64, width) for i in range(min(64, width))]
    shown, maps, by_layer = pick_evenly(list(range(blocks)), 3), {}, {"attn": [], "mlp": []}
    for branch, statistics in by_layer.items():
        for block in range(blocks):
            jacobian = streams.residual_jacobian(model, inputs, positions, block, branch)
            statistics.append(streams.jacobian_statistics(jacobian))
            if block in shown:
                part = jacobian[channels][:, channels].tolist()
                maps.setdefault(branch, []).append({"block": block + 1, "map": part})
    return {"tokens": len(positions), "positions": positions, "channels": channels, "maps": maps, "layers": by_layer}


def measure_gains(run, model, tokens):
    slots = norms.gain_statistics(model)
    if not slots:
        raise NotApplicable("no scale vector")
    return {"slots": slots, "cosines": norms.qkv_cosines(model)}


def measure_logits(run, model, tokens):
    inputs = run.batch(tokens)[0]
    return {**run.count(inputs), "layers": streams.largest_logits(model, inputs)}


def read_tracked_rows(run) -> list:
    """The rows of metrics.jsonl with a "track"; NotApplicable if there is none."""
    rows = [row for row in read_metrics(run.folder) if isinstance(row.get("track"), dict)]
    if not rows:
        raise NotApplicable("metrics.jsonl has no tracked rows (train.py --track_interval)")
    return rows


def measure_experts(run, model, tokens):
    if not model.config.n_expert:
        raise NotApplicable("no mixture of experts")
    tracks = {row["step"]: row["track"] for row in read_tracked_rows(run) if row["track"].get("load")}
    if not tracks:
        raise NotApplicable("no tracked row has the load of experts")
    load = np.array([track["load"] for track in tracks.values()], float) * model.config.n_expert  # (rows, L, E); mean 1
    return {
        "steps": list(tracks),
        "experts": model.config.n_expert,
        "load": {block + 1: load[:, block].tolist() for block in pick_evenly(list(range(load.shape[1])), 3)},
        "largest": load.max(-1).tolist(),
        "smallest": load.min(-1).tolist(),
        "entropy": [track.get("router_entropy") or [] for track in tracks.values()],
    }


def measure_tracking(run, model, tokens):
    rows = read_tracked_rows(run)
    tracks = [row["track"] for row in rows]
    by_role = {key: [t.get(key) or {} for t in tracks] for key in ("grad_norm", "grad_kurtosis", "update_ratio")}
    by_depth = {key: [t.get(key) or [] for t in tracks] for key in ("stream_var", "logit_max")}
    gains = [(t.get("gain") or {}).items() for t in tracks]
    ranges = [{slot: g[2] - g[1] for slot, g in found if None not in g} for found in gains]
    return {"steps": [row["step"] for row in rows], **by_role, **by_depth, "gain_range": ranges}
