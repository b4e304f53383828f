"""mlfq's levels, and the keys of hrrn, edf and random, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvlab.policies.registry import by_name
from kvlab.policies.scheduling import Edf, Hrrn, Mlfq, Random
from kvlab.types import Now, UserError

NONE: Any = None


def group(group_id: int = 0, num_prompt: int = 10, **fields: Any) -> Any:
    defaults: dict[str, Any] = {"group_id": group_id, "request_id": f"r{group_id}", "num_prompt_tokens": num_prompt,
                                "num_output_tokens": 0, "arrival_s": 0.0, "priority": 0, "max_tokens": 1, "num_sequences": 1,
                                "num_uncomputed_tokens": 1}  # fmt: skip
    return SimpleNamespace(**{**defaults, **fields})


def at(step: int) -> Now:
    return Now(step, step / 10)


# -------------------------------------------------------------------------------------------------------- mlfq


@pytest.mark.parametrize(("num_prompt", "level"), [(1, 0), (200, 0), (201, 1), (400, 1), (401, 2), (800, 2), (801, 3), (99_999, 3)])
def test_skip_join(num_prompt: int, level: int) -> None:
    """Quanta of 2, 4, 8 iterations and without end; 100 prompt tokens are an iteration."""
    policy = Mlfq(num_levels=4, quantum=2, prompt_tokens_per_iteration=100)
    asked = group(0, num_prompt)
    policy.arrived(asked, NONE, at(7))
    assert policy.key(asked, at(9)) == (level, 7, 1)


def test_demotion_when_a_quantum_is_used_up() -> None:
    """Quanta of 1, 2, 4: the prompt is one iteration, then 2 tokens on level 1, then 4 on level 2; the last level (3) has no end."""
    policy, asked, levels = Mlfq(num_levels=4), group(), []
    policy.arrived(asked, NONE, at(0))
    policy.entered(asked, "new", at(0))
    for step in range(30):
        policy.computed(asked, 10 if step == 0 else 1, 1, at(step))
        levels.append(policy.key(asked, at(step))[0])
    assert levels == [1, 1, 2, 2, 2, 2, 3] + [3] * 23
    assert policy.key(asked, at(29)) == (3, 6, 4)  # the fourth to join a level, at step 6


def test_a_prompt_in_pieces_is_charged_by_its_tokens() -> None:
    """512 tokens in pieces of 256 are two iterations: all of level 1's quantum; pieces of 100 would be charged an iteration each."""
    policy, asked = Mlfq(), group(0, 512)
    policy.arrived(asked, NONE, at(0))
    policy.entered(asked, "new", at(0))
    policy.computed(asked, 256, 0, at(0))
    assert policy.key(asked, at(1))[0] == 1
    policy.computed(asked, 256, 1, at(1))
    assert policy.key(asked, at(1))[0] == 2


def test_what_is_computed_again_is_not_charged() -> None:
    """On level 1 with one of two iterations used; 800 tokens are computed again without charge, the token at their end is one."""
    policy, asked = Mlfq(), group(0, 10)
    policy.arrived(asked, NONE, at(0))
    policy.entered(asked, "new", at(0))
    policy.computed(asked, 10, 1, at(0))
    policy.computed(asked, 1, 1, at(1))
    policy.preempted(asked, "recompute", at(2))
    policy.entered(asked, "resumed", at(4))
    policy.computed(asked, 400, 0, at(4))
    assert policy.key(asked, at(5))[0] == 1
    policy.computed(asked, 400, 1, at(5))
    assert policy.key(asked, at(6))[0] == 2


def test_promotion_of_the_starved() -> None:
    """Waiting since step 3, 10 steps starve: at 13 it stands on level 0 behind who joined that before, and stays there when it enters."""
    policy, asked, fresh = Mlfq(starvation_steps=10), group(0), group(1)
    policy.arrived(asked, NONE, at(0))
    policy.entered(asked, "new", at(0))
    for step in range(3):
        policy.computed(asked, 1, 1, at(step))
    policy.preempted(asked, "swap", at(3))
    assert policy.key(asked, at(12)) == (2, 2, 3)
    assert policy.key(asked, at(13)) == policy.key(asked, at(40)) == (0, 13, 3)
    policy.arrived(fresh, NONE, at(12))
    assert policy.key(fresh, at(14)) < policy.key(asked, at(14))
    policy.entered(asked, "swapped_in", at(14))
    assert policy.key(asked, at(99)) == (0, 13, 3)  # it runs: it starves no more
    policy.computed(asked, 1, 1, at(14))
    assert policy.key(asked, at(14))[0] == 1


