"""Train every combination of config files, flags and seeds; write a table, and draw loss against
learning rate.

python sweep.py config/quickstart.py --learning_rate=1e-3,3e-3,1e-2 --seeds=3
python sweep.py config/quickstart.py --files=config/dnt/s1.py,config/dnt/s5.py --seeds=3
python sweep.py config/quickstart.py --files=config/dnt/s5.py+config/optimizers/msgdw.py
python sweep.py config/dnt_small.py --learning_rate=3e-4,6e-4 --print=True > commands.txt
python sweep.py config/transfer.py --n_embd=64,128 --learning_rate=2e-3,4e-3,8e-3 \
    --parametrization=mup --max_iters=300 --for=config/quickstart.py
python sweep.py config/transfer.py --n_embd=64,128 --parametrization=standard,mup --coordinates=8

A flag of train.py may have several values, separated by commas. If you give learning_rate but not
min_lr, min_lr is a tenth of it. Kill the sweep at any time and start it again: finished runs stay,
and an unfinished run goes on from its last checkpoint. A run that fails is reported, and the others
go on. The folder --out gets sweep.json with every result, sweep.md with a table (each curve's best,
its spread over the seeds, the runs that diverged), and sweep.png (with --format=pdf sweep.pdf). A
sweep over sizes also writes transfer.md. With --coordinates, which takes seconds, only
coordinates.md is written.
"""

import sys
from pathlib import Path

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

from configurator import configure
from nanodnt.files import check_folder, make_folder
from nanodnt.run.errors import reports_errors
from studies.sweep.coordinates import check_coordinates
from studies.sweep.grid import SweepConfig, list_points, split_arguments
from studies.sweep.results import write_results
from studies.sweep.runner import ROOT, Runner, is_finished
from studies.sweep.transfer import check_large, large_commands, swept_size, write_transfer


@reports_errors
def main() -> int:
    own, files, lists = split_arguments(sys.argv[1:])
    (config,), _ = configure(SweepConfig, argv=own, description=__doc__)
    name = Path(files[0]).stem if files else "base"
    folder = Path(config.out) if config.out else ROOT / "out" / "sweep" / name
    check_folder(folder, "--out")
    folder = folder.resolve()
    points = list_points(config, files, lists, folder)
    runner = Runner(config.jobs)
    runs = {point.run.path.name: point.run for point in points}
    if config.for_:
        check_large(points, config.for_)
    if config.coordinates:
        print("\n".join(check_coordinates(points, config.coordinates, folder)))
        return 0
    if config.print:
        print("\n".join(runner.command(point.run) for point in points))
        return 0
    make_folder(folder, "--out")
    if config.collect:
        finished = [name for name, run in runs.items() if is_finished(run)]
        code = 0
    else:
        print(f"{len(points)} runs, {runner.jobs} at a time, in {folder}")
        runner.progress.needed = {run.path for run in runs.values()}
        tasks = {name: (run,) for name, run in runs.items()}
        finished, code = runner.call_all(runner.finish, tasks)
    lines, results = write_results(points, finished, folder, sys.argv, config.formats)
    if size := swept_size(points[0].flags):
        lines += write_transfer(results, size, folder)
    if config.for_:
        lines += ["", *large_commands(results, points, config.for_)]
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
