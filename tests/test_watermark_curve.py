"""The watermark's known curve (vLLM pull request 44594), from the committed simulation; one of its runs is simulated again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "watermark_curve"
MEASURED = {0.0: 1065, 0.02: 400, 0.05: 187, 0.10: 168, 0.15: 168}


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("watermark_curve", FOLDER / "watermark_curve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return pd.read_csv(FOLDER / "watermark_curve.csv")


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


@pytest.mark.slow
def test_the_committed_rows_follow_from_the_script(runs: pd.DataFrame) -> None:
    """2.2 million simulated tokens, decided as they were when the figure was made."""
    row = script().simulate_one((8192, 0.15, 0))
    committed = runs[(runs["max_num_batched_tokens"] == 8192) & (runs["watermark"] == 0.15) & (runs["seed"] == 0)].iloc[0]
    decided = ("num_preemptions", "recomputed_tokens", "num_output_tokens")
    assert {key: row[key] for key in decided} == {key: int(committed[key]) for key in decided}
