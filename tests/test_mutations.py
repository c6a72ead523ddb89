"""Damaged and hostile files of every kind, drawn by hypothesis: each one loads as it was meant to or is refused in one
line, no code in it ever runs, and a refusal leaves an earlier run as it was.

Every example starts from the same tiny run. Examples that a user would meet through a program go through it.
"""

import contextlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import warnings
import zipfile
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import helpers
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import loader
import rundir
import sample
import summary
import train
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = helpers.TINY | dict(n_layer=1, n_embd=16, block_size=16, batch_size=4, warmup_iters=1)
TRAIN |= dict(max_iters=3, eval_interval=1, eval_tokens=64)
SAMPLE = dict(start="AB", max_new_tokens=4, num_samples=2, device="cpu", dtype="float32")
ROOM = 2 << 30  # bytes of address space that a program under test may take beside what is mapped already
PATIENCE_S = 20  # after which it hangs, as far as a user can tell


def examples(n):
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=n, deadline=None, database=None, suppress_health_check=checks)


# ------------------------------------------------------------------------------------------------------- the stage


class World(NamedTuple):
    tmp: Path  # a folder that holds:
    run: Path  # a run of 3 steps
    data: Path  # its dataset


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("earlier")
    world = World(tmp, tmp / "run", helpers.make_dataset(tmp / "data"))
    assert helpers.run(**TRAIN, out_dir=world.run, dataset=world.data) == 0
    return world


@pytest.fixture(scope="module")
def original(earlier):
    """A function that reads the checkpoint of `earlier`, without the code under test. (A function, like the next, so
    that hypothesis does not print all of it.)"""
    return lambda name="last.pt": helpers.load(earlier.run / name)


@pytest.fixture(scope="module")
def file(earlier):
    """A function that reads the bytes of that file."""
    return lambda name="last.pt": (earlier.run / name).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


DRAW_LOSS = rundir.draw_loss


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Runs that do not draw loss.png, a quarter of a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rundir, "draw_loss", lambda *_: None)
        yield


@contextlib.contextmanager
def copy(earlier):
    """A World to spoil; it is the working directory meanwhile."""
    tmp = earlier.tmp.with_name("copy")
    shutil.copytree(earlier.tmp, tmp)
    try:
        with contextlib.chdir(tmp) if hasattr(contextlib, "chdir") else pytest.MonkeyPatch.context() as patch:
            if patch:
                patch.chdir(tmp)  # Python 3.10
            yield World(tmp, tmp / "run", tmp / "data")
    finally:
        shutil.rmtree(tmp)


class Hangs(BaseException):
    pass


@contextlib.contextmanager
def limits():
    """Little memory and time: a file of some kilobytes is no reason to take gigabytes or minutes."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def give_up(*_):
        raise Hangs(f"no answer in {PATIENCE_S} s")

    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def call(program, *argv, **flags) -> Outcome:
    """`program` in this process, as python PROGRAM.py runs it. Whatever it raises is a traceback, and raised here."""
    argv = [f"{program.__name__}.py", *map(str, argv), *(f"--{name}={value}" for name, value in flags.items())]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, limits(), warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")  # a program would print them on stderr
        patch.setattr(sys, "argv", argv)
        patch.setattr(rundir, "run_record", dict)  # asks git, in two processes
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = program.main()
            except SystemExit as e:
                code = e.code
    assert not [w for w in shown if issubclass(w.category, (UserWarning, RuntimeWarning, FutureWarning))], shown[0]
    return Outcome(code, out.getvalue(), err.getvalue())


def assert_one_line(text):
    assert text.strip() and len(text.strip().splitlines()) == 1 and len(text) < 5000, text


def message(error):
    """What a program prints of a ValueError: runtime.report makes it one line."""
    return " ".join(str(error).split())


def loads_or_is_refused(before, after, outcome):
    """Whether it went well; if not, one line said why, and nothing changed."""
    if outcome.code == 0:
        assert outcome.err == ""
        return True
    assert outcome.code in (1, 2) and outcome.err.startswith("error: "), outcome
    assert_one_line(outcome.err)
    assert "out of memory" not in outcome.err, outcome.err  # small files ask for too much: say what is wrong with them
    assert after == before
    return False


def resume(world, **flags):
    before = helpers.files(world.run)
    outcome = call(train, **(TRAIN | dict(init_from="resume", out_dir=world.run, dataset=world.data) | flags))
    return loads_or_is_refused(before, helpers.files(world.run), outcome)


def speak(world, **flags):
    before = helpers.files(world.run)
    outcome = call(sample, **(SAMPLE | dict(out_dir=world.run, checkpoint="last.pt") | flags))
    return loads_or_is_refused(before, helpers.files(world.run), outcome)


def plain(value):
    """`value` with every tensor as (kind, dtype, shape, bytes) and every float by its bits: == then means the same."""
    if isinstance(value, torch.Tensor):
        return (str(value.device), value.layout, value.dtype, tuple(value.shape), value.detach().numpy().tobytes())
    if isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value).__name__, [(plain(k), plain(v)) for k, v in pairs]
    return type(value).__name__, value.hex() if isinstance(value, float) else value


def changes(loaded, original):
    """Names of what a checkpoint does not hold exactly as it was saved. (What older versions did not save is more.)"""
    return [key for key in original if key not in loaded or plain(loaded[key]) != plain(original[key])]


def load(path):
    """rundir.load_checkpoint's answer, or None where it refuses."""
    try:
        with limits(), warnings.catch_warnings():
            warnings.simplefilter("error")
            return rundir.load_checkpoint(path)
    except ValueError as e:
        assert_one_line(message(e))
        assert str(path) in str(e)


