"""Test the papers' claims: train the runs that are missing, measure, judge, and write docs/results/claims.md.

python reproduce.py                                    # every claim at the smallest scale, on CPU cores
python reproduce.py --only=lns-loss,DyT                # some claims, or those of a paper
python reproduce.py --scale=small --jobs=4             # on one GPU
python reproduce.py --scale=124m --dry_run=True        # the commands that are missing, here for torchrun

The claims are data: nanodnt/claims/claims.py. Kill it at any time and start it again: finished runs stay, and an
unfinished one goes on from its last checkpoint. An arm's learning rate is searched with the first seed, from a stated
start along a stated grid, until both neighbours are worse or the grid ends; the best one is run with all seeds. Each
number has a 95% interval over the seeds (Student's t). It is confirmed if the interval lies inside the values that the
claim asks for, not confirmed if it lies outside, and otherwise inconclusive.
"""

import sys

import nanodnt.run.allocator  # noqa: F401  # isort: skip, before torch

from configurator import configure
from nanodnt.claims.judge import choose_claims, reproduce
from nanodnt.claims.runner import ReproduceConfig, Runner
from nanodnt.run.errors import EXPECTED, report_error


def main() -> int:
    (config,), _ = configure(ReproduceConfig, description=__doc__)
    try:
        config.check()
        claims, runner = choose_claims(config.only, config.scale), Runner(config)
        return reproduce(claims, runner)
    except EXPECTED as e:
        return report_error(e)


if __name__ == "__main__":
    sys.exit(main())
