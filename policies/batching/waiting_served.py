"""Prompts pause the decodes only when enough of them wait, or have waited long enough."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import RUNNING, SWAPPED, WAITING, BatchingPolicy, is_number, is_whole, require
from kvlab.types import GroupView, Now, QueuesView


class WaitingServed(BatchingPolicy):
    """New prompts are computed in a step of their own, which pauses the decodes: only when enough wait compared with those that run,
    or enough tokens have been decoded since the last such step.

    Source: text-generation-inference's router (`waiting_served_ratio`, `max_waiting_tokens`),
        https://github.com/huggingface/text-generation-inference/blob/main/backends/v2/src/backend.rs
    Parameters: waiting_served_ratio: share of the running requests that must wait (rounded down). max_waiting_tokens: decode steps
        after which any number will do. The prompts of a step are bounded by the engine's max_num_batched_tokens
        (`max_batch_prefill_tokens` there).
    Deviations: those that wait are counted, not those that would fit as well. A prompt longer than max_num_batched_tokens is computed
        in pieces beside decodes, as in prefill_first (there it is refused). While anything is swapped no prompt is taken (there nothing
        is ever preempted: pair it with admission reserve_all).
    """

    def __init__(self, waiting_served_ratio: float = 0.3, max_waiting_tokens: int = 20) -> None:
        ratio, tokens = waiting_served_ratio, max_waiting_tokens
        require(is_number(ratio) and ratio >= 0, self, "waiting_served_ratio", ratio, "a number, at least 0")
        is_integer = is_whole(tokens)
        require(is_integer and tokens >= 0, self, "max_waiting_tokens", tokens, "a whole number, at least 0")
        self.waiting_served_ratio = waiting_served_ratio
        self.max_waiting_tokens = max_waiting_tokens
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._prefilled_at = -1  # the last step that took prompts
        self._others_ran = False  # and whether it paused somebody
        self._num_running = 0

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        """Prompts alone, if it is time for them; else what runs. After prompts that paused the decodes a decode always follows."""
        self._num_running = len(queues.running)
        if queues.swapped:
            return ((RUNNING, SWAPPED),)
        if queues.running and not self._is_time(queues.num_waiting, now.step - self._prefilled_at):
            return ((RUNNING,),)
        return ((WAITING,), (RUNNING,))

    def _is_time(self, num_waiting: int, num_steps: int) -> bool:
        """`num_steps` since prompts were taken: 1 + decodes since then, as the router counts its waiting tokens."""
        if num_steps <= 1 and self._others_ran:
            return False
        return num_steps >= self.max_waiting_tokens or num_waiting >= int(self._num_running * self.waiting_served_ratio)

    def entered(self, group: GroupView, kind: str, now: Now) -> None:
        """Prompts are taken in this step."""
        if kind != "swapped_in":
            self._prefilled_at, self._others_ran = now.step, self._num_running > 0

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        """All, or for what no step could hold: as much as fits now."""
        if num_uncomputed <= budget:
            return num_uncomputed
        return budget if num_uncomputed > max_num_batched_tokens else 0
