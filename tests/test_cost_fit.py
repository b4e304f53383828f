"""Fitted cost models: exact where the truth is linear, honest where it is not, a clear refusal where nothing can be learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvlab
from kvlab import calibration
from kvlab.engine.cost import Fitted, Linear, fit_steps
from kvlab.engine.cost.fit import Errors, held_out_steps, nonnegative_least_squares
from kvlab.results import Run
from kvlab.trace.frames import empty_frame
from kvlab.types import UserError

TRUTH = {"step_ms": 3.5, "chunk_ms": 0.75, "chunk_token_us": 41.0, "decode_seq_us": 130.0, "kv_token_ns": 870.0, "pair_ns": 65.0,
         "block_us": 210.0}  # fmt: skip
WORKLOAD = ("model=tiny", "runner=simulated", "workload=synthetic", "workload.num_requests=60", "workload.output_len=24",
            "workload.prompt_len={kind: uniform, min: 10, max: 90}", "workload.arrivals={kind: poisson, rate: 60}", "max_model_len=128",
            "num_blocks=24", "num_cpu_blocks=40", "preemption/mode=swap", "max_num_batched_tokens=64")  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose steps take what TRUTH says: chunks, decodes and blocks that are swapped."""
    costs = [f"cost_model.{name}={value}" for name, value in TRUTH.items()]
    config = kvlab.compose(*WORKLOAD, "cost_model=linear", *costs)
    return kvlab.run(config, folder=tmp_path_factory.mktemp("recorded") / "run", progress=False)


def test_the_coefficients_of_a_known_machine_are_found(recorded: Run) -> None:
    assert recorded.summary["swapped_out_blocks"] > 0
    fit = kvlab.calibrate(recorded)
    assert fit.coefficients == pytest.approx(TRUTH, rel=1e-6)
    assert fit.not_seen == ()
    assert fit.held_out.num_steps >= 20
    assert fit.seen.num_steps + fit.held_out.num_steps == len(recorded.steps()) - 1, "the first step is left out"
    assert max(fit.held_out.mape, fit.held_out.p90, abs(fit.held_out.total)) < 1e-6


def test_the_same_workload_simulated_with_the_fit_is_the_same_run(recorded: Run, tmp_path: Path) -> None:
    config = kvlab.compose(*WORKLOAD, "cost_model=fitted", f"cost_model.run={recorded.folder}")
    run = kvlab.run(config, folder=tmp_path / "run", progress=False)
    for figure in ("duration_s", "output_token_throughput_per_s", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_e2el_ms"):
        assert run.summary[figure] == pytest.approx(recorded.summary[figure], rel=1e-6), figure
    told = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))["step_cost"]
    assert told["name"] == "Fitted"
    assert told["source"] == str(recorded.folder)
    assert told["held_out"]["mape"] < 1e-6
    assert told["extrapolated_steps"] < 0.05, "a held-out step may be the largest"
    assert "held-out steps off by 0.0% in the mean" in json.loads((tmp_path / "run/status.json").read_text(encoding="utf-8"))["notes"][-1]


def test_a_run_beyond_the_fit_says_how_much_of_it_is_extrapolated(recorded: Run, tmp_path: Path) -> None:
    """Nothing recorded had more than 64 tokens in a step; here prompts of 100 tokens are computed at once."""
    config = kvlab.compose("model=tiny", "runner=simulated", "workload=synthetic", "workload.num_requests=4", "workload.output_len=1",
                           "workload.prompt_len=100", "workload.arrivals={kind: fixed, rate: 1}", "cost_model=fitted",
                           f"cost_model.run={recorded.folder}", "max_model_len=128", "num_blocks=24")  # fmt: skip
    run = kvlab.run(config, folder=tmp_path / "run", progress=False)
    assert run.summary["step_cost"]["extrapolated_steps"] == 1.0


def frame(num_steps: int = 80, **more: Any) -> pd.DataFrame:
    """Steps of 1 to 4 decodes, every fourth with a chunk of 8 to 22 tokens, over a growing context."""
    i = np.arange(num_steps)
    steps = pd.DataFrame({name: np.zeros(num_steps) for name in empty_frame("steps")})
    steps["num_decode_seqs"] = 1 + i % 4
    chunks = (i % 4 == 0).astype(int)
    steps["num_prompt_tokens_computed"] = chunks * (8 + i % 15)
    steps["num_generation_tokens"] = steps["num_decode_seqs"]
    steps["num_scheduled_seqs"] = steps["num_decode_seqs"] + chunks
    steps["num_kv_tokens_read"] = steps["num_decode_seqs"] * (50 + 3 * i) + steps["num_prompt_tokens_computed"]
    steps["num_attention_pairs"] = steps["num_kv_tokens_read"] + steps["num_prompt_tokens_computed"] ** 2 // 2
    return steps.assign(execute_ms=10.0, **more)


def run_of(steps: pd.DataFrame, device: str = "simulated") -> Run:
    """A run in memory that recorded these steps."""
    run = Run("made up", env={"device": device})
    run._frames["steps"] = steps
    return run


