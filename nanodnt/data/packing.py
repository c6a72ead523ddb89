"""Examples packed into rows of one length."""

from bisect import bisect_left, insort

import numpy as np


def pack(sizes: np.ndarray, room: int) -> np.ndarray:
    """The row of each example, numbered from 0, so that no row holds more than `room`; int64 (examples,).

    Best-fit decreasing: the largest example first, of equal ones the earlier, each into the row where it leaves the
    least room. It needs at most 11/9 of the fewest rows possible, plus 4 (Johnson et al., 1974). `sizes`: 1 to `room`.
    """
    rows, used = np.empty(len(sizes), np.int64), 0
    waiting = [[] for _ in range(room)]  # waiting[r]: the rows with room r left
    rooms = []  # where `waiting` has a row, ascending
    for example in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[example])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            row, left = used, room - size
            used += 1
        else:
            row, left = waiting[rooms[at]].pop(), rooms[at] - size
            if not waiting[rooms[at]]:
                del rooms[at]
        if left:
            if not waiting[left]:
                insort(rooms, left)
            waiting[left].append(row)
        rows[example] = row
    return rows