# ------------------------------------------------------------------------------------------ bytes of a checkpoint

SIGNATURES = (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")


def landmarks(raw):
    """Where the zip's headers, directory entries and end records begin."""
    return sorted({m.start() for s in SIGNATURES for m in re.finditer(re.escape(s), raw)})


def damage(draw, raw):
    """`raw` with one to three injuries, half of them near the zip's own structures."""
    places = landmarks(raw)
    for _ in range(draw(st.integers(1, 3))):
        if not raw:
            break
        near = st.builds(int.__add__, st.sampled_from(places), st.integers(0, 120))
        at = min(draw(st.one_of(st.integers(0, len(raw) - 1), near)), len(raw) - 1)
        end = min(at + draw(st.one_of(st.integers(1, 8), st.integers(1, 20_000))), len(raw))
        match draw(st.sampled_from(["flip", "overwrite", "zeros", "cut", "insert", "drop", "twice", "move", "number"])):
            case "flip":
                raw = raw[:at] + bytes([raw[at] ^ 1 << draw(st.integers(0, 7))]) + raw[at + 1 :]
            case "overwrite":
                new = draw(st.binary(min_size=1, max_size=64))
                raw = raw[:at] + new + raw[at + len(new) :]
            case "zeros":
                raw = raw[:at] + bytes(end - at) + raw[end:]
            case "cut":
                raw = raw[:at]
            case "insert":
                raw = raw[:at] + draw(st.binary(min_size=1, max_size=64)) + raw[at:]
            case "drop":
                raw = raw[:at] + raw[end:]
            case "twice":
                raw = raw[:end] + raw[at:end] + raw[end:]
            case "move":
                to = draw(st.integers(0, len(raw)))
                raw = raw[:to] + raw[at:end] + raw[to + end - at :]
            case "number":  # a size, an offset, a checksum
                number = draw(st.sampled_from([0, 1, 255, 2**16 - 1, 2**31 - 1, 2**32 - 1, len(raw)]))
                raw = raw[:at] + number.to_bytes(4, "little") + raw[at + 4 :]
    return raw


@examples(250)
@given(data=st.data())
def test_a_checkpoint_of_damaged_bytes(file, original, scratch, data):
    path = scratch / "damaged.pt"
    path.write_bytes(damage(data.draw, file()))
    loaded = load(path)
    if loaded is not None:
        assert loaded["path"] == path and not changes(loaded, original())


@examples(40)
@given(data=st.data())
def test_the_latest_of_two_where_one_or_both_are_damaged(earlier, file, original, scratch, data):
    """A damaged last.pt means prev.pt and a warning; and where nothing is left, a refusal that names both."""
    whole = {name: file(name) for name in ("last.pt", "prev.pt")}
    hurt = data.draw(st.sets(st.sampled_from(sorted(whole)), min_size=1))
    for name, raw in whole.items():
        (scratch / name).write_bytes(damage(data.draw, raw) if name in hurt else raw)
    good = {name: load(scratch / name) is not None for name in whole}
    said = []
    if not any(good.values()):
        with pytest.raises(ValueError, match="last.pt.*prev.pt.*nothing to resume"):
            rundir.load_latest(scratch, said.append)
        return
    loaded = rundir.load_latest(scratch, said.append)
    name = "last.pt" if good["last.pt"] else "prev.pt"
    assert loaded["path"] == scratch / name and not changes(loaded, original(name))
    assert [("warning" in line, "step 2" in line) for line in said] == [(True, True)] * (not good["last.pt"])


def rezipped(raw, compression, names=None, double=False):
    """The archive written anew by another program, as unzipping and zipping a checkpoint does."""
    new = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(new, "w", compression) as archive:
        for item in old.infolist():
            content = old.read(item)
            if double and item.filename.endswith("/data/0"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    archive.writestr(item.filename, bytes(len(content)))
            archive.writestr(names(item.filename) if names else item.filename, content)
    return new.getvalue()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize(
    "how",
    [dict(), dict(double=True), dict(names=lambda n: n.replace("archive/", "last/"))],
    ids=["as is", "one twice", "renamed"],
)
def test_a_checkpoint_zipped_anew(file, original, scratch, compression, how):
    path = scratch / "zipped.pt"
    path.write_bytes(rezipped(file(), compression, **how))
    loaded = load(path)
    if loaded is not None:
        assert not changes(loaded, original())


# ---------------------------------------------------------------------------------- what a checkpoint's dict holds


def holders(value, kinds=(dict, list)):
    """Every dict and list in a tree, the tree itself first."""
    if isinstance(value, kinds):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from holders(part, kinds)


def rebuilt(value):
    """The dicts and lists of a tree anew, the leaves as they are."""
    if isinstance(value, dict):
        return {k: rebuilt(v) for k, v in value.items()}
    return [rebuilt(v) for v in value] if isinstance(value, list) else value


HUGE = [2**31, 2**40, 2**62, 2**63, 10**30, -1, -(10**30)]
NUMBERS = st.one_of(
    st.integers(-3, 100),
    st.sampled_from(HUGE),
    st.floats(),
    st.sampled_from([float("nan"), float("inf"), 1e300, -1e-9]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["scratch", "muon", "rope"]))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def strange(like):
    """A tensor of `like`'s shape, or nearly, that is no ordinary float32 tensor."""
    like = torch.as_tensor(like, dtype=torch.float32)
    dtypes = (torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64)
    made = [lambda: like.to("meta"), lambda: like.to_sparse(), lambda: torch.nn.Parameter(like.clone())]
    made += [lambda: like.unsqueeze(0), lambda: like.flatten()[:-1], lambda: torch.zeros(0), lambda: torch.tensor(1.0)]
    made += [lambda: torch.zeros(1).expand(like.shape), lambda: torch.zeros(1).expand(2**40)]
    made += [lambda: like.reshape(-1, 2).t(), lambda: like.clone().requires_grad_()]
    made += [lambda: torch.nested.nested_tensor([like, like])]
    made += [lambda d=d: like.to(d) for d in dtypes]
    return made


def one_of(draw, options):
    """One of `options`, drawn by its number: a failure then prints the number, not tensors."""
    options = list(options)
    return options[draw(st.integers(0, len(options) - 1))]


def changed(draw, tree):
    """`tree` with one or two changes anywhere in it, top levels as likely as deep ones."""
    tree = rebuilt(tree)
    for _ in range(draw(st.integers(1, 2))):
        every = [holder for holder in holders(tree) if holder]
        if not every:
            break
        top = [part for part in tree.values() if isinstance(part, (dict, list)) and part]
        holder = one_of(draw, [tree, one_of(draw, top or every), one_of(draw, every)])
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        key, other = one_of(draw, keys), one_of(draw, keys)
        match draw(st.sampled_from(["drop", "leaf", "leaf", "json", "rename", "swap", "tensor", "more"])):
            case "drop":
                del holder[key]
            case "leaf":
                holder[key] = draw(LEAVES)
            case "json":
                holder[key] = draw(JSON)
            case "rename" if isinstance(holder, dict):
                new = one_of(draw, [other, f"_orig_mod.{key}", draw(LEAVES)])
                holder[new] = holder.pop(key)
            case "more" if isinstance(holder, dict):
                holder[draw(LEAVES)] = draw(JSON)
            case "tensor":
                like = holder[key] if torch.is_tensor(holder[key]) else torch.ones(4, 4)
                try:
                    holder[key] = one_of(draw, strange(like))()
                except RuntimeError:  # it has no such form
                    assume(False)
            case _:
                holder[key], holder[other] = holder[other], holder[key]
    return tree


def saved(path, content):
    path.unlink(missing_ok=True)  # last.pt and best.pt may be one file
    try:
        torch.save(content, path)
    except Exception:  # no checkpoint, then
        assume(False)


def model_of(path):
    """GPT.from_checkpoint's answer, or None where it or the load refuses."""
    loaded = load(path)
    if loaded is None:
        return None
    try:
        with limits(), warnings.catch_warnings():
            warnings.simplefilter("error")
            return GPT.from_checkpoint(loaded)
    except ValueError as e:
        assert_one_line(message(e))


@examples(120)
@given(data=st.data())
def test_a_checkpoint_of_changed_content(original, scratch, data):
    content = changed(data.draw, original())
    saved(scratch / "changed.pt", content)
    model = model_of(scratch / "changed.pt")
    if model is not None:
        weights = {str(name).removeprefix("_orig_mod."): p for name, p in content["model"].items()}
        for name, p in model.state_dict().items():
            assert torch.equal(p.to(weights[name].dtype), weights[name]), name
        with contextlib.suppress(ValueError):  # a refusal
            loader.Tokenizer(rundir.load_checkpoint(scratch / "changed.pt")["meta"])


SIZES = (
    "n_layer",
    "n_head",
    "n_embd",
    "block_size",
    "vocab_size",
    "n_kv_head",
    "n_ff",
    "norm_groups",
    "post_norm_blocks",
)


@examples(60)
@given(data=st.data())
def test_a_model_config_that_the_weights_do_not_have(original, scratch, data):
    """Whatever sizes it names, memory and time go to what the file holds."""
    content = rebuilt(original())
    config = content["model_config"]
    for name in data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2, unique=True)):
        config[name] = data.draw(
            st.sampled_from([0, 1, 2, 3, 16, 64, 1000, 10**5, 10**6, 10**9, 2**31, 2**62, 2**63, 10**30])
        )
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(config)))
        config[name] = data.draw(LEAVES)
    saved(scratch / "sizes.pt", content)
    model = model_of(scratch / "sizes.pt")
    if model is not None:
        assert not helpers.different(model.state_dict(), original()["model"])


