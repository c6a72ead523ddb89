"""Time a Muon step on the hidden matrices of the 124M model against torch.optim.Muon, the two in turn.

    python docs/scripts/bench_muon.py    # one to two minutes; on a GPU if there is one

Two sets of matrices: the 72 of this model (q, k, v, o, up, down), and the 48 of a GPT with q, k and v in one matrix.
Prints medians and, for the accuracy, the relative error of one update to the same iteration in float64.
"""

import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanodnt.optim import RULES, Optimizer
from nanodnt.optim.newton_schulz import NS, newton_schulz, one_at_a_time

ROUNDS = 7
D, LAYERS = 768, 12
SETS = {
    "72 matrices, q, k, v separate": [(D, D)] * 4 * LAYERS + [(4 * D, D)] * LAYERS + [(D, 4 * D)] * LAYERS,
    "48 matrices, qkv as one": [(3 * D, D), (D, D), (4 * D, D), (D, 4 * D)] * LAYERS,
}


def ours(shapes, device):
    config = SimpleNamespace(momentum=0.95, nesterov=True, muon_steps=5, muon_adjust_lr="match_rms_adamw")
    model = SimpleNamespace(compute_dtype=torch.bfloat16)
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    options = RULES["muon"].options(config, "ffn", model)
    return Optimizer([dict(params=params, rule="muon", lr=1e-3, weight_decay=0.1, **options)]), params


def theirs(shapes, device):
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    return torch.optim.Muon(params, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), params


def seconds(step, device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def errors(shape, device) -> tuple:
    """(our, torch's) relative error on one random matrix."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    x = torch.randn(shape, device=device)
    exact = x.double() if shape[0] <= shape[1] else x.double().T
    exact = exact / exact.norm()
    for _ in range(5):
        a = exact @ exact.T
        exact = NS[0] * exact + (NS[1] * a + NS[2] * a @ a) @ exact
    exact = exact if shape[0] <= shape[1] else exact.T
    mine = newton_schulz(x.bfloat16()[None], triangular=one_at_a_time(x))[0]
    other = _zeropower_via_newtonschulz(x, NS, 5, 1e-7)
    return tuple(((y.double() - exact).norm() / exact.norm()).item() for y in (mine, other))


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and os.getloadavg()[0] > 1:
        print(f"warning: the machine is busy (load {os.getloadavg()[0]:.1f}), so the times are unreliable")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    singly = one_at_a_time(torch.empty(D, D, device=device))
    print(f"{name}, torch {torch.__version__}, matrices {'one at a time' if singly else 'in stacks'}")
    for title, shapes in SETS.items():
        torch.manual_seed(0)
        made = {"torch.optim.Muon": theirs(shapes, device), "ours": ours(shapes, device)}
        grads = [torch.randn(shape, device=device) for shape in shapes]
        for _, params in made.values():
            for p, g in zip(params, grads, strict=True):
                p.grad = g
        times = {key: [] for key in made}
        for i in range(ROUNDS + 2):
            for key, (optimizer, _) in made.items():
                t = seconds(optimizer.step, device)
                if i >= 2:  # after warm-up
                    times[key].append(t)
        base = times["torch.optim.Muon"]
        for key, t in times.items():
            ratios = sorted(b / x for b, x in zip(base, t, strict=True))
            spread = f"{statistics.median(ratios):.2f}× as fast ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{title}: {key}: {statistics.median(t) * 1e3:.0f} ms, {spread}")
    for shape in sorted({shape for shapes in SETS.values() for shape in shapes}):
        mine, other = errors(shape, device)
        print(f"relative error at {shape[0]}×{shape[1]}: ours {mine:.4f}, torch.optim.Muon {other:.4f}")


if __name__ == "__main__":
    main()
