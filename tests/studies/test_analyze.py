"""analyze.py end to end, in this process, on tiny runs: files, numbers, what is left out, and what
is refused."""

import io
import json
import math
import re
import shutil
from contextlib import redirect_stdout
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.image import imread

import analyze
from nanodnt.run.metrics import PALETTE, read_formats, save_figure
from studies.analysis import runs as analysis_runs
from studies.analysis.figure import (
    STYLE,
    TYPE_COLORS,
    NotApplicable,
    Panel,
    draw,
    line,
    plain_label,
)
from studies.analysis.pipeline import FIGURES, AnalyzeConfig, measure_runs, round_for_json
from studies.analysis.runs import Batches, CheckpointedRun, pick_evenly
from support import runs as tiny
from support.pages import ROOT, rows_with
from support.tracked import SIX_DIGITS

APPLY = set(FIGURES) - {"alpha", "experts", "tracking"}  # to a DNT run without tracked rows
HG = r"$\hg$"  # a run's name that must not be taken for mathematics
SMALL = ("--tokens=256", "--draws=1", "--device=cpu")


def call(*argv):
    """The exit code of analyze.py for this command line."""
    return tiny.call(analyze.main, *argv)


def record(folder, name):
    # no NaN in JSON
    return json.loads((folder / f"{name}.json").read_text(), parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four runs: a DNT that kept its checkpoints, HG with Mix-LN, DyT, and a mixture of experts
    with tracked rows."""
    folder = tmp_path_factory.mktemp("analyze")
    data = tiny.make_dataset(folder / "data")
    how = dict(dataset=data, track_interval=0)
    plain = how | dict(pre_norm="both", mid_norm="none", input_norm=False, qk_norm=False)
    hg = dict(
        gain="branch", post_norm_blocks=1, tie_weights=False, mlp="swiglu", pos="rope", n_kv_head=1
    )
    experts = dict(n_expert=5, n_expert_shared=1, balance="bias", track_interval=4, keep_every=10)
    with tiny.quick_runs():
        assert tiny.run(**how, out_dir=folder / "dnt", keep_every=10) == 0
        assert tiny.run(**plain, **hg, out_dir=folder / HG) == 0
        assert tiny.run(**plain, norm="dyt", out_dir=folder / "dyt", keep_every=20) == 0
        assert tiny.run(**plain | experts, out_dir=folder / "moe") == 0
    return folder


@pytest.fixture(scope="module")
def drawn(runs):
    """(folder of the results, what was printed) of all figures of the DNT, which must stay as it
    was."""
    before, output = tiny.contents(runs / "dnt"), io.StringIO()
    with redirect_stdout(output):
        assert call(runs / "dnt", *SMALL) == 0
    after = tiny.contents(runs / "dnt")
    assert {name: after[name] for name in before} == before
    return runs / "dnt" / "analysis", output.getvalue()


def test_every_figure_of_one_run(drawn):
    folder, output = drawn
    assert {p.name for p in folder.iterdir()} == {
        f"{name}.{kind}" for name in APPLY for kind in ("png", "json")
    }
    assert "experts is left out: no mixture of experts" in output
    for words in (
        "alpha is left out: no DyT",
        "tracking is left out",
        "sharpness of step_10.pt, 256 tokens, 1 draws",
        "kurtosis",
    ):
        assert words in output
    for name in APPLY:
        image = imread(folder / f"{name}.png")  # (height, width, RGBA)
        assert (
            image.shape[1] >= 900 and image.shape[0] > 200 and len(np.unique(image[::5, ::5])) > 10
        ), name
        found = record(folder, name)
        assert (
            found["figure"] == name
            and found["settings"]["seed"] == 1337
            and list(found["runs"]) == ["dnt"]
        )
        steps = [(m["step"], m["checkpoint"]) for m in found["runs"]["dnt"]]
        assert steps in (
            [(20, "last.pt")],
            [(0, "step_0.pt"), (10, "step_10.pt"), (20, "last.pt")],
        ), name


def test_numbers_of_a_run(runs, drawn):
    last = {name: record(drawn[0], name)["runs"]["dnt"][-1] for name in APPLY}
    weights = tiny.load(runs / "dnt" / "last.pt")["model"]

    assert last["norms"]["types"]["emb"] == pytest.approx(
        weights["wte.weight"].norm().item(), rel=SIX_DIGITS
    )
    rms = weights["final_norm.gain"].square().mean().sqrt().item()
    assert last["gains"]["slots"]["final_norm"]["rms"] == pytest.approx(rms, rel=SIX_DIGITS)
    assert last["gains"]["cosines"] == []
    kinds = last["sharpness"]["types"]
    assert kinds["emb"]["n"] == 50 * 32, "the padding of the vocabulary counts"
    assert all(0 < found["geometric"] <= found["arithmetic"] for found in kinds.values())
    assert last["sharpness"]["tokens"] == 256 and last["sharpness"]["draws"] == 1
    assert last["variance"]["stream"][0] == pytest.approx(1, rel=0.2)  # after the input norm
    assert (
        last["gradients"]["types"]["w1"]["n"] == 2 * 4 * 32 * 32
        and last["gradients"]["tokens"] == 256
    )
    logged = [row["val_loss"] for row in tiny.metrics(runs / "dnt") if "val_loss" in row]
    # of 256 of its 512 tokens
    assert last["removal"]["loss"] == pytest.approx(logged[-1], abs=0.05)
    # a position of each window
    assert last["jacobian"]["tokens"] == 256 and len(last["jacobian"]["positions"]) == 8
    assert (
        len(last["jacobian"]["maps"]["attn"]) == 2
        and len(last["jacobian"]["maps"]["mlp"][0]["map"]) == 32
    )


def open_run(path, **config):
    return CheckpointedRun(
        path, path.name, AnalyzeConfig(device="cpu", **config), torch.device("cpu")
    )


def test_the_same_numbers_twice(runs, drawn):
    names = ["sharpness", "scatter", "jacobian"]  # these sample
    found = round_for_json(measure_runs([open_run(runs / "dnt", tokens=256, draws=1)], names)[0])
    assert found == {name: record(drawn[0], name)["runs"] for name in names}


def test_batches_are_even_parts_of_the_validation_windows(runs, monkeypatch):
    """That a figure is the same of all parts and of one batch: the tests of its measures, with
    `rows`."""
    run, windows = open_run(runs / "dnt"), np.fromfile(runs / "data" / "val.bin", "<u2").astype(int)
    monkeypatch.setattr(analysis_runs, "MICRO_TOKENS", 128)
    for tokens, length, read in (
        (32, 0, 32),
        (1000, 0, 992),
        (10**6, 0, 2976),
        (64, 16, 64),
        (1, 64, 32),
    ):
        batches = Batches(run, tokens, length)
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert (
            batches.count == {"tokens": read}
            and inputs.numel() == read
            and inputs.shape == targets.shape
        )
        assert max(len(x) for x, _ in batches) == min(len(inputs), 4)
        starts = np.array(batches.starts)
        assert (
            len(set(starts)) == len(inputs) and np.ptp(np.diff(starts)) <= 32
            if len(starts) > 1
            else starts == [0]
        )
        for i, start in enumerate(starts):
            text = windows[start : start + inputs.shape[1] + 1].tolist()
            assert inputs[i].tolist() == text[:-1] and targets[i].tolist() == text[1:]
    monkeypatch.setitem(FIGURES, "scatter", FIGURES["scatter"]._replace(tokens=4096, window=16))
    (found,) = measure_runs([run], ["scatter"])[0]["scatter"]["dnt"]
    assert (
        found["tokens"] == 2976 // 32 * 16
        and len(set(found["slots"]["final_norm"]["token"])) > 1000
    )


@pytest.mark.house
def test_the_help_and_the_page_say_what_a_figure_reads(capsys):
    assert call("--help") == 0
    said = " ".join(capsys.readouterr().out.split()).split("for a CPU: ")[1].split(" (these")[0]
    defaults = {}
    for names, number in re.findall(r"([a-z, ]+?) (\d[\d,]*\d)", said):
        defaults |= dict.fromkeys(re.findall(r"[a-z]+", names), int(number.replace(",", "")))
    assert defaults == {name: figure.tokens for name, figure in FIGURES.items() if figure.tokens}
    rows = rows_with((ROOT / "docs/analysis.md").read_text(), "tokens")
    stated = {row["figure"].strip("`"): int(row["tokens"].replace(",", "") or 0) for row in rows}
    assert stated == {name: figure.tokens for name, figure in FIGURES.items()}


def test_angular_distance_is_drawn_over_the_block_and_n():
    """At (ℓ, n) the distance between what enters block ℓ and block ℓ + n, and nothing where there
    is none."""
    d = [[abs(a - b) / 10 + max(a, b) / 100 for b in range(4)] for a in range(4)]  # of 3 blocks
    ax, bar = draw({"a": FIGURES["angular"].panels([{"step": 1, "distance": d}])}).axes
    (image,) = ax.images
    for (i, block), value in np.ndenumerate(image.get_array().filled(math.nan)):  # n = i + 1
        assert value == d[block][block + i + 1] if block + i < 3 else math.isnan(value)
    assert list(image.get_extent()) == [0.5, 3.5] * 2 and image.get_clim() == (0, 1)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("block ℓ", "a\nn") and "arccos" in ax.get_title()
    plt.close()


def test_lines_in_one_place_have_one_scale():
    def rows(*highest):
        return [[Panel("", "step", [line([0, 1], [0, y])])] for y in highest]

    figure = draw({"a": rows(1, 10), "b": rows(2, 20)})
    assert [round(ax.get_ylim()[1]) for ax in figure.axes] == [2, 2, 21, 21]  # with a margin
    plt.close()


def made_up(*labels):
    """Rows of panels: two that stay a run's own, one that compares runs."""
    lines = [line([0, 1], [i, i + 1], label=label) for i, label in enumerate(labels)]
    own = [Panel("own", "step", lines), Panel("also own", "step", lines)]
    return [own, [Panel("compared", "block", lines, by_run=True)]]


def test_runs_are_compared_in_one_panel_with_one_color_each():
    """A panel for each label, a color for each run of the command, also of one that is not in this
    figure. In panels of a run's own each label has one color, in all runs."""
    runs = {"b": made_up("qk", "x"), "c": made_up("y", "x")}
    figure = draw(runs, ["a", "b", "c"])
    axes = figure.axes
    titles = ["own", "also own"] * 2 + [f"compared\n{label}" for label in ("qk", "x", "y")]
    assert [ax.get_title() for ax in axes] == titles
    colors = [[to_hex(line.get_color()).upper() for line in ax.lines] for ax in axes]
    assert colors[0] == [TYPE_COLORS["qk"], colors[2][1]] and len({*colors[0], *colors[2]}) == 3
    b, c = PALETTE[1:3]
    assert colors[4:] == [[b], [b, c], [c]]
    assert [ax.get_ylabel() for ax in axes[:4:2]] == ["b\n", "c\n"]
    plt.close()
    one = draw({"b": made_up("qk", "x")})
    assert len(one.axes) == 3 and not one.legends
    plt.close()


def test_legends_cover_no_curve():
    names = [f"_run_{i} with a long name" for i in range(3)]
    labels = [f"a long label {i}" for i in range(7)]
    with plt.rc_context(STYLE | {"figure.constrained_layout.use": True}):
        figure = draw({plain_label(name): made_up(*labels) for name in names})
        figure.canvas.draw()
    legends = [ax.get_legend() for ax in figure.axes if ax.get_legend()] + figure.legends
    assert [len(legend.get_texts()) for legend in legends] == [7, 7, 3]
    for legend in legends:
        box = legend.get_window_extent()
        assert figure.bbox.y0 <= box.y0 and not [a for a in figure.axes if box.overlaps(a.bbox)]
    plt.close()


def test_vector_files_have_text_as_text_and_the_same_bytes_twice(tmp_path):
    found = []
    for name in ("a", "b"):
        figure = draw({"run": made_up("label")})
        save_figure(figure, tmp_path / f"{name}.png", read_formats("svg,pdf"))
        found.append([(tmp_path / f"{name}.{kind}").read_bytes() for kind in ("svg", "pdf")])
    assert found[0] == found[1] and not list(tmp_path.glob("*.png"))
    svg, pdf = found[0]
    assert b">compared</text>" in svg and b"<dc:date>" not in svg
    assert b"/CIDFontType2" in pdf and b"/Type3" not in pdf and b"CreationDate" not in pdf


@pytest.mark.parametrize("names", ["alpha,gains", pytest.param("all", marks=pytest.mark.deep)])
def test_runs_side_by_side(runs, capsys, tmp_path, names):
    out = tmp_path / "out"
    paths = (runs / "dnt", runs / HG, runs / "dyt")
    assert call(*paths, *SMALL, "--snapshots=2", f"--figures={names}", f"--out={out}") == 0
    output = capsys.readouterr().out
    assert "baseline" in output and ("kurtosis" in output) == (names == "all")
    wanted = {"loss", *(APPLY | {"alpha"} if names == "all" else names.split(","))}
    assert {p.stem for p in out.glob("*.png")} == wanted
    assert (out / "report.md").read_text().count("](") == len(wanted)
    assert list(record(out, "gains")["runs"]) == ["dnt", HG, "dyt"]
    if names == "all":
        types = set(record(out, "sharpness")["runs"][HG][-1]["types"])
        assert types == {"emb", "head", "qk", "vo", "ffn", "norm"}
    assert list(record(out, "alpha")["runs"]) == ["dyt"]
    first, last = record(out, "alpha")["runs"]["dyt"]
    assert (first["step"], last["step"]) == (0, 20) and -1 <= last["pearson_r"] <= 1
    assert first["pearson_r"] is None  # all α are the same at first
    cosines = record(out, "gains")["runs"][HG][-1]["cosines"]
    # Mix-LN's first block has no pre norm
    assert cosines[0]["qk"] is None and 0.9 < cosines[1]["qk"] <= 1


@pytest.mark.parametrize(
    "names", ["experts,tracking,norms", pytest.param("all", marks=pytest.mark.deep)]
)
def test_a_mixture_of_experts(runs, tmp_path, names):
    """The load of experts is drawn as it was logged; other figures know the router, and the experts
    as FFNs."""
    assert (
        call(runs / "moe", *SMALL, "--snapshots=2", f"--figures={names}", f"--out={tmp_path}") == 0
    )
    wanted = set(FIGURES) - {"alpha"} if names == "all" else set(names.split(","))
    assert {p.stem for p in tmp_path.glob("*.png")} == wanted
    (found,) = record(tmp_path, "experts")["runs"]["moe"]
    rows = {row["step"]: row["track"] for row in tiny.metrics(runs / "moe") if "track" in row}
    assert found["steps"] == list(rows) == [4, 8, 12, 16, 20] and found["experts"] == 5
    for i, track in enumerate(rows.values()):
        assert found["entropy"][i] == track["router_entropy"] and len(track["load"]) == 2
        for block, load in enumerate(track["load"]):
            assert found["load"][str(block + 1)][i] == pytest.approx(
                [5 * x for x in load], rel=SIX_DIGITS
            )
            assert sum(load) == pytest.approx(1, rel=SIX_DIGITS)
            extremes = [found[name][i][block] for name in ("largest", "smallest")]
            assert extremes == pytest.approx([5 * max(load), 5 * min(load)], rel=SIX_DIGITS)
    (tracked,) = record(tmp_path, "tracking")["runs"]["moe"]
    for i, track in enumerate(rows.values()):
        assert all(
            tracked[key][i] == track[key]
            for key in ("grad_kurtosis", "logit_max", "block_norm", "embedding")
        )
        _, low, high = track["gain"]["final_norm"]
        assert tracked["gain_range"][i]["final_norm"] == pytest.approx(high - low, rel=SIX_DIGITS)
    weights = tiny.load(runs / "moe" / "last.pt")["model"]
    router = torch.cat([weights[f"blocks.{i}.mlp.f.router.weight"] for i in range(2)]).norm().item()
    assert record(tmp_path, "norms")["runs"]["moe"][-1]["types"]["router"] == pytest.approx(
        router, rel=SIX_DIGITS
    )
    if names == "all":
        types = record(tmp_path, "gradients")["runs"]["moe"][-1]["types"]
        assert types["w1"]["n"] == types["w2"]["n"] == 2 * (5 + 1) * 4 * 32 * 32
        assert "router" in record(tmp_path, "sharpness")["runs"]["moe"][-1]["types"]


def test_the_figures_of_tracked_numbers_at_their_edges(tmp_path):
    """A single row, an expert without a token, a gradient and a load that are not finite; and no
    row at all."""
    load = [[0.0, 1.0], [None, None]]
    track = {key: {"qk": None} for key in ("grad_norm", "grad_kurtosis", "update_ratio")}
    track |= dict(
        stream_var=[1.0, 2.0, 3.0], logit_max=[1.0, 2.0], gain={"a": [1.0, None, None]}, load=load
    )
    norms = dict.fromkeys(("q", "k", "v", "o", "w1", "w2"), [1.0, 2.0]) | dict.fromkeys(
        ("attn_gain", "mlp_gain"), [None]
    )
    track |= dict(
        block_norm=norms,
        embedding=dict(rows=5, smallest=0.5, gain=None),
        router_entropy=[0.5, None],
    )
    row = {"step": 3, "tokens": 1, "track": track}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    run, model = (
        SimpleNamespace(folder=tmp_path),
        SimpleNamespace(config=SimpleNamespace(n_expert=2)),
    )
    for name in ("experts", "tracking"):
        draw({"a": FIGURES[name].panels([FIGURES[name].measure(model, None, run)])}).canvas.draw()
        plt.close()
    del row["track"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(NotApplicable, match="no tracked rows"):
        FIGURES["tracking"].measure(model, None, run)


def test_one_checkpoint(runs, tmp_path):
    assert call(runs / "dnt" / "step_10.pt", *SMALL, "--figures=removal", f"--out={tmp_path}") == 0
    (found,) = record(tmp_path, "removal")["runs"].values()
    assert [(m["step"], m["checkpoint"]) for m in found] == [(10, "step_10.pt")]


def test_spread_is_even_and_keeps_the_ends():
    assert pick_evenly([0, 1, 2], 3) == [0, 1, 2]
    assert pick_evenly(list(range(100)), 6) == [0, 20, 40, 59, 79, 99]
    assert pick_evenly(list(range(5)), 1) == [4]


def test_json_has_no_nan():
    assert round_for_json({"a": [math.nan, (math.inf, 1.23456789)], "b": 3}) == {
        "a": [None, [None, 1.23457]],
        "b": 3,
    }


def refuse(capsys, *argv, code=1) -> str:
    """The one line on stderr of a command line that is refused."""
    capsys.readouterr()
    assert call(*argv, "--device=cpu") == code
    output = capsys.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1, output
    return output


@pytest.mark.parametrize(
    "flag, says",
    [
        (
            dict(figures="gains,propositions"),
            "has .'propositions'.: allowed are all, .*gradients, sharpness",
        ),
        (dict(tokens=0), "tokens=0 must be at least 1"),
        (dict(format="jpg"), "format='jpg' must be png, pdf or svg, or several of them"),
        (dict(seed=-1), "seed=-1"),
    ],
)
def test_flags_that_mean_nothing(flag, says):
    with pytest.raises(ValueError, match=says):
        AnalyzeConfig(**flag)


def test_runs_that_are_none(runs, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.pt").write_bytes(b"no checkpoint")
    for argv, says in (
        ((), "no run is named"),
        ((tmp_path / "nowhere",), "there is no"),
        ((tmp_path / "empty",), "neither last.pt nor step_N.pt"),
        ((tmp_path / "file.pt",), "cannot be read as a checkpoint"),
        ((runs / "dnt", runs / "dnt"), "given twice"),
        ((runs / "dnt", "--dataset=nowhere"), "is not prepared"),
        (
            (runs / "dnt", "--figures=alpha,tracking"),
            "nothing to draw: dnt: alpha is left out: no DyT",
        ),
        ((runs / "dnt", f"--out={tmp_path / 'file.pt'}"), "choose another --out"),
        ((runs / "dnt", runs / "dyt", "--baseline=pre", f"--out={tmp_path}"), "baseline"),
        ((runs / "dnt", "--baseline=dnt"), "baseline is for runs compared"),
    ):
        assert says in refuse(capsys, *argv)
    assert "did you mean --figures" in refuse(capsys, runs / "dnt", "--figure=norms", code=2)


def test_another_dataset(runs, capsys, tmp_path):
    """Another alphabet is refused; another text is noted."""
    other = tiny.make_dataset(tmp_path / "alphabet", alphabet=40)
    output = refuse(capsys, runs / "dnt", f"--dataset={other}")
    assert "chars, 40 tokens" in output and "choose another dataset" in output
    other = tiny.make_dataset(tmp_path / "text", seed=1)
    open_run(runs / "dnt", dataset=str(other))
    assert "has another validation split than the data of its training" in capsys.readouterr().out


def test_only_what_was_kept_is_there(runs, tmp_path, capsys):
    """Without last.pt the kept checkpoints are used; without both there is an error."""
    shutil.copytree(
        runs / "dnt", tmp_path / "run", ignore=shutil.ignore_patterns("last.pt", "analysis")
    )
    assert [path.name for path in open_run(tmp_path / "run").snapshots] == [
        f"step_{n}.pt" for n in (0, 10, 20)
    ]
    for path in (tmp_path / "run").glob("step_*.pt"):
        path.unlink()
    assert "best.pt" in refuse(capsys, tmp_path / "run")


@pytest.mark.parametrize("where", ["measure", "panels"])
def test_a_figure_that_fails_does_not_lose_the_others(where, runs, tmp_path, monkeypatch, capsys):
    """Neither as it is measured nor as it is drawn. It is named in one line."""

    def fail(*_):
        raise RuntimeError("a singular\nmatrix")

    monkeypatch.setitem(FIGURES, "gains", FIGURES["gains"]._replace(**{where: fail}))
    assert (
        call(runs / "dnt", "--figures=norms,gains,logits", f"--out={tmp_path}", "--tokens=256") == 1
    )
    what = "dnt: gains" if where == "measure" else "gains"
    printed = capsys.readouterr()
    assert printed.err == f"error: {what} is not drawn: RuntimeError: a singular matrix\n"
    assert {path.stem for path in tmp_path.glob("*.json")} == {"norms", "logits"}
    assert f"{tmp_path}/norms.png\n{tmp_path}/logits.png\n" in printed.out


def test_ctrl_c_in_a_figure_ends_the_command(runs, tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(FIGURES, "norms", FIGURES["norms"]._replace(measure=interrupt))
    assert call(runs / "dnt", "--figures=norms,gains", f"--out={tmp_path}") == 130
    assert capsys.readouterr().err == "interrupted\n" and list(tmp_path.glob("*")) == []
