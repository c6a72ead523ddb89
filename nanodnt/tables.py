"""Aligned tables for the console."""


def table(rows: list) -> list:
    """Rows of strings → aligned lines; the first column is left-aligned, the others
    right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
