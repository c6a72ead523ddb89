"""What each figure needs, measured on the checkpoints of a run: measure_FIGURE(run, model, tokens) → a dict for JSON.

A measure that does not apply to the run raises `NotApplicable` with the reason."""

import math
from pathlib import Path

import numpy as np
import torch

from model import GPTConfig
from nanodnt.data import load_meta
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.run.metrics import read_metrics
from nanodnt.settings import TrainConfig
from nanodnt.tasks import open_data, task_of_data
from nanodnt.weights import model_from_checkpoint
from studies.analysis import gradients, norms, streams
from studies.analysis.settings import AnalyzeConfig

SCATTER_POINTS = 3000
WINDOW = 128  # scatter and jacobian read so many tokens of a sequence; jacobian is of one of them, or of an image [I]
# what must be the same in meta.json where a model reads another dataset than that of its training
READ = ("tokenizer", "vocab_size", "chars", "image_size", "channels", "classes")


class NotApplicable(Exception):
    """A figure does not apply to a run; the message is the reason."""


# -------------------------------------------------------------------------------------------------------- runs


class CheckpointedRun:
    """A run directory, or one checkpoint file in it: its snapshots and the data that they are measured on."""

    def __init__(self, path: Path, name: str, config: AnalyzeConfig, device: torch.device):
        self.name, self.config, self.device, self.folder = name, config, device, path if path.is_dir() else path.parent
        kept = kept_checkpoints(path) if path.is_dir() else [path]
        self.snapshots = pick_evenly(kept, config.snapshots)
        checkpoint = load_checkpoint(kept[-1])
        self.block_size, trained_on = checkpoint["model_config"]["block_size"], checkpoint["meta"]
        dataset = config.dataset or checkpoint["train_config"]["dataset"]
        meta = load_meta(dataset)
        if any(meta.get(key) != trained_on.get(key) for key in READ):
            here, there = map(describe_data, (meta, trained_on))
            raise ValueError(
                f"dataset {dataset!r} ({here}) is not what {path} reads ({there}): choose another --dataset"
            )
        self.images = task_of_data(meta).reads == "images"
        self.data = open_data(TrainConfig(dataset=dataset), GPTConfig(**checkpoint["model_config"]), meta)
        if meta["splits"]["val"] != trained_on.get("splits", {}).get("val"):
            what = "images of {!r} are not the ones" if self.images else "text of {!r} is not the one"
            print(f"note: {name}: the validation {what.format(dataset)} of its training")
        if checkpoint["train_config"].get("doc_mask"):
            print(f"note: {name} was trained with doc_mask; here the documents of a row see each other")
        self.has_kept_one = len(kept) == 1 and path.is_dir()
        available = self.data.val_windows * self.block_size
        if (config.tokens or 0) > available:
            print(f"note: {name}: the validation data has {available:,} tokens, fewer than tokens={config.tokens}")

    def load(self, path: Path) -> tuple:
        """(model in eval mode, fp32, on the device; step)."""
        checkpoint = load_checkpoint(path)
        return model_from_checkpoint(checkpoint).eval().to(self.device), checkpoint["step"]

    def generator(self, device="cpu") -> torch.Generator:
        """A new random generator with the seed of the configuration."""
        return torch.Generator(device).manual_seed(self.config.seed)


