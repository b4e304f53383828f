"""Synthetic requests: statistics of arrivals and lengths, real sharing of prefixes, determinism, errors."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from workload_helpers import all_due, context, serve

from kvlab.types import UserError
from kvlab.workload import SyntheticWorkload, WorkloadContext
from kvlab.workload.distributions import Arrivals, Numbers
from kvlab.workload.rng import generator


def gaps(kind: dict[str, Any], count: int = 20_000) -> np.ndarray[Any, Any]:
    times = Arrivals("arrivals", kind, []).draw(generator(1, 0), count)
    assert times[0] == 0.0
    return np.diff(times)


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    g = gaps({"kind": "poisson", "rate": 4.0})
    assert 0.245 < g.mean() < 0.255
    assert 0.97 < g.std() / g.mean() < 1.03
    assert 0.617 < (g < 0.25).mean() < 0.647  # 1 - 1/e = 0.632


def test_gamma_arrivals_keep_the_rate_and_take_their_burstiness() -> None:
    g = gaps({"kind": "gamma", "rate": 2.0, "cv": 3.0})
    assert 0.46 < g.mean() < 0.54
    assert 2.85 < g.std() / g.mean() < 3.15
    smooth = gaps({"kind": "gamma", "rate": 2.0, "cv": 0.5})
    assert 0.495 < smooth.mean() < 0.505
    assert 0.49 < smooth.std() / smooth.mean() < 0.51


def test_fixed_and_all_at_once_arrivals() -> None:
    assert Arrivals("arrivals", {"kind": "fixed", "rate": 4}, []).draw(generator(0, 0), 4).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert Arrivals("arrivals", None, []).draw(generator(0, 0), 3).tolist() == [0.0, 0.0, 0.0]


def test_lognormal_lengths_have_mean_and_cv_as_given() -> None:
    drawn = Numbers("len", {"kind": "lognormal", "mean": 200, "cv": 0.8}, [], minimum=1).integers(generator(3, 1), 50_000)
    assert 198 < drawn.mean() < 202
    assert 0.78 < drawn.std() / drawn.mean() < 0.82
    assert drawn.min() >= 1


def test_lengths_are_clipped_and_the_clipping_is_told() -> None:
    notes: list[str] = []
    clipped = Numbers("len", {"kind": "lognormal", "mean": 100, "cv": 1, "min": 50, "max": 120}, notes)
    drawn = clipped.integers(generator(3, 1), 1000)
    assert (drawn.min(), drawn.max()) == (50, 120)
    reals = Numbers("len", {"kind": "lognormal", "mean": 100, "cv": 1}, []).reals(generator(3, 1), 1000)
    num_above = (reals > 120).sum()
    assert num_above == pytest.approx(259, abs=60)  # P(exp(0.833 z + 4.258) > 120) = P(z > 0.636) = 0.262
    assert notes == [f"len: {num_above} of 1000 draws were above max and became 120."]


def test_uniform_lengths_include_both_ends_evenly() -> None:
    counts = Counter(Numbers("len", {"kind": "uniform", "min": 3, "max": 6}, []).integers(generator(0, 0), 8000).tolist())
    assert sorted(counts) == [3, 4, 5, 6]
    assert all(1850 < n < 2150 for n in counts.values())


def test_a_plain_number_is_a_fixed_length() -> None:
    requests = all_due(SyntheticWorkload(5, 12, 4))
    assert [(len(r.prompt_token_ids), r.sampling.max_tokens, r.oracle_output_len) for r in requests] == [(12, 4, 4)] * 5
    assert all(r.sampling.ignore_eos for r in requests)
    assert [r.request_id for r in requests] == [f"synthetic-{i}" for i in range(5)]


def test_the_same_seed_is_the_same_run_and_another_seed_another() -> None:
    def run(seed: int) -> list[Any]:
        workload = SyntheticWorkload(
            40, {"kind": "lognormal", "mean": 30, "cv": 1}, {"kind": "uniform", "min": 1, "max": 9},
            arrivals={"kind": "poisson", "rate": 3}, prefix={"depth": 2, "branching": 2, "tokens_per_node": 4},
            priorities={0: 1, 5: 1}, tenants={"a": 1, "b": 3},
        )  # fmt: skip
        first, second = all_due(workload, context(seed=seed)), all_due(workload, context(seed=seed))
        assert first == second
        return first

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_one_parameter_leaves_the_other_draws_as_they_were() -> None:
    def run(rate: float, max_output: int) -> list[Any]:
        prompt_len, output_len = {"kind": "lognormal", "mean": 20, "cv": 1}, {"kind": "uniform", "min": 1, "max": max_output}
        return all_due(SyntheticWorkload(30, prompt_len, output_len, arrivals={"kind": "poisson", "rate": rate}))

    slow, fast = run(1.0, 9), run(4.0, 50)
    assert [r.prompt_token_ids for r in slow] == [r.prompt_token_ids for r in fast]
    assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast])


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prefixes_are_shared_exactly_down_to_where_the_paths_part() -> None:
    workload = SyntheticWorkload(60, 20, 1, prefix={"depth": 3, "branching": 2, "tokens_per_node": 10})
    prompts = [r.prompt_token_ids for r in all_due(workload)]
    assert {len(p) for p in prompts} == {50}
    shared = Counter(common_prefix(a, b) for i, a in enumerate(prompts) for b in prompts[:i])
    assert sorted(shared) == [0, 10, 20, 30]
    assert len({tuple(p[:10]) for p in prompts}) == 2
    assert len({tuple(p[:20]) for p in prompts}) == 4
    assert len({tuple(p[:30]) for p in prompts}) == 8
    assert len({tuple(p[30:]) for p in prompts}) == 60


def test_one_branch_is_a_system_prompt_that_all_share() -> None:
    workload = SyntheticWorkload(10, 5, 1, prefix={"depth": 1, "branching": 1, "tokens_per_node": 8})
    prompts = [r.prompt_token_ids for r in all_due(workload)]
    assert {common_prefix(a, b) for a, b in pairwise(prompts)} == {8}


def test_skew_makes_the_first_branches_popular() -> None:
    workload = SyntheticWorkload(6000, 1, 1, prefix={"depth": 1, "branching": 3, "tokens_per_node": 2, "skew": 1.0})
    counts = sorted(Counter(tuple(r.prompt_token_ids[:2]) for r in all_due(workload)).values())
    # weights 1, 1/2, 1/3 -> shares 6/11, 3/11, 2/11 of 6000
    assert counts == [pytest.approx(1091, abs=90), pytest.approx(1636, abs=110), pytest.approx(3273, abs=120)]


def test_random_prompts_use_the_whole_vocabulary_but_no_special_id() -> None:
    prompts = all_due(SyntheticWorkload(200, 50, 1), context(vocab_size=20, special_ids=(0, 1, 19)))
    counts = Counter(token for r in prompts for token in r.prompt_token_ids)
    assert sorted(counts) == list(range(2, 19))
    assert all(480 < n < 700 for n in counts.values())  # 10,000 / 17 = 588


def test_a_tokenizers_bos_and_eos_are_special() -> None:
    class Names:
        vocab_size, bos_token_id, eos_token_ids, special_ids = 8, 2, (0, 1), (0, 6)

    ctx = WorkloadContext(Names(), 8, 1000, 0, special_ids=(7,))  # type: ignore[arg-type]
    assert ctx.reserved_ids == (0, 1, 2, 6, 7)
    assert {t for r in all_due(SyntheticWorkload(20, 20, 1), ctx) for t in r.prompt_token_ids} == {3, 4, 5}


def test_priorities_and_tenants_are_drawn_by_weight() -> None:
    requests = all_due(SyntheticWorkload(4000, 1, 1, priorities={"0": 1, "2": 3}, tenants={"free": 0.5, "paid": 0.5}))
    priorities = Counter(r.priority for r in requests)
    assert sorted(priorities) == [0, 2]
    assert 900 < priorities[0] < 1100
    tenants = Counter(r.tenant for r in requests)
    assert sorted(tenants) == ["free", "paid"]
    assert 1880 < tenants["free"] < 2120


def test_closed_loop_serves_all_at_its_concurrency() -> None:
    workload = SyntheticWorkload(30, 4, 2, concurrency=4)
    _, records, most = serve(workload, context(), lambda request: 0.1 + request.prompt_token_ids[0] / 50_000)
    assert (len(records), most) == (30, 4)


def test_outputs_that_max_model_len_cuts_are_counted() -> None:
    workload = SyntheticWorkload(3, 90, 20)
    requests = all_due(workload, context(max_model_len=100))
    assert [(r.sampling.max_tokens, r.oracle_output_len) for r in requests] == [(20, 10)] * 3
    assert workload.notes == ["3 of 3 requests will end at max_model_len=100, before their max_tokens."]


def test_a_setting_of_another_kind_is_told() -> None:
    workload = SyntheticWorkload(2, 4, 2, arrivals={"kind": "all_at_once", "rate": 3, "cv": None})
    all_due(workload)
    assert workload.notes == ["workload.arrivals.rate has no effect with kind=all_at_once."]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": 0}, r"workload\.num_requests = 0 is not allowed: a whole number >= 1"),
        ({"prompt_len": 0}, r"workload\.prompt_len\.value = 0"),
        ({"prompt_len": 2.5}, r"workload\.prompt_len\.value = 2\.5 is not allowed: a whole number"),
        ({"prompt_len": {"kind": "lognormal", "mean": 10}}, r"workload\.prompt_len with kind=lognormal needs cv"),
        ({"prompt_len": {"kind": "lognormall", "mean": 10, "cv": 1}}, r"Unknown workload\.prompt_len\.kind 'lognormall'. Did"),
        ({"prompt_len": {"kind": "fixed", "valeu": 10}}, r"Unknown key of workload\.prompt_len 'valeu'. Did you mean 'value'"),
        ({"prompt_len": {"kind": "uniform", "min": 9, "max": 3}}, r"min = 9 is above workload\.prompt_len\.max = 3"),
        ({"prompt_len": {"kind": "lognormal", "mean": float("inf"), "cv": 1}}, r"mean = inf"),
        ({"output_len": "long"}, r"workload\.output_len\.value = 'long'"),
        ({"arrivals": {"kind": "poisson", "rate": 0}}, r"workload\.arrivals\.rate = 0 is not allowed: more than 0"),
        ({"arrivals": {"kind": "gamma", "rate": 1}}, r"kind=gamma needs cv"),
        ({"arrivals": "poisson"}, r"workload\.arrivals = 'poisson' is not allowed: a mapping, for example {kind: poisson"),
        ({"prefix": 3}, r"workload\.prefix = 3 is not allowed: a mapping"),
        ({"priorities": [0, 1]}, r"workload\.priorities = \[0, 1\] is not allowed: a mapping"),
        ({"sampling": "greedy"}, r"workload\.sampling = 'greedy' is not allowed: a mapping"),
        ({"prefix": {"depth": 2, "branching": 2}}, r"workload\.prefix needs tokens_per_node"),
        ({"prefix": {"depth": 2, "branching": 0, "tokens_per_node": 4}}, r"workload\.prefix\.branching = 0"),
        ({"prefix": {"depth": 60, "branching": 9, "tokens_per_node": 4}}, r"9\^60 leaves are too many"),
        ({"priorities": {"high": 1}}, r"workload\.priorities has the key 'high'"),
        ({"tenants": {"a": 0}}, r"at least one weight"),
        ({"tenants": {"a": -1, "b": 2}}, r"workload\.tenants\['a'\] = -1"),
        ({"sampling": {"temprature": 1}}, r"Unknown sampling parameter 'temprature'. Did you mean 'temperature'"),
        ({"sampling": {"max_tokens": 5}}, r"max_tokens has no effect"),
        ({"sampling": {"min_tokens": 9}}, r"min_tokens = 9 is not allowed: between 0 and max_tokens \(4\)"),
        ({"sampling": {"top_p": 0}}, r"workload\.sampling: top_p = 0\.0 is not allowed: in \(0, 1\]"),
        ({"sampling": {"temperature": "hot"}}, r"temperature = 'hot' is not allowed: a number"),
        ({"prompt_len": 200_000}, r"10 of 10 prompts leave no room .* max_model_len=100000 \(the longest has 200000 tokens\)"),
    ],
)
def test_wrong_parameters_are_named_before_work_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SyntheticWorkload(**{"num_requests": 10, "prompt_len": 8, "output_len": 4, **changes}).start(context())


def test_a_vocabulary_of_special_ids_only_is_refused() -> None:
    with pytest.raises(UserError, match="All 3 ids of the vocabulary are special"):
        SyntheticWorkload(1, 1, 1).start(context(vocab_size=3, special_ids=(0, 1, 2)))
