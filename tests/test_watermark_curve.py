"""The watermark's known curve (vLLM pull request 44594), from the committed simulation; test_figures.py makes one of its runs again."""

from __future__ import annotations

import pandas as pd
import pytest

from kvlab.figures import load, manifest

MEASURED = {0.0: 1065, 0.02: 400, 0.05: 187, 0.10: 168, 0.15: 168}


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return manifest.read_results(load("watermark_curve"))


def test_the_median_of_five_seeds_lies_within_30_percent_of_each_measured_value_and_never_rises(runs: pd.DataFrame) -> None:
    assumed = runs[runs["max_num_batched_tokens"] == 8192]
    assert assumed.groupby("watermark").size().to_dict() == dict.fromkeys(MEASURED, 5)
    medians = assumed.groupby("watermark")["num_preemptions"].median()
    assert medians.is_monotonic_decreasing
    ratios = {watermark: round(medians[watermark] / measured, 3) for watermark, measured in MEASURED.items()}
    assert all(0.7 <= ratio <= 1.3 for ratio in ratios.values()), ratios


def test_with_a_quarter_of_the_token_budget_watermark_0_preempts_far_more(runs: pd.DataFrame) -> None:
    """Only the first chunk is tested at entry: with 2,048 tokens a step more prompts are let in whose rest does not fit."""
    medians = runs.groupby(["max_num_batched_tokens", "watermark"])["num_preemptions"].median()
    assert medians[2048, 0.0] > 2 * medians[8192, 0.0]
