"""The block size that costs least for the lengths that come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvlab.policies.base import BlockSizingPolicy, is_number, is_whole, require
from kvlab.types import RequestShape

CANDIDATES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Cost(NamedTuple):
    """What a block size costs, each as a share of the work: slots that stay empty, handling of blocks, shared tokens computed again."""

    block_size: int
    empty_slots: float
    per_block: float
    lost_sharing: float

    @property
    def total(self) -> float:
        """The sum: what the choice goes by."""
        return self.empty_slots + self.per_block + self.lost_sharing


class Auto(BlockSizingPolicy):
    """The candidate with the smallest sum of three costs over the lengths of the workload; of equals the larger.

    empty_slots: slots of last blocks that stay empty, over tokens held, both summed over the life of each sequence (about B / 2 each).
    per_block: a block's table entry and its share of a kernel's loop, against reading its tokens: block_overhead / B; or, where
    `measured` gives times, how much slower a size is than the fastest one. lost_sharing: tokens that a prompt shares with an earlier one
    in a block that does not match as a whole, over the tokens computed.

    Source: the trade-off of Kwon et al., SOSP 2023, section 7.2, https://arxiv.org/abs/2309.06180, in figures. With one length L and
        nothing shared it is least at B = sqrt(2 * block_overhead * L).
    Parameters: candidates: sizes to choose from, positive integers. block_overhead: what a block costs beyond its tokens, in tokens'
        worth of reading K and V. measured: size -> time of a step or of an attention call at it, in any unit, for every candidate;
        null: modelled. fallback: the choice where neither lengths nor a workload are known.
    Deviations: the three shares are added as they are (a slot not held, a moment of time, a token not computed again count alike). Samples
        of one prompt count each by itself. Later turns of conversations are not foreseen.
    """

    def __init__(self, candidates: Sequence[int] = CANDIDATES, block_overhead: float = 1.0, measured: Mapping[int, float] | None = None,
                 fallback: int = 16) -> None:  # fmt: skip
        good = isinstance(candidates, Sequence) and len(candidates) > 0 and all(_is_size(size) for size in candidates)
        require(good, self, "candidates", candidates, "a list of positive integers (tokens per block)")
        is_right = is_number(block_overhead) and block_overhead >= 0
        require(is_right, self, "block_overhead", block_overhead, "a number of at least 0 (tokens)")
        require(_is_size(fallback), self, "fallback", fallback, "a positive integer (tokens per block)")
        if measured is not None:
            has_all = isinstance(measured, Mapping) and all(_time_of(measured, size) > 0 for size in candidates)
            require(has_all, self, "measured", measured, f"null, or a time above 0 for each of {', '.join(map(str, candidates))}")
        self.candidates = candidates
        self.block_overhead = block_overhead
        self.measured = measured
        self.fallback = fallback
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._shapes: list[RequestShape] = []
        self._costs: list[Cost] = []
        self._why = ""

    def foresee(self, shapes: Sequence[RequestShape]) -> None:
        """Keep the lengths."""
        self._shapes = list(shapes)

    def block_size(self, prompt_lens: Sequence[int], max_model_len: int) -> int:
        """The cheapest candidate that is not longer than a sequence may get."""
        shapes = self._shapes or [RequestShape(length, 1) for length in prompt_lens if length > 0]
        self._costs = []
        if not shapes:
            self._why = f"{self.fallback} tokens a block: no lengths are known beforehand, so the fallback stands"
            return self.fallback
        sizes = sorted({size for size in self.candidates if size <= max_model_len}) or [min(self.candidates)]
        self._costs = [self._cost(size, shapes) for size in sizes]
        best = min(reversed(self._costs), key=lambda cost: cost.total)
        mean = sum(shape.num_prompt_tokens + shape.num_output_tokens for shape in shapes) / len(shapes)
        how = "measured times" if self.measured is not None else f"block_overhead {self.block_overhead:g}"
        self._why = f"{best.block_size} tokens a block cost least for {len(shapes)} requests of {mean:,.0f} tokens in the mean ({how})"
        return best.block_size

    def explain(self) -> Sequence[str]:
        """The choice, and the costs of every size in per cent."""
        lines = [f"Block size: {self._why}."]
        if self._costs:
            lines.append(f"{'tokens':>8}{'empty slots %':>15}{'per block %':>13}{'lost sharing %':>16}{'sum %':>9}")
        for size, *shares in self._costs:
            empty, block, sharing = (100 * share for share in shares)
            lines.append(f"{size:>8}{empty:>15.1f}{block:>13.1f}{sharing:>16.1f}{empty + block + sharing:>9.1f}")
        return lines

    def _cost(self, size: int, shapes: Sequence[RequestShape]) -> Cost:
        """The shares for one size."""
        empty = held = lost = computed = 0
        for num_prompt, num_output, num_shared, num_sequences in shapes:
            last = num_prompt + max(1, num_output) - 1  # the last token's K and V are never written
            empty += num_sequences * (_empty_slots(last, size) - _empty_slots(num_prompt - 1, size))
            held += num_sequences * (last * (last + 1) - num_prompt * (num_prompt - 1)) // 2
            lost += num_shared % size
            computed += num_prompt - num_shared + num_sequences * (last - num_prompt)
        return Cost(size, empty / held, self._per_block(size), lost / max(1, computed))

    def _per_block(self, size: int) -> float:
        if self.measured is None:
            return self.block_overhead / size
        return _time_of(self.measured, size) / min(_time_of(self.measured, other) for other in self.candidates) - 1


def _empty_slots(length: int, size: int) -> int:
    """Empty slots of the last block, summed over lengths 1 to `length`."""
    whole, rest = divmod(length, size)
    return whole * size * (size - 1) // 2 + rest * size - rest * (rest + 1) // 2


def _time_of(measured: Mapping[int, float], size: int) -> float:
    """Its time; 0 where it is missing or no number. Keys may be texts, as in a configuration."""
    value = measured.get(size, measured.get(str(size)))  # type: ignore[call-overload]
    return float(value) if is_number(value) else 0.0


def _is_size(value: object) -> bool:
    return is_whole(value) and value >= 1
