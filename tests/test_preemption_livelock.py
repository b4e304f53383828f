"""Public case 19 for every victim policy: somebody gets on, within a bound of steps."""

from __future__ import annotations

import pytest
from test_admission_collapse import NUM_BLOCKS, OUTPUT, PROMPT, serve

from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.registry import by_name, list_policies
from kvlab.types import Request, SamplingParams

VICTIMS = [row.name for row in list_policies("preemption")]


@pytest.mark.parametrize("victim", VICTIMS)
def test_two_prompts_whose_first_chunks_fit(victim: str) -> None:
    """With protect_oldest the first never gives way: it ends as if it were alone (15 chunks, 199 decodes), plus the steps in which
    the second took a part of the budget (none: it comes after the first)."""
    assert NUM_BLOCKS * 16 < 2 * PROMPT
    result = serve(by_name("admission", "none"), preemption=by_name("preemption", victim))
    assert result.num_preemptions > 0
    assert result.first_end == 214
    assert result.num_steps <= 2 * (15 + OUTPUT)


def _two_that_each_need_over_half(victim: str, protect_oldest: bool, mode: str) -> list[int]:
    """B = 4, 21 blocks just above one full sequence of 20: prompts of 40 tokens, 40 out; chunks of 8. Steps of the two ends."""
    config = EngineConfig(21, 4, max_model_len=100, max_num_batched_tokens=8, num_cpu_blocks=21)
    policies = PolicySet(admission=by_name("admission", "none"), prefix_cache=by_name("prefix_cache", "none"),
                         preemption=by_name("preemption", victim, protect_oldest=protect_oldest, mode=mode))  # fmt: skip
    engine = Engine(config, policies, SimulatedRunner(vocab_size=500))
    for number in range(2):
        engine.add_request(Request(f"{number}", [number] * 40, SamplingParams(max_tokens=40, ignore_eos=True)))
    ends: list[int] = []
    num_preemptions = 0
    while engine.has_work:
        result = engine.step()
        num_preemptions += len(result.plan.preempted)
        ends += [result.plan.step + 1 for _ in result.finished]
        assert result.plan.step < 2000, f"nobody gets on under {victim}"
    assert num_preemptions > 0
    return ends


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_two_that_each_need_over_half(victim: str, mode: str) -> None:
    """With protect_oldest the first ends after 5 chunks and 39 decodes (44 steps), or a few more where it shared the budget."""
    first, last = _two_that_each_need_over_half(victim, True, mode)
    assert first <= 50
    assert last <= 150


@pytest.mark.parametrize("victim", VICTIMS)
def test_the_ablation_without_protection_ends_too(victim: str) -> None:
    """protect_oldest=false, as in a comparison of victims: the two may take turns at giving way, so it takes longer; bounded here."""
    first, last = _two_that_each_need_over_half(victim, False, "recompute")
    assert first <= last <= 500
