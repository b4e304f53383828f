"""Each admission policy has a trace, worked out by hand, that no other policy of its seam passes.

One story of a pool of 100 blocks of one token, told to every policy: `r` (20 prompt tokens, at most 40 out) runs and holds 30 blocks all
the time, so 70 are free; groups ask one after the other and never enter. Answers: "y" lets in.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvlab.policies.registry import by_name, list_policies
from kvlab.types import Now

NAMES = [row.name for row in list_policies("admission")]
POOL = SimpleNamespace(num_blocks=100, num_free=70, num_evictable=0, num_used=30, block_size=1)
PARAMETERS: dict[str, dict[str, Any]] = {
    "watermark": {"fraction": 0.1},
    "adaptive": {"initial": 0.0, "step": 0.1, "factor": 2.0, "target": 0.1, "interval": 10},
    "expected_output": {"decay_steps": 10},  # 0.7 to 0.098: 0.0602 a step
    "past_future": {"reserved": 0.0},
}


def group(number: int, prompt: int, limit: int, output: int = 0, blocks: int = 0) -> Any:
    """A group of one sequence."""
    return SimpleNamespace(group_id=number, num_sequences=1, num_prompt_tokens=prompt, max_tokens=limit, num_output_tokens=output,
                           num_tokens=prompt + output, num_computed_tokens=blocks, num_blocks=blocks, admitted_step=0)  # fmt: skip


class Story:
    """Tells one policy what happens."""

    def __init__(self, name: str) -> None:
        self.policy = by_name("admission", name, **PARAMETERS.get(name, {}))
        self.running = group(0, prompt=20, limit=40, output=10, blocks=30)
        self.num_groups = 0
        self.step = 1
        self.answers = ""
        self.arrive(self.running)
        self.policy.entered(self.running, "new", Now(0, 0.0))

    def arrive(self, newcomer: Any) -> Any:
        self.num_groups += 1
        self.policy.arrived(newcomer, SimpleNamespace(waiting=(), running=(), swapped=()), Now(self.step, 0.0))
        return newcomer

    def ask(self, prompt: int, limit: int, first_chunk: int | None = None) -> None:
        """A new group asks; whatever it hears, it leaves again."""
        newcomer = self.arrive(group(self.num_groups, prompt, limit))
        entry = SimpleNamespace(group=newcomer, kind="new", first_chunk_tokens=first_chunk or prompt, num_available_blocks=70,
                                running=(self.running,), blocks_for=lambda num_tokens: num_tokens)  # fmt: skip
        self.answers += "n" if self.policy.admits(entry, POOL, Now(self.step, 0.0)) else "y"
        self.policy.ended(newcomer, Now(self.step, 0.0))

    def preempt_one(self, step: int) -> None:
        """Somebody enters in a step and gives way in it."""
        self.step = step
        victim = self.arrive(group(self.num_groups, 5, 5))
        victim.admitted_step = step
        self.policy.entered(victim, "new", Now(step, 0.0))
        self.policy.preempted(victim, "recompute", Now(step, 0.0))
        self.policy.ended(victim, Now(step, 0.0))

    def serve_one(self, length: int) -> None:
        """Somebody comes, gets `length` tokens in the present step, and ends."""
        served = self.arrive(group(self.num_groups, 1, 400))
        self.policy.computed(served, length, length, Now(self.step, 0.0))
        self.policy.ended(served, Now(self.step, 0.0))

    def decode(self, step: int) -> None:
        """r decodes (its length stays as it is, for the sake of the sums)."""
        self.step = step
        self.policy.computed(self.running, 1, 1, Now(step, 0.0))


def tell(name: str) -> str:
    """The whole story to one policy; its answers."""
    story = Story(name)
    story.ask(prompt=60, limit=20, first_chunk=20)  # 1
    story.ask(prompt=71, limit=20, first_chunk=20)  # 2
    story.ask(prompt=65, limit=20)  # 3
    story.ask(prompt=20, limit=20)  # 4
    story.ask(prompt=25, limit=24)  # 5
    story.preempt_one(step=3)
    story.preempt_one(step=13)
    story.step = 20
    story.ask(prompt=55, limit=20)  # 6
    story.ask(prompt=25, limit=24)  # 7
    story.decode(step=21)
    story.ask(prompt=25, limit=24)  # 8
    for _ in range(3):
        story.serve_one(length=12)
    story.ask(prompt=50, limit=40)  # 9
    return story.answers


# 1  prompt 60 in chunks of 20, limit 20. Fits whole (60 <= 70), beside a reserve of 10 too (20 + 10).
#    expected_output: 60 + 20 + 0.7 * 30 = 101 > 70. reserve_all: 80 + 30 > 70. past_future: nothing is remembered, so r will take
#    30 more, the newcomer 20: r alone at its end 30 + 30 = 60, both when the newcomer ends 30 + 60 + 2 * 20 = 130 > 100.
# 2  prompt 71 in chunks of 20: only those who look at the first chunk alone let it in.
# 3  prompt 65 in one: 65 + 10 > 70 for the watermark of a tenth.
# 4  prompt 20, limit 20: reserve_all 40 + 30 = 70 <= 70; expected_output 40 + 21; past_future 60, then 30 + 20 + 2 * 20 = 90 <= 100.
# 5  prompt 25, limit 24: reserve_all 49 + 30 = 79 > 70; expected_output 49 + 21 = 70 <= 70; past_future 55 + 2 * 24 = 103 > 100.
#    Two intervals of ten steps with one preemption for one entry follow: adaptive keeps 0, then 0.1, then 0.2 of the pool free.
#    expected_output's ratio becomes (10 + 20) / 40 = 0.75 by r alone.
# 6  prompt 55: 55 + 20 = 75 > 70 for adaptive, 55 + 10 for the watermark.
# 7  as 5: 49 + 0.75 * 30 = 71.5 > 70 now.      8  one decode later 0.75 - 0.0602 = 0.6898: 49 + 20.69 <= 70 again.
#    Three requests of 12 tokens have ended: r (10 so far) is expected to end in 2, a newcomer in 12.
# 9  prompt 50, limit 40: past_future: newcomer alone 50 + 12 = 62, both when r ends 30 + 50 + 2 * 2 = 84 <= 100. expected_output and
#    reserve_all add all 40; 50 + 20 <= 70 for adaptive, 50 + 10 for the watermark.
ANSWERS = {
    #                   123456789
    "none":            "yyyyyyyyy",
    "full_sequence":   "ynyyyyyyy",
    "watermark":       "yynyyyyyy",
    "adaptive":        "yyyyynyyy",
    "reserve_all":     "nnnynnnnn",
    "expected_output": "nnnyynnyn",
    "past_future":     "nnnynnnny",
}  # fmt: skip


@pytest.mark.parametrize("owner", NAMES)
def test_only_the_owner_passes_its_trace(owner: str) -> None:
    """Every policy of the seam hears the story; the owner's answers are the written ones, everybody else's are others."""
    passed = [name for name in NAMES if tell(name) == ANSWERS[owner]]
    assert passed == [owner], "a new policy needs its row in ANSWERS"
