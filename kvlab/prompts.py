"""What a caller of `kvlab.LLM` may give as a prompt, as texts and lists of token ids.

A text is one prompt, and so is a sequence, 1-d array or tensor of whole numbers: token ids. Any other sequence or iterable (a list of
both kinds, a 2-d array, a generator) holds prompts. What is none of these is refused: bytes, floats, true and false, dicts, sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from kvlab.types import UserError
from kvlab.types.token_ids import as_whole, plain, token_ids


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """The prompts, each a text or token ids. UserError: there is none, or something else (its place and type are said)."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items is None:
        raise UserError(f"The prompt is {_named(prompts)}: a text, texts or token ids are needed.")
    if not items:
        raise UserError("There is no prompt: give a text, texts or token ids.")
    ids = token_ids(items)
    if ids is not None:
        return [ids]
    parts = [item if isinstance(item, str) else _items(item) for item in items]
    if all(part is None for part in parts):
        raise UserError(f"The prompt holds {_named(_wrong(items))}: a text, texts or token ids are needed.")
    return [_one(number, item, part) for number, (item, part) in enumerate(zip(items, parts, strict=True))]


def one_each(name: str, value: Any, num_prompts: int) -> list[Any]:
    """A setting that is given for all prompts, or as a sequence or array of one for each. UserError: another number of them."""
    items = None if isinstance(value, str) else _items(value)
    if items is None:
        return [value] * num_prompts
    if len(items) != num_prompts:
        raise UserError(f"{len(items)} values of {name} for {num_prompts} prompts: give one for all, or one for each.")
    return items


def _items(value: Any) -> list[Any] | None:
    """What a sequence, array or iterable holds; None: it is none of them."""
    if isinstance(value, (bytes, bytearray, memoryview, Mapping, Set)):
        return None
    value = plain(value)
    return list(value) if isinstance(value, Iterable) else None


def _one(number: int, item: Any, part: str | list[Any] | None) -> str | list[int]:
    if isinstance(part, str):
        return part
    ids = None if part is None else token_ids(part)
    if ids is None:
        what = f"is {_named(item)}" if part is None else f"holds {_named(_wrong(part))}"
        raise UserError(f"Prompt {number} {what}: a text or a list of token ids is needed.")
    return ids


def _wrong(items: list[Any]) -> Any:
    """The first that is no token id."""
    return next(item for item in items if as_whole(item) is None)


def _named(value: Any) -> str:
    """A wrong value's type, and what to do about it."""
    name = type(value).__name__
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{name} (decode it, if it is a text)"
    return f"{name} {value!r:.40}" if isinstance(value, (bool, float)) else name