@examples(20)
@given(data=st.data())
def test_resuming_from_changed_content(earlier, original, data):
    content = changed(data.draw, original())
    half = data.draw(st.booleans())  # of the time prev.pt is whole
    with copy(earlier) as world:
        saved(world.run / "last.pt", content)
        if not half:
            saved(world.run / "prev.pt", content)
        if resume(world, max_iters=4):
            assert all(row["step"] >= 0 for row in rundir.read_metrics(world.run))
            assert load(world.run / "last.pt") is not None


COUNTS = (
    "step",
    "tokens",
    "skipped",
    "evaluated",
    "best_val_loss",
    "pending",
    "wandb_id",
    "scaler",
    "train_config",
    "meta",
    "recent",
    "shift",
    "rollbacks",
)


@examples(25)
@given(data=st.data())
def test_resuming_with_other_counts(earlier, original, data):
    """The plain values of a checkpoint, which have no shape to give them away."""
    content = rebuilt(original())
    name = data.draw(st.sampled_from(COUNTS))
    value = content[name]
    if isinstance(value, dict):
        few = st.dictionaries(st.sampled_from(["step", "lr", "scale"]), JSON)
        content[name] = changed(data.draw, value) if value else data.draw(few)
    else:
        content[name] = data.draw(st.one_of(NUMBERS, JSON))
    with copy(earlier) as world:
        saved(world.run / "last.pt", content)
        (world.run / "prev.pt").unlink()
        if resume(world, max_iters=4, dtype=data.draw(st.sampled_from(["float32", "float32", "float16"]))):
            assert all(row["step"] >= 0 for row in rundir.read_metrics(world.run))  # what a next resume needs
            for line in (world.run / "metrics.jsonl").read_text().splitlines():
                json.loads(line, parse_constant=pytest.fail)


