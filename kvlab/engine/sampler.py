"""From logits to tokens, for a batch of sequences with a parameter set each.

Order, as in vLLM: min_tokens mask, repetition, frequency and presence penalties; greedy rows take the largest logit now; for the
others temperature, min_p, top_k, top_p (each over what the one before left), then one draw. A draw is the inverse of the
cumulative distribution, in ascending order of token ids and in float64, at a uniform number that depends on (seed, stream,
position) alone: batch, preemption and other requests can't change it.

An infinite temperature is the limit of high ones. All that the filters leave is equally likely, and the filters still go by the order of
the logits: of V tokens min_p leaves all, top_k the k largest logits (and those equal to the k-th), top_p the ceil(top_p * n) largest of
the n left.

Shapes: S rows (sequences), R those of them that are drawn, V vocabulary.
Deviations: ties at the border of top_p keep the lower ids (vLLM: whatever its sort leaves); ties at top_k all stay, as in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch

from kvlab.engine.beam import num_beam_candidates
from kvlab.engine.filters import NARROW_TOP_K, keep_min_p, keep_top_k, keep_top_p, penalise, take_top_k, top_k_stable
from kvlab.engine.randomness import uniforms
from kvlab.engine.stopping import end_token_ids, ids_of_the_model
from kvlab.kernels.transfer import on_device
from kvlab.types import Candidate, SamplingParams, SeqStart, TokenLogprobs

MAX_ELEMENTS = (2**18, 2**24)
"""Logits that are drawn from at a time, in float64: on a CPU (what its caches hold), on a GPU (so that launches are few)."""

HIGH_TEMPERATURE = 1e6
"""Above it logits that differ may come out as equal masses: top_p looks at the logits then."""


@dataclass(slots=True)
class SamplingState:
    """What sampling must know of one sequence.

    Attributes:
        end_ids: ids masked below min_tokens. history: its tokens, only where penalties need them.
        is_plain: greedy and nothing else: the largest logit is the answer.
    """

    sampling: SamplingParams
    seed: int
    stream: int
    num_prompt_tokens: int
    end_ids: tuple[int, ...]
    history: npt.NDArray[np.int64] | None = None
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.sampling
        self.is_plain = (params.temperature == 0 and params.min_tokens == 0 and params.logprobs is None
                         and not params.needs_logits_processing and params.beam_width == 0)  # fmt: skip

    @classmethod
    def of(cls, start: SeqStart, eos_token_ids: Sequence[int]) -> SamplingState:
        """For a sequence that a runner is told about."""
        history = np.array(start.token_ids, dtype=np.int64) if start.sampling.needs_logits_processing else None
        return cls(start.sampling, start.seed, start.stream, start.num_prompt_tokens,
                   end_token_ids(start.sampling, eos_token_ids), history)  # fmt: skip

    def write_history(self, first_position: int, token_ids: Sequence[int]) -> None:
        """Note tokens from `first_position` on; does nothing where no penalty needs them."""
        if self.history is None:
            return
        end = first_position + len(token_ids)
        if end > len(self.history):
            grown = np.zeros(max(end, 2 * len(self.history)), dtype=np.int64)
            grown[: len(self.history)] = self.history
            self.history = grown
        self.history[first_position:end] = token_ids


@dataclass(slots=True)
class Sampled:
    """Per row: its tokens (`num_samples` of them), and a TokenLogprobs for each where the request asked for it (else ())."""

    tokens: list[tuple[int, ...]]
    logprobs: list[tuple[TokenLogprobs, ...]]


@torch.inference_mode()
def sample(logits_SV: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int],
           num_samples: Sequence[int]) -> Sampled:  # fmt: skip
    """Choose tokens.

    Args:
        logits_SV: float32 or float64; not changed.
        positions: index in the whole sequence (prompt and output) of the token that is chosen.
        num_samples: tokens to draw from the row's distribution, with streams `state.stream`, + 1, + 2 ...

    Raises:
        RuntimeError: a row of logits holds NaN or nothing finite.
    """
    if all(state.is_plain for state in states):
        return Sampled([(token,) * n for token, n in zip(_greedy(logits_SV), num_samples, strict=True)], [()] * len(states))
    work_SV = processed(logits_SV, states, positions)
    tokens: list[tuple[int, ...]] = [()] * len(states)
    greedy = [row for row, state in enumerate(states) if state.sampling.temperature == 0]
    if greedy:
        for row, token in zip(greedy, _greedy(work_SV[greedy] if len(greedy) < len(states) else work_SV), strict=True):
            tokens[row] = (token,) * num_samples[row]
    for rows, logits_RV, ids_RV in _portions(work_SV, states):
        picked = _draw(logits_RV, ids_RV, [states[row] for row in rows], [positions[row] for row in rows],
                       [num_samples[row] for row in rows])  # fmt: skip
        for row, row_tokens in zip(rows, picked, strict=True):
            tokens[row] = row_tokens
    return Sampled(tokens, _logprobs(logits_SV, states, tokens))


@torch.inference_mode()
def beam_candidates(logits_SV: torch.Tensor, states: Sequence[SamplingState]) -> list[tuple[Candidate, ...]]:
    """Per row the best continuations for beam search, best first (ties: lower id): `num_beam_candidates` of them, or all.

    Log-probabilities in the dtype of the logits. min_tokens is left to `BeamState`, which knows a beam's length.
    """
    counts = [num_beam_candidates(state.sampling.beam_width, len(state.end_ids)) for state in states]
    values, ids = top_k_stable(logits_SV.log_softmax(dim=-1), max(counts))
    return [tuple(map(Candidate, row_ids[:count], row_values[:count]))
            for row_ids, row_values, count in zip(ids.tolist(), values.tolist(), counts, strict=True)]  # fmt: skip


def _greedy(logits_SV: torch.Tensor) -> list[int]:
    """Index of the largest logit of each row, the lowest on a tie; one transfer from the device."""
    values_S, ids_S = logits_SV.max(dim=-1)  # as argmax, and NaN wins: a broken row is seen for nothing
    ids: list[int] = torch.where(values_S > -torch.inf, ids_S, -1).tolist()
    _check(ids)
    return ids


def _check(ids: list[int]) -> None:
    if min(ids) < 0:
        num_broken = sum(i < 0 for i in ids)
        raise RuntimeError(f"The model's logits are NaN (or all -inf) in {num_broken} of {len(ids)} rows.")


def processed(logits_SV: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> torch.Tensor:
    """Logits with end ids masked below min_tokens and with penalties; the input itself where there is nothing to do."""
    masked_rows: list[int] = []
    masked_ids: list[int] = []
    penalised: list[int] = []
    for row, state in enumerate(states):
        if positions[row] - state.num_prompt_tokens < state.sampling.min_tokens:
            ids_of_row = ids_of_the_model(state.end_ids, logits_SV.shape[1])
            masked_ids.extend(ids_of_row)
            masked_rows.extend(repeat(row, len(ids_of_row)))
        if state.history is not None:
            penalised.append(row)
    if not masked_rows and not penalised:
        return logits_SV
    work_SV = logits_SV.clone()
    if masked_rows:
        rows, ids = on_device([masked_rows, masked_ids], torch.int64, logits_SV.device).unbind(0)
        work_SV.index_put_((rows, ids), work_SV.new_full((), -torch.inf))
    if penalised:
        penalise(work_SV, penalised, [states[row].sampling for row in penalised],
                 [_split(states[row], positions[row]) for row in penalised])  # fmt: skip
    return work_SV


def _split(state: SamplingState, position: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Prompt and output tokens before `position`."""
    assert state.history is not None
    return state.history[: state.num_prompt_tokens], state.history[state.num_prompt_tokens : position]


