"""Policies that know the future or predict it: rank quality as asked for, and a clear error where the workload does not know it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_support import VOCAB, make_engine, policies, prompt_of, request, run_to_end

from kvlab.engine.driver import drive
from kvlab.policies.registry import by_name, list_policies
from kvlab.policies.scheduling import SjfOracle, SjfPredicted, SrptPredicted
from kvlab.policies.scheduling._predictor import LengthPredictor
from kvlab.types import MissingOracle, Now, UserError
from kvlab.workload.base import WorkloadContext
from kvlab.workload.fixed import FixedWorkload

NOW = Now(0, 0.0)
ORACLES = [row.name for row in list_policies("scheduling") if row.cls.reads_oracle]


# ----------------------------------------------------------------------------------------------- rank quality


def kendall_tau(xs: Any, ys: Any) -> float:
    """Concordant less discordant pairs, over pairs that differ in both (ties of whole lengths left out)."""
    signs = np.sign(xs[:, None] - xs[None, :]) * np.sign(ys[:, None] - ys[None, :])
    return float(signs.sum() / np.abs(signs).sum())


def lognormal(mean: float, cv: float, num: int = 1000) -> Any:
    """Lengths in whole tokens, at least 1."""
    sigma = np.sqrt(np.log1p(cv * cv))
    drawn = np.random.default_rng(7).lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
    return np.maximum(1, np.rint(drawn)).astype(int)


@pytest.mark.parametrize("tau", [-1.0, -0.6, 0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize(("mean", "cv"), [(48.0, 1.0), (200.0, 0.5)])
def test_the_rank_correlation_is_the_one_asked_for(tau: float, mean: float, cv: float) -> None:
    """1,000 lognormal lengths: the tau reached is within 0.04 of the one asked for, and exactly 1 or -1 at the ends."""
    lengths = lognormal(mean, cv)
    predictor = LengthPredictor(tau, mean, cv, seed=3)
    predicted = np.array([predictor.predict(f"r{i}", int(length)) for i, length in enumerate(lengths)])
    reached = kendall_tau(lengths.astype(float), predicted)
    assert reached == pytest.approx(tau, abs=1e-9 if abs(tau) == 1 else 0.04)
    assert np.median(predicted) == pytest.approx(np.median(lengths), rel=0.15)  # predictions are distributed as lengths are


def test_lengths_of_another_distribution_reach_another_tau_of_the_same_sign() -> None:
    """Uniform lengths around the mean vary less than cv = 1 says: the noise is too strong for them, and tau smaller."""
    lengths = np.random.default_rng(7).integers(40, 56, 1000)
    predictor = LengthPredictor(0.6, 48.0, 1.0, seed=3)
    predicted = np.array([predictor.predict(f"r{i}", int(length)) for i, length in enumerate(lengths)])
    assert 0 < kendall_tau(lengths.astype(float), predicted) < 0.3


def test_a_perfect_predictor_is_the_oracle() -> None:
    assert [LengthPredictor(1.0, 48.0, 1.0, 0).predict("r", n) for n in (1, 7, 48, 5000)] == pytest.approx([1, 7, 48, 5000])


def test_noise_depends_on_seed_and_request_alone() -> None:
    lengths = [12, 90, 33]
    one, same, other = (LengthPredictor(0.5, 48.0, 1.0, seed) for seed in (1, 1, 2))
    forward = [one.predict(f"r{i}", n) for i, n in enumerate(lengths)]
    backward = [same.predict(f"r{i}", lengths[i]) for i in (2, 1, 0)]
    assert forward == backward[::-1]
    assert forward != [other.predict(f"r{i}", n) for i, n in enumerate(lengths)]
    assert one.predict("r0", 12) != one.predict("r1", 12)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tau": 1.2}, r"tau = 1.2 is not allowed: a rank correlation in \[-1, 1\]"),
        ({"tau": float("nan")}, "tau = nan"),
        ({"mean": 0}, "mean = 0 is not allowed: tokens, more than 0"),
        ({"cv": 0}, "cv = 0"),
        ({"seed": 1.5}, "seed = 1.5"),
    ],
)
@pytest.mark.parametrize("cls", [SjfPredicted, SrptPredicted])
def test_a_parameter_out_of_range(cls: type, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cls(**parameters)


def test_displaceable_share_out_of_range() -> None:
    for name in ("srpt_oracle", "srpt_predicted"):
        with pytest.raises(UserError, match=r"displaceable_share = 1.5 is not allowed: in \[0, 1\]"):
            by_name("scheduling", name, displaceable_share=1.5)


# ------------------------------------------------------------------------------------------------- who knows


def test_which_policies_read_the_oracle() -> None:
    assert ORACLES == ["sjf_oracle", "sjf_predicted", "srpt_oracle", "srpt_predicted"]


@pytest.mark.parametrize("scheduling", ORACLES)
def test_without_an_oracle_the_first_request_is_a_clear_error_that_changes_nothing(scheduling: str) -> None:
    """EOS may end r1 before max_tokens: how long it gets is not known. Another request is served as if it had never been there."""
    engine, log = make_engine(40, 4, policies(scheduling=scheduling))
    unknown = replace(request("r1", prompt_of(5), 4, ignore_eos=False), oracle_output_len=None)
    with pytest.raises(MissingOracle) as error:
        engine.add_request(unknown)
    name, text = type(engine.policies.scheduling).__name__, str(error.value)
    assert text.startswith(f"{name} needs the true output length, and request 'r1' has none (oracle_output_len). Take a workload")
    assert not engine.has_work
    assert len(engine.scheduler.waiting) == len(engine.sequences) == 0
    engine.add_request(request("r2", prompt_of(5), 4))
    assert engine.groups["r2"].group_id == 0
    run_to_end(engine, 9)
    assert list(log.records) == ["r2"]


def test_a_run_whose_workload_does_not_know_ends_with_the_error() -> None:
    """Also where requests that can't be served are only recorded: this is no single request's fault."""
    unknown = replace(request("r1", prompt_of(5), 4, ignore_eos=False), oracle_output_len=None)
    workload = FixedWorkload([unknown, request("r2", prompt_of(5), 4)])
    workload.start(WorkloadContext(None, VOCAB, 8192, 0))
    engine, log = make_engine(40, 4, policies(scheduling="srpt_oracle"))
    with pytest.raises(MissingOracle, match="SrptOracle needs .* 'r1'"):
        drive(engine, workload)
    assert not log.records


@pytest.mark.parametrize(
    ("sampling", "oracle", "known"),
    [
        ({"ignore_eos": True}, None, 9),
        ({"ignore_eos": True}, 5, 5),
        ({"ignore_eos": False}, 5, 5),
        ({"ignore_eos": False}, None, None),
        ({"ignore_eos": True, "stop_token_ids": (3,)}, None, None),
        ({"ignore_eos": True, "n": 2, "beam_width": 2}, None, 9),
    ],
)
def test_what_is_known_of_a_request(sampling: dict[str, Any], oracle: int | None, known: int | None) -> None:
    """What the workload says; else max_tokens where nothing can end the request before. 9 tokens fit behind a prompt of 7 in 16."""
    engine, _ = make_engine(40, 4, max_model_len=16)
    asked = replace(request("r", prompt_of(7), 12, **sampling), oracle_output_len=oracle)
    engine.add_request(asked)
    assert engine.groups["r"].oracle_output_len == known


def test_the_oracle_counts_output_not_prompts() -> None:
    """A long prompt with a short output goes first."""
    engine, log = make_engine(40, 4, policies(scheduling=SjfOracle()), max_num_seqs=1)
    engine.add_request(request("short prompt", prompt_of(3), 6))
    engine.add_request(request("long prompt", prompt_of(50), 2))
    run_to_end(engine, 20)
    assert list(log.records) == ["long prompt", "short prompt"]
