"""Temperatures at the ends of their range. Draws are made at 1,200 evenly spaced numbers, so that shares are exact."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.engine import sampler
from kvlab.engine.runners.cuda_sampling import choose
from kvlab.engine.sampler import SamplingState, sample
from kvlab.types import SamplingParams

INF = math.inf
NUM = 1200


@pytest.fixture(autouse=True)
def even_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, streams, positions: (np.zeros_like(seeds, dtype=float) + streams + 0.5) / NUM)


def state(output: tuple[int, ...] = (), eos: tuple[int, ...] = (), **params: Any) -> SamplingState:
    sampling = SamplingParams(**params)
    history = np.array([0, *output]) if sampling.needs_logits_processing else None
    return SamplingState(sampling, 0, 0, 1, eos, history)


def shares(logits: list[float], one: SamplingState, position: int = 1) -> dict[int, float]:
    """Share of each token, the same on the host and in the sampling that stays on a device."""
    row = torch.tensor([logits], dtype=torch.float32)
    counts = Counter(sample(row, [one], [position], [NUM]).tokens[0])
    if one.history is None:
        assert Counter(choose(row, [one], [position], [NUM])[0].tolist()) == counts
    return {token: count / NUM for token, count in sorted(counts.items())}


LOGITS = [1.0, 5.0, 3.0, 4.0, 2.0, 3.0]  # in order: 1, 3, 2 and 5 (equal), 4, 0
EACH = dict.fromkeys(range(6), 1 / 6)


@pytest.mark.parametrize("temperature", [INF, 1e300])
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, EACH),
        ({"min_p": 0.99}, EACH),  # of a probability that is everybody's
        ({"top_k": 2}, {1: 1 / 2, 3: 1 / 2}),
        ({"top_k": 3}, {1: 1 / 4, 2: 1 / 4, 3: 1 / 4, 5: 1 / 4}),  # those equal to the third stay
        ({"top_k": 6}, EACH),
        ({"top_k": 1000}, EACH),
        ({"top_p": 0.5}, {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}),  # three of six; of the two equal ones the lower id
        ({"top_p": 0.51}, {1: 1 / 4, 2: 1 / 4, 3: 1 / 4, 5: 1 / 4}),
        ({"top_p": 0.01}, {1: 1.0}),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.5}, {1: 1 / 2, 3: 1 / 2}),  # two of the four that top_k leaves
        ({"top_k": 1}, {1: 1.0}),
    ],
)
def test_an_infinite_temperature_is_uniform_over_what_the_filters_leave(
    temperature: float, params: dict[str, Any], expected: dict[int, float]
) -> None:
    assert shares(LOGITS, state(temperature=temperature, **params)) == expected


def test_masked_ids_stay_masked_at_an_infinite_temperature() -> None:
    low = {0: 1 / 4, 2: 1 / 4, 4: 1 / 4, 5: 1 / 4}
    assert shares(LOGITS, state(temperature=INF, eos=(1, 3), min_tokens=2, max_tokens=4)) == low
    assert shares([-INF, 5.0, 3.0, -INF], state(temperature=INF)) == {1: 1 / 2, 2: 1 / 2}
    assert shares([-INF, 5.0, 3.0, -INF], state(temperature=INF, top_p=0.5)) == {1: 1.0}
    assert shares([-INF, 5.0, 3.0, -INF], state(temperature=INF, top_k=3)) == {1: 1 / 2, 2: 1 / 2}


def test_penalties_come_before_and_change_the_order_alone() -> None:
    penalised = state(output=(1,), temperature=INF, presence_penalty=2.0, frequency_penalty=1.0, top_k=1)
    assert shares(LOGITS, penalised, position=2) == {3: 1.0}  # 5 - 3 is below 4
    assert shares(LOGITS, state(output=(1,), temperature=INF, repetition_penalty=5.0), position=2) == EACH


def test_filters_are_those_of_transformers_at_any_high_temperature() -> None:
    from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(0)
    logits = torch.randperm(40, dtype=torch.float64) / 4
    ids = torch.zeros(1, 1, dtype=torch.long)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1e4), MinPLogitsWarper(0.5), TopKLogitsWarper(30), TopPLogitsWarper(0.51)])
    kept = warpers(ids, logits[None].clone())[0].isfinite().nonzero().flatten().tolist()
    assert len(kept) == 16  # the limit: ceil(0.51 * 30)
    for temperature in (1e5, 1e12, INF):
        found = shares(logits.tolist(), state(temperature=temperature, min_p=0.5, top_k=30, top_p=0.51))
        assert sorted(found) == kept, temperature
        assert all(abs(share - 1 / 16) <= 1 / NUM for share in found.values())


@pytest.mark.parametrize("temperature", [0.0, -0.0, 5e-324, 1e-308, 1e-250])
def test_a_tiny_temperature_takes_the_largest_logit_the_lowest_of_equals(temperature: float) -> None:
    for logits, best in (
        ([-3.0, 5.0, 5.0, 1.0], 1), ([-3.0, -7.0], 0), ([0.0, -1.0, 0.0], 0), ([3e38, -3e38], 0), ([-1e-30, 1e-30], 1),
    ):  # fmt: skip
        assert shares(logits, state(temperature=temperature)) == {best: 1.0}


@pytest.mark.parametrize("temperature", [1e-200, 1e-100, 1e-30])
def test_a_small_temperature_is_shared_by_equals_alone(temperature: float) -> None:
    for logits, best in (([-3.0, 5.0, 5.0, 1.0], (1, 2)), ([-7.0, -3.0], (1,)), ([3e38, -3e38], (0,)), ([0.0, -1e-20], (0,))):
        assert shares(logits, state(temperature=temperature)) == dict.fromkeys(best, 1 / len(best))


def test_a_row_at_a_high_temperature_changes_no_other() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-16, 0.5, 1.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    other = state(temperature=1.0, top_p=0.5)
    alone = sample(logits[:1], [other], [1], [NUM]).tokens[0]
    together = sample(logits, [other, state(temperature=INF, top_p=0.5)], [1, 1], [NUM, NUM]).tokens
    assert together[0] == alone
    assert Counter(together[1]) == {2: NUM // 2, 3: NUM // 2}
