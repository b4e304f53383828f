"""Admission by the expected peak of memory."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from hashlib import blake2b
from random import Random

from kvlab.policies.admission._footprint import blocks_at
from kvlab.policies.base import AdmissionPolicy, EntryView, is_number, is_whole, require
from kvlab.types import GroupView, Now, PoolView, QueuesView


class PastFuture(AdmissionPolicy):
    """A group enters if the highest use of memory to be expected on the way to everybody's end fits into the pool.

    Each output length is a draw from those of requests that ended lately and produced more than this one has so far. With all groups in
    order of what they still produce, longest first, the memory when group i ends is what the first i hold by then:

        peak = max over i of ( sum of j <= i of held_j  +  remaining_i * i ),  admitted if peak <= (1 - reserved) * pool

    Source: the past-future scheduler of LightLLM (Gong et al., ASPLOS 2025), https://arxiv.org/abs/2507.10150
    Parameters: window: ended requests that are remembered. reserved: share of the pool left out, in [0, 1). num_draws: draws per group; the
        largest peak of them counts. seed: of the draws.
    Deviations: max_tokens bounds a prediction, and is the prediction where nothing longer is remembered (the paper begins with a window
        full of the longest length allowed). A draw depends on seed, step and the group that asks only, so asking twice changes
        nothing. A group of n sequences holds and grows n times; its remembered length is their mean. Blocks shared between groups
        count in each. A request that was aborted is remembered with what it had.
    """

    def __init__(self, window: int = 1000, reserved: float = 0.03, num_draws: int = 1, seed: int = 0) -> None:
        for name, number in (("window", window), ("num_draws", num_draws)):
            require(is_whole(number) and number >= 1, self, name, number, "a positive integer")
        require(is_number(reserved) and 0 <= reserved < 1, self, "reserved", reserved, "in [0, 1)")
        require(is_whole(seed), self, "seed", seed, "an integer")
        self.window = window
        self.reserved = reserved
        self.num_draws = num_draws
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._recent: deque[int] = deque()  # in order of their ends
        self._sorted: list[int] = []  # the same lengths, ascending
        self._live: dict[int, list[int]] = {}  # group id -> [its sequences, output tokens so far over all of them]

    # ------------------------------------------------------------------- the past

    def arrived(self, group: GroupView, queues: QueuesView, now: Now) -> None:
        """Begin to count its output."""
        self._live[group.group_id] = [group.num_sequences, 0]

    def computed(self, group: GroupView, num_computed_tokens: int, num_output_tokens: int, now: Now) -> None:
        """Count its output."""
        self._live.setdefault(group.group_id, [group.num_sequences, 0])[1] += num_output_tokens

    def ended(self, group: GroupView, now: Now) -> None:
        """Remember its length, if it has one."""
        num_sequences, num_output = self._live.pop(group.group_id, (1, 0))
        length = round(num_output / max(1, num_sequences))
        if length < 1:
            return
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self.window:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    # ----------------------------------------------------------------- the future

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """Compare the expected peak with what there is."""
        groups = [*entry.running, entry.group]
        size = pool.block_size
        held = [max(group.num_blocks, blocks_at(group, group.num_tokens, size)) * size for group in groups]
        key = b"%d/%d/%d" % (self.seed, now.step, entry.group.group_id)
        draw = Random(int.from_bytes(blake2b(key, digest_size=8).digest(), "little"))
        most = (pool.num_blocks - int(self.reserved * pool.num_blocks)) * size
        for _ in range(self.num_draws):
            lengths = [self._remaining(group, draw.random()) for group in groups]
            if expected_peak([(r, h, group.num_sequences) for r, h, group in zip(lengths, held, groups, strict=True)]) > most:
                return "past_future" if entry.blocks_for(entry.first_chunk_tokens) <= entry.num_available_blocks else "blocks"
        return ""

    def _remaining(self, group: GroupView, quantile: float) -> int:
        """Tokens that each of its sequences is expected to produce still; `quantile` in [0, 1) picks among the remembered lengths."""
        limit, so_far = group.max_tokens, group.num_output_tokens
        first = bisect_right(self._sorted, so_far)
        longer = len(self._sorted) - first
        length = self._sorted[first + int(quantile * longer)] if longer else limit
        return max(0, min(length, limit) - so_far)


def expected_peak(groups: list[tuple[int, int, int]]) -> int:
    """Highest sum of memory of (remaining tokens, tokens held, sequences) groups that grow in step and leave when they end."""
    peak = held = growing = 0
    for remaining, own, num_sequences in sorted(groups, reverse=True):
        held += own
        growing += num_sequences
        peak = max(peak, held + remaining * growing)
    return peak
