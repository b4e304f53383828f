"""Token ids: random ones that are a function of their name, and text without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvlab.types import UserError
from kvlab.workload.base import WorkloadContext
from kvlab.workload.rng import CounterRandom

Ids = npt.NDArray[np.int64]


class RandomTokens:
    """Random token ids that depend on (seed, purpose, stream) only: the same stream has the same tokens wherever it is asked for.

    Special ids are left out. The first k tokens of a stream are the same whatever the count asked for.
    """

    def __init__(self, ctx: WorkloadContext, purpose: int) -> None:
        """UserError when no ordinary id is left."""
        special = ctx.reserved_ids
        self._allowed = np.delete(np.arange(ctx.vocab_size, dtype=np.int64), list(special)) if special else None
        self.num_allowed = ctx.vocab_size if self._allowed is None else len(self._allowed)
        if self.num_allowed < 1:
            raise UserError(f"All {ctx.vocab_size} ids of the vocabulary are special: none is left for random prompts.")
        self._words = CounterRandom(ctx.seed, purpose)

    def blocks(self, streams: Sequence[int] | Ids, count: int) -> Ids:
        """Shape (len(streams), count): the first `count` tokens of each stream."""
        words = self._words.words(streams, count) >> np.uint64(32)
        index = ((words * np.uint64(self.num_allowed)) >> np.uint64(32)).astype(np.int64)
        return index if self._allowed is None else self._allowed[index]

    def tokens(self, stream: int, count: int) -> list[int]:
        """The first `count` tokens of a stream."""
        ids: list[int] = self.blocks([stream], count)[0].tolist()
        return ids


def byte_ids(text: str, vocab_size: int) -> list[int]:
    """UTF-8 bytes of a text as token ids (modulo a vocabulary of under 256 ids): simulated runs have no tokenizer."""
    return [byte % vocab_size for byte in text.encode("utf-8")]


def byte_chat(messages: Sequence[Mapping[str, str]], vocab_size: int) -> list[int]:
    """A conversation as bytes, in ChatML's shape, so that a shared system prompt is a shared prefix here too."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return byte_ids(text + "<|im_start|>assistant\n", vocab_size)
