"""Admission by a share of the output that may still come."""

from __future__ import annotations

from kvlab.policies.admission._footprint import blocks_to_come
from kvlab.policies.base import AdmissionPolicy, EntryView, is_number, is_whole, require
from kvlab.types import GroupView, Now, PoolView, QueuesView


class ExpectedOutput(AdmissionPolicy):
    """A group enters if it fits with its own max_tokens and a share of what the running ones may still produce; the share falls step by
    step while all goes well and is estimated anew when somebody had to give way.

        own tokens + min(max_tokens, clip) + sum over running of min(max_tokens - output, clip) * ratio  <=  available tokens

    Source: SGLang's `new_token_ratio` (scheduler, schedule policy, `retract_decode`),
        https://github.com/sgl-project/sglang/blob/v0.5.3/python/sglang/srt/managers/schedule_policy.py
    Parameters: schedule_conservativeness: the ratio starts at min(1, initial_ratio * this). initial_ratio: at least 0.
        min_ratio_factor: it falls to this share of its start. decay_steps: evenly, in so many steps. retract_decode_steps: output
        tokens that a preemption grants each group that goes on, when the ratio becomes (their output + these) / (their max_tokens),
        at most 1. clip_max_new_tokens: more than this is not reserved for a request, whatever its max_tokens.
    Deviations: a preemption by swap counts as one by recompute (SGLang only knows the latter). The ratio falls in steps in which somebody
        decodes, prompts beside them or not. It starts anew when no request is left, as SGLang's does when idle. A fit to the last
        token is a fit. Tokens of prompts still in chunks are counted in full. The exact simulation that SGLang turns to for requests
        with ignore_eos when its cache is off is not made.
    """

    def __init__(self, schedule_conservativeness: float = 1.0, initial_ratio: float = 0.7, min_ratio_factor: float = 0.14,
                 decay_steps: int = 600, retract_decode_steps: int = 20, clip_max_new_tokens: int = 4096) -> None:  # fmt: skip
        for name, value in (("schedule_conservativeness", schedule_conservativeness), ("initial_ratio", initial_ratio)):
            require(is_number(value) and value >= 0, self, name, value, "a number of at least 0")
        require(is_number(min_ratio_factor) and 0 <= min_ratio_factor <= 1, self, "min_ratio_factor", min_ratio_factor, "in [0, 1]")
        for name, number, least in (("decay_steps", decay_steps, 1), ("retract_decode_steps", retract_decode_steps, 0),
                                    ("clip_max_new_tokens", clip_max_new_tokens, 1)):  # fmt: skip
            is_integer = is_whole(number)
            require(is_integer and number >= least, self, name, number, f"an integer of at least {least}")
        self.schedule_conservativeness = schedule_conservativeness
        self.initial_ratio = initial_ratio
        self.min_ratio_factor = min_ratio_factor
        self.decay_steps = decay_steps
        self.retract_decode_steps = retract_decode_steps
        self.clip_max_new_tokens = clip_max_new_tokens
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._first_ratio = min(1.0, self.initial_ratio * self.schedule_conservativeness)
        self.ratio = self._first_ratio
        self._running: dict[int, GroupView] = {}  # in order of entry
        self._num_live = 0
        self._quiet_step = -1  # the last step in which the ratio fell or was set

    # ------------------------------------------------------------------ the ratio

    def arrived(self, group: GroupView, queues: QueuesView, now: Now) -> None:
        """One more."""
        self._num_live += 1

    def entered(self, group: GroupView, kind: str, now: Now) -> None:
        """It runs."""
        self._running[group.group_id] = group

    def computed(self, group: GroupView, num_computed_tokens: int, num_output_tokens: int, now: Now) -> None:
        """Once a step in which somebody got another token than its first, and nobody gave way: the ratio falls."""
        if num_output_tokens > 0 and group.num_output_tokens > 1 and now.step > self._quiet_step:
            self._quiet_step = now.step
            lowest = self._first_ratio * self.min_ratio_factor
            self.ratio = max(lowest, self.ratio - (self._first_ratio - lowest) / self.decay_steps)

    def preempted(self, group: GroupView, mode: str, now: Now) -> None:
        """The ratio becomes what those who go on have reached, with some steps more."""
        self._running.pop(group.group_id, None)
        self._quiet_step = now.step
        rest = self._running.values()
        limit = sum(other.max_tokens * other.num_sequences for other in rest)
        if limit:
            decoded = sum((other.num_output_tokens + self.retract_decode_steps) * other.num_sequences for other in rest)
            self.ratio = min(1.0, decoded / limit)

    def ended(self, group: GroupView, now: Now) -> None:
        """One less; with the last one the ratio starts anew."""
        self._running.pop(group.group_id, None)
        self._num_live -= 1
        if self._num_live <= 0:
            self._num_live = 0
            self.ratio = self._first_ratio

    # --------------------------------------------------------------- the question

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """Count in tokens: blocks on hand and needed, and the running ones' expected output."""
        group, size = entry.group, pool.block_size
        own = entry.blocks_for(group.num_tokens + self._to_come(group)) * size
        expected = 0.0
        for other in entry.running:
            ratio = 1.0 if other.admitted_step == now.step else self.ratio  # who enters in the same step counts in full
            expected += self._to_come(other) * other.num_sequences * ratio
            expected += blocks_to_come(other, other.num_tokens, size) * size
        if own + expected <= entry.num_available_blocks * size:
            return ""
        return "expected_output" if entry.blocks_for(entry.first_chunk_tokens) <= entry.num_available_blocks else "blocks"

    def _to_come(self, group: GroupView) -> int:
        """Output tokens that a sequence of the group may still produce, as far as they are reserved at all."""
        return min(max(0, group.max_tokens - group.num_output_tokens), self.clip_max_new_tokens)
