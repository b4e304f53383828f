"""Public case 19: two long prompts in chunks, whose first chunks fit and whose wholes don't."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.registry import by_name, list_policies
from kvlab.types import Request, SamplingParams

PROMPT, OUTPUT, BUDGET, BLOCK_SIZE = 120_000, 200, 8192, 16
NUM_BLOCKS = 10_000  # 160,000 tokens: one prompt of 7,500 blocks and five chunks of another


class Result(NamedTuple):
    """Counts of a run; `first_end`: steps until some request had finished."""

    num_steps: int
    first_end: int
    num_preemptions: int
    recomputed_tokens: int
    blocked: set[str]


def serve(admission: Any, max_steps: int = 3000, **policies: Any) -> Result:
    """Both prompts to their ends, one after the other in the queue."""
    config = EngineConfig(NUM_BLOCKS, BLOCK_SIZE, max_model_len=200_000, max_num_batched_tokens=BUDGET)
    policies.setdefault("prefix_cache", by_name("prefix_cache", "none"))
    engine = Engine(config, PolicySet(admission=admission, **policies), SimulatedRunner(vocab_size=500))
    for number in range(2):
        engine.add_request(Request(f"{number}", [number] * PROMPT, SamplingParams(max_tokens=OUTPUT, ignore_eos=True)))
    first_end = num_preemptions = recomputed = 0
    blocked: set[str] = set()
    while engine.has_work:
        result = engine.step()
        num_preemptions += len(result.plan.preempted)
        recomputed += result.stats.recomputed_tokens
        blocked |= {entry.by for entry in result.plan.blocked}
        num_steps = result.plan.step + 1
        first_end = first_end or (num_steps if result.finished else 0)
        assert num_steps < max_steps, f"nobody gets on: {num_preemptions} preemptions in {num_steps} steps"
    return Result(num_steps, first_end, num_preemptions, recomputed, blocked)


@pytest.mark.parametrize(("admission", "parameters"), [("none", {}), ("watermark", {"fraction": 0.01}), ("adaptive", {"initial": 0.01})])
def test_the_collapse_without_full_sequence(admission: str, parameters: dict[str, Any]) -> None:
    """While the first decodes, the second enters with a chunk, computes the 40,000 tokens that fit, gives way, and enters again: five
    prompts' worth of tokens are computed for nothing, though only the second ever has to wait."""
    result = serve(by_name("admission", admission, **parameters))
    assert result.num_preemptions >= 30
    assert result.recomputed_tokens > 5 * 2 * PROMPT


SWITCHED: list[tuple[str, dict[str, Any]]] = [
    ("none", {"full_sequence": True}), ("watermark", {"fraction": 0.01, "full_sequence": True}), ("full_sequence", {}),
    ("adaptive", {"initial": 0.01, "full_sequence": True}), ("expected_output", {}), ("past_future", {}), ("reserve_all", {}),
]  # fmt: skip


@pytest.mark.parametrize(("admission", "parameters"), SWITCHED, ids=[f"{name}{'+' if given else ''}" for name, given in SWITCHED])
def test_no_collapse_where_the_whole_sequence_must_fit(admission: str, parameters: dict[str, Any]) -> None:
    """Nobody gives way, nothing is computed twice: 15 chunks (the last one of 5,312 tokens samples) and 199 decodes, twice."""
    result = serve(by_name("admission", admission, **parameters))
    assert (result.num_preemptions, result.recomputed_tokens) == (0, 0)
    assert (result.first_end, result.num_steps) == (214, 428)
    assert result.blocked - {"tokens"}, "the second was never kept out"


def test_every_admission_policy_can_test_the_whole_sequence() -> None:
    """Those that test the first chunk have the switch, the others need none."""
    assert {name for name, _ in SWITCHED} == {row.name for row in list_policies("admission")}
    switched = {row.name for row in list_policies("admission") if "full_sequence" in row.parameters}
    assert switched == {"none", "watermark", "adaptive"}


def test_a_prefix_cache_hides_the_collapse() -> None:
    """What the second had computed is found again, so that its next chunk does not fit into what is left: it gives way once."""
    result = serve(by_name("admission", "none"), prefix_cache=by_name("prefix_cache", "hash"))
    assert result.num_preemptions == 1
    assert result.recomputed_tokens < BLOCK_SIZE
