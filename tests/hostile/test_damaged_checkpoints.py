"""Checkpoints with damaged bytes or changed content, drawn by hypothesis: each loads as it was saved or is refused in
one line, and a refusal leaves an earlier run as it was."""

import contextlib
import io
import json
import re
import zipfile
from copy import deepcopy

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nanodnt.data.tokenizer import Tokenizer
from nanodnt.run.checkpoints import RunState, load_checkpoint, load_latest
from nanodnt.run.metrics import read_metrics
from nanodnt.weights import model_from_checkpoint
from support import runs
from support.hostile import changes, copy, holders, load, refused_as_none, resume, save, speak
from support.hypotheses import JSON, LEAVES, NUMBERS, drawn

pytestmark = pytest.mark.usefixtures("quick")

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


@drawn(fast=30, deep=400)
@given(data=st.data())
def test_a_checkpoint_of_damaged_bytes(file, original, scratch, data):
    path = scratch / "damaged.pt"
    path.write_bytes(damage(data.draw, file()))
    loaded = load(path)
    if loaded is not None:
        assert loaded["path"] == path and not changes(loaded, original())


@drawn(fast=12, deep=60)
@given(data=st.data())
def test_the_latest_of_two_where_one_or_both_are_damaged(earlier, file, original, scratch, data):
    """A damaged last.pt means prev.pt and a warning; where neither is left, a refusal that names both."""
    whole = {name: file(name) for name in ("last.pt", "prev.pt")}
    hurt = data.draw(st.sets(st.sampled_from(sorted(whole)), min_size=1))
    for name, raw in whole.items():
        (scratch / name).write_bytes(damage(data.draw, raw) if name in hurt else raw)
    good = {name: load(scratch / name) is not None for name in whole}
    printed = []
    if not any(good.values()):
        with pytest.raises(ValueError, match="last.pt.*prev.pt.*nothing to resume"):
            load_latest(scratch, printed.append)
        return
    loaded = load_latest(scratch, printed.append)
    name = "last.pt" if good["last.pt"] else "prev.pt"
    assert loaded["path"] == scratch / name and not changes(loaded, original(name))
    assert [("warning" in line, "step 2" in line) for line in printed] == [(True, True)] * (not good["last.pt"])


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("how", ["as it is", "one record twice", "renamed"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_checkpoint_zipped_anew(file, original, scratch, compression, how):
    """The archive written by another program, as unzipping and zipping a checkpoint does."""
    path = scratch / "zipped.pt"
    with zipfile.ZipFile(io.BytesIO(file())) as old, zipfile.ZipFile(path, "w", compression) as new:
        for item in old.infolist():
            content = old.read(item)
            if how == "one record twice" and item.filename.endswith("/data/0"):
                new.writestr(item.filename, bytes(len(content)))
            name = item.filename.replace("archive/", "last/") if how == "renamed" else item.filename
            new.writestr(name, content)
    loaded = load(path)
    if loaded is not None:
        assert not changes(loaded, original())


# ---------------------------------------------------------------------------------- what a checkpoint's dict holds


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
    tree = deepcopy(tree)
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


def model_of(path):
    """The model of a checkpoint file, or None where the file or its content is refused."""
    loaded = load(path)
    return None if loaded is None else refused_as_none(model_from_checkpoint, loaded)


@drawn(fast=15, deep=150)
@given(data=st.data())
def test_a_checkpoint_of_changed_content(original, scratch, data):
    content = changed(data.draw, original())
    assume(save(scratch / "changed.pt", content))
    model = model_of(scratch / "changed.pt")
    if model is not None:
        weights = {str(name).removeprefix("_orig_mod."): p for name, p in content["model"].items()}
        for name, p in model.state_dict().items():
            assert torch.equal(p.to(weights[name].dtype), weights[name]), name
        with contextlib.suppress(ValueError):  # a refusal
            Tokenizer(load_checkpoint(scratch / "changed.pt")["meta"])


SIZES = "n_layer n_head n_embd block_size vocab_size n_kv_head n_ff norm_groups post_norm_blocks".split()


@drawn(fast=15, deep=80)
@given(data=st.data())
def test_a_model_config_that_the_weights_do_not_have(original, scratch, data):
    """Whatever sizes it names, memory and time go to what the file holds."""
    content = deepcopy(original())
    config = content["model_config"]
    for name in data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2, unique=True)):
        config[name] = data.draw(
            st.sampled_from([0, 1, 2, 3, 16, 64, 1000, 10**5, 10**6, 10**9, 2**31, 2**62, 2**63, 10**30])
        )
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(config)))
        config[name] = data.draw(LEAVES)
    assume(save(scratch / "sizes.pt", content))
    model = model_of(scratch / "sizes.pt")
    if model is not None:
        assert not runs.different(model.state_dict(), original()["model"])


@drawn(fast=8, deep=50)
@given(data=st.data(), use=st.sampled_from(["resumed", "resumed from both", "weights", "sample"]))
def test_changed_content_is_used_or_refused(earlier, original, data, use):
    content = changed(data.draw, original())
    with copy(earlier) as world:
        assume(save(world.run / "last.pt", content))
        if use == "resumed from both":  # else prev.pt stays whole
            assume(save(world.run / "prev.pt", content))
        if use == "sample":
            speak(world)
        elif use == "weights":
            resume(world, init_from=world.run / "last.pt", out_dir=world.tmp / "new", max_iters=1)
        elif resume(world, max_iters=4):
            assert all(row["step"] >= 0 for row in read_metrics(world.run))
            assert load(world.run / "last.pt") is not None


PLAIN = [*RunState.__annotations__, "scaler", "train_config", "meta"]


@drawn(fast=6, deep=40)
@given(data=st.data())
def test_resuming_with_other_plain_values(earlier, original, data):
    """What is no tensor: a wrong value has no wrong shape to give it away."""
    content = deepcopy(original())
    name = data.draw(st.sampled_from(PLAIN))
    value = content[name]
    if isinstance(value, dict):
        few = st.dictionaries(st.sampled_from(["step", "lr", "scale"]), JSON)
        content[name] = changed(data.draw, value) if value else data.draw(few)
    else:
        content[name] = data.draw(st.one_of(NUMBERS, JSON))
    with copy(earlier) as world:
        assume(save(world.run / "last.pt", content))
        (world.run / "prev.pt").unlink()
        if resume(world, max_iters=4, dtype=data.draw(st.sampled_from(["float32", "float32", "float16"]))):
            assert all(row["step"] >= 0 for row in read_metrics(world.run))  # what a next resume needs
            for line in (world.run / "metrics.jsonl").read_text().splitlines():
                json.loads(line, parse_constant=pytest.fail)