class Batches:
    """At most `tokens` tokens of a run's validation data, evenly spread: at least one window, or image. Of each window
    only the first `length` tokens are read, if given. An iterable of (inputs, targets) on the run's device, of
    MICRO_TOKENS tokens or less: each batch is read anew when it is its turn, so few are in memory.

    `count`: how much it is, {"tokens": number}, or {"images": number}."""

    def __init__(self, run: CheckpointedRun, tokens: int, length: int | None = None):
        whole = run.images or not length or length > run.block_size  # an image cannot be cut
        self.run, self.length = run, run.block_size if whole else length
        self.starts = run.data.validation(max(1, tokens // self.length) * run.block_size)
        self.count = {"images": len(self.starts)} if run.images else {"tokens": len(self.starts) * self.length}

    def __iter__(self):
        rows = max(1, gradients.MICRO_TOKENS // self.run.block_size)
        for first in range(0, len(self.starts), rows):
            chosen = self.starts[first : first + rows]
            batch = self.run.data.val_batch(chosen, len(chosen))
            inputs, targets = (torch.from_numpy(part).to(self.run.device) for part in batch)
            yield (inputs, targets) if self.run.images else (inputs[:, : self.length], targets[:, : self.length])


def describe_data(meta: dict) -> str:
    """What READ says of a dataset, in words."""
    if task_of_data(meta).reads == "images":
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
    batches, types = Batches(run, tokens), gradients.matrix_types(model)
    found = gradients.compute_gradients(model, batches)
    pooled = {}
    for kind in dict.fromkeys(gradients.MATRIX_TYPES.values()):
        g = torch.cat([found[name].flatten() for name, its in types.items() if its == kind])
        statistics = gradients.tail_statistics(g)
        histogram = gradients.log_histogram(g / (statistics["rms"] or 1), 80, 1e-6, 1e4)
        pooled[kind] = {**statistics, "histogram_of_g_over_rms": histogram}
    return {**batches.count, "types": pooled}


def measure_sharpness(run, model, tokens):
    batches, types, draws = Batches(run, tokens), gradients.block_types(model), run.config.draws
    h = gradients.estimate_sharpness(model, batches, draws, run.generator(run.device))
    h = gradients.drop_padding_rows(model, h)
    density = {
        kind: gradients.log10_density(torch.cat([t.flatten() for name, t in h.items() if types[name] == kind]), 60)
        for kind in dict.fromkeys(types[name] for name in h)
    }
    averages = {"types": gradients.average_by_type(h, types), "layers": gradients.average_by_block(model, h)}
    return {**batches.count, "draws": draws, **averages, "log10_density": density}


def measure_norms(run, model, tokens):
    blocks, embedding = gradients.block_norms(model), gradients.smallest_row(model)
    return {"types": gradients.parameter_norms(model), "blocks": blocks, "embedding": embedding}


def measure_alpha(run, model, tokens):
    batches = Batches(run, tokens)
    slots = norms.dyt_alphas(model, batches)
    if not slots:
        raise NotApplicable("no DyT")
    alpha, inv_std = ([slot[key] for slot in slots] for key in ("alpha", "inv_std"))
    spread = min(np.ptp(alpha), np.ptp(inv_std)) if len(slots) > 2 else 0
    return {
        **batches.count,
        "slots": slots,
        "pearson_r": float(np.corrcoef(alpha, inv_std)[0, 1]) if spread else math.nan,
    }


def measure_scatter(run, model, tokens):
    names = pick_evenly(list(norms.norm_slots(model)), 3)
    if not names:
        raise NotApplicable("no norm on the residual path")
    batches = Batches(run, tokens, WINDOW)
    points = {name: norms.norm_scatter(model, batches, name, SCATTER_POINTS, run.generator()) for name in names}
    kinds = {name: slot.norm for name, slot in norms.norm_slots(model).items()}
    return {**batches.count, "slots": {name: {"norm": kinds[name], **points[name]} for name in names}}


def measure_variance(run, model, tokens):
    batches = Batches(run, tokens)
    return {**batches.count, **streams.stream_variance(model, batches)}


def measure_angular(run, model, tokens):
    batches = Batches(run, tokens)
    return {**batches.count, "distance": streams.mean_angular_distance(model, batches)}


def measure_removal(run, model, tokens):
    batches = Batches(run, tokens)
    return {**batches.count, **streams.removal_drop(model, batches)}


def measure_jacobian(run, model, tokens):
    batches = Batches(run, tokens, WINDOW)
    positions = torch.randint(batches.length, (len(batches.starts),), generator=run.generator()).tolist()
    width, blocks = model.config.n_embd, len(model.blocks)
    channels = [i * width // min(64, width) for i in range(min(64, width))]
    shown, maps, by_layer = pick_evenly(list(range(blocks)), 3), {}, {"attn": [], "mlp": []}
    for branch, statistics in by_layer.items():
        for block in range(blocks):
            jacobian = streams.residual_jacobian(model, batches, positions, block, branch)
            statistics.append(streams.jacobian_statistics(jacobian))
            if block in shown:
                part = jacobian[channels][:, channels].tolist()
                maps.setdefault(branch, []).append({"block": block + 1, "map": part})
    return {**batches.count, "positions": positions, "channels": channels, "maps": maps, "layers": by_layer}


def measure_gains(run, model, tokens):
    slots = norms.gain_statistics(model)
    if not slots:
        raise NotApplicable("no scale vector")
    return {"slots": slots, "cosines": norms.qkv_cosines(model)}


def measure_logits(run, model, tokens):
    batches = Batches(run, tokens)
    return {**batches.count, "layers": streams.largest_logits(model, batches)}


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
