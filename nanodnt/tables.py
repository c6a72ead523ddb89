"""Texts for the console: aligned tables, counted nouns, durations."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: the first is left-aligned, the others are right-aligned."""
    columns = zip(*rows, strict=True)
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:], strict=True):
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def count(n: int, noun: str) -> str:
    """A number and its noun: "1 process", "1,024 processes"."""
    if n == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{n:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: "3:14:10"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
