"""Batches of examples: conversations packed into rows. Only the answers count in the loss."""

from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np

from nanodnt.data.prepared import Batch, Tokens
from nanodnt.tables import count

# Marks of a token: it belongs to an answer, so it counts as a target; or it begins an example.
ANSWER = 1
BEGIN = 2


class Examples(NamedTuple):
    """The examples of a split, one value each: int64 arrays (examples,)."""

    starts: np.ndarray  # position of the first token
    lengths: np.ndarray  # number of tokens
    answers: np.ndarray  # number of tokens that count as targets


class Packed(NamedTuple):
    """The examples of a split in the order of rows. Row r holds those from bounds[r] to
    bounds[r + 1]."""

    starts: np.ndarray  # (examples,)
    lengths: np.ndarray  # (examples,)
    bounds: np.ndarray  # (rows + 1,)


class PreparedExamples(Tokens):
    """A prepared dataset of examples. A row has `block_size` inputs: whole examples, and padding.

    An example of n tokens gives n - 1 inputs and their targets, which are -1 unless they belong to
    an answer. The lengths alone decide which examples share a row; in every epoch the rows come in
    another order. Padding is end of text, with targets -1. With `doc_mask` batches have positions,
    which begin at 0 in each example and in the padding."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.marks = {
            split: self._open(entry["marks"]["file"]) for split, entry in self.splits.items()
        }
        splits = {split: self._find(split) for split in self.splits}
        self._check_lengths(np.concatenate([examples.lengths for examples in splits.values()]))
        self.rows: dict[str, Packed] = {}
        self.counted = {}  # {split: (rows,) number of targets that count in the loss}
        for split, examples in splits.items():
            row = pack(examples.lengths - 1, self.block_size)
            order = np.argsort(row, kind="stable")
            bounds = np.append(0, np.cumsum(np.bincount(row)))
            self.rows[split] = Packed(examples.starts[order], examples.lengths[order], bounds)
            self.counted[split] = np.add.reduceat(examples.answers[order], bounds[:-1])
        self.n_train = len(self.counted["train"])
        self.n_val = len(self.counted["val"])

    def describe(self) -> str:
        lengths = self.rows["train"].lengths
        filled = (lengths - 1).sum() / (self.n_train * self.block_size)
        rows = count(self.n_train, "row")
        return f"{count(len(lengths), 'example')} in {rows} an epoch, {filled:.0%} filled"

    def loss_tokens(self, step: int, batch_size: int, offset: int = 0) -> int:
        rows = self._draw(step, batch_size, offset=offset)
        return int(self.counted["train"][rows].sum())

    def _find(self, split: str) -> Examples:
        """The examples of a split, in the order of the file."""
        marks = self._read_marks(split, 0, self.splits[split]["tokens"])
        starts = np.flatnonzero(marks == BEGIN)
        n_examples = self.splits[split]["examples"]
        problem = (
            f"{self.marks[split].name} does not mark {n_examples:,} examples, "
            "each with its first token"
        )
        if len(starts) != n_examples or not n_examples or starts[0] or marks.max() > BEGIN:
            raise ValueError(f"{problem}: prepare {self.name!r} again")
        answers = np.add.reduceat(marks == ANSWER, starts, dtype=np.int64)
        if not answers.all():
            raise ValueError(f"{problem} and an answer: prepare {self.name!r} again")
        return Examples(starts, np.diff(starts, append=len(marks)), answers)

    def _read_marks(self, split: str, start: int, n: int) -> np.ndarray:
        return self._read_values(self.marks[split], np.uint8, start, n)

    def _check_lengths(self, lengths: np.ndarray) -> None:
        """ValueError unless all examples fit into a row."""
        room = self.block_size + 1
        longest = lengths.max()
        if longest > room:
            raise ValueError(
                f"{(lengths > room).sum():,} examples of {self.name!r} are longer than "
                f"block_size+1 = {room} tokens (the longest has {longest:,}): prepare it again "
                f"with --max_tokens={room - 1}, which leaves them out, or raise --block_size to "
                f"{longest - 1} (not with init_from: a trained model keeps its own)"
            )

    def _rows(self, split: str, starts: np.ndarray) -> Batch:
        inputs = np.full((len(starts), self.block_size), self.meta["eot"], np.int64)
        targets = np.full_like(inputs, -1)
        positions = np.empty_like(inputs)
        packed = self.rows[split]
        for i, row in enumerate(starts.tolist()):
            end = 0  # number of inputs in the row so far
            for example in range(packed.bounds[row], packed.bounds[row + 1]):
                start = int(packed.starts[example])
                n = int(packed.lengths[example])
                ids = self._read(split, start, n)
                marks = self._read_marks(split, start, n)
                here = slice(end, end + n - 1)
                inputs[i, here] = ids[:-1]
                targets[i, here] = np.where(marks[1:] == ANSWER, ids[1:], -1)
                positions[i, here] = np.arange(n - 1)
                end += n - 1
            positions[i, end:] = np.arange(self.block_size - end)
        return (inputs, targets, positions) if self.doc_mask else (inputs, targets)


def pack(sizes: np.ndarray, room: int) -> np.ndarray:
    """The row of each example, numbered from 0, so that no row holds more than `room`; int64
    (examples,).

    Best-fit decreasing: the largest example first, of equal ones the earlier, each into the row
    where it leaves the least room. It needs at most 11/9 of the fewest rows, plus 4 (Johnson et
    al., 1974). `sizes`: 1 to `room`."""
    rows = np.empty(len(sizes), np.int64)
    waiting = [[] for _ in range(room + 1)]  # waiting[r]: the rows with room r left
    waiting[room] = list(reversed(range(len(sizes))))  # no row is used yet
    rooms = [room]  # the r with a row in waiting[r], ascending
    for example in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[example])
        i = bisect_left(rooms, size)
        best = rooms[i]
        row = waiting[best].pop()
        if not waiting[best]:
            del rooms[i]
        left = best - size
        if left:
            if not waiting[left]:
                insort(rooms, left)
            waiting[left].append(row)
        rows[example] = row
    return rows
