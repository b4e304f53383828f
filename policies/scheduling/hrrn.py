"""Highest response ratio next."""

from __future__ import annotations

from kvlab.policies.base import SchedulingPolicy, is_number, is_whole, require
from kvlab.types import GroupView, Now


class Hrrn(SchedulingPolicy):
    """The request whose wait is longest in proportion to the time it will take goes first: short ones soon, long ones in the end.

    Source: Brinch Hansen, "An analysis of response ratio scheduling" (IFIP 1971): (wait + service) / service, highest first.
    Parameters: prompt_tokens_per_s: speed of computing a prompt by which a request's service time is estimated, in tokens/s of one request.
        output_tokens_per_s: the same of decoding. output_tokens: the output expected of every request; null: its max_tokens.
    Deviations: service times of requests are unknown and so estimated; waits are counted from arrival, also for one that was
        preempted (it stands at the front anyway). SGLang's `hrrn` counts tokens computed meanwhile against uncached prompt tokens.
    """

    is_static = False
    key_is_elementwise = True

    def __init__(self, prompt_tokens_per_s: float = 8000.0, output_tokens_per_s: float = 50.0, output_tokens: int | None = None) -> None:
        for name, value in (("prompt_tokens_per_s", prompt_tokens_per_s), ("output_tokens_per_s", output_tokens_per_s)):
            require(is_number(value) and value > 0, self, name, value, "tokens/s, more than 0")
        is_count = output_tokens is None or (is_whole(output_tokens) and output_tokens >= 1)
        require(is_count, self, "output_tokens", output_tokens, "null or a positive integer")
        self.prompt_tokens_per_s = prompt_tokens_per_s
        self.output_tokens_per_s = output_tokens_per_s
        self.output_tokens = output_tokens

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """-(wait / service), which orders as the response ratio does; then arrival (s)."""
        num_output = group.max_tokens if self.output_tokens is None else self.output_tokens
        service_s = group.num_prompt_tokens / self.prompt_tokens_per_s + num_output / self.output_tokens_per_s
        return (-(now.now_s - group.arrival_s) / service_s, group.arrival_s)
