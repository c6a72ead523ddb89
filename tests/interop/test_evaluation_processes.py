"""evaluate.py on two processes finds what it finds on one, for texts, answers and the harness's tasks."""

import importlib.util
import json

import pytest

from support.evaluation import call, keep_caches, make_runs, on_processes, read, write_tasks
from support.processes import processes

pytestmark = pytest.mark.usefixtures("one_thread")
TASKS = ["local_choices", "local_rolling", "local_texts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("processes"))


def on_one_and_two(folder, run: str, commands: list) -> dict:
    """{task: (its entry on one process, on two)}."""
    commands = [dict(command, out_dir=folder / run, batch_size=2) for command in commands]
    (folder / run / "evaluation.json").unlink(missing_ok=True)
    for command in commands:
        assert call(**command) == 0
    one = read(folder / run)
    (folder / run / "evaluation.json").unlink()
    for meeting in (folder / run).glob("*.meeting"):  # of an earlier test, if torch has not deleted it
        meeting.unlink()
    processes(2, on_processes, folder / run, commands)
    two = read(folder / run)
    assert one.keys() == two.keys()
    return {task: (one[task], two[task]) for task in one}


def assert_same(one, two):
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["metrics"].keys() == two["metrics"].keys() != set()
    for name, value in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(value, rel=1e-6), name


def test_texts(folder):
    commands = [dict(tasks="text", input=folder / "data"), dict(tasks="text", input=folder / "text.txt", overlap=5)]
    found = on_one_and_two(folder, "a", commands)
    assert len(found) == 2
    for one, two in found.values():
        assert_same(one, two)


def test_answers(folder):
    """Of two files with five and one conversations: a process may have none."""
    for name, n in (("five", 5), ("one", 1)):
        records = [dict(prompt=f"{i} π?", response=i % 3 * "Zwölf " + "!") for i in range(n)]
        (folder / "records").mkdir(exist_ok=True)
        (folder / "records" / f"{name}.json").write_text(json.dumps(records))
    found = on_one_and_two(folder, "a", [dict(tasks="answers", input=folder / "records", template="plain")])
    assert len(found) == 3
    for one, two in found.values():
        assert_same(one, two)


@pytest.mark.deep
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="lm_eval is not installed: make install-eval")
def test_tasks_of_the_harness(folder, monkeypatch):
    """Of 5 documents, 3 are the first process's."""
    keep_caches(monkeypatch, folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for the other processes
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    tasks = write_tasks(folder / "tasks")
    found = on_one_and_two(folder, "b", [dict(tasks=",".join(TASKS), task_folder=tasks, limit=5)])
    assert list(found) == TASKS
    for one, two in found.values():
        assert_same(one, two)
        assert one["documents"] == two["documents"] == 5
