"""When a sequence ends: ids that end it, and stop strings in its text."""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.engine.detokenizer import Detokenizer
from kvlab.types import SamplingParams


def ids_of_the_model(token_ids: Iterable[int], vocab_size: int | None) -> tuple[int, ...]:
    """Those that a model can say: from 0 on, and in its vocabulary (None: not known). A model's folder may name others as EOS (-1 for
    none, an id of the tokenizer's that the embedding has no row for): they end nothing, real, simulated or recorded."""
    return tuple(i for i in token_ids if i >= 0 and (vocab_size is None or i < vocab_size))


def end_token_ids(sampling: SamplingParams, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
    """Ids that end a sequence, ascending: EOS (unless `ignore_eos`) and `stop_token_ids`. Masked below `min_tokens` outputs."""
    eos: Iterable[int] = () if sampling.ignore_eos else eos_token_ids
    return tuple(sorted({*eos, *sampling.stop_token_ids}))


class StopChecker:
    """Text of one sequence up to the first stop string. O(1) a token (in the length of the text).

    The match that is complete first counts, of those that end together the longest: so the result does not depend on how the text
    was cut into tokens. The text is truncated before it (or after it, `include_stop_str`); token ids are the engine's and stay.

    `min_tokens` as in vLLM: a stop string counts only if its last character comes with a token after the first `min_tokens` (the
    first token that could be an EOS); one completed earlier never counts.

    Args:
        detokenizer: fresh, of this sequence. stop: stop strings; may be empty (then it only collects text for streaming).
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...], include_stop_str: bool = False,
                 min_tokens: int = 0) -> None:  # fmt: skip
        self._detokenizer = detokenizer
        self._stop = stop
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._tail = ""  # the end of the text: as much as a stop string may need from before a new piece
        self._tail_chars = max((len(s) for s in stop), default=1) - 1
        self._unsent: list[str] = []
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    @property
    def text(self) -> str:
        """The text so far: truncated once a stop string was found."""
        return "".join(self._pieces)

    def append(self, token_id: int) -> bool:
        """Add a token. True: a stop string is complete, the sequence ends."""
        self._num_tokens += 1
        return self._add(self._detokenizer.append(token_id))

    def finish(self) -> bool:
        """The sequence has ended otherwise: add what an incomplete character leaves. True if that completes a stop string."""
        return self._add(self._detokenizer.flush())

    def take(self) -> str:
        """Text for a stream since the last call. What may yet become part of an excluded stop string is held back."""
        unsent = self.take_rest()
        held = 0 if self._include_stop_str or self.stopped_by is not None else min(self._num_held_chars(), len(unsent))
        self._unsent = [unsent[len(unsent) - held :]]
        return unsent[: len(unsent) - held]

    def take_rest(self) -> str:
        """The last text of a stream, once the sequence has ended: nothing is held back."""
        rest = "".join(self._unsent)
        self._unsent = []
        return rest

    def _add(self, piece: str) -> bool:
        """Take new text; cut it at the first stop string that ends in it."""
        if self.stopped_by is not None:
            return True
        window = self._tail + piece
        start, end = self._first_match(window) if piece and self._num_tokens > self._min_tokens else (-1, -1)
        if start >= 0:
            self.stopped_by = window[start:end]
            num_cut = len(window) - (end if self._include_stop_str else start)
            self._pieces = [_without_end([*self._pieces, piece], num_cut)]
            self._unsent = [_without_end([*self._unsent, piece], num_cut)]
            return True
        self._pieces.append(piece)
        self._unsent.append(piece)
        self._tail = window[max(0, len(window) - self._tail_chars) :]
        return False

    def _first_match(self, window: str) -> tuple[int, int]:
        """(start, end) in `window` of the match that ends first, behind the tail; (-1, -1) if none."""
        best: tuple[int, int] | None = None
        for stop in self._stop:
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if best is None or (end, start) < (best[1], best[0]):
                    best = (start, end)
        return best or (-1, -1)

    def _num_held_chars(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string (and not all of it)."""
        for length in range(len(self._tail), 0, -1):
            end = self._tail[len(self._tail) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0


def _without_end(pieces: list[str], num_chars: int) -> str:
    text = "".join(pieces)
    return text[: max(0, len(text) - num_chars)]