def test_held_out_steps_are_judged_and_not_learnt_from() -> None:
    """10 ms a step where the fit looks, 15 ms where it does not: off by a third there, and nowhere else."""
    steps = frame()
    held_out = held_out_steps((steps["num_scheduled_seqs"] > steps["num_decode_seqs"]).to_numpy())
    assert np.flatnonzero(held_out).tolist() == [*range(30, 40), *range(70, 80)]
    fit = kvlab.calibrate(run_of(steps.assign(execute_ms=np.where(held_out, 15.0, 10.0))), skip=0)
    assert fit.coefficients["step_ms"] == pytest.approx(10.0)
    assert fit.seen.mape == pytest.approx(0.0, abs=1e-9)
    assert (fit.held_out.num_steps, fit.seen.num_steps) == (20, 60)
    assert [fit.held_out.mape, fit.held_out.median, fit.held_out.p90, fit.held_out.total] == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1 / 3])
    said = "off by 33.3% in the mean, 33.3% in the median, 33.3% at the 90th percentile, -33.3% in total"
    assert fit.sentence() == f"step times fitted from made up; on 20 held-out steps {said}"


def test_errors_by_hand() -> None:
    """Off by 10 %, 0 %, 50 %: 11 + 20 + 15 predicted, 10 + 20 + 10 measured."""
    errors = Errors.of(np.array([11.0, 20.0, 15.0]), np.array([10.0, 20.0, 10.0]))
    assert errors == Errors(3, pytest.approx(0.2), pytest.approx(0.1), pytest.approx(0.1 + 0.8 * 0.4), pytest.approx(0.15))


def test_a_machine_that_is_not_linear_shows_in_the_error() -> None:
    """Time grows with the square of the decodes: no sum over work is right, and the error says so."""
    steps = frame()
    steps["execute_ms"] = 5.0 + 4.0 * steps["num_decode_seqs"] ** 2
    assert kvlab.calibrate(run_of(steps)).held_out.mape > 0.05


def test_noise_is_neither_learnt_nor_hidden() -> None:
    """10 % of noise (a fixed draw): coefficients within a tenth or so, an error of what |noise| is in the mean (8 %), no bias in total."""
    steps = frame(400)
    noise = np.random.default_rng(7).normal(1.0, 0.1, 400)
    steps["execute_ms"] = (4.0 + 2.0 * steps["num_decode_seqs"] + 0.3 * steps["num_prompt_tokens_computed"]) * noise
    fit = kvlab.calibrate(run_of(steps))
    assert fit.coefficients["step_ms"] == pytest.approx(4.0, rel=0.15)
    assert fit.coefficients["decode_seq_us"] == pytest.approx(2000.0, rel=0.15)
    assert 0.06 < fit.held_out.mape < 0.11
    assert abs(fit.seen.total) < 0.005


def test_host_time_belongs_to_the_steps_of_a_real_run() -> None:
    steps = frame(schedule_ms=1.0, commit_ms=0.5, record_ms=0.25)
    assert kvlab.calibrate(run_of(steps, "cpu")).coefficients["step_ms"] == pytest.approx(11.75)
    assert kvlab.calibrate(run_of(steps, "simulated")).coefficients["step_ms"] == pytest.approx(10.0)
    assert kvlab.calibrate(run_of(steps, "cpu"), host=False).coefficients["step_ms"] == pytest.approx(10.0)


# --------------------------------------------------------------------------- bad input


def only(steps: pd.DataFrame, decodes: bool) -> pd.DataFrame:
    """Its steps of one kind."""
    chunks = steps["num_scheduled_seqs"] - steps["num_decode_seqs"]
    return steps[(chunks == 0) == decodes]