def _portions(logits_SV: torch.Tensor, states: Sequence[SamplingState]) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor | None]]:
    """The rows to draw, a few at a time: (rows, their logits, ids of the logits' columns or None for all).

    Which way a row goes depends on that row alone, so its token does too.
    """
    drawn = [row for row, state in enumerate(states) if state.sampling.temperature > 0]
    narrow = [row for row in drawn if 0 < states[row].sampling.top_k <= NARROW_TOP_K]
    taken: list[int] = []
    if narrow:
        values_RK, ids_RK, is_exact = take_top_k(logits_SV[narrow], [states[row].sampling.top_k for row in narrow])
        exact = [i for i, one in enumerate(is_exact) if one]
        taken = [narrow[i] for i in exact]
        if taken:
            yield taken, values_RK[exact], ids_RK[exact]
    done = set(taken)
    wide = [row for row in drawn if row not in done]
    chunk = max(1, MAX_ELEMENTS[logits_SV.device.type == "cuda"] // logits_SV.shape[1])
    for first in range(0, len(wide), chunk):
        rows = wide[first : first + chunk]
        yield rows, logits_SV[rows], None


def _draw(logits_RV: torch.Tensor, ids_RV: torch.Tensor | None, states: Sequence[SamplingState], positions: Sequence[int],
          num_samples: Sequence[int]) -> list[tuple[int, ...]]:  # fmt: skip
    """`num_samples` tokens of each row by inverse CDF."""
    picked = draw_ids(logits_RV, ids_RV, states, positions, max(num_samples)).tolist()
    _check([row[0] for row in picked])
    return [tuple(row[:n]) for row, n in zip(picked, num_samples, strict=True)]


def draw_ids(logits_RV: torch.Tensor, ids_RV: torch.Tensor | None, states: Sequence[SamplingState], positions: Sequence[int],
             width: int) -> torch.Tensor:  # fmt: skip
    """`width` ids of each row by inverse CDF, [R, width], on the device of the logits; -1 in a row without a number. `ids_RV`: of the
    logits' columns, None: all in order."""
    params = [state.sampling for state in states]
    scaled_RV = logits_RV.double() / _column(logits_RV, [p.temperature for p in params])
    highest = max(p.temperature for p in params)
    if highest == math.inf:
        scaled_RV.masked_fill_(logits_RV == -torch.inf, -torch.inf)  # what is masked stays so
    mass_RV = scaled_RV.sub_(scaled_RV.amax(dim=-1, keepdim=True)).exp_()
    if any(p.min_p > 0 for p in params):
        mass_RV = keep_min_p(mass_RV, _column(logits_RV, [p.min_p for p in params]))
    if any(p.top_k > 0 for p in params):
        mass_RV = keep_top_k(mass_RV, [p.top_k for p in params], logits_RV)
    if any(p.top_p < 1 for p in params):
        order_RV = None
        if highest > HIGH_TEMPERATURE:  # of these rows alone: what a row draws is its own affair
            order_RV = logits_RV.masked_fill(_column(logits_RV, [p.temperature for p in params]) <= HIGH_TEMPERATURE, 0.0)
        mass_RV = keep_top_p(mass_RV, _column(logits_RV, [p.top_p for p in params]), order_RV)
    cumulative_RV = mass_RV.cumsum(dim=-1)
    streams = np.array([state.stream for state in states])[:, None] + np.arange(width)
    seeds = np.array([[state.seed % 2**64] for state in states], dtype=np.uint64)
    uniform_Rn = uniforms(seeds, streams, np.array(positions)[:, None])
    total_R1 = cumulative_RV[:, -1:]
    # u is at most 1 - 2^-53, so the product rounds to less than the total: some token lies above it.
    ids_Rn = torch.searchsorted(cumulative_RV, on_device(uniform_Rn, torch.float64, logits_RV.device) * total_R1, right=True)
    if ids_RV is not None:
        ids_Rn = ids_RV.gather(1, ids_Rn.clamp(max=ids_RV.shape[1] - 1))  # a row of NaN points behind the end
    return torch.where(torch.isfinite(total_R1), ids_Rn, -1)


def _column(like: torch.Tensor, values: list[float]) -> torch.Tensor:
    return on_device(values, torch.float64, like.device)[:, None]


def _logprobs(logits_SV: torch.Tensor, states: Sequence[SamplingState],
              tokens: Sequence[tuple[int, ...]]) -> list[tuple[TokenLogprobs, ...]]:  # fmt: skip
    """Log-probabilities from the model's own logits, before masks, penalties, temperature and filters (vLLM's raw_logprobs)."""
    result: list[tuple[TokenLogprobs, ...]] = [()] * len(states)
    rows = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
    if not rows:
        return result
    logprobs_RV = logits_SV[rows].log_softmax(dim=-1)
    counts = [states[row].sampling.logprobs or 0 for row in rows]
    values_Rk, ids_Rk = (t.tolist() for t in top_k_stable(logprobs_RV, max(1, *counts)))
    width = max(len(tokens[row]) for row in rows)
    chosen_Rn = torch.tensor([tokens[row] + (0,) * (width - len(tokens[row])) for row in rows], device=logits_SV.device)
    chosen = logprobs_RV.gather(1, chosen_Rn).tolist()
    for i, row in enumerate(rows):
        top = (tuple(ids_Rk[i][: counts[i]]), tuple(values_Rk[i][: counts[i]]))
        result[row] = tuple(TokenLogprobs(value, *top) for value in chosen[i][: len(tokens[row])])
    return result
