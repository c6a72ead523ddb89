"""Batches of examples: conversations packed into rows, of which the answers alone count in the loss."""

from dataclasses import dataclass

import numpy as np

from nanodnt.data.packing import pack
from nanodnt.data.prepared import Tokens

ANSWER, BEGIN = 1, 2  # marks of a token: it counts in the loss as a target; it is the first of an example


@dataclass
class Rows:
    """The examples of a split in the order of their rows; within a row as in the file."""

    starts: np.ndarray  # (examples,) the first token of each
    lengths: np.ndarray  # (examples,) its tokens
    bounds: np.ndarray  # (rows + 1,) where the examples of each row begin in the two above
    loss_tokens: np.ndarray  # (rows,) targets that count in the loss

    def examples(self, row: int):
        """Yield (first token, number of tokens) of the examples of a row."""
        part = slice(*self.bounds[row : row + 2])
        yield from zip(self.starts[part].tolist(), self.lengths[part].tolist(), strict=True)


class PreparedExamples(Tokens):
    """A prepared dataset of examples: rows of `block_size` inputs hold whole examples, and padding.

    An example of n tokens gives n - 1 inputs and their targets, which are -1 unless they belong to an answer. Which
    examples share a row follows from the lengths alone and stays; in every epoch the rows come in another order. The
    rest of a row is padding: end of text, with targets -1. With `doc_mask` batches have positions, which begin at 0 in
    each example and in the padding.
    """

    kind = "examples"

    def __init__(self, name: str, block_size: int, seed: int = 1337, meta: dict | None = None, doc_mask: bool = False):
        super().__init__(name, block_size, seed, meta, doc_mask)
        self.marks = {split: self._open(part["marks"]["file"]) for split, part in self.splits.items()}
        found = {split: self._find(split) for split in self.splits}
        check_lengths({split: lengths for split, (_, lengths, _) in found.items()}, block_size, name)
        self.rows = {split: arrange(*examples, block_size) for split, examples in found.items()}
        self.n_train, self.n_val = (len(self.rows[split].loss_tokens) for split in ("train", "val"))

    def describe(self) -> str:
        """What an epoch is, in words."""
        train = self.rows["train"]
        targets = int(train.lengths.sum()) - len(train.lengths)
        return (
            f"{len(train.lengths):,} examples in {self.n_train:,} rows an epoch, "
            f"{targets / (self.n_train * self.block_size):.0%} filled, "
            f"{train.loss_tokens.sum() / targets:.0%} of the tokens count in the loss"
        )

    def loss_tokens(self, step: int, batch_size: int) -> int:
        return int(self.rows["train"].loss_tokens[self._draw(step, batch_size)].sum())

    def _find(self, split):
        """First token, length and number of answer tokens of every example of a split, in the order of the file."""
        marks = self._read_marks(split, 0, self.splits[split]["tokens"])
        starts, expected = np.flatnonzero(marks == BEGIN), self.splits[split]["examples"]
        answers = np.add.reduceat(marks == ANSWER, starts, dtype=np.int64) if len(starts) else starts
        if not len(starts):
            problem = "marks no token as the first of an example"
        elif marks.max() > BEGIN:
            problem = f"holds the mark {marks.max()}, and marks are 0, {ANSWER} or {BEGIN}"
        elif starts[0]:
            problem = "does not mark the first token as the first of an example"
        elif len(starts) != expected:
            problem = f"marks {len(starts):,} examples where meta.json says {expected:,}"
        elif not answers.all():
            problem = f"marks no answer in {(answers == 0).sum():,} examples"
        else:
            return starts, np.diff(starts, append=len(marks)), answers
        raise ValueError(f"{self.marks[split].name} {problem}: prepare {self.name!r} again")

    def _read_marks(self, split, start, n):
        return self._read_values(self.marks[split], np.dtype(np.uint8), start, n)

    def _rows(self, split, rows):
        x = np.full((len(rows), self.block_size), self.meta["eot"], np.int64)
        y, positions = np.full_like(x, -1), np.empty_like(x)
        for i, row in enumerate(rows.tolist()):
            at = 0
            for start, n in self.rows[split].examples(row):
                ids, marks = self._read(split, start, n), self._read_marks(split, start, n)
                here = slice(at, at + n - 1)
                x[i, here], y[i, here] = ids[:-1], np.where(marks[1:] == ANSWER, ids[1:], -1)
                positions[i, here] = np.arange(n - 1)
                at += n - 1
            positions[i, at:] = np.arange(self.block_size - at)
        return (x, y, positions) if self.doc_mask else (x, y)


def arrange(starts: np.ndarray, lengths: np.ndarray, answers: np.ndarray, block_size: int) -> Rows:
    """Pack the examples of a split into rows of `block_size`."""
    rows = pack(lengths - 1, block_size)
    order, bounds = np.argsort(rows, kind="stable"), np.append(0, np.cumsum(np.bincount(rows)))
    return Rows(starts[order], lengths[order], bounds, np.add.reduceat(answers[order], bounds[:-1]))


def check_lengths(lengths: dict, block_size: int, name: str) -> None:
    """ValueError unless all examples fit into a row; `lengths` are {split: tokens of each example}."""
    long = {split: (n > block_size + 1).sum() for split, n in lengths.items()}
    if any(long.values()):
        counts = " and ".join(f"{k:,} of {len(lengths[split]):,} in {split}" for split, k in long.items() if k)
        longest = max(n.max() for n in lengths.values())
        raise ValueError(
            f"examples of {name!r} are longer than block_size+1 = {block_size + 1} tokens ({counts}; the longest has "
            f"{longest:,}): prepare it again with --max_tokens={block_size}, which leaves them out, or raise "
            f"--block_size to {longest - 1} (not with init_from: a trained model keeps its own)"
        )
