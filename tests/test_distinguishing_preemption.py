"""Each victim policy has a trace, worked out by hand, that no other policy of its seam passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvlab.policies.registry import by_name, list_policies
from kvlab.types import Now

NAMES = [row.name for row in list_policies("preemption")]


def group(number: int, priority: int, computed: int, own_blocks: int, lost: int) -> Any:
    """A running group of one sequence. `own_blocks`: held by no other group; `lost`: computed tokens that are not published."""
    return SimpleNamespace(group_id=number, request_id="abcdefg"[number], priority=priority, num_sequences=1, num_computed_tokens=computed,
                           num_unshared_blocks=own_blocks, num_unpublished_tokens=lost, num_published_tokens=computed - lost)  # fmt: skip


# B = 16, in order of entry. d shares eight of its ten blocks (128 tokens, published); of f 96 tokens are published.
RUNNING = [
    group(0, priority=0, computed=64, own_blocks=4, lost=64),  # a: 4 / 64 blocks a lost token = 0.0625
    group(1, priority=5, computed=40, own_blocks=3, lost=40),  # b: 3 / 40 = 0.075
    group(2, priority=0, computed=8, own_blocks=1, lost=8),  # c: 1 / 8 = 0.125
    group(3, priority=1, computed=150, own_blocks=2, lost=22),  # d: 2 / 22 = 1 / 11
    group(4, priority=2, computed=112, own_blocks=7, lost=112),  # e: 7 / 112 = 0.0625
    group(5, priority=0, computed=100, own_blocks=6, lost=4),  # f: 6 / 4 = 1.5
    group(6, priority=1, computed=33, own_blocks=3, lost=33),  # g: 3 / 33 = 1 / 11, frees more than d
]

FIRST_THREE = {
    "lifo": "gfe",  # in reverse order of entry
    "priority": "beg",  # 5, 2, then 1 (the later of d and g)
    "least_computed": "cgb",  # 8, 33, 40
    "most_computed": "def",  # 150, 112, 100
    "most_blocks": "efa",  # 7, 6, 4
    "cost_aware": "fcg",  # 1.5, 0.125, then 1 / 11 with three blocks before 1 / 11 with two
    "random": "ead",  # blake2b-64 of "0/7/0,1,2,3,4,5,6" mod 7, of those left mod 6, mod 5 (computed apart)
}


def first_three(name: str) -> str:
    """The victims that a policy names, one after the other, in step 7."""
    policy, candidates, chosen = by_name("preemption", name), list(RUNNING), ""
    for _ in range(3):
        victim = policy.victim(tuple(candidates), Now(7, 0.0))
        chosen += victim.request_id
        candidates.remove(victim)
    return chosen


@pytest.mark.parametrize("owner", NAMES)
def test_only_the_owner_passes_its_trace(owner: str) -> None:
    """Every policy of the seam is run; the owner's victims are the written ones, everybody else's are others."""
    passed = [name for name in NAMES if first_three(name) == FIRST_THREE[owner]]
    assert passed == [owner], "a new policy needs its row in FIRST_THREE"


def test_who_frees_nothing_is_the_last_choice_and_who_loses_nothing_the_first() -> None:
    """a loses nothing (all published), b neither loses nor frees anything (all shared), c frees 2 blocks for 30 tokens."""
    a, b, c = group(0, 0, 32, 2, 0), group(1, 0, 64, 0, 0), group(2, 0, 30, 2, 30)
    policy, candidates, order = by_name("preemption", "cost_aware"), [a, b, c], ""
    while candidates:
        victim = policy.victim(candidates, Now(0, 0.0))
        order += victim.request_id
        candidates.remove(victim)
    assert order == "acb"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random"])
def test_of_equals_the_latest_to_enter_gives_way(name: str) -> None:
    """Three that are alike, whose work is lost or kept."""
    for lost in (32, 0):
        alike = [group(number, priority=1, computed=32, own_blocks=2, lost=lost) for number in range(3)]
        assert by_name("preemption", name).victim(alike, Now(0, 0.0)).group_id == 2


def test_of_those_that_lose_nothing_who_frees_most_gives_way() -> None:
    candidates = [group(0, 0, 32, 5, 0), group(1, 0, 32, 3, 0), group(2, 0, 0, 0, 0)]
    assert by_name("preemption", "cost_aware").victim(candidates, Now(0, 0.0)).group_id == 0


def test_random_draws_by_seed_step_and_candidates_alone() -> None:
    """The same question has the same answer; over 700 steps each of seven is drawn between 70 and 130 times."""
    policy, other = by_name("preemption", "random", seed=3), by_name("preemption", "random", seed=4)
    draws = [policy.victim(RUNNING, Now(step, 0.0)).group_id for step in range(700)]
    assert draws == [policy.victim(RUNNING, Now(step, 9.9)).group_id for step in range(700)]
    assert draws != [other.victim(RUNNING, Now(step, 0.0)).group_id for step in range(700)]
    assert all(70 <= draws.count(number) <= 130 for number in range(7))
