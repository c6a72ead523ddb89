"""Test the papers' claims: train the runs that are missing, measure, judge, and write docs/results/claims.md.

python reproduce.py                                    # every claim at scale mini: hours on CPU cores
python reproduce.py --only=lns-loss,DyT,robustness     # some claims, those of a paper, the figure on robustness
python reproduce.py --judge_only=True                  # no run: verdicts, page and figures from the committed record
python reproduce.py --scale=digits                     # the claims about images, on handwritten digits: an hour
python reproduce.py --scale=small --jobs=4             # on one GPU
python reproduce.py --scale=124m --dry_run=True        # the commands that are missing, here for torchrun

The claims are data: studies/claims/claims.py, and arms.py for the runs. Kill it at any time and start it again:
finished runs stay, and an unfinished one goes on from its last checkpoint. Learning rates are tuned with seed 0, on a
grid of factors of two that grows until the best rate lies inside (at 124m and paper they are those of the papers' own
config files); numbers are reported with --seeds other seeds. What is measured goes to docs/results/claims/SCALE.json,
and everything else is derived from that file.
"""

import sys

import nanodnt.run.allocator  # noqa: F401  # isort: skip, before torch

from configurator import configure
from nanodnt.run.errors import reports_errors
from studies.claims.experiment import Experiment, ReproduceConfig, choose_claims
from studies.claims.page import write_page


@reports_errors
def main() -> int:
    (config,), _ = configure(ReproduceConfig, description=__doc__)
    chosen, experiment, code = choose_claims(config.only, config.scale), Experiment(config), 0
    if config.judge_only and not experiment.record.runs:
        raise ValueError(f"{experiment.record.path} has no runs: train them, without --judge_only")
    if not config.judge_only:
        needs, runner = experiment.list_needs(*chosen), experiment.runner
        if not config.dry_run:
            experiment.check_datasets(needs)
        _, code = runner.call_all(experiment.train_arm, {name: (name, needs[name]) for name in needs})
        if config.dry_run:
            print("".join(f"{runner.command(run)}\n" for run in experiment.missing.values()), end="")
            return code
    if experiment.record.runs and code != 130:
        print(write_page(experiment))
    return code


if __name__ == "__main__":
    sys.exit(main())
