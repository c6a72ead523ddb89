"""What bench.py does instead of timing one step: sweeps, a profile, compile times.

Each function takes the configuration's Setting, prints a table, and returns its figures for --json."""

from nanodnt.bench.sweeps.compiling import time_compilation, time_compilers
from nanodnt.bench.sweeps.experts import time_experts
from nanodnt.bench.sweeps.layouts import time_layouts
from nanodnt.bench.sweeps.losses import time_losses
from nanodnt.bench.sweeps.norms import time_norms
from nanodnt.bench.sweeps.optimizers import time_optimizers
from nanodnt.bench.sweeps.profile import profile_steps
from nanodnt.bench.sweeps.sizes import time_micro_batches, time_sizes
from nanodnt.bench.sweeps.streams import time_streams

MODES = {
    "layouts": time_layouts,
    "experts": time_experts,
    "norms": time_norms,
    "stream": time_streams,
    "optimizers": time_optimizers,
    "micro_batch": time_micro_batches,
    "loss": time_losses,
    "scaling": time_sizes,
    "compile": time_compilers,
    "profile": profile_steps,
    "compile_times": time_compilation,
}
