"""evaluate.py on two processes finds what it finds on one, for texts, answers and the harness's tasks."""

import importlib.util

import pytest
import torch

from support.evaluation import call, keep_caches, make_runs, read, write_tasks
from support.examples import write_records
from support.processes import join_as, processes

pytestmark = pytest.mark.usefixtures("one_thread")
TASKS = ["local_choices", "local_rolling", "local_texts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("processes"))


def on_processes(rank: int, world: int, folder, commands: list) -> None:
    """evaluate.py on this process, one of `world` under torchrun, with each of the command lines {flag: value}."""
    torch.set_num_threads(1)
    for turn, flags in enumerate(commands):
        with pytest.MonkeyPatch.context() as patch:
            join_as(patch, rank, world, folder / f"evaluation.{turn}")
            assert call(**flags) == 0


def assert_same_on_two(folder, run: str, commands: list) -> dict:
    """One process and two find the same; {task: its entry}."""
    commands = [dict(command, out_dir=folder / run, batch_size=2) for command in commands]
    for command in commands:
        assert call(**command) == 0
    one = read(folder / run)
    (folder / run / "evaluation.json").unlink()
    processes(2, on_processes, folder / run, commands)
    two = read(folder / run)
    assert one.keys() == two.keys()
    for task, entry in one.items():
        assert (entry["processes"], two[task]["processes"]) == (1, 2)
        assert entry["metrics"].keys() == two[task]["metrics"].keys() != set()
        for name, value in entry["metrics"].items():
            assert two[task]["metrics"][name] == pytest.approx(value, rel=1e-6), name
    return two


def test_texts_and_answers(folder):
    """Answers of two files with five and one conversations: a process may have none."""
    for name, n in (("five", 5), ("one", 1)):
        records = [dict(prompt=f"{i} π?", response=i % 3 * "Zwölf " + "!") for i in range(n)]
        write_records(folder / "records" / f"{name}.json", records, array=True)
    commands = [dict(tasks="text", input=folder / "data"), dict(tasks="text", input=folder / "text.txt", overlap=5)]
    commands += [dict(tasks="answers", input=folder / "records", template="plain")]
    assert len(assert_same_on_two(folder, "a", commands)) == 2 + 3


@pytest.mark.deep
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="lm_eval is not installed: make install-eval")
def test_tasks_of_the_harness(folder, monkeypatch):
    """Of 5 documents, 3 are the first process's."""
    keep_caches(monkeypatch, folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for the other processes
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    tasks = write_tasks(folder / "tasks")
    found = assert_same_on_two(folder, "b", [dict(tasks=",".join(TASKS), task_folder=tasks, limit=5)])
    assert list(found) == TASKS and {entry["documents"] for entry in found.values()} == {5}