@examples(20)
@given(data=st.data())
def test_weights_or_text_from_changed_content(earlier, original, data):
    content = changed(data.draw, original())
    with copy(earlier) as world:
        saved(world.run / "last.pt", content)
        if data.draw(st.booleans()):
            speak(world)
        else:
            resume(world, init_from=world.run / "last.pt", out_dir=world.tmp / "new", max_iters=1)


# -------------------------------------------------------------------------------------------------------- pickles


class Evil:
    """Unpickled without care, it makes the file `marker`."""

    def __init__(self, marker, how):
        self.call = {
            "system": (os.system, (f"touch {marker}",)),
            "open": (open, (str(marker), "w")),
            "exec": (exec, (f"open({str(marker)!r}, 'w')",)),
            "eval": (eval, (f"open({str(marker)!r}, 'w')",)),
            "touch": (Path.touch, (Path(marker),)),
            "popen": (subprocess.getoutput, (f"touch {marker}",)),
            "torch": (torch.save, (1, str(marker))),
            "numpy": (np.save, (str(marker), 1)),
            "reduce": (reduce, (exec, [f"open({str(marker)!r}, 'w')", {}])),
        }[how]

    def __reduce__(self):
        return self.call


HOWS = ["system", "open", "exec", "eval", "touch", "popen", "torch", "numpy", "reduce"]


