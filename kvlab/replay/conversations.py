"""ShareGPT conversations for a replay: as accesses of hashed token blocks, or as requests with the answers that the file has."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.replay.trace import DEFAULT_BLOCK_SIZE, AccessTrace, BlockRows, ReadOptions
from kvlab.types import Request, SamplingParams, UserError
from kvlab.workload.base import Tokenizer
from kvlab.workload.sharegpt import Conversation, read_sharegpt

BYTES = 256
"""Vocabulary of texts without a tokenizer: their UTF-8 bytes."""


@dataclass
class _Open:
    """A conversation under way: what its last prompt was, and the hashes of that prompt's full blocks."""

    conversation: Conversation
    turn: int = 0
    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def hashes(self, tokens: list[int], block_size: int) -> list[bytes]:
        """Chained 8-byte hashes of the full blocks of a prompt; what the last prompt had is not hashed again."""
        if tokens[: len(self.tokens)] != self.tokens:
            self.digests = []
        data = array("I", tokens)
        for first in range(len(self.digests) * block_size, len(tokens) - block_size + 1, block_size):
            parent = self.digests[-1] if self.digests else b""
            self.digests.append(blake2b(parent + data[first : first + block_size].tobytes(), digest_size=8).digest())
        self.tokens = tokens
        return self.digests


def tokenizer_of(given: Any) -> Tokenizer | None:
    """A tokenizer from what `ReadOptions.tokenizer` may be. UserError: neither a name, nor a folder, nor a tokenizer."""
    if given is None or given == "bytes":
        return None
    if isinstance(given, (str, Path)):
        from kvlab.model.specs import hf, smollm2, tiny  # here, because models need torch

        named = {"smollm2": smollm2, "tiny": tiny}
        tokenizer, _ = named[str(given)]().text() if str(given) in named else hf(path=str(given)).text()
        if tokenizer is None:
            raise UserError(f"tokenizer = {str(given)!r}: that model has no tokenizer.")
        return tokenizer
    if not hasattr(given, "encode") or not hasattr(given, "apply_chat"):
        allowed = "bytes, smollm2, a model's folder, or an object with encode and apply_chat"
        raise UserError(f"tokenizer = {given!r:.60} is not allowed: {allowed}.")
    own: Tokenizer = given
    return own


def turns_in_order(conversations: Iterator[Conversation], interleave: int) -> Iterator[tuple[_Open, int]]:
    """(conversation, place of the answer) of each request: `interleave` conversations take turns; one that ends makes room."""
    waiting: list[_Open] = [_Open(one) for one in islice(conversations, interleave)]
    while waiting:
        still_open: list[_Open] = []
        for one in waiting:
            answers = one.conversation.answers
            yield one, answers[one.turn]
            one.turn += 1
            if one.turn < len(answers):
                still_open.append(one)
            elif (following := next(conversations, None)) is not None:
                still_open.append(_Open(following))
        waiting = still_open


def _notes(path: Path, reading: ReadOptions) -> list[str]:
    order = f"{reading.interleave} conversations take turns" if reading.interleave > 1 else "conversations follow one another"
    what = "UTF-8 bytes" if tokenizer_of(reading.tokenizer) is None else "tokens"
    advice = "" if reading.interleave > 1 else ", which favours recency; interleave=n lets n of them take turns"
    return [f"{path.name}: has no times; {order}{advice}. Prompts are {what}."]


def access_sharegpt(path: Path, limit: int | None, reading: ReadOptions) -> AccessTrace:
    """Each answer is a request whose blocks are the full blocks of all messages before it, named by a hash of their tokens.

    Raises:
        UserError: malformed conversations, a tokenizer or template that refuses, nothing in it.
    """
    block_size = reading.block_size or DEFAULT_BLOCK_SIZE
    tokenizer, notes = tokenizer_of(reading.tokenizer), _notes(path, reading)
    starts, inputs, outputs, data = array("q", [0]), array("q"), array("q"), bytearray()
    untils: list[int | None] = []
    with closing(read_sharegpt(path, notes)) as conversations:
        for one, place in islice(turns_in_order(conversations, reading.interleave), limit):
            prompt = one.conversation.prompt(place, tokenizer, BYTES)
            data += b"".join(one.hashes(prompt, block_size))
            starts.append(len(data) // 8)
            inputs.append(len(prompt))
            untils.append(one.conversation.cache_until)
            outputs.append(len(one.conversation.answer(place, tokenizer, BYTES)))
    if not inputs:
        raise UserError(f"{path} holds no requests.")
    _, ids = np.unique(np.frombuffer(bytes(data), dtype=np.int64), return_inverse=True)
    blocks = BlockRows(np.array(starts, dtype=np.int64), ids.astype(np.int64))
    return AccessTrace(path.name, blocks, [0.0] * len(inputs), inputs.tolist(), outputs.tolist(), block_size, notes=tuple(notes),
                       cache_until=None if untils.count(None) == len(untils) else untils)  # fmt: skip


def served_sharegpt(path: Path, limit: int | None, reading: ReadOptions) -> tuple[Iterator[tuple[Request, list[int]]], list[str]]:
    """Requests with the tokens of the file's answers, one at a time, and notes (complete when all were taken)."""
    notes = _notes(path, reading)

    def requests() -> Iterator[tuple[Request, list[int]]]:
        tokenizer = tokenizer_of(reading.tokenizer)
        with closing(read_sharegpt(path, notes)) as conversations:
            for one, place in islice(turns_in_order(conversations, reading.interleave), limit):
                answer = one.conversation.answer(place, tokenizer, BYTES)
                name = f"sharegpt-{one.conversation.number}-turn-{one.turn}"
                sampling = SamplingParams(max_tokens=len(answer), ignore_eos=True)
                yield Request(name, one.conversation.prompt(place, tokenizer, BYTES), sampling, turn=one.turn,
                              cache_until=one.conversation.cache_until), answer  # fmt: skip

    return requests(), notes
