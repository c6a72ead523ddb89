"""`sweep.py`: which runs a command line means, what is refused, its table and figure.

That it goes on after a kill, as all that trains by studies/sweep/runner.py: test_reproduce.py."""

import json
import os
import shlex
import shutil
import statistics

import pytest

import sweep
from nanodnt.run.environment import GROUP
from studies.analysis.figure import STYLE, plt
from studies.sweep.grid import SweepConfig
from studies.sweep.results import (
    collect,
    describe_figure,
    draw_curves,
    find_axis,
    new_figure,
    summary_rows,
)
from studies.sweep.runner import Runner, make_run
from support.claims import in_process, points_of
from support.runs import call, column


def test_every_combination_once_in_order(base):
    flags = [
        "--files=config/dnt/s1.py,config/dnt/s5.py+config/optimizers/msgdw.py",
        "--learning_rate=1e-3,0.02",
    ]
    points = points_of(base, *flags, "--beta2=0.9", "--weight_decay=0,1e-4", "--seeds=2")
    assert len(points) == 2 * 2 * 2 * 2 == len({point.run.path for point in points})
    assert [point.seed for point in points[:4]] == [1, 2, 1, 2]
    last = points[-1]
    assert last.run.args[:3] == (str(base), "config/dnt/s5.py", "config/optimizers/msgdw.py")
    values = dict(arg[2:].split("=") for arg in last.run.args[3:])
    rates = dict(learning_rate="0.02", min_lr="0.002")  # a tenth
    assert values == rates | dict(beta2="0.9", weight_decay="0.0001", seed="2")
    assert last.flags == {"learning_rate": "0.02", "weight_decay": "1e-4"}


def test_seeds_are_a_number_or_a_list():
    for text, seeds in (("3", [1, 2, 3]), ("0,5", [0, 5]), ("7,", [7]), ("1", [1])):
        assert SweepConfig(seeds=text).list_seeds() == seeds
    for text in ("0", ",", "a", "1,a", "1,01", "1.5", "101", 30 * "9"):
        with pytest.raises(ValueError, match="seeds="):
            SweepConfig(seeds=text).list_seeds()


def test_min_lr_is_a_tenth_of_a_given_rate_unless_it_is_given(base):
    (one, two) = points_of(base, "--learning_rate=1e-3,1e-2", "--min_lr=1e-4")
    assert (
        {arg for arg in one.run.args if "min_lr" in arg} == {"--min_lr=0.0001"} <= set(two.run.args)
    )
    (only,) = points_of(base, "--learning_rate=1e-3")
    # one more rate is the same schedule
    assert only.run.args == points_of(base, "--learning_rate=1e-3,1e-2")[0].run.args
    (other,) = points_of(base, "--bias")  # a bool needs no value
    assert "--bias=True" in other.run.args and not [
        arg for arg in other.run.args if "min_lr" in arg
    ]


def test_keyword_arguments_of_an_optimizer_are_one_value(base):
    text = "--optimizer_args=betas=(0.9,0.95),eps=1e-8"
    (point,) = points_of(base, "--optimizer=torch.optim:NAdam", "--learning_rate=1e-3", text)
    assert text in point.run.args