class Array(np.ndarray):
    pass


def as_jit(content, path, protocol):
    """A TorchScript archive with the evil pickle where its constants are."""
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    replaced(
        path, path, {"data.pkl": pickle.dumps(content, protocol), "constants.pkl": pickle.dumps(content, protocol)}
    )


def replaced(source, path, records):
    """The zip archive `source` with other contents of some records, and checksums that fit."""
    out = io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.infolist():
            new.writestr(item.filename, records.get(item.filename.rpartition("/")[2], old.read(item)))
    path.unlink(missing_ok=True)
    path.write_bytes(out.getvalue())


def as_tar(content, path, protocol):
    raw = pickle.dumps(content, protocol)
    with tarfile.open(path, "w") as tar:
        for name in ("storages", "tensors", "pickle", "data.pkl"):
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


def as_numpy(content, path, protocol):
    with open(path, "wb") as f:
        np.save(f, np.array([content, content], dtype=object), allow_pickle=True)


DISGUISES = {
    "torch.save": lambda content, path, protocol: torch.save(content, path, pickle_protocol=max(2, protocol)),
    "torch.save, legacy": lambda content, path, protocol: torch.save(
        content, path, pickle_protocol=max(2, protocol), _use_new_zipfile_serialization=False
    ),
    "pickle": lambda content, path, protocol: path.write_bytes(pickle.dumps(content, protocol)),
    "pickle of a pickle": lambda content, path, protocol: path.write_bytes(
        pickle.dumps(pickle.dumps(content, protocol))
    ),
    "data.pkl alone": lambda content, path, protocol: replaced(
        path, path, {"data.pkl": pickle.dumps(content, protocol)}
    ),
    "byteorder": lambda content, path, protocol: replaced(path, path, {"byteorder": pickle.dumps(content, protocol)}),
    "jit": as_jit,
    "tar": as_tar,
    "npy": as_numpy,
}
PLACES_IN = {  # where in a checkpoint's content the evil object hides
    "alone": lambda content, evil: evil,
    "in a list": lambda content, evil: [evil],
    "beside the model": lambda content, evil: {**content, "extra": evil},
    "a weight": lambda content, evil: {**content, "model": {**content["model"], "wte.weight": evil}},
    "a name": lambda content, evil: {**content, "model_config": {evil: 1}},
    "an object array": lambda content, evil: {**content, "best_val_loss": np.array([evil], dtype=object)},
    "a subclass of an array": lambda content, evil: {**content, "pending": {"x": np.ones(3).view(Array), "y": evil}},
    "a parameter's attribute": lambda content, evil: {**content, "extra": attributed(evil)},
}


def attributed(evil):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.hook = evil
    return parameter


@examples(60)
@given(
    how=st.sampled_from(HOWS),
    disguise=st.sampled_from(sorted(DISGUISES)),
    place=st.sampled_from(sorted(PLACES_IN)),
    protocol=st.integers(0, 5),
    program=st.sampled_from(["load_checkpoint", "load_latest", "resume", "weights", "sample"]),
)
def test_no_code_runs(earlier, original, how, disguise, place, protocol, program):
    with copy(earlier) as world:
        marker, path = world.tmp / "marker", world.run / "last.pt"
        for name in ("prev.pt", "best.pt"):
            (world.run / name).unlink()
        content = PLACES_IN[place](original(), Evil(marker, how))
        DISGUISES[disguise](content, path, protocol)
        marker.unlink(missing_ok=True)
        match program:
            case "load_checkpoint":
                refused = load(path) is None
            case "load_latest":
                with pytest.raises(ValueError, match="nothing to resume"):
                    rundir.load_latest(world.run)
                refused = True
            case "resume":
                refused = not resume(world)
            case "weights":
                refused = not resume(world, init_from=path, out_dir=world.tmp / "new")
            case "sample":
                refused = not speak(world)
        assert not marker.exists() and not Path(f"{marker}.npy").exists()
        assert refused or disguise == "byteorder"


