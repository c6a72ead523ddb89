"""Train every combination of config files, flags and seeds; write a table, and draw loss against learning rate.

python sweep.py config/quickstart.py --learning_rate=1e-3,3e-3,1e-2 --files=config/dnt/s1.py,config/dnt/s5.py --seeds=3
python sweep.py config/quickstart.py --files=config/dnt/s5.py+config/optimizers/msgdw.py --learning_rate=0.1,0.3,1
python sweep.py config/dnt_small.py --learning_rate=3e-4,6e-4,1.2e-3 --print=True > commands.txt     # for a cluster

A flag of train.py may have several values, separated by commas. Where learning_rate has several, min_lr is a tenth of
each, unless you give it. Kill it at any time and start it again: finished runs stay, and an unfinished one goes on from
its last checkpoint. A run that fails is reported, and the others go on. The folder --out gets sweep.json with every
result, sweep.md with a table (each curve's best, its spread over the seeds, the runs that diverged), and sweep.png.
"""

import sys
from pathlib import Path

import nanodnt.run.allocator  # noqa: F401  # isort: skip, before torch

from configurator import configure
from nanodnt.run.errors import EXPECTED, report_error
from nanodnt.sweep.grid import SweepConfig, default_folder, list_points, split_arguments
from nanodnt.sweep.results import write_results
from nanodnt.sweep.runner import Runner, Stopped


def train_all(points: list, runner: Runner) -> int:
    """Train what is missing; returns the number of runs that failed. Stopped if the user ends it."""
    runner.expected = sum(not (point.run.path / "done.json").exists() for point in points)
    futures, failed = [runner.pool.submit(runner.finish, point.run) for point in points], 0
    for point, future in zip(points, futures, strict=True):
        try:
            future.result()
        except ValueError as e:
            failed += 1
            print(f"error: {point.run.path.name}: {e}", file=sys.stderr, flush=True)
    return failed


def main() -> int:
    try:
        own, files, lists = split_arguments(sys.argv[1:])
        (config,), _ = configure(SweepConfig, argv=own, description=__doc__)
        config.check()
        folder = Path(config.out).resolve() if config.out else default_folder(files)
        points = list_points(config, files, lists, folder)
        if config.print:
            runner = Runner(config.jobs)
            print("\n".join(runner.command(point.run) for point in points))
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        code, runner = 0, Runner(config.jobs)
        with runner:
            try:
                code = int(train_all(points, runner) > 0)
            except Stopped:
                print("stopped; the same command goes on from here")
                code = 130
        print("\n".join(write_results(points, folder, sys.argv)))
        print(f"{folder}: sweep.json, sweep.md, sweep.png")
        return code
    except EXPECTED as e:
        return report_error(e)


if __name__ == "__main__":
    sys.exit(main())