def test_files_are_found_from_the_current_folder(base, tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    mine, other = tmp_path / "config" / "mine.py", tmp_path / "config" / "quickstart.py"
    mine.write_text(base.read_text())
    other.write_text("n_layer = 2\n")
    monkeypatch.chdir(tmp_path)
    # an empty choice is none
    without, point = points_of("config/mine.py", "--files=,config/dnt/s5.py")
    assert without.run.args[0] == str(mine) and without.files == ""
    # of the repository, where it is not here
    assert point.run.args[:2] == (str(mine), "config/dnt/s5.py")
    assert points_of("config/quickstart.py", str(base))[0].run.args[0] == str(other)


def test_a_number_written_in_two_ways_is_one_run(tmp_path):
    a, b, c = (
        make_run(tmp_path, ["x.py"], {"learning_rate": lr, "seed": 1})
        for lr in ("1e-3", 0.001, "1.1e-3")
    )
    assert a == b and a.path != c.path
    # nor does the order count
    assert make_run(tmp_path, ["x.py"], {"seed": 1, "learning_rate": "1e-3"}) == a


FILES = "--files=config/dnt/s1.py,config/dnt/s5.py+config/optimizers/msgdw.py"


def test_a_folder_is_named_after_what_varies(base, tmp_path):
    shared = (base, "config/dnt/s2.py", "--weight_decay=0")
    *_, last = points_of(*shared, FILES, "--beta2=0.9,0.99", "--seeds=2", folder=tmp_path)
    name, _, digest = last.run.path.name.rpartition("-")
    assert name == "dnt_s5-optimizers_msgdw-beta20.99-seed2" and len(digest) == 6
    (only,) = points_of(*shared, folder=tmp_path)
    assert only.run.path.name.startswith("seed1-")
    rates = ",".join(f"{k}e-3" for k in range(1, 10))
    many = [f"--lr_ratio_{kind}=1,2" for kind in ("emb", "qk", "vo", "ffn", "norm", "head")]
    points = points_of(base, *many, "--blockwise_lr", f"--learning_rate={rates}", folder=tmp_path)
    names = {point.run.path.name for point in points}
    assert len(names) == len(points) == 576 and max(map(len, names)) == 99


def test_a_folder_keeps_its_name_whatever_varies_later(base, tmp_path):
    """The digest is that of the command, so a run is found again: under a name of before, with all
    files and flags, and when another flag gets a second value."""
    (point,) = points_of(base, "--beta2=0.9", "--seeds=3,", folder=tmp_path)
    old = make_run(tmp_path, [str(base)], {"beta2": "0.9", "seed": 3})
    assert old.path.name.startswith("base-beta20.9-seed3-") and old.args == point.run.args
    for path in (old.path, point.run.path):
        path.mkdir()
        found, other = points_of(base, "--beta2=0.9,0.99", "--seeds=3,", folder=tmp_path)
        assert found.run == old._replace(path=path)
        assert other.run.path.name.startswith("beta20.99-seed3-")
        path.rmdir()


@pytest.mark.parametrize(
    "argv, words",
    [
        (["-beta2=0.9"], "-beta2=0.9: write --beta2=0.9"),
        (["--learning_rate"], "--learning_rate has no value: write --learning_rate=VALUE"),
        (["--seed=1"], "--seed cannot be swept: use --seeds"),
        (
            ["--tokens_per_param=20"],
            "--tokens_per_param cannot be swept: sweep each size by itself",
        ),
        (["--learning_rate=1e-3", "--learning_rate=2e-3"], "--learning_rate is given twice"),
        (["--learning_rate=1e-3,,2e-3"], "--learning_rate cannot be '': it takes float"),
        (["--files=config/dnt/s9.py"], "there is no config file 'config/dnt/s9.py'"),
        (
            ["--leraning_rate=1e-3,2e-3"],
            "unknown flag --leraning_rate (did you mean --learning_rate?)",
        ),
        (["--micro_batch_size=3,4"], "micro_batch_size=3 does not divide"),
        (["--learning_rate=1e-3,-1"], "learning_rate=-1.0 must not be negative"),
        (["--seeds=1337"], "seeds=1337 must be a number n to 100"),
        (["--print=True", "--collect=True"], "print, collect and coordinates do not go together"),
        (["--jobs=-1"], "jobs=-1 must not be negative"),
        (["--format=png,jpg"], "format='png,jpg' must be png, pdf or svg, or several of them"),
        (["--dataset=gone"], "dataset 'gone' is not prepared"),
        (["--beta2=0.9,.9"], "is there twice: give each value and file once"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_run(argv, words, base, tmp_path, capsys):
    assert call(sweep.main, base, f"--out={tmp_path / 'out'}", *argv) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert "error:" in line and words in line
    assert not (tmp_path / "out").exists()


def test_printed_commands_are_those_of_the_runs(base, tmp_path, capsys):
    flags = ["--learning_rate=1e-3,1e-2", "--seeds=2", f"--out={tmp_path}"]
    assert call(sweep.main, base, *flags, "--print=True") == 0
    lines = capsys.readouterr().out.splitlines()
    points = points_of(base, *flags, folder=tmp_path)
    wanted = [
        ["python", "train.py", *p.run.args, "--init_from=auto", f"--out_dir={p.run.path}"]
        for p in points
    ]
    assert list(map(shlex.split, lines)) == wanted
    assert not list(tmp_path.iterdir())


def row(x, seed, loss):
    return dict(
        x=x, seed=seed, loss=loss, outcome="diverged" if loss is None else "finished", run="r"
    )


def test_the_best_is_the_lowest_mean_where_no_seed_diverged_or_is_missing():
    rows = [
        row(1.0, 1, 3.0),
        row(1.0, 2, 2.0),
        row(2.0, 1, 2.2),
        row(2.0, 2, 2.4),
        row(4.0, 1, 1.0),
        row(4.0, 2, None),
    ]
    curves = {"a": [*rows, row(8.0, 1, 0.5)], "b": [], "c": [row(4.0, 1, None)]}
    lines = summary_rows({"axis": "learning_rate", "seeds": 2, "curves": curves})
    assert ", ".join(lines[0]) == (
        ", best learning_rate, loss, lowest to highest, diverged, 1, 2, 4, 8"
    )
    assert ", ".join(lines[1]) == (
        "a, 2, 2.3000, 2.2000 to 2.4000, 1 of 7, 2.5000, 2.3000, diverged, 0.5000"
    )
    assert lines[2] == ["b", *"–––", "0 of 0", *"––––"]
    assert lines[3][:5] == ["c", "–", "–", "–", "1 of 1"]


def test_the_axis_is_the_learning_rate_or_the_first_number(base):
    assert (
        find_axis(points_of(base, "--beta2=0.9,0.99", "--learning_rate=1e-3,1e-2"))
        == "learning_rate"
    )
    assert find_axis(points_of(base, "--norm=rmsnorm,none", "--beta2=0.9,0.99")) == "beta2"
    assert find_axis(points_of(base, "--norm=rmsnorm,layernorm")) == "learning_rate"


def test_curves_are_named_after_files_and_flags(base):
    both = collect(
        points_of(base, "--files=config/dnt/s2.py,", "--beta2=0.9,0.99", "--norm=rmsnorm,dyt"), []
    )["curves"]
    assert list(both) == ["dnt/s2 norm=rmsnorm", "dnt/s2 norm=dyt", "norm=rmsnorm", "norm=dyt"]


def test_what_the_figure_says(monkeypatch):
    """Everything that a reader needs, and nothing on a curve: names and crosses are outside."""
    curves = {"a": {1e-3: [3.0, 2.0], 1e-2: [2.5, None]}, "b": {1e-3: [2.8, 2.9], 1.0: [None] * 2}}
    with plt.rc_context(STYLE):
        figure, (ax,) = new_figure(1)
        title = describe_figure("x", {"seeds": 2, "missing": ["r"]})
        draw_curves(ax, curves, title, "learning_rate", "image")
        figure.canvas.draw()
    assert ax.get_title() == "x\nmean of 2 seeds, bars from lowest to highest; runs missing: 1"
    assert ax.get_xlabel() == "learning rate (log scale)"
    assert ax.get_ylabel() == "validation loss (nats per image)"
    low, high = ax.get_xlim()
    assert low < 1e-3 and high > 1.0  # also where all runs diverged
    assert [text.get_text() for text in ax.texts] == ["× 1 of 2", "× 2 of 2"]
    assert [line.get_ydata().tolist() for line in ax.lines[:2]] == [
        [2.5, 2.5],
        pytest.approx([2.85]),
    ]
    legend = ax.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == ["a", "b", "seeds that diverged"]
    for artist in (legend, ax.title, *ax.texts):
        assert not artist.get_window_extent().overlaps(ax.bbox)
    plt.close()


@pytest.fixture(scope="module")
def swept(base, tmp_path_factory):
    """A sweep in this process: two rates, one of which ruins a model without norms."""
    folder = tmp_path_factory.mktemp("swept")
    with in_process():
        flags = [
            "--norm=none",
            "--pre_norm=none",
            "--weight_decay=0",
            "--learning_rate=1e-3,1e15",
            "--seeds=2",
        ]
        assert call(sweep.main, base, *flags, f"--out={folder}") == 0
    return folder, flags


def test_table_json_and_figure_and_started_again_it_trains_nothing(swept, base, monkeypatch):
    folder, flags = swept
    found = json.loads((folder / "sweep.json").read_text())
    (curve,) = found["curves"].values()
    assert [r["outcome"] for r in curve] == ["finished"] * 2 + ["diverged"] * 2
    losses = [column(folder / r["run"], "val_loss")[20] for r in curve[:2]]
    assert [r["loss"] for r in curve] == [*losses, None, None]
    assert {"torch", "git_commit", "date"} <= set(curve[0]) and {"hardware", "command"} <= set(
        found
    )
    assert found["missing"] == []
    table = (folder / "sweep.md").read_text()
    assert (
        f"{statistics.mean(losses):.4f} | {min(losses):.4f} to {max(losses):.4f} | 2 of 4" in table
    )
    assert "| diverged |" in table.splitlines()[-1]
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    monkeypatch.setattr(Runner, "train", lambda self, run: pytest.fail(f"trains {run.path}"))
    assert call(sweep.main, base, *flags, f"--out={folder}") == 0


def test_runs_that_fail_or_are_refused_are_reported_and_the_others_go_on(
    swept, base, tmp_path, monkeypatch, capsys
):
    folder, flags = swept
    copy = shutil.copytree(folder, tmp_path / "copy")
    runs = [copy / point.run.path.name for point in points_of(base, *flags, folder=copy)]
    record = json.loads((runs[0] / "config.json").read_text())
    record["train"]["max_iters"] = 5
    (runs[0] / "config.json").write_text(json.dumps(record))
    shutil.rmtree(runs[2])

    def fail(self, run):
        raise ValueError(f"made up: {run.path.name}")

    monkeypatch.setattr(Runner, "train", fail)
    assert call(sweep.main, base, *flags, f"--out={copy}") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and f"error: {runs[2].name}: made up: {runs[2].name}" in lines
    assert any(
        line.endswith("was trained with other settings (max_iters 5 → 20): remove it")
        for line in lines
    )
    found = json.loads((copy / "sweep.json").read_text())
    assert [r["run"] for rows in found["curves"].values() for r in rows] == [
        runs[1].name,
        runs[3].name,
    ]
    assert found["missing"] == [runs[0].name, runs[2].name]


def test_runs_made_by_their_printed_commands_are_collected(swept, base, tmp_path, capsys):
    """Here one is missing, and one was killed before it saved."""
    folder, flags = swept
    copy = shutil.copytree(folder, tmp_path / "copy")
    done, killed, missing, diverged = (
        point.run.path for point in points_of(base, *flags, folder=copy)
    )
    os.utime(killed / "last.pt", (1, 1))
    shutil.rmtree(missing)
    assert call(sweep.main, base, *flags, f"--out={copy}", "--collect=True") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"not finished: {killed.name}", f"not finished: {missing.name}"]
    (curve,) = json.loads((copy / "sweep.json").read_text())["curves"].values()
    assert [r["run"] for r in curve] == [done.name, diverged.name]


def test_a_run_is_not_in_the_process_group_of_its_sweep(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    environment = Runner(1).env
    assert environment.keys().isdisjoint(GROUP) and environment["NCCL_DEBUG"] == "INFO"
