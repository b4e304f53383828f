"""Reading files of prompts: JSON lines (text, chat messages or token ids, with parameters) and plain text, a prompt a line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.types import UserError, unknown_name, wrong_caching
from kvlab.types.chat import as_messages
from kvlab.types.text import half_pair, left_out
from kvlab.workload.sampling import NAMES, sampling_params
from kvlab.workload.traces import numbered_lines

CONTENT = ("prompt", "messages", "prompt_token_ids")
"""Fields of which a line has exactly one."""


@dataclass
class PromptLine:
    """One prompt as its file has it. `where`: file and line, for messages. `content`: the value of the field `kind`."""

    where: str
    kind: str
    content: Any
    fields: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: Path, limit: int | None, notes: list[str] | None = None) -> list[PromptLine]:
    """The first `limit` prompts of a file (.jsonl or .ndjson: JSON lines; anything else: text; .gz of either).

    Lines whose strings are no text (half of a surrogate pair) are left out; `notes` hears of them.

    Raises:
        UserError: with file and line, for broken JSON, an unknown or wrong field; or when there is no prompt.
    """
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix == ".json":
        raise UserError(f"{path}: one JSON object a line is read, and such a file is called .jsonl; this one is called .json.")
    parse: Callable[[str, str], PromptLine] = parse_line if suffix in (".jsonl", ".ndjson") else _text_line
    prompts: list[PromptLine] = []
    odd: list[str] = []
    for number, line in numbered_lines(path):
        if limit is not None and len(prompts) >= limit:
            break
        prompt = parse(f"{path}, line {number}", line)
        if half_pair([prompt.content, prompt.fields, prompt.sampling]) is None:
            prompts.append(prompt)
        else:
            odd.append(prompt.where)
    if notes is not None:
        notes += left_out(odd)
    if not prompts:
        raise UserError(" ".join([f"{path} holds no prompts.", *left_out(odd)]))
    return prompts


def _text_line(where: str, line: str) -> PromptLine:
    return PromptLine(where, "prompt", line)


def parse_line(where: str, line: str) -> PromptLine:
    """One line of a JSONL file, checked."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: broken JSON ({error}).") from error
    if not isinstance(row, dict):
        raise UserError(f'{where}: a JSON object is expected, for example {{"prompt": "Hello"}}, not {type(row).__name__}.')
    kinds = [kind for kind in CONTENT if kind in row]
    if len(kinds) != 1:
        raise UserError(f"{where}: exactly one of {', '.join(CONTENT)} is needed; there is {' and '.join(kinds) or 'none'}.")
    prompt = PromptLine(where, kinds[0], row.pop(kinds[0]))
    CONTENT_CHECKS[prompt.kind](where, prompt.content)
    if prompt.kind == "messages":
        prompt.content = as_messages(prompt.content, where)
    for name, value in row.items():
        if name in NAMES:
            prompt.sampling[name] = value
        elif name in FIELDS:
            prompt.fields[name] = _checked(where, name, value)
        else:
            raise UserError(f"{where}: {unknown_name('field', name, [*CONTENT, *FIELDS, *NAMES])}")
    if words := wrong_caching(prompt.fields.get("cache", True), prompt.fields.get("cache_until")):
        raise UserError(f"{where}: {words}.")
    sampling_params(where, {"max_tokens": max(16, _int_or_zero(prompt.sampling.get("min_tokens")))}, prompt.sampling)
    return prompt


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0


def _check_text(where: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: prompt must be a text of at least one character.")


def _check_ids(where: str, value: Any) -> None:
    if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
        raise UserError(f"{where}: prompt_token_ids must be a list of at least one token id (whole numbers >= 0).")


def _check_messages(where: str, value: Any) -> None:
    as_messages(value, where)


CONTENT_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "prompt": _check_text, "messages": _check_messages, "prompt_token_ids": _check_ids,
}  # fmt: skip

FIELDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "request_id": (str, "a string"),
    "arrival_s": ((int, float), "seconds >= 0"),
    "priority": (int, "a whole number, lower goes first"),
    "tenant": (str, "a string"),
    "cache_salt": (str, "a string"),
    "oracle_output_len": (int, "tokens, at least 1"),
    "abort_at_s": ((int, float), "seconds >= 0"),
    "session_id": (str, "a string"),
    "cache": (bool, "true or false"),
    "cache_until": (int, "a position in tokens, 0 (nothing may be cached) or more"),
}
"""Fields of a line besides the prompt and the sampling parameters: name -> (type, in words)."""

MINIMUM = {"arrival_s": 0, "abort_at_s": 0, "oracle_output_len": 1, "cache_until": 0}


def _checked(where: str, name: str, value: Any) -> Any:
    kind, words = FIELDS[name]
    ok = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if ok and isinstance(value, (int, float)):
        ok = math.isfinite(value) and value >= MINIMUM.get(name, -math.inf)
    if not ok:
        raise UserError(f"{where}: {name} = {value!r} is not allowed: {words}.")
    return value