@pytest.mark.parametrize("how", HOWS)
def test_the_evil_objects_are_evil(tmp_path, how):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        pickle.loads(pickle.dumps(Evil(tmp_path / "marker", how)))
    assert list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- meta.json


def changed_json(draw, tree):
    """The text of a JSON tree, changed in its values, its keys or its letters."""
    tree = rebuilt(tree)
    for _ in range(draw(st.integers(0, 2))):
        holder = draw(st.sampled_from([h for h in holders(tree) if h]))
        key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(min(3, len(holder)))))
        match draw(st.sampled_from(["value", "value", "near", "drop", "rename", "path"])):
            case "value":
                holder[key] = draw(JSON)
            case "near" if type(holder[key]) is int:
                holder[key] = draw(
                    st.sampled_from([holder[key] - 1, holder[key] + 1, float(holder[key]), -holder[key]])
                )
            case "near" if isinstance(holder[key], str):
                holder[key] = draw(
                    st.sampled_from(["uint32", "uint16", "bytes", "gpt2", "chars", "val.bin", "train.bin"])
                )
            case "path":
                holder[key] = draw(
                    st.sampled_from(["../../x", "/etc/passwd", "..", ".", "", "a\0b", "meta.json", "C:\\x"])
                )
            case "rename" if isinstance(holder, dict):
                holder[draw(st.text(max_size=5))] = holder.pop(key)
            case _:
                del holder[key]
        if not tree:
            break
    text = json.dumps(tree, indent=draw(st.sampled_from([None, 2])), ensure_ascii=draw(st.booleans()))
    match draw(st.sampled_from(["whole"] * 4 + ["cut", "twice", "deep", "letters", "encoding"])):
        case "cut":
            text = text[: draw(st.integers(0, len(text)))]
        case "twice":  # every key a second time, with another value: the last one counts
            text = text.replace("{", '{"tokens": 1, "vocab_size": 2, "dtype": "uint32", ', draw(st.integers(1, 3)))
        case "deep":
            depth = draw(st.sampled_from([100, 2000, 100_000]))
            text = text.replace("null", "[" * depth + "]" * depth, 1)
        case "letters":
            at = draw(st.integers(0, len(text)))
            text = text[:at] + draw(st.text(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
        case "encoding":
            return text.encode(draw(st.sampled_from(["utf-8-sig", "utf-16", "utf-32", "cp037"])), "replace")
    return text.encode("utf-8", "surrogatepass")


def dataset_of(folder):
    """The Dataset of a folder, or None where it is refused."""
    try:
        with limits():
            return loader.Dataset(str(folder), 16)
    except ValueError as e:
        assert_one_line(message(e))
        assert "meta.json" in str(e) or str(folder) in str(e)


@examples(150)
@given(data=st.data())
def test_meta_json(earlier, scratch, data):
    """What is accepted reads the same tokens as before, by a tokenizer that has as many."""
    folder = scratch / "data"
    if not folder.exists():
        shutil.copytree(earlier.data, folder)
    meta = json.loads((earlier.data / "meta.json").read_text())
    (folder / "meta.json").write_bytes(changed_json(data.draw, meta))
    found = dataset_of(folder)
    if found is not None:
        whole = loader.Dataset(str(earlier.data), 16)
        assert np.array_equal(found.batch(0, 4), whole.batch(0, 4))
        assert np.array_equal(found.val_batch(found.validation(128), 8), whole.val_batch(whole.validation(128), 8))
        tokenizer = loader.Tokenizer(found.meta)
        assert tokenizer.vocab_size == {"chars": 50, "bytes": 257, "gpt2": 50257}[tokenizer.kind]
        assert tokenizer.eot is None or 0 <= tokenizer.eot < tokenizer.vocab_size
        text = tokenizer.decode(range(tokenizer.vocab_size))
        if tokenizer.kind == "chars":
            assert tokenizer.encode(text) == list(range(50))


@examples(15)
@given(data=st.data())
def test_a_run_on_another_meta_json(earlier, data):
    with copy(earlier) as world:
        meta = json.loads((world.data / "meta.json").read_text())
        (world.data / "meta.json").write_bytes(changed_json(data.draw, meta))
        resume(world, init_from=data.draw(st.sampled_from(["resume", "scratch"])), overwrite=True, max_iters=4)


# --------------------------------------------------------------------------------------- config files, command lines

CONFIGS = sorted(path.relative_to(helpers.ROOT) for path in (helpers.ROOT / "config").rglob("*.py"))
HOSTILE = [  # each as a program makes the file `marker`
    "open('marker', 'w')",
    "__import__('os').mkdir('marker')",
    "import os; os.mkdir('marker')",
    "exec(\"open('marker', 'w')\")",
    "n_layer = open('marker', 'w').fileno()",
    "n_layer = [open('marker', 'w') for _ in (1,)][0]",
    "n_layer = (lambda: open('marker', 'w'))()",
    "n_layer: open('marker', 'w') = 1",
    "n_layer = 1 if open('marker', 'w') else 2",
    "out_dir = f\"{open('marker', 'w')}\"",
    "out_dir = 'a' + f\"{open('marker', 'w')}\"",
    "class A: open('marker', 'w')",
    "def f(x=open('marker', 'w')): pass",
    "@open('marker', 'w').close\ndef f(): pass",
    "with open('marker', 'w'): pass",
    "assert open('marker', 'w')",
    "for _ in [open('marker', 'w')]: n_layer = 1",
    "(n_layer := open('marker', 'w'))",
    "from pathlib import Path; Path('marker').touch()",
]
ODD = [
    "n_layers = 3",
    "n_layer = '3'",
    "n_layer = [3]",
    "n_layer = 3 3",
    "x",
    "= 3",
    "n_layer = " + "(" * 300 + ")" * 300,
]
ODD += [
    "n_layer = " + "-" * 50_000 + "1",
    "n_layer = 9**9**9",
    "n_layer = 1e999",
    "n_layer = 1/0",
    "n_layer = '\0'",
    "\0",
]
ODD += [
    "\ufeffn_layer = 3",
    "n_layer = True",
    "seed = 1_000",
    "n_layer = 0x10",
    "n_layer = " + "9" * 5000,
    "\tn_layer = 3",
]
ODD += [
    "out_dir = 'a\\nb'",
    "dropout = 1j",
    "out_dir = b'x'",
    "n_layer = None",
    "norm = 'rmsnormm'",
    "# " + "x" * 200_000,
]
ENCODINGS = ["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1", "cp037"]


@st.composite
def config_text(draw):
    """A config file of the project with lines put in, cut, doubled or spoilt, in some encoding."""
    lines = (helpers.ROOT / draw(st.sampled_from(CONFIGS))).read_text(encoding="utf-8").splitlines()
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(lines)))
        new = draw(st.one_of(st.sampled_from(HOSTILE), st.sampled_from(ODD), st.text(max_size=20)))
        match draw(st.sampled_from(["insert", "insert", "replace", "join", "cut", "twice", "indent"])):
            case "insert":
                lines.insert(at, new)
            case "replace":
                lines[at : at + 1] = [new]
            case "join":
                lines[at : at + 1] = [
                    line + draw(st.sampled_from(["; ", " + ", " = ", "\\\n"])) + new for line in lines[at : at + 1]
                ]
            case "cut":
                lines[at:] = [line[: draw(st.integers(0, len(line)))] for line in lines[at : at + 1]]
            case "twice":
                lines[at:at] = lines[at : at + 2]
            case "indent":
                lines[at : at + 1] = [" " + line for line in lines[at : at + 1]]
    text = draw(st.sampled_from(["\n", "\n", "\r\n", "\r"])).join(lines)
    return text.encode(draw(st.sampled_from(ENCODINGS)), "replace")


