"""Arrays in one compressed buffer: what a widget's JavaScript reads as typed arrays, and its layout as plain data.

The buffer is a zlib stream (browsers undo it themselves, `DecompressionStream("deflate")`); inside, each array begins at a multiple of
eight bytes. A saved page carries it as base64, so bytes count.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
LEVEL = 1
"""zlib level: the higher ones take three times as long for a tenth less."""
_TYPES = {"uint8", "uint16", "uint32", "int32", "float32", "float64"}


def pack(arrays: Arrays) -> tuple[bytes, dict[str, list[Any]]]:
    """(compressed bytes, name -> [dtype, byte offset, length]); little-endian, one-dimensional arrays."""
    chunks: list[bytes] = []
    layout: dict[str, list[Any]] = {}
    at = 0
    for name, values in arrays.items():
        assert values.ndim == 1, name
        assert str(values.dtype) in _TYPES, (name, values.dtype)
        raw = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
        layout[name] = [str(values.dtype), at, len(values)]
        padding = -len(raw) % 8
        chunks += (raw, bytes(padding))
        at += len(raw) + padding
    return zlib.compress(b"".join(chunks), LEVEL), layout


def unpack(data: bytes, layout: dict[str, list[Any]]) -> Arrays:
    """What `pack` packed."""
    raw = zlib.decompress(data)
    kinds = {name: np.dtype(kind).newbyteorder("<") for name, (kind, _, _) in layout.items()}
    return {name: np.frombuffer(raw, dtype=kinds[name], count=num, offset=at) for name, (_, at, num) in layout.items()}
