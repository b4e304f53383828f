"""Capacities as people say them: blocks, tokens, bytes of a model, or a share of the distinct blocks; one parser for all doors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvlab.types import UserError, unknown_name
from kvlab.types.homes import expanded

UNITS = ("blocks", "tokens", "bytes", "share")
HINT = "blocks (5000), tokens (40000tok), bytes of a model (8GiB with model=llama3_8b), or a share of the distinct blocks (0.1, 10%)"
KV_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
INT8_SCALE_BYTES = 2
"""dtype of stored K and V -> bytes of a number."""

_TEXT = re.compile(r"\s*(?P<number>[0-9][0-9_]*(?:\.[0-9]*)?(?:e[0-9]+)?|\.[0-9]+)\s*(?P<unit>[a-z%]*)\s*", re.IGNORECASE)
_BYTES = {"b": 1, "byte": 1, "bytes": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate(("k", "m", "g", "t"), 1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_TOKENS = {"tok": 1, "toks": 1, "token": 1, "tokens": 1, "ktok": 1000, "mtok": 1_000_000}
_BLOCKS = {"blk": 1, "block": 1, "blocks": 1}


@dataclass(frozen=True)
class Capacity:
    """A capacity as given: `amount` in `unit` (one of UNITS), `text` for messages. `num_blocks` makes blocks of it."""

    amount: Fraction
    unit: str
    text: str

    def check(self, takes_share: bool, kv_bytes_per_token: int | None) -> None:
        """UserError for a share where none is possible, or bytes of no model: what can be known without the trace."""
        if self.unit == "share" and not takes_share:
            told = "semantics engine takes blocks (an integer), tokens or bytes, since outputs take room as well"
            raise UserError(f"capacity = {self.text}: {told}.")
        if self.unit == "bytes" and kv_bytes_per_token is None:
            raise UserError(f"capacity = {self.text}: bytes need a model, for example model=llama3_8b.")

    def num_blocks(self, block_tokens: int | Fraction | None, num_unique_blocks: int | None, kv_bytes_per_token: int | None) -> int:
        """Whole blocks.

        Args:
            block_tokens: tokens a block stands for; None: the trace does not say.
            num_unique_blocks: distinct blocks of the trace; None: a share is not possible.
            kv_bytes_per_token: of the model named; None: none was.

        Raises:
            UserError: less than one block, or the unit needs what is not known.
        """
        if self.unit == "blocks":
            return int(self.amount)
        self.check(num_unique_blocks is not None, kv_bytes_per_token)
        if self.unit == "share":
            return max(1, int(self.amount * (num_unique_blocks or 0)))
        if block_tokens is None:
            told = "this trace has no lengths, so that a block is no number of tokens"
            raise UserError(f"capacity = {self.text}: {told}. Give blocks or a share.")
        size = block_tokens * (kv_bytes_per_token or 1) if self.unit == "bytes" else block_tokens
        blocks = int(self.amount / size)
        if blocks < 1:
            raise UserError(f"capacity = {self.text} holds no block of {block_tokens} tokens: at least {size} {self.unit}.")
        return blocks


def parse_capacity(value: object, unit: str | None = None) -> Capacity:
    """A capacity from a number or a text.

    A whole number is blocks, a float in (0, 1) a share, a text either of them or with its unit: "40000tok", "8GiB", "10%". `unit`
    says what a plain number is.

    Raises:
        UserError: none of these, or below one block where that is known already.
    """
    if unit is not None and unit not in UNITS:
        raise unknown_name("capacity_unit", str(unit), UNITS)
    amount, own = _parse(value)
    if own is not None and unit is not None and own != unit:
        raise UserError(f"capacity = {value!r} is {own}, and capacity_unit={unit} says otherwise. Give one of them.")
    is_float = own is None and (isinstance(value, float) or (isinstance(value, str) and "." in value))
    kind = own or unit or ("share" if is_float and 0 < amount < 1 else "blocks")
    if kind == "share" and not 0 < amount < 1:
        raise _wrong(value)
    if amount <= 0 or (kind == "blocks" and (is_float or amount < 1 or amount.denominator != 1)):
        raise _wrong(value)
    return Capacity(amount, kind, f"{value}" if own or unit is None else f"{value} {unit}")


def _wrong(value: object) -> UserError:
    return UserError(f"capacity = {value!r} is not allowed: {HINT}; at least one block.")


def _parse(value: object) -> tuple[Fraction, str | None]:
    """(amount, unit where a text names one)."""
    if isinstance(value, Capacity):
        return value.amount, value.unit
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return Fraction(str(value)), None  # as it is written: 0.3 of 10 blocks are 3, not 2
    match = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _wrong(value)
    amount, ending = Fraction(match["number"].replace("_", "").rstrip(".")), match["unit"].lower()
    if not ending:
        return amount, None
    if ending == "%":
        return amount / 100, "share"
    for kind, units in (("tokens", _TOKENS), ("bytes", _BYTES), ("blocks", _BLOCKS)):
        if ending in units:
            return amount * units[ending], kind
    known = ["%", "tok", "ktok", "blocks", "B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]
    raise unknown_name("unit of a capacity", match["unit"], known)


def kv_bytes_per_token(model: Any, kv_dtype: str = "bfloat16") -> int:
    """Bytes of K and V of one token over all layers: 2 x layers x KV heads x head size x bytes of a number (int8: and 2 of a scale a head).

    model: a name in kvlab's table of shapes, a folder with a config.json (any model that says its layers, heads and KV heads), a
    mapping like that file, an object with the numbers (LlamaConfig), or the bytes themselves.

    Raises:
        UserError: an unknown name or dtype, or a config without the numbers.
    """
    if type(model) is int:
        if model < 1:
            raise UserError(f"model = {model} is not allowed as bytes per token: at least 1.")
        return model
    if kv_dtype not in KV_ITEM_BYTES:
        raise unknown_name("kv_dtype", kv_dtype, KV_ITEM_BYTES)
    layers, heads, head_dim = _kv_shape(model)
    return 2 * layers * heads * (head_dim * KV_ITEM_BYTES[kv_dtype] + (INT8_SCALE_BYTES if kv_dtype == "int8" else 0))


def _kv_shape(model: Any) -> tuple[int, int, int]:
    """(layers, KV heads, head size)."""
    if isinstance(model, (str, Path)):
        from kvlab.model.random_weights import SHAPES, TINY  # here, because models need torch

        shapes = {**SHAPES, "tiny": TINY}
        folder = expanded(model)
        name = str(model).removeprefix("dummy_")
        if name in shapes:
            return shapes[name].num_layers, shapes[name].num_kv_heads, shapes[name].head_dim
        file = folder / "config.json" if folder.is_dir() else folder
        if not file.is_file():
            raise UserError(f"{unknown_name('model', str(model), shapes)} Or the folder of a model with its config.json.")
        try:
            model = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} can't be read as JSON ({error}).") from None
    if isinstance(model, Mapping):
        try:
            num_heads = int(model["num_attention_heads"])
            head_dim = int(model.get("head_dim") or int(model["hidden_size"]) // num_heads)
            return int(model["num_hidden_layers"]), int(model.get("num_key_value_heads") or num_heads), head_dim
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            told = "num_hidden_layers, num_attention_heads and hidden_size"
            raise UserError(f"The model's config doesn't say {told} ({error!r}).") from None
    numbers = [getattr(model, name, None) for name in ("num_layers", "num_kv_heads", "head_dim")]
    layers, heads, size = (number if type(number) is int else 0 for number in numbers)
    if not layers or not heads or not size:
        raise UserError(f"model = {model!r:.60} is not allowed: a name such as llama3_8b, a model's folder, or bytes per token.")
    return layers, heads, size
