"""Draw the papers' figures from runs, and compare runs.

python analyze.py out/dnt_small                    # figures that apply, in out/dnt_small/analysis
python analyze.py out/gpt2_small out/dnt_small --figures=gradients,sharpness  # and report.md
python analyze.py out/dnt_small/step_2000.pt --figures=gradients             # one checkpoint
python analyze.py --init_from=gpt2 --dataset=corpus.txt --figures=angular,removal

The second command compares runs side by side. The third measures an early checkpoint, as DNT's
Fig. 1 does. The last draws LNS's Figs. 2 and 3 for a published model.

Each figure is a PNG (a PDF or SVG with --format) and a JSON file; the JSON holds everything that is
drawn and how it was measured. docs/analysis.md lists the figures; studies/analysis defines their
numbers. They are measured on validation windows, the same every time. Changes over training are
read from the checkpoints that a run kept (train.py --keep_every) and its metrics.jsonl.
"""

import sys
from pathlib import Path

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

from configurator import configure
from nanodnt.run.errors import reports_errors
from studies.analysis.pipeline import AnalyzeConfig, analyze


@reports_errors
def main() -> int:
    (config,), given = configure(AnalyzeConfig, description=__doc__, positional="run")
    paths = [Path(path) for path in given["run"][0]]
    if config.init_from:
        if paths:
            raise ValueError(
                f"init_from={config.init_from} is in place of runs: leave it out, or {paths[0]}"
            )
        return analyze([Path(config.init_from)], config)
    if not paths:
        raise ValueError(
            "no run is named: python analyze.py RUN [RUN ...], a run directory or a checkpoint of "
            "one; or --init_from=FOLDER, a model of Hugging Face or nanoGPT"
        )
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise ValueError(
            f"there is no {', '.join(missing)}: name run directories, or checkpoint files in them"
        )
    return analyze(paths, config)


if __name__ == "__main__":
    sys.exit(main())