def test_who_gives_way() -> None:
    """Levels 2, 1, 2: for a head on level 1 the later of those on level 2, unless it is in the middle of its prompt."""
    policy, running = Mlfq(), [group(i, num_output_tokens=3) for i in range(3)]
    for each, level in zip(running, (2, 1, 2), strict=True):
        policy.arrived(each, NONE, at(0))
        policy._jobs[each.group_id].level = level
    head = group(9, 500)
    policy.arrived(head, NONE, at(1))
    assert policy.key(head, at(1))[0] == 1
    assert policy.displaces(head, running, at(1)) is running[2]
    assert policy.displaces(head, running[:2], at(1)) is running[0]  # asked again in the same step
    assert policy.displaces(head, running[:2], at(2)) is None  # later only after a token of its own
    other = group(8, 500)
    policy.arrived(other, NONE, at(1))
    running[2].num_uncomputed_tokens = 40
    assert policy.displaces(other, running, at(3)) is running[0]
    assert policy.displaces(other, running[1:], at(3)) is None


@pytest.mark.parametrize("parameter", ["num_levels", "quantum", "ratio", "prompt_tokens_per_iteration", "starvation_steps"])
def test_mlfq_parameters_are_whole_numbers(parameter: str) -> None:
    for value in (0, 1.5, True):
        with pytest.raises(UserError, match=f"Mlfq.{parameter} = {value} is not allowed: a whole number, at least"):
            by_name("scheduling", "mlfq", **{parameter: value})


# -------------------------------------------------------------------------------------------- hrrn, edf, random


def test_hrrn() -> None:
    """1,000 prompt tokens/s and 10 output tokens/s: short takes 0.1 + 0.4 = 0.5 s, long 1 + 4 = 5 s.

    At 10 s short has waited 1 s (ratio of wait to service 2), long 8 s (1.6); at 12 s 3 s (6) and 10 s (2). With 40 outputs expected of
    all, short takes 4.1 s and long 5 s: at 10 s 0.24 and 1.6.
    """
    short, long = group(0, 100, arrival_s=9.0, max_tokens=4), group(1, 1000, arrival_s=2.0, max_tokens=40)
    policy = Hrrn(prompt_tokens_per_s=1000, output_tokens_per_s=10)
    keys = [policy.key(each, Now(0, now_s)) for now_s in (10.0, 12.0) for each in (short, long)]
    assert [key[0] for key in keys] == pytest.approx([-2, -1.6, -6, -2])
    policy = Hrrn(prompt_tokens_per_s=1000, output_tokens_per_s=10, output_tokens=40)
    assert [policy.key(each, Now(0, 10.0))[0] for each in (short, long)] == pytest.approx([-1 / 4.1, -1.6])
    assert Hrrn.is_static is False


def test_edf() -> None:
    """Goals of 500 and 50 ms, 2 ms a prompt token; priority 7 has goals of its own, priority 8 one of them."""
    policy = Edf(500, 50, 2, {7: {"ttft_ms": 100, "tpot_ms": 10}, "8": {"tpot_ms": 1}})
    due = [policy.key(each, at(0))[0] for each in (
        group(0, 100, arrival_s=3.0),  # 3 + 0.5 + 0.2
        group(1, 100, arrival_s=3.0, num_output_tokens=4),  # and 4 * 0.05
        group(2, 100, arrival_s=3.0, num_output_tokens=4, priority=7),  # 3 + 0.1 + 0.2 + 4 * 0.01
        group(3, 100, arrival_s=3.0, num_output_tokens=4, priority=8),  # 3 + 0.5 + 0.2 + 4 * 0.001
    )]  # fmt: skip
    assert due == pytest.approx([3.7, 3.9, 3.34, 3.704])
    assert Edf.preempted_first is False


def test_random_is_a_draw_by_seed_and_request() -> None:
    """Over many requests the first half of the ids stands in the first half of the order about half the time."""
    groups = [group(i) for i in range(1000)]
    orders = [[g.group_id for g in sorted(groups, key=lambda g: Random(seed).key(g, at(0)))] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert 430 < 2 * sum(i < 500 for i in orders[0][:500]) < 570


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("hrrn", {"prompt_tokens_per_s": 0}), ("hrrn", {"output_tokens_per_s": "fast"}), ("hrrn", {"output_tokens": 0}),
     ("random", {"seed": 0.5}),
     ("edf", {"ttft_ms": -1}), ("edf", {"tpot_ms": float("nan")}), ("edf", {"ttft_ms_per_prompt_token": True}),
     ("edf", {"by_priority": {0: {"ttft": 1}}}), ("edf", {"by_priority": {"a": {}}}), ("edf", {"by_priority": [1]})],
)  # fmt: skip
def test_a_parameter_out_of_range(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(parameters))} = .* is not allowed: "):
        by_name("scheduling", name, **parameters)
