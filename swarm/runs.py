"""Numbers of blocks, as people read them."""

from itertools import groupby


def runs_text(numbers: tuple[int, ...]) -> str:
    """Write sorted block numbers as ranges: (3, 4, 5, 9) -> "3:6, 9:10"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}:{run[-1] + 1}" for run in runs)
