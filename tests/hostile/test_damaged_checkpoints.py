"""Damaged checkpoints: each is refused in one line, or loads as it was saved. The run goes on from
the one before."""

import io
import re
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanodnt.run.checkpoints import load_latest
from support.hostile import changes, load, resume
from support.hypotheses import drawn

pytestmark = pytest.mark.usefixtures("quick")


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :]


def compressed(raw: bytes) -> bytes:
    """The archive written by another program, as unzipping and zipping a checkpoint does."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(raw)) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
    return out.getvalue()


DAMAGES = {  # what a bad disk, a full one or another program leaves of a file
    "empty": lambda raw: b"",
    "truncated": lambda raw: raw[: len(raw) // 2],
    "the last byte is lost": lambda raw: raw[:-1],
    "a bit of a tensor": lambda raw: flipped(raw, len(raw) // 2),
    "a bit of the pickle": lambda raw: flipped(raw, raw.index(b"nanoDNT checkpoint")),
    "a page of zeros": lambda raw: raw[:8192] + bytes(4096) + raw[12288:],
    "a page is lost": lambda raw: raw[:8192] + raw[12288:],
    "a page twice": lambda raw: raw[:12288] + raw[8192:],
    "no directory": lambda raw: raw.replace(b"PK\x01\x02", b"PK\x01\x00"),
    "bytes before it": lambda raw: b"<html>" + raw,
    "compressed": compressed,
    "text": lambda raw: b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_taken(damage, world, original):
    """Only last.pt, then prev.pt too: then nothing is left, and no file changes."""
    last, prev = world.run / "last.pt", world.run / "prev.pt"
    raw = DAMAGES[damage](last.read_bytes())
    last.unlink()  # best.pt may be the same file
    last.write_bytes(raw)
    assert load(last) is None
    printed = []
    loaded = load_latest(world.run, printed.append)
    assert loaded["path"] == prev and not changes(loaded, original("prev.pt"))
    assert re.fullmatch(f"warning: {last} .*; going on from {prev}, step 2", *printed)
    prev.write_bytes(raw)
    assert not resume(world)


def damaged(draw, raw: bytes) -> bytes:
    """`raw` with one to three injuries, half of them near the zip's own structures."""
    places = sorted(match.start() for match in re.finditer(rb"PK[\x01\x03\x05\x06]", raw))
    for _ in range(draw(st.integers(1, 3))):
        near = st.builds(int.__add__, st.sampled_from(places), st.integers(0, 120))
        at = draw(st.one_of(st.integers(0, len(raw)), near))
        end = at + draw(st.one_of(st.integers(1, 8), st.integers(1, 20_000)))
        new = draw(st.one_of(st.binary(max_size=64), st.just(bytes(end - at))))
        raw = raw[:at] + new + raw[end:]  # overwritten, lost or inserted
    return raw


@drawn(fast=30, deep=400)
@given(data=st.data())
def test_a_checkpoint_of_damaged_bytes(file, original, scratch, data):
    path = scratch / "damaged.pt"
    path.write_bytes(damaged(data.draw, file()))
    loaded = load(path)
    if loaded is not None:
        assert loaded["path"] == path and not changes(loaded, original())
