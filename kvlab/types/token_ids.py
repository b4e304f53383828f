"""Whether a value is a number or a sequence of token ids: one rule for all who take them from a user."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from numbers import Integral, Real
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """An array or tensor as nested lists, one without dimensions as a number; anything else as it is."""
    is_array = hasattr(value, "ndim") and hasattr(value, "tolist") and not isinstance(value, memoryview)
    return value.tolist() if is_array else value


def is_yes_or_no(value: Any) -> bool:
    """Python's or numpy's true or false."""
    return isinstance(value, (bool, np.bool_))


def as_whole(value: Any) -> int | None:
    """A whole number of Python's, numpy's or a tensor without dimensions as an int; None: something else (True and 5.0 are)."""
    value = plain(value)
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def as_real(value: Any) -> float | None:
    """A number, infinity included, as a float; None: something else (True and NaN are)."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all floats
        return None
    return None if math.isnan(number) else number


def token_ids(value: Any) -> list[int] | None:
    """A sequence, 1-d array or tensor of whole numbers, or anything else that yields them in order, as a list; None: something else.

    Sets, which have no order, are something else, and so are bytes."""
    value = plain(value)
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping, Set)) or not isinstance(value, Iterable):
        return None
    many = list(value)
    if all(type(one) is int for one in many):  # as nearly always, and quick
        return many
    ids = [as_whole(one) for one in many]
    return None if None in ids else ids  # type: ignore[return-value]
