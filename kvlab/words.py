"""Words of a command line, read."""

from __future__ import annotations


def as_number(word: str) -> int | float | None:
    """The number that a word stands for, a whole one if it can be read so; None: it is no number."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return None
