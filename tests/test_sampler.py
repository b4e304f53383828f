"""Sampling: small vocabularies by hand, transformers' processors, chi-square with fixed seeds, and independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvlab.engine import filters, sampler
from kvlab.engine.filters import keep_min_p, keep_top_k, keep_top_p, top_k_stable
from kvlab.engine.randomness import philox4x32, uniforms
from kvlab.engine.sampler import SamplingState, beam_candidates, sample
from kvlab.types import Candidate, SamplingParams, SeqStart

INF = math.inf


def state(prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = (), seed: int = 0, stream: int = 0, eos: tuple[int, ...] = (),
          **params: object) -> SamplingState:  # fmt: skip
    sampling = SamplingParams(**{"max_tokens": 100, **params})  # type: ignore[arg-type]
    start = SeqStart(0, 0, "admit", sampling, seed, stream, len(prompt), prompt + output)
    return SamplingState.of(start, eos)


def probabilities(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def mass(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64) / max(values)


def kept(mass_RV: torch.Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mass_RV]


def one(logits: torch.Tensor, row: SamplingState, position: int) -> int:
    return sample(logits[None], [row], [position], [1]).tokens[0][0]


# --------------------------------------------------------------------------------------------------------------- greedy


def test_greedy_takes_the_largest_and_the_lowest_id_on_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 0.0, 5.0]])
    assert sample(logits, [state(), state()], [1, 1], [1, 3]).tokens == [(1,), (0, 0, 0)]


def test_greedy_and_drawn_rows_in_one_batch_do_not_change_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 50)
    rows = [state(), state(temperature=0.8, seed=3), state(temperature=1.3, top_p=0.7, seed=4), state(repetition_penalty=1.5),
            state(temperature=0.8, top_k=3, min_p=0.05, seed=3, stream=2, logprobs=2)]  # fmt: skip
    together = sample(logits, rows, [4, 9, 2, 1, 9], [1] * 5).tokens
    alone = [sample(logits[i : i + 1], [rows[i]], [position], [1]).tokens[0] for i, position in enumerate([4, 9, 2, 1, 9])]
    backwards = sample(logits.flip(0), rows[::-1], [9, 1, 2, 9, 4], [1] * 5).tokens[::-1]
    assert together == alone == backwards


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    sample(logits, [state(output=(2,), eos=(2,), min_tokens=5, repetition_penalty=2.0, temperature=1.0, top_k=1)], [2], [1])
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 2}, {"logprobs": 0}])
@pytest.mark.parametrize("broken", [[math.nan, 1.0, 2.0], [-INF, -INF, -INF]])
def test_logits_without_a_number_are_an_error(params: dict[str, float], broken: list[float]) -> None:
    with pytest.raises(RuntimeError, match=r"logits are NaN \(or all -inf\) in 1 of"):
        sample(torch.tensor([[0.0, 1.0, 2.0], broken]), [state(**params), state(**params)], [1, 1], [1, 1])


# -------------------------------------------------------------------------------------------------------------- filters


def test_top_k_by_hand() -> None:
    rows = torch.stack([mass(1.0, 4.0, 2.0, 3.0)] * 4 + [mass(1.0, 2.0, 2.0, 0.5)])
    assert kept(keep_top_k(rows, [1, 2, 0, 9, 1], rows.log())) == [[1], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2]]  # ties all stay


def test_top_p_by_hand() -> None:
    rows = mass(0.125, 0.5, 0.125, 0.25).repeat(6, 1)
    top_p = torch.tensor([[0.4], [0.5], [0.51], [0.75], [0.8], [1.0]], dtype=torch.float64)
    assert torch.equal(keep_top_p(rows, top_p, looks=False), keep_top_p(rows, top_p))
    assert kept(keep_top_p(rows, top_p)) == [[1], [1], [1, 3], [1, 3], [0, 1, 3], [0, 1, 2, 3]]  # of two equals the lower id


def test_top_p_keeps_of_equals_those_that_stand_first_in_another_order() -> None:
    """Four equal masses, two of which are enough: those with the largest logits stay, of equal logits the lower id."""
    flat = torch.ones(2, 4, dtype=torch.float64)
    order = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    half = torch.full((2, 1), 0.5, dtype=torch.float64)
    assert kept(keep_top_p(flat, half, order)) == [[1, 3], [1, 2]]


def test_top_p_with_a_flat_distribution_sorts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "NUCLEUS_GUESSES", (4, 6))
    flat = torch.ones(2, 10, dtype=torch.float64)
    assert kept(keep_top_p(flat, torch.tensor([[0.65], [0.3]], dtype=torch.float64))) == [list(range(7)), [0, 1, 2]]


def test_top_p_mass_is_of_what_top_k_left() -> None:
    left = keep_top_k(mass(0.4, 0.3, 0.2, 0.1)[None], [2], mass(0.4, 0.3, 0.2, 0.1)[None])  # 4/7 and 3/7
    assert kept(keep_top_p(left, torch.tensor([[0.57]], dtype=torch.float64))) == [[0]]
    assert kept(keep_top_p(left, torch.tensor([[0.58]], dtype=torch.float64))) == [[0, 1]]


def test_min_p_by_hand() -> None:
    rows = mass(0.125, 0.5, 0.125, 0.25).repeat(7, 1)
    min_p = torch.tensor([[0.0], [0.2], [0.4], [0.6], [0.25], [0.5], [1.0]], dtype=torch.float64)
    assert kept(keep_min_p(rows, min_p)) == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 3], [1], [0, 1, 2, 3], [1, 3], [1]]  # at the border it stays


def test_filters_agree_with_transformers() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(1)
    logits = torch.randn(8, 400, dtype=torch.float64) * 2
    ids = torch.zeros(8, 1, dtype=torch.long)
    rows = (logits - logits.amax(dim=-1, keepdim=True)).exp()

    def column(value: float) -> torch.Tensor:
        return torch.full((8, 1), value, dtype=torch.float64)

    for k in (1, 7, 399):
        assert torch.equal(keep_top_k(rows, [k] * 8, logits) > 0, TopKLogitsWarper(k)(ids, logits).isfinite())
    for p in (0.05, 0.5, 0.93, 0.999):
        assert torch.equal(keep_top_p(rows, column(p)) > 0, TopPLogitsWarper(p)(ids, logits).isfinite())
        assert torch.equal(keep_top_p(rows, column(p), looks=False), keep_top_p(rows, column(p), looks=True))
    for m in (0.001, 0.1, 0.7):
        assert torch.equal(keep_min_p(rows, column(m)) > 0, MinPLogitsWarper(m)(ids, logits).isfinite())


def test_top_k_stable_orders_ties_by_id() -> None:
    values = torch.tensor([[2.0, 5.0, 2.0, 5.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    found, ids = top_k_stable(values, 3)
    assert ids.tolist() == [[1, 3, 0], [4, 3, 2]]
    assert found.tolist() == [[5.0, 5.0, 2.0], [4.0, 3.0, 2.0]]
    assert top_k_stable(values, 9)[1].tolist() == [[1, 3, 0, 2, 4], [4, 3, 2, 1, 0]]


# ------------------------------------------------------------------------------------------------------------ penalties


def test_repetition_penalty_as_transformers_over_prompt_and_output() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(2)
    logits = torch.randn(6, 12)
    histories = [tuple(torch.randint(0, 12, (7,)).tolist()) for _ in range(6)]
    for penalty in (0.5, 1.3, 4.0):
        processed = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(histories), logits.clone())
        rows = [state(history[:4], history[4:], repetition_penalty=penalty) for history in histories]
        assert [t[0] for t in sample(logits, rows, [7] * 6, [1] * 6).tokens] == processed.argmax(-1).tolist()


def test_penalties_by_hand_value_for_value() -> None:
    # Token 0 in the prompt, 1 twice and 2 once in the output, 3 never.
    logits = torch.tensor([[2.0, 2.0, -1.0, 0.5]])
    work = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=1.0)
    filters.penalise(work, [0], [params], [(np.array([0, 0]), np.array([1, 2, 1]))])
    assert work.tolist() == [[1.0, 1.0 - 0.5 - 1.0, -2.0 - 0.25 - 1.0, 0.5]]
    output_only = logits.clone()
    filters.penalise(output_only, [0], [SamplingParams(frequency_penalty=-1.0)], [(np.array([0, 0]), np.array([1, 2, 1]))])
    assert output_only.tolist() == [[2.0, 4.0, 0.0, 0.5]]


def test_presence_and_frequency_count_the_output_only_and_up_to_the_position() -> None:
    logits = torch.tensor([1.0, 1.2, 1.1, 0.0])
    assert one(logits, state((1,), (), presence_penalty=2.0), 1) == 1  # in the prompt: no penalty
    assert one(logits, state((1,), (1,), presence_penalty=2.0), 2) == 2
    assert one(logits, state((0,), (1, 2), frequency_penalty=0.3), 3) == 0
    row = state((0,), (), frequency_penalty=0.15)
    row.write_history(1, [1])
    row.write_history(2, [1, 3, 3])
    assert one(logits, row, 5) == 2  # 1.2 - 2 * 0.15 < 1.1
    assert one(logits, row, 2) == 2  # 1.2 - 0.15 = 1.05
    assert one(logits, row, 1) == 1  # nothing yet


def test_min_tokens_masks_the_end_ids_until_they_may_come() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, 3.0])
    row = state((0, 0), eos=(1,), stop_token_ids=(2,), min_tokens=3)
    assert [one(logits, row, position) for position in (2, 4, 5)] == [3, 3, 1]
    assert one(logits, state((0, 0), eos=(1,), stop_token_ids=(2,), min_tokens=3, ignore_eos=True), 2) == 1
    random_row = state((0, 0), eos=(1,), stop_token_ids=(2,), min_tokens=3, temperature=2.0)
    drawn = sample(logits[None], [random_row], [3], [500]).tokens[0]
    assert set(drawn) == {0, 3}


# ----------------------------------------------------------------------------------------------------------- randomness


def test_philox_known_answers() -> None:
    """Vectors of Random123 (kat_vectors: philox4x32 10)."""

    def words(*values: int) -> tuple[np.ndarray, ...]:  # type: ignore[type-arg]
        return tuple(np.array([value], dtype=np.uint64) for value in values)

    ones = 0xFFFFFFFF
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]  # fmt: skip
    for counter, key, expected in vectors:
        found = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
        assert tuple(int(word[0]) for word in found) == expected


def test_uniforms_are_the_first_53_bits_of_philox() -> None:
    """Counter and key of the known answers as (seed, stream, position): low words first, the key is the seed."""
    assert uniforms(0, 0, 0).item() == (0x6627E8D5E169C58D >> 11) / 2**53
    pi = uniforms(0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88)
    assert pi.item() == (0xD16CFE0994FDCCEB >> 11) / 2**53


def test_uniforms_are_a_function_of_seed_stream_and_position() -> None:
    grid = uniforms(np.arange(3)[:, None, None], np.arange(4)[:, None], np.arange(5))
    assert grid.shape == (3, 4, 5)
    assert len(np.unique(grid)) == 60
    assert uniforms(2, 3, 4) == grid[2, 3, 4]
    assert uniforms([-1, 2**64 - 1, 2**70 - 1], 0, 0).tolist() == [uniforms(-1, 0, 0).item()] * 3  # any Python integer is a seed
    many = uniforms(5, 0, np.arange(100_000))
    assert many.min() >= 0
    assert many.max() < 1
    counts = np.histogram(many, bins=20, range=(0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # chi-square, 19 degrees of freedom, 0.1 %
    neighbours = np.corrcoef([uniforms(seed, stream, np.arange(20_000)) for seed, stream in ((5, 0), (5, 1), (6, 0))])
    assert np.abs(neighbours - np.eye(3)).max() < 0.03


def test_a_draw_is_the_inverse_of_the_cumulative_distribution_in_id_order() -> None:
    logits = probabilities(0.1, 0.4, 0.3, 0.2)
    for position in range(1, 40):
        u = float(uniforms(11, 2, position))
        expected = 0 if u < 0.1 else 1 if u < 0.5 else 2 if u < 0.8 else 3
        assert one(logits, state(seed=11, stream=2, temperature=1.0), position) == expected


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_smallest_and_the_largest_number_never_pick_a_masked_token(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([-INF, 0.3, 0.2, 0.1, -INF])
    for u, expected in ((0.0, 1), (1 - 2**-53, 3)):
        monkeypatch.setattr(sampler, "uniforms", lambda seeds, streams, positions, u=u: np.full(streams.shape, u))
        assert one(logits, state(temperature=1.0, top_k=top_k), 1) == expected


def test_n_samples_use_the_streams_that_follow() -> None:
    torch.manual_seed(3)
    logits = torch.randn(30)
    four = sample(logits[None], [state(seed=7, temperature=1.5)], [6], [4]).tokens[0]
    assert four == tuple(one(logits, state(seed=7, stream=stream, temperature=1.5), 6) for stream in range(4))
    assert len(set(four)) > 1
    assert four == sample(logits[None], [state(seed=7, temperature=1.5)], [6], [4]).tokens[0]
    mixed = sample(logits.repeat(2, 1), [state(seed=7, temperature=1.5), state(seed=8, temperature=1.5)], [6, 6], [2, 4]).tokens
    assert mixed[0] == four[:2]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 1.0}, [0.1, 0.4, 0.3, 0.2]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 9 / 30, 4 / 30]),  # squares
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 3 / 7, 0]),
        ({"temperature": 1.0, "top_p": 0.85}, [0, 4 / 9, 3 / 9, 2 / 9]),
        ({"temperature": 1.0, "min_p": 0.3}, [0, 4 / 9, 3 / 9, 2 / 9]),
        ({"temperature": 0.5, "top_p": 0.8}, [0, 16 / 25, 9 / 25, 0]),  # after temperature, two tokens hold 25/30
        ({"temperature": 1.0, "min_p": 0.3, "top_p": 0.75}, [0, 4 / 7, 3 / 7, 0]),  # min_p first: two of 9/9 hold 7/9
    ],
)
def test_shares_match_the_distribution(params: dict[str, float], expected: list[float]) -> None:
    drawn = sample(probabilities(0.1, 0.4, 0.3, 0.2)[None], [state(seed=123, **params)], [17], [20_000]).tokens[0]
    counts = np.bincount(drawn, minlength=4)
    share = np.array(expected)
    assert counts[share == 0].sum() == 0
    possible = share > 0
    chi_square = (((counts - 20_000 * share) ** 2)[possible] / (20_000 * share[possible])).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, 0.1 %


def test_a_small_top_k_taken_out_draws_the_same_as_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    logits = torch.randn(12, 40).round(decimals=1)  # with ties, also at the border
    rows = [state(seed=i, temperature=1.0 + 0.1 * i, top_k=1 + 4 * i, top_p=(1.0, 0.7)[i % 2], min_p=(0.0, 0.0, 0.1)[i % 3])
            for i in range(12)]  # fmt: skip
    narrow = sample(logits, rows, [3] * 12, [50] * 12).tokens
    is_exact = filters.take_top_k(logits, [min(1 + 4 * i, 40) for i in range(12)])[2]
    assert 0 < sum(is_exact) < 12  # both ways were taken
    monkeypatch.setattr(sampler, "NARROW_TOP_K", 0)
    assert sample(logits, rows, [3] * 12, [50] * 12).tokens == narrow


def test_take_top_k_by_hand() -> None:
    values, ids, is_exact = filters.take_top_k(torch.tensor([[5.0, 1.0, 4.0, 3.0]] * 2 + [[2.0, 7.0, 2.0, 2.0]] * 3), [2, 9, 2, 1, 4])
    assert ids.tolist()[:2] == [[0, 1, 2, 3]] * 2
    assert values.tolist()[0] == [5.0, -INF, 4.0, -INF]
    assert values.tolist()[1] == [5.0, 1.0, 4.0, 3.0]
    assert values.tolist()[3] == [-INF, 7.0, -INF, -INF]
    assert is_exact == [True, True, False, True, True]


def test_rows_in_chunks_are_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    logits = torch.randn(9, 64)
    rows = [state(seed=i, temperature=0.5 + 0.2 * i, top_p=1 - 0.05 * i, top_k=i) for i in range(9)]
    whole = sample(logits, rows, list(range(9)), [1] * 9).tokens
    monkeypatch.setattr(sampler, "MAX_ELEMENTS", (200, 200))
    assert sample(logits, rows, list(range(9)), [1] * 9).tokens == whole


# ------------------------------------------------------------------------------------------------- logprobs, candidates


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]], dtype=torch.float64).log()
    result = sample(logits, [state(eos=(1,), min_tokens=1, logprobs=2)], [1], [2])
    assert result.tokens == [(2, 2)]  # EOS, the likeliest, may not come yet
    first, second = result.logprobs[0]
    assert first == second
    assert first.logprob == pytest.approx(math.log(0.3))
    assert first.top_ids == (1, 2)
    assert first.top_logprobs == pytest.approx((math.log(0.4), math.log(0.3)))
    chosen_only = sample(logits, [state(logprobs=0, temperature=9.0, seed=1)], [1], [1])
    assert chosen_only.logprobs[0][0].logprob == pytest.approx(float(logits[0, chosen_only.tokens[0][0]]))
    assert chosen_only.logprobs[0][0].top_ids == ()


def test_only_rows_that_ask_get_logprobs() -> None:
    result = sample(torch.zeros(3, 4), [state(), state(logprobs=1), state(logprobs=3)], [1] * 3, [1] * 3)
    assert [len(entries) for entries in result.logprobs] == [0, 1, 1]
    assert result.logprobs[1][0].top_ids == (0,)
    assert result.logprobs[2][0].top_ids == (0, 1, 2)


def test_beam_candidates_are_the_best_in_order_of_the_logits_precision() -> None:
    logits = torch.tensor([[0.2, 0.05, 0.2, 0.3, 0.05, 0.2], [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    found = beam_candidates(logits, [state(beam_width=2, eos=(1,)), state(beam_width=1, eos=(1, 2, 3))])
    assert [c.token_id for c in found[0]] == [3, 0, 2, 5]
    assert [c.token_id for c in found[1]] == [0, 1, 2, 3]
    assert found[0][0] == Candidate(3, pytest.approx(math.log(0.3), abs=1e-15))
    assert [len(c) for c in beam_candidates(logits, [state(beam_width=4)] * 2)] == [6, 6]  # no more than the vocabulary
