"""block_sizing=auto: costs worked by hand, the size that each of them alone would choose, and what a run says of its choice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import kvlab
from kvlab.policies.block_sizing import Auto, Fixed
from kvlab.policies.registry import list_policies
from kvlab.tables import run_table
from kvlab.types import RequestShape, UserError
from kvlab.workload.base import WorkloadContext
from kvlab.workload.multi_turn import MultiTurnWorkload
from kvlab.workload.shapes import first_shapes
from kvlab.workload.synthetic import SyntheticWorkload

SIZES = (1, 2, 4, 8)


def choose(*shapes: RequestShape, max_model_len: int = 4096, **parameters: Any) -> tuple[int, list[list[float]]]:
    """The choice and the costs of each size in per cent, as `explain` shows them."""
    policy = Auto(**{"candidates": SIZES, **parameters})
    policy.foresee(shapes)
    size = policy.block_size((), max_model_len)
    return size, [[float(cell) for cell in line.split()] for line in policy.explain()[2:]]


def test_costs_worked_by_hand() -> None:
    """4 tokens in, 3 out: 4, 5, 6 tokens are held (the last one's K and V are never written), 15 in all. Empty slots of sizes 1, 2, 4,
    8: 0; 0 1 0; 0 3 2; 4 3 2. 3 prompt tokens are shared: sizes 2, 4, 8 lose 1, 3, 3 of them; 1 + 2 tokens are computed."""
    size, costs = choose(RequestShape(4, 3, 3))
    assert costs == [
        [1, 0.0, 100.0, 0.0, 100.0],
        [2, 6.7, 50.0, 33.3, 90.0],
        [4, 33.3, 25.0, 100.0, 158.3],
        [8, 60.0, 12.5, 100.0, 172.5],
    ]
    assert size == 2


@pytest.mark.parametrize(
    ("parameters", "shared", "size"),
    [
        ({}, 0, 2),  # 100, 56.7, 58.3, 72.5 %
        ({"block_overhead": 0}, 0, 1),  # empty slots alone
        ({"block_overhead": 4}, 0, 8),  # 400, 206.7, 133.3, 110 %
        ({"block_overhead": 2}, 0, 4),  # 200, 106.7, 83.3, 85 %
        ({"block_overhead": 2}, 3, 2),  # 200, 140, 183.3, 185 %
        ({"measured": {1: 3.0, 2: 2.0, 4: 1.25, 8: 1.0}}, 0, 4),  # 200, 106.7, 58.3, 60 %
        ({"measured": {"1": 3.0, "2": 2.0, "4": 1.25, "8": 1.0}}, 0, 4),  # keys as a configuration has them
    ],
)
def test_each_cost_moves_the_choice(parameters: dict[str, Any], shared: int, size: int) -> None:
    assert choose(RequestShape(4, 3, shared), **parameters)[0] == size


@pytest.mark.parametrize("length", [50, 200, 800, 3200])
def test_one_length_and_nothing_shared_is_the_square_root(length: int) -> None:
    """Empty slots cost (B - 1) / 2L, blocks c / B: least at sqrt(2 c L), in a sea of lengths around L (else it matters how B divides L)."""
    shapes = [RequestShape(length + i, 1) for i in range(-length // 4, length // 4, 1 + length // 100)]
    size, _ = choose(*shapes, candidates=range(1, 257), block_overhead=1.0)
    assert size == pytest.approx(math.sqrt(2 * length), rel=0.25)


def test_only_the_owner_passes_its_trace() -> None:
    """Long prompts want large blocks, short ones small ones; the other policy of the seam doesn't care."""
    names = [row.name for row in list_policies("block_sizing")]
    assert names == ["auto", "fixed"], "a new policy needs its trace here"
    answers: dict[str, list[int]] = {}
    for name, policy in {"auto": Auto(), "fixed": Fixed(16)}.items():
        answers[name] = []
        for length in (20, 3000):
            policy.foresee([RequestShape(length, 4)])
            answers[name].append(policy.block_size((), 4096))
    assert answers == {"auto": [8, 64], "fixed": [16, 16]}


def test_nothing_known_is_the_fallback_and_long_sizes_are_left_out() -> None:
    policy = Auto(fallback=24)
    assert policy.block_size((), 4096) == 24
    assert policy.explain() == ["Block size: 24 tokens a block: no lengths are known beforehand, so the fallback stands."]
    assert policy.block_size([3000], 4096) == 64  # 8 empty slots of 3,000 and a block in 64: 1.8 %; 32 costs 3.4 %, 128 3.2 %
    assert choose(RequestShape(3000, 4), max_model_len=4)[0] == 4
    assert choose(RequestShape(3000, 4), candidates=(8, 16), max_model_len=4)[0] == 8


@pytest.mark.parametrize(
    ("parameters", "named"),
    [({"candidates": ()}, "candidates"), ({"candidates": (0, 8)}, "candidates"), ({"candidates": "16"}, "candidates"),
     ({"block_overhead": -1}, "block_overhead"), ({"fallback": 0}, "fallback"), ({"measured": {16: 1.0}}, "measured"),
     ({"candidates": (16,), "measured": {16: 0.0}}, "measured")],
)  # fmt: skip
def test_a_parameter_out_of_range_is_named(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Auto(**parameters)


def _workload() -> SyntheticWorkload:
    return SyntheticWorkload(40, 10, 5, prefix={"depth": 1, "branching": 2, "tokens_per_node": 20, "skew": 0.0})


def test_shapes_come_from_a_copy_with_what_prompts_share() -> None:
    """40 prompts of one of two prefixes of 20 tokens and 10 of their own: all but the first of each family share 20 (or a token more by
    chance, seldom: ids are drawn from 32,000). The workload itself is as it was."""
    context = WorkloadContext(None, 32_000, 4096, seed=0)
    workload = _workload()
    shapes = first_shapes(workload, context)
    assert {(s.num_prompt_tokens, s.num_output_tokens, s.num_sequences) for s in shapes} == {(30, 5, 1)}
    assert [s.num_shared_tokens for s in shapes].count(20) == 38
    assert sorted(s.num_shared_tokens for s in shapes)[:2] == [0, 0]
    assert {s.num_shared_tokens for s in first_shapes(workload, context, shares=False)} == {0}
    assert len(first_shapes(workload, context, most=7)) == 7
    workload.start(context)
    again = _workload()
    again.start(context)
    assert [r.prompt_token_ids for r in workload.due(1e9)] == [r.prompt_token_ids for r in again.due(1e9)]


def test_a_run_takes_the_size_and_says_why(tmp_path: Path) -> None:
    """Prompts of 20 tokens: 8 tokens a block, in the pool, in the config, in the notes, the log and the printed table."""
    config = kvlab.compose("block_sizing=auto", "runner=simulated", "model=dummy_smollm2", "workload=synthetic", "workload.num_requests=5",
                           "workload.prompt_len=20", "workload.output_len=4", "kv_cache_tokens=512")  # fmt: skip
    run = kvlab.run(config, folder=tmp_path / "run", progress=False)
    assert (run.config["block_size"], run.config["num_blocks"]) == (8, 64)
    assert set(run.steps()["kv_blocks_total"]) == {64}
    why = "Block size: 8 tokens a block cost least for 5 requests of 24 tokens in the mean (block_overhead 1)."
    status = json.loads((tmp_path / "run" / "status.json").read_text(encoding="utf-8"))
    assert why in status["notes"]
    assert status["block_sizing"][0] == why
    assert len(status["block_sizing"]) == 11
    assert why in (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert "\n".join(status["block_sizing"]) in run_table(run)


def test_shapes_of_conversations_are_those_of_their_first_turns() -> None:
    """Three conversations of two turns are six requests, of which three are known beforehand."""
    workload = MultiTurnWorkload(num_sessions=3, turns=2, prompt_len=10, turn_len=4, output_len=5)
    shapes = first_shapes(workload, WorkloadContext(None, 32_000, 4096, seed=0))
    assert [(s.num_prompt_tokens, s.num_output_tokens) for s in shapes] == [(10, 5)] * 3
