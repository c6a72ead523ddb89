"""The flags of `evaluate.py`, and the lists of tasks that have a name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configurator import PathName, read_path

DYT15 = (
    "anli_r1 anli_r2 anli_r3 arc_challenge arc_easy boolq hellaswag openbookqa piqa record rte "
    "truthfulqa_mc1 truthfulqa_mc2 wic winogrande"
)
COMMONSENSE8 = "boolq piqa social_iqa hellaswag winogrande arc_easy arc_challenge openbookqa"
# {list: {task: its metric in the list's mean}}. The papers do not name their metrics: these are our
# choice.
SUITES = {
    # The 15 zero-shot tasks of the DyT paper (arXiv 2503.10622, App. A). record has no accuracy
    "dyt15": dict.fromkeys(DYT15.split(), "acc") | {"record": "f1"},
    # The eight tasks of the LNS paper after fine-tuning (arXiv 2502.05795, sec. 5.2). Our text of
    # the paper lacks the cells of its Table 2. Our choice: the eight tasks of its dataset,
    # Commonsense170K (Hu et al. 2023).
    "commonsense8": dict.fromkeys(COMMONSENSE8.split(), "acc"),
}
# {flag: the task that it belongs to}
OF_TASK = {"overlap": "text", "max_answer_tokens": "answers", "template": "answers"}


@dataclass
class EvaluateConfig:
    # --- what to evaluate ---
    out_dir: str = "out/quickstart"  # a run directory, or several with commas between, which are
    #   shown side by side
    checkpoint: PathName = "best.pt"  # a checkpoint in each: best.pt, last.pt, prev.pt
    init_from: PathName = ""  # a model from elsewhere instead of a run: a folder of Hugging Face,
    #   OWNER/MODEL, gpt2, …, nanoGPT's ckpt.pt, or its folder; out_dir is then the folder for
    #   results
    tasks: str = ""  # tasks, with commas between: text, answers, tasks of lm-evaluation-harness,
    #   dyt15 (the DyT paper's 15), commonsense8 (the LNS paper's 8 after fine-tuning); empty =
    #   evaluate nothing, show earlier results
    without_block: str = ""  # evaluate the model without this block, counted from 1; all = without
    #   each block, one after another
    # --- the tasks text and answers ---
    input: str = ""  # text: a text file (UTF-8), or a prepared dataset, by name or folder, of which
    #   the validation windows are read. answers: a prepared dataset of examples, of which the
    #   validation split is read; a file of records (.jsonl, .json or .parquet, as for
    #   data/sft/prepare.py); or a folder of such files
    overlap: int = 0  # text: tokens that each window of a file repeats, as context, from the window
    #   before; 0 = none
    max_answer_tokens: int = 32  # answers: exact_match counts answers of up to this many tokens,
    #   with end of text; 0 = all
    template: str = ""  # answers: template that turns records into text: chat, alpaca, chatml,
    #   plain; empty = the run's own
    # --- tasks of lm-evaluation-harness ---
    num_fewshot: int | None = None  # number of examples in the prompt; None = each task's own
    #   number, mostly 0
    limit: int = 0  # only the first documents of each task; 0 = all
    task_folder: PathName = ""  # a folder with YAML files of your own tasks
    gen_kwargs: str = ""  # settings of generation in place of those of the tasks, as in
    #   temperature=0.7,do_sample=True
    seed: int = 1234  # seed of the choice of few-shot examples, and of sampled text
    # --- how ---
    batch_size: int = 16  # sequences of one forward pass; changes results only by rounding
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of the matrix
    #   products

    def check(self) -> None:
        """ValueError for values that are not allowed, or contradict each other."""
        for name in ("overlap", "max_answer_tokens", "num_fewshot", "limit", "seed", "batch_size"):
            value = getattr(self, name)
            least = 1 if name == "batch_size" else 0
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be {least} or more")
        if not self.folders():
            raise ValueError(f"out_dir={self.out_dir} must be a run directory")
        if self.without_block and not self.task_names():
            raise ValueError(
                f"without_block={self.without_block} must be left out where there are no tasks"
            )
        if self.init_from and len(self.folders()) > 1:
            raise ValueError(
                f"init_from is one model, so out_dir={self.out_dir} must be one folder, for its "
                "results"
            )
        if self.init_from and any(Path(self.folders()[0]).glob("*.pt")):
            raise ValueError(
                f"{self.out_dir} holds a run of its own: name another --out_dir for results of "
                "init_from"
            )
        names = self.task_names()
        inputs = {
            "text": "a text file or a prepared dataset",
            "answers": "a dataset of examples, or records",
        }
        reading = [name for name in inputs if name in names]
        if len(reading) == 2:
            raise ValueError(
                "the tasks text and answers read different inputs: evaluate one after the other"
            )
        if reading and not self.input:
            raise ValueError(f"the task {reading[0]} needs --input=FILE, {inputs[reading[0]]}")
        if self.input and not reading:
            raise ValueError(
                "input belongs to the tasks text and answers: add one to --tasks, or leave it out"
            )
        for flag, task in OF_TASK.items():
            if task not in names and getattr(self, flag) != getattr(EvaluateConfig, flag):
                raise ValueError(
                    f"{flag} belongs to the task {task}: add it to --tasks, or leave it out"
                )

    def folders(self) -> list[str]:
        """The run directories, each once."""
        names = [name.strip() for name in self.out_dir.split(",")]
        return list(dict.fromkeys(read_path(name) for name in names if name))

    def left_out(self, n_layer: int, source: str) -> list[int | None]:
        """The blocks to leave out of `source`, which has n_layer blocks, one after another; None:
        no block. ValueError for another number."""
        blocks = list(range(1, n_layer + 1))
        if self.without_block == "":
            return [None]
        if self.without_block == "all":
            return blocks
        if self.without_block not in map(str, blocks):
            raise ValueError(
                f"without_block={self.without_block} must be one of the blocks 1 to {n_layer} of "
                f"{source}, or all"
            )
        return [int(self.without_block)]

    def task_names(self) -> list[str]:
        """The tasks that `tasks` names, each once; a list such as dyt15 is replaced by its
        tasks."""
        names = []
        for name in self.tasks.split(","):
            if name.strip():
                names += SUITES.get(name.strip(), [name.strip()])
        return list(dict.fromkeys(names))
