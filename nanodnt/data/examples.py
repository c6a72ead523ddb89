"""Batches of examples: conversations packed into rows, of which the answers alone count in the
loss."""

from bisect import bisect_left, insort

import numpy as np

from nanodnt.data.prepared import Tokens

# marks of a token: it counts in the loss as a target; it is the first of an example
ANSWER, BEGIN = 1, 2


class PreparedExamples(Tokens):
    """A prepared dataset of examples: rows of `block_size` inputs hold whole examples, and padding.

    An example of n tokens gives n - 1 inputs and their targets, which are -1 unless they belong to
    an answer. Which examples share a row follows from the lengths alone and stays; in every epoch
    the rows come in another order. The rest of a row is padding: end of text, with targets -1. With
    `doc_mask` batches have positions, which begin at 0 in each example and in the padding."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.marks = {
            split: self._open(part["marks"]["file"]) for split, part in self.splits.items()
        }
        found = {split: self._find(split) for split in self.splits}
        self._check_lengths({split: lengths for split, (_, lengths, _) in found.items()})
        self.rows, self.counted = {}, {}  # counted: targets of each row that count in the loss
        for split, (starts, lengths, answers) in found.items():
            rows = pack(lengths - 1, self.block_size)
            # First token and length of each example, in the order of rows; and where each row
            # begins in these.
            order, bounds = (
                np.argsort(rows, kind="stable"),
                np.append(0, np.cumsum(np.bincount(rows))),
            )
            self.rows[split] = starts[order], lengths[order], bounds
            self.counted[split] = np.add.reduceat(answers[order], bounds[:-1])
        self.n_train, self.n_val = map(len, self.counted.values())

    def describe(self) -> str:
        lengths = self.rows["train"][1]
        filled = (lengths - 1).sum() / (self.n_train * self.block_size)
        return f"{len(lengths):,} examples in {self.n_train:,} rows an epoch, {filled:.0%} filled"

    def loss_tokens(self, step: int, batch_size: int, offset: int = 0) -> int:
        rows = self._draw(step, batch_size, offset=offset)
        return int(self.counted["train"][rows].sum())

    def _find(self, split):
        """First token, length and number of answer tokens of every example of a split, in the order
        of the file."""
        marks = self._read_values(self.marks[split], np.uint8, 0, self.splits[split]["tokens"])
        starts, expected = np.flatnonzero(marks == BEGIN), self.splits[split]["examples"]
        problem = f"{self.marks[split].name} does not mark {expected:,} examples, each with its first token"
        if len(starts) != expected or not expected or starts[0] or marks.max() > BEGIN:
            raise ValueError(f"{problem}: prepare {self.name!r} again")
        answers = np.add.reduceat(marks == ANSWER, starts, dtype=np.int64)
        if not answers.all():
            raise ValueError(f"{problem} and an answer: prepare {self.name!r} again")
        return starts, np.diff(starts, append=len(marks)), answers

    def _check_lengths(self, lengths):
        """ValueError unless all examples fit into a row; `lengths` are {split: tokens of each
        example}."""
        room, longest = self.block_size + 1, max(n.max() for n in lengths.values())
        if longest > room:
            long = sum((n > room).sum() for n in lengths.values())
            raise ValueError(
                f"{long:,} examples of {self.name!r} are longer than block_size+1 = {room} tokens (the longest has "
                f"{longest:,}): prepare it again with --max_tokens={room - 1}, which leaves them out, or raise "
                f"--block_size to {longest - 1} (not with init_from: a trained model keeps its own)"
            )

    def _rows(self, split, rows):
        x = np.full((len(rows), self.block_size), self.meta["eot"], np.int64)
        y, positions = np.full_like(x, -1), np.empty_like(x)
        starts, lengths, bounds = self.rows[split]
        for i, row in enumerate(rows.tolist()):
            at = 0
            for example in range(*bounds[row : row + 2].tolist()):
                start, n = int(starts[example]), int(lengths[example])
                ids, marks = (
                    self._read(split, start, n),
                    self._read_values(self.marks[split], np.uint8, start, n),
                )
                here = slice(at, at + n - 1)
                x[i, here], y[i, here] = ids[:-1], np.where(marks[1:] == ANSWER, ids[1:], -1)
                positions[i, here] = np.arange(n - 1)
                at += n - 1
            positions[i, at:] = np.arange(self.block_size - at)
        return (x, y, positions) if self.doc_mask else (x, y)


def pack(sizes: np.ndarray, room: int) -> np.ndarray:
    """The row of each example, numbered from 0, so that no row holds more than `room`; int64
    (examples,).

    Best-fit decreasing: the largest example first, of equal ones the earlier, each into the row
    where it leaves the least room. It needs at most 11/9 of the fewest rows, plus 4 (Johnson et
    al., 1974). `sizes`: 1 to `room`."""
    rows = np.empty(len(sizes), np.int64)
    # waiting[r]: the rows with room r left
    waiting = [[] for _ in range(room)] + [list(range(len(sizes)))[::-1]]
    rooms = [room]  # where `waiting` has a row, ascending
    for example in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[example])
        at = bisect_left(rooms, size)
        row, left = waiting[rooms[at]].pop(), rooms[at] - size
        if not waiting[rooms[at]]:
            del rooms[at]
        if left:
            if not waiting[left]:
                insort(rooms, left)
            waiting[left].append(row)
        rows[example] = row
    return rows