@pytest.mark.parametrize(("steps", "message"), [
    (frame(30), r"29 steps are too few .* at least 40"),
    (frame(0), "no recorded steps"),
    (only(frame(200), decodes=True), "only 0 of 149 steps are with prompt tokens"),
    (only(frame(200), decodes=False), "only 0 of 49 steps are of decodes alone"),
    (frame().assign(execute_ms=np.where(np.arange(80) == 41, np.nan, 10.0)), r"1 of 79 steps have a time .* row 40: .*nan"),
    (frame().assign(execute_ms=np.where(np.arange(80) > 77, -1.0, 10.0)), r"2 of 79 steps have a time .* row 77"),
    (frame().assign(num_scheduled_seqs=0, num_decode_seqs=0), "older kvlab"),
])  # fmt: skip
def test_a_run_that_teaches_nothing_is_refused(steps: pd.DataFrame, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kvlab.calibrate(run_of(steps))


def chunks_in(num_steps: int, *places: range) -> pd.DataFrame:
    """Steps of which only those in `places`, of the steps after the first, have prompt tokens."""
    steps = frame(num_steps)
    decodes = ~np.isin(np.arange(num_steps) - 1, [step for place in places for step in place])
    steps.loc[decodes, "num_scheduled_seqs"] = steps["num_decode_seqs"]
    steps.loc[decodes, "num_prompt_tokens_computed"] = 0
    steps.loc[~decodes, "num_scheduled_seqs"] = steps["num_decode_seqs"] + 1
    steps.loc[~decodes, "num_prompt_tokens_computed"] = 7
    return steps


@pytest.mark.parametrize(("places", "num_held_out"), [
    ((range(28), range(35, 37)), 29),  # steps 30-39 and 70-79, ... as ever: 9 of the last ten
    ((range(28),), 30),  # prompts that come first: there is nothing of them in 30-39, but in 0-9
    ((range(3, 8),), 30),  # within one stretch of ten, in two of five: 0-4, 20-24, ...
])  # fmt: skip
def test_both_parts_have_steps_of_both_kinds(places: tuple[range, ...], num_held_out: int) -> None:
    fit = kvlab.calibrate(run_of(chunks_in(120, *places).assign(execute_ms=10.0)))
    assert (fit.held_out.num_steps, fit.seen.num_steps) == (num_held_out, 119 - num_held_out)


def test_prompts_within_five_steps_can_be_learnt_or_judged_but_not_both() -> None:
    with pytest.raises(UserError, match=r"of one kind only .* however the run is divided"):
        kvlab.calibrate(run_of(chunks_in(120, range(5, 10))))


@pytest.mark.parametrize("skip", [-1, 1.5, True])
def test_skip_is_a_number_of_steps(skip: Any) -> None:
    with pytest.raises(UserError, match="skip = "):
        kvlab.calibrate(run_of(frame()), skip=skip)


def test_folders_that_are_not_there_or_of_another_model(recorded: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no run folder"):
        kvlab.calibrate(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"cost_model.run=FOLDER"):
        kvlab.run(kvlab.compose(*WORKLOAD, "cost_model=fitted"), folder=tmp_path / "a", progress=False)
    other = kvlab.compose(*WORKLOAD[1:], "model=dummy_llama3_1b", "cost_model=fitted", f"cost_model.run={recorded.folder}")
    with pytest.raises(UserError, match="a run of a model of 2 layers"):
        kvlab.run(other, folder=tmp_path / "b", progress=False)
    (tmp_path / "empty").mkdir()
    assert calibration.main([f"run={tmp_path / 'empty'}"]) == 2
    assert "no recorded steps" in capsys.readouterr().err
    assert calibration.main(["rum=x"]) == 2
    assert "'run'" in capsys.readouterr().err
    assert calibration.main([f"run={recorded.folder}", "skip=many"]) == 2


def test_the_door_prints_coefficients_and_errors(recorded: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibration.main([f"run={recorded.folder}"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[:7]] == list(TRUTH)
    assert text.splitlines()[0].split() == ["step_ms", "3.5"]
    assert "held out" in text


def test_this_machine_is_measured() -> None:
    figures = calibration.measure_machine(seconds=0.01)
    assert set(figures) == {"tflops", "gb_per_s", "transfer_gb_per_s", "layer_overhead_us"}
    assert all(value > 0 for value in figures.values())
    assert 1e-4 < figures["tflops"] < 1e3
    assert 0.1 < figures["gb_per_s"] < 1e4


# ----------------------------------------------------------------------- least squares


def test_nonnegative_least_squares_by_hand() -> None:
    """Through (1, 3), (2, 2), (3, 1) the best line falls; without falling it is the mean. A column of zeros gets nothing."""
    a = np.array([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 0.0]])
    assert nonnegative_least_squares(a, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0, 0.0])
    assert nonnegative_least_squares(a, np.array([1.0, 2.0, 3.0])) == pytest.approx([0.0, 1.0, 0.0])
    assert nonnegative_least_squares(a, np.array([-1.0, -2.0, -3.0])) == pytest.approx([0.0, 0.0, 0.0])
    twins = np.array([[1.0, 1.0], [2.0, 2.0]])
    assert (twins @ nonnegative_least_squares(twins, np.array([2.0, 4.0]))).tolist() == pytest.approx([2.0, 4.0])


@pytest.mark.parametrize("seed", range(20))
def test_nonnegative_least_squares_is_optimal(seed: int) -> None:
    """Karush-Kuhn-Tucker: no step that stays at 0 or above makes the residual smaller."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(30, 6)) * 10.0 ** rng.integers(-4, 5, 6), rng.normal(size=30)
    x = nonnegative_least_squares(a, b)
    slope = a.T @ (a @ x - b) / np.abs(a).max(axis=0)
    assert (x >= 0).all()
    assert (slope > -1e-9).all()
    assert np.abs(slope[x > 0]).max(initial=0.0) < 1e-9


def test_a_fitted_model_is_a_linear_one() -> None:
    fit = fit_steps(calibration.work_of(frame()), np.full(80, 0.01), "here")
    cost = Fitted(fit)
    assert isinstance(cost, Linear)
    assert cost.coefficients == fit.coefficients
    assert cost.describe()["not_seen"] == "block_us"
