"""What a configuration comes to: equations, parameters, FLOPs, memory, learning rates. Nothing is trained.

python model.py config/dnt_small.py
python model.py config/dnt_small.py --lns=norm --residual_init=plain
python model.py config/dnt_small.py --schedule=wsd --plot        # also draws the learning rates: OUT_DIR/lr.png
python model.py config/dnt_xl.py --plan --gpus=32 --gpu=h100     # memory on each GPU, largest micro batch, days, disk
python model.py config/dnt_xl.py --plan --gpus=32 --gpu=a800 --mfu=0.45 --optimizer=msgdw

--plan and --plot are words without a value.
"""

import sys
from pathlib import Path

from configurator import configure
from layers import rules
from model import GPTConfig
from nanodnt.data import folder_of, load_meta
from nanodnt.optim import describe_groups, fill_defaults, make_optimizer, notes
from nanodnt.plan.describe import (
    describe_flops,
    describe_memory,
    describe_parameters,
    describe_rates,
    describe_size,
    draw_rates,
)
from nanodnt.plan.equations import describe_network
from nanodnt.plan.planning import PlanConfig, describe_plan
from nanodnt.run.errors import EXPECTED, report_error
from nanodnt.settings import TrainConfig
from nanodnt.tasks import fill_from_dataset, task_of


def resolve(description: str, *schemas, argv=None) -> tuple:
    """Read the command line: (model, optimizer, TrainConfig, a remark on the data), then an instance of each
    further schema. Model and optimizer are on the meta device."""
    (flags, config, *others), _ = configure(GPTConfig, TrainConfig, *schemas, argv=argv, description=description)
    config.check()
    fill_defaults(config)
    task = task_of(flags)
    if (folder_of(config.dataset) / "meta.json").exists():
        meta, source = load_meta(config.dataset, verify=False), ""
    else:
        meta, source = task.placeholder_meta(flags)
    fill_from_dataset(flags, meta, config.dataset)
    remark = source and f"; {source}, since dataset {config.dataset!r} is not prepared here"
    model = task.network().empty(flags)
    return model, make_optimizer(model, config), config, remark, *others


def main() -> int:
    """`python model.py …`; returns the exit code."""
    words, argv = {"--plan", "--plot"}, sys.argv[1:]
    given = words & set(argv)
    schemas = (PlanConfig,) if {"--plan", "--help", "-h"} & set(argv) else ()
    try:
        argv = [argument for argument in argv if argument not in words]
        model, optimizer, config, remark, *others = resolve(__doc__, *schemas, argv=argv)
        lines = [*describe_size(model, remark), *config.source_notes(), ""]
        if "--plan" in given:
            lines += describe_plan(model, config, *others)
        else:
            lines += [*describe_network(model), *(f"note: {note}" for note in rules.notes(model.config)), ""]
            lines += [*describe_parameters(model), "", describe_flops(model), ""]
            lines += [*describe_memory(model), "activations come on top: --plan counts them", ""]
            lines += [describe_groups(optimizer, model), "", *describe_rates(optimizer, config)]
            lines += [f"note: {note}" for note in notes(config, model)]
        print(*lines, sep="\n", flush=True)
        if "--plot" in given:
            path = Path(config.out_dir) / "lr.png"
            draw_rates(optimizer, config, path)
            print(f"drawn: {path}", flush=True)
    except EXPECTED as e:
        return report_error(e)
    return 0


if __name__ == "__main__":
    sys.exit(main())
