"""Flags that sample.py and chat.py share: the model, and how its tokens are drawn."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from configurator import PathName
from nanodnt.run.environment import choose_device, choose_dtype
from nanodnt.weights import Trained, load_pretrained, load_trained


@dataclass
class SamplingConfig:
    # --- the model ---
    out_dir: PathName = "out/quickstart"  # a run directory
    checkpoint: PathName = "best.pt"  # a checkpoint in it: best.pt, last.pt, prev.pt
    init_from: PathName = ""  # weights from elsewhere instead of a run's checkpoint: nanoGPT's
    #   ckpt.pt, or its folder; a folder of Hugging Face, OWNER/MODEL, gpt2, …; resume: the
    #   checkpoint of out_dir
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of the matrix
    #   products
    # --- how tokens are drawn ---
    max_new_tokens: int = 500  # most tokens of a continuation or an answer; it ends earlier at end
    #   of text
    temperature: float = 0.8  # divisor of the logits; 0 = always the most likely token
    top_k: int = 200  # only the k most likely tokens; 0 = off
    top_p: float = 1.0  # only the most likely tokens that together reach this probability; 1 = off
    seed: int = 1337  # seed of the random draws

    def check(self) -> None:
        """Raise ValueError for a value out of its range."""
        usable_temperature = self.temperature == 0 or 1e-4 <= self.temperature < math.inf
        ranges = [
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", usable_temperature, "0, or at least 0.0001"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ]
        for name, is_valid, allowed in ranges:
            if not is_valid:
                raise ValueError(f"{name}={getattr(self, name)} must be {allowed}")

    def load_model(self) -> Trained:
        """The model on its device, with its tokenizer. ValueError as in `load_trained`."""
        device, _ = choose_device(self.device)
        dtype, _ = choose_dtype(self.dtype, device)
        if self.init_from not in ("", "resume"):
            trained = load_pretrained(self.init_from)
        else:
            trained = load_trained(self.out_dir, self.checkpoint)
        trained.model.to(device).set_runtime(compute_dtype=dtype)
        return trained

    def draw_options(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of `generate.sample_token` for a model on `device`."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k or None,
            "top_p": self.top_p if self.top_p < 1 else None,
            "generator": torch.Generator(device).manual_seed(self.seed),
        }
