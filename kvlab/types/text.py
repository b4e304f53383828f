"""Strings that are no text: Python and JSON allow halves of surrogate pairs ("\\ud800"), and no encoding, tokenizer or table does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvlab.types.errors import UserError

T = TypeVar("T")

NAMED = 10
"""Places of a file that are named in a note; the others are counted."""


def half_pair(value: object) -> str | None:
    """The first half of a surrogate pair in a string, or in the strings of a list or mapping; None: all of it is text."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return value[error.start]
        return None
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return next((found for item in value if (found := half_pair(item)) is not None), None)
    return None


def as_text(value: T) -> T:
    """The same string, list or mapping. UserError: a string in it is no text."""
    if (half := half_pair(value)) is not None:
        raise UserError(f"A text holds {half!r}, half of a surrogate pair, which is no character. Leave it out, or write the whole pair.")
    return value


def left_out(places: Sequence[str]) -> list[str]:
    """The note on places of a file whose strings are no text; none: no note."""
    if not places:
        return []
    more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
    return [f"Left out, as a text there holds half of a surrogate pair, which is no character: {'; '.join(places[:NAMED])}{more}."]
