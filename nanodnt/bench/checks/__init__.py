"""Checks of this device that bench.py makes with --verify, each against a reference: most are computed on the CPU.

Each function takes the configuration's Setting and returns {"checks": figures and limits, "why": where the limits come
from} for --json. `describe_checks` prints that."""

from nanodnt.bench.checks.numerics import check_compiled, check_precision, check_updates
from nanodnt.bench.checks.products import check_products
from nanodnt.bench.checks.runs import check_devices, check_resume, check_sampling

CHECKS = {
    "precision": check_precision,
    "compiled": check_compiled,
    "products": check_products,
    "updates": check_updates,
    "resume": check_resume,
    "devices": check_devices,
    "sampling": check_sampling,
}
