"""Anyone gives way."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from kvlab.policies.base import PreemptionMode, PreemptionPolicy, is_whole, require
from kvlab.types import GroupView, Now


class Random(PreemptionPolicy):
    """Any running group gives way, each with the same chance: the baseline that a choice has to beat.

    Source: the baseline in the comparison of victims of vLLM's RFC 54644, https://github.com/vllm-project/vllm/issues/54644
    Parameters: mode: how it gives way. protect_oldest: the earliest-admitted running group is never a candidate. seed: any integer; the
        same seed and the same events give the same victims.
    Deviations: a draw is blake2b(seed, step, candidates) mod candidates, not a generator's stream: it depends on nothing else.
    """

    def __init__(self, mode: PreemptionMode, protect_oldest: bool = True, seed: int = 0) -> None:
        super().__init__(mode, protect_oldest)
        require(is_whole(seed), self, "seed", seed, "an integer")
        self.seed = seed

    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        """A draw among the candidates; asked again before anything changed, it answers the same."""
        names = ",".join(str(group.group_id) for group in candidates)
        digest = blake2b(f"{self.seed}/{now.step}/{names}".encode(), digest_size=8).digest()
        return candidates[int.from_bytes(digest, "little") % len(candidates)]
