"""Test claims, the papers' or yours: tune, train, measure, judge, and write a page with a figure.

python reproduce.py                                  # claims on language models: hours on CPU cores
python reproduce.py --claims=studies/digits.py       # claims on images, handwritten digits: an hour
python reproduce.py --claims=my_claims.py --dry_run  # yours: the number of runs, and their commands
python reproduce.py --claims=my_claims.py --seeds=24 # with a number of seeds of your choice
python reproduce.py --only=lns-loss,DyT              # some claims, or those of a paper
python reproduce.py --judge_only                     # no run: judge the committed record

docs/claims.md shows how to write a claims file. It is Python and is executed, with all your rights:
only run one that you trust. A config file is not executed: it is read as data.

Kill the command at any time and start it again: finished runs stay, and an unfinished run goes on
from its last checkpoint. Two seeds tune the learning rates, and their spread gives the number of
seeds; other seeds give the reported numbers. The command ends with the verdicts. The measures of
NAME.py go to out/reproduce/NAME/record.json; the page out/reproduce/NAME.md and its figure are
derived from this record alone. Those of studies/NAME.py go to docs/results.
"""

import sys

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

from configurator import configure
from nanodnt.run.errors import reports_errors
from studies.claims.experiment import Experiment, ReproduceConfig
from studies.claims.page import summarize, write_page


@reports_errors
def main() -> int:
    (config,), _ = configure(ReproduceConfig, description=__doc__)
    from scipy import stats  # noqa: F401  # verdicts need it: if it is missing, fail before the runs

    experiment = Experiment(config)
    if config.judge_only and not experiment.record.runs:
        raise ValueError(f"{experiment.record.path} has no runs: train them, without --judge_only")
    code = 0
    if not config.judge_only:
        experiment.check()
        if config.dry_run:
            print("\n".join(experiment.forecast()))
            return 0
        code = experiment.train()
    if code <= 128 and experiment.record.runs:  # above it, a signal
        verdicts = experiment.judge()
        paths = write_page(experiment, verdicts)
        print("\n".join([*summarize(experiment, verdicts), "", *map(str, paths)]))
    return code


if __name__ == "__main__":
    sys.exit(main())