@examples(100)
@given(text=config_text())
def test_config_files(scratch, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(scratch)
        Path("config.py").write_bytes(text)
        outcome = call(summary, "config.py", n_layer=1, vocab_size=300, dataset="none")
        assert not Path("marker").exists()
    if loads_or_is_refused(0, 0, outcome):
        assert "1 blocks" in outcome.out


@pytest.mark.parametrize("text", HOSTILE)
def test_the_hostile_lines_are_hostile(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(Exception):
        exec(compile(text, "control", "exec"), {})
    assert Path("marker").exists()


FLAGS = sorted(GPTConfig.__dataclass_fields__ | train.TrainConfig.__dataclass_fields__)
WORDS = st.one_of(
    st.sampled_from(
        ["", "=", "none", "None", "True", "nan", "inf", "-inf", "1e400", "0x1", "1_0", " 1", "１", "-1", "0", "1", "3"]
    ),
    st.sampled_from(
        ["$(touch marker)", "`touch marker`", "__import__('os').mkdir('marker')", "../../x", "\0", "\n", "\x1b[31m"]
    ),
    st.integers(-10, 300).map(str),
    st.floats().map(str),
    st.text(max_size=10),
)


@examples(100)
@given(
    given_=st.lists(st.tuples(st.sampled_from(["--", "--", "--", "-", ""]), st.sampled_from(FLAGS), WORDS), max_size=4),
    loose=st.lists(st.one_of(WORDS, WORDS.map(lambda w: f"--{w}")), max_size=1),
)
def test_command_lines(scratch, given_, loose):
    flags = [f"{dashes}{name}={value}" for dashes, name, value in given_]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(scratch)
        outcome = call(summary, *flags, *loose)
        assert not Path("marker").exists()
    loads_or_is_refused(0, 0, outcome)


@pytest.mark.parametrize("name", ["n_embd", "n_head", "n_ff", "block_size", "vocab_size"])
@pytest.mark.parametrize("size", [10**12, 2**62, 2**63 - 1, 2**63])
def test_sizes_that_no_machine_has(name, size):
    flags = dict(n_layer=1, vocab_size=300) | {name: size}
    outcome = call(summary, **flags)
    assert outcome.code in (0, 1, 2) and (outcome.code == 0) == (outcome.err == ""), outcome
    assert outcome.code == 0 or outcome.err.startswith("error: ")
    assert_one_line(outcome.err or "fits")


@examples(20)
@given(
    program=st.sampled_from([train, sample]),
    given_=st.lists(st.tuples(st.sampled_from(FLAGS + list(SAMPLE)), WORDS), min_size=1, max_size=2),
)
def test_command_lines_of_runs(earlier, program, given_):
    """A flag more on a command line that works. Values that ask for long or large runs are not drawn."""
    flags = TRAIN | dict(init_from="resume", max_iters=4) if program is train else SAMPLE
    known = {*FLAGS} if program is train else {*SAMPLE}
    with copy(earlier) as world:
        flags = flags | dict(out_dir="run") | (dict(dataset="data") if program is train else {})
        flags |= {
            name: value for name, value in given_ if name in known and name not in ("device", "compile", "wandb_log")
        }
        before = helpers.files(world.run)
        outcome = call(program, **flags)
        loads_or_is_refused(before, helpers.files(world.run), outcome)


# --------------------------------------------------------------------------------------------------- metrics.jsonl


def changed_lines(draw, text):
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["row", "row", "json", "cut", "drop", "twice", "swap", "letters", "deep", "long"])):
            case "row":
                row = json.loads(text.splitlines()[draw(st.integers(0, 3))])
                row[draw(st.sampled_from(["step", "tokens", "train_loss", "val_loss", *row, "more"]))] = draw(JSON)
                lines[at] = json.dumps(row, ensure_ascii=draw(st.booleans()))
            case "json":
                lines[at] = json.dumps(draw(JSON))
            case "cut":
                lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
            case "drop" if len(lines) > 1:
                del lines[at]
            case "twice":
                lines.insert(at, lines[at])
            case "letters":
                lines[at] = lines[at][:5] + draw(st.text(max_size=4)) + lines[at][5:]
            case "deep":
                lines[at] = '{"step": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
            case "long":
                lines[at] = '{"step": ' + "1" * draw(st.sampled_from([30, 5000])) + "}"
            case _:
                lines.reverse()
    raw = "\n".join(lines).encode("utf-8", "surrogatepass") + draw(
        st.sampled_from([b"\n", b"", b"\0", b"\xff", b"\r\n"])
    )
    return draw(st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf", b"\n"])) + raw


@examples(15)
@given(data=st.data())
def test_metrics_before_a_resume(earlier, data):
    """Rows that are rows are kept, whatever else they say; and the end of the run, which draws them, is reached."""
    with copy(earlier) as world:
        path = world.run / "metrics.jsonl"
        path.write_bytes(changed_lines(data.draw, path.read_text()))
        if resume(world, max_iters=4):
            rows = helpers.metrics(world.run)
            assert rows[-1]["step"] == 4 and all(type(row["step"]) is int for row in rows)
            DRAW_LOSS(world.run, "a run")
