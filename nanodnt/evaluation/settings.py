"""The knobs of `evaluate.py`, and the lists of tasks that have a name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DYT15 = "anli_r1 anli_r2 anli_r3 arc_challenge arc_easy boolq hellaswag openbookqa piqa record rte"
DYT15 += " truthfulqa_mc1 truthfulqa_mc2 wic winogrande"
# list: {task: the metric of it that the list's mean takes}
SUITES = {
    # The 15 zero-shot tasks of the DyT paper (arXiv 2503.10622). Which metric of each it averages is not published [U]:
    # we take the accuracy, and for record, which has none, F1 [I]
    "dyt15": {task: "f1" if task == "record" else "acc" for task in DYT15.split()},
}


@dataclass
class EvaluateConfig:
    # --- what to evaluate ---
    out_dir: str = "out/quickstart"  # a run directory, or several with commas between, to be shown side by side
    checkpoint: str = "best.pt"  # a checkpoint in each: best.pt, last.pt, prev.pt
    init_from: str = ""  # instead of a run: a folder or a name of Hugging Face; out_dir is then where results go
    tasks: str = ""  # text, tasks of lm-evaluation-harness, dyt15 (the DyT paper's 15), with commas between; empty =
    #   evaluate nothing, show what was evaluated before
    # --- the task text ---
    input: str = ""  # a text file (UTF-8), or a prepared dataset, by name or folder: its validation windows are read
    overlap: int = 0  # tokens that each window of a file repeats, as context, from the window before; 0 = none
    # --- tasks of lm-evaluation-harness ---
    num_fewshot: int | None = None  # examples in the prompt; None = as each task has it, mostly 0
    limit: int = 0  # only the first documents of each task; 0 = all
    task_folder: str = ""  # a folder with YAML files of your own tasks
    gen_kwargs: str = ""  # settings of generation, instead of the tasks': temperature=0.7,do_sample=True
    seed: int = 1234  # of the choice of few-shot examples, and of sampled text
    # --- how ---
    batch_size: int = 16  # sequences of one forward pass, on each process; changes no result but by rounding
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matrix multiplications
    timeout_s: int = 1800  # a process gives up after waiting this long for the others

    def check(self):
        """ValueError for values that mean nothing, or contradict each other."""
        for name, ok, allowed in (
            ("out_dir", self.folders(), "a run directory"),
            ("overlap", self.overlap >= 0, "0 or more"),
            ("num_fewshot", self.num_fewshot is None or self.num_fewshot >= 0, "None, 0 or more"),
            ("limit", self.limit >= 0, "0 or more"),
            ("seed", 0 <= self.seed < 2**32, "0 or more, and below 2**32"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("timeout_s", self.timeout_s >= 1, "at least 1"),
        ):
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)} must be {allowed}")
        if self.init_from and len(self.folders()) > 1:
            raise ValueError(f"init_from is one model, so out_dir={self.out_dir} must be one folder, for its results")
        if self.init_from and any(Path(self.folders()[0]).glob("*.pt")):
            raise ValueError(f"{self.out_dir} holds a run of its own: name another --out_dir for results of init_from")
        text = "text" in self.task_names()
        if text and not self.input:
            raise ValueError("the task text needs --input=FILE, a text file or a prepared dataset")
        if not text and (self.input or self.overlap):
            raise ValueError("input and overlap belong to the task text: add it to --tasks, or leave them out")

    def folders(self) -> list:
        """The run directories, each once."""
        return list(dict.fromkeys(filter(None, (name.strip() for name in self.out_dir.split(",")))))

    def task_names(self) -> list:
        """The tasks that `tasks` asks for, each once; lists such as dyt15 are replaced by what they contain."""
        names = filter(None, (name.strip() for name in self.tasks.split(",")))
        return list(dict.fromkeys(task for name in names for task in SUITES.get(name, [name])))
