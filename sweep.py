"""Train every combination of config files, flags and seeds; write a table, and draw loss against learning rate.

python sweep.py config/quickstart.py --learning_rate=1e-3,3e-3,1e-2 --files=config/dnt/s1.py,config/dnt/s5.py --seeds=3
python sweep.py config/quickstart.py --files=config/dnt/s5.py+config/optimizers/msgdw.py --learning_rate=0.1,0.3,1
python sweep.py config/dnt_small.py --learning_rate=3e-4,6e-4,1.2e-3 --print=True > commands.txt     # for a cluster

A flag of train.py may have several values, separated by commas. min_lr is a tenth of a learning_rate that is given,
unless you give it too. Kill it at any time and start it again: finished runs stay, and an unfinished one goes on from
its last checkpoint. A run that fails is reported, and the others go on. The folder --out gets sweep.json with every
result, sweep.md with a table (each curve's best, its spread over the seeds, the runs that diverged), and sweep.png.
"""

import sys
from concurrent.futures import as_completed
from pathlib import Path

import nanodnt.run.allocator  # noqa: F401  # isort: skip, before torch

from configurator import configure
from nanodnt.run.errors import EXPECTED, report_error
from studies.sweep.grid import SweepConfig, default_folder, list_points, split_arguments
from studies.sweep.results import write_results
from studies.sweep.runner import Runner, Stopped


def finish_all(points: list, runner: Runner, train: bool) -> tuple:
    """Train what is missing, or only look what is there; returns (the points that are finished, 0 or the exit code)."""
    finished, code = [], 0

    def finish(run) -> bool:
        if train:
            runner.finish(run)
        return train or runner.is_finished(run)

    with runner:
        futures = {runner.pool.submit(finish, point.run): point for point in points}
        try:
            for future in as_completed(futures):
                try:
                    if future.result():
                        finished.append(futures[future])
                    else:
                        print(f"not finished: {futures[future].run.path.name}")
                except (ValueError, OSError) as e:  # the others go on
                    code, runner.expected = 1, runner.expected - 1
                    print(f"error: {futures[future].run.path.name}: {e}", file=sys.stderr, flush=True)
        except Stopped:
            print("stopped; the same command goes on from here")
            code = 130
    return [point for point in points if point in finished], code


def main() -> int:
    try:
        own, files, lists = split_arguments(sys.argv[1:])
        (config,), _ = configure(SweepConfig, argv=own, description=__doc__)
        config.check()
        folder = Path(config.out).expanduser().resolve() if config.out else default_folder(files)
        points, runner = list_points(config, files, lists, folder), Runner(config.jobs)
        if config.print:
            print("\n".join(runner.command(point.run) for point in points))
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        runner.expected = sum(not (point.run.path / "done.json").exists() for point in points)
        if not config.collect:
            print(f"{len(points)} runs, {runner.expected} of them to be made, {runner.jobs} at a time, in {folder}")
        finished, code = finish_all(points, runner, train=not config.collect)
        print("\n".join(write_results(points, finished, folder, sys.argv)))
        return code
    except EXPECTED as e:
        return report_error(e)


if __name__ == "__main__":
    sys.exit(main())
