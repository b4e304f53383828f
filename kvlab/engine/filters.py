"""What sampling does to logits (penalties) and which tokens stay. Rows are independent of each other.

The filters take the mass of each token, exp(logit - largest logit), so 1 at most, and set it to 0 for a token that they drop.

Shapes: R rows, V vocabulary, k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvlab.kernels.transfer import on_device
from kvlab.types import SamplingParams

Ids = npt.NDArray[np.int64]

NUCLEUS_GUESSES = (128, 2048)
"""Tokens that top_p sorts at first; only where they hold too little of the mass are more sorted, at last the whole vocabulary."""

NARROW_TOP_K = 1024
"""Up to this top_k the k largest are taken out and all else is done with them alone."""


def penalise(logits_SV: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams],
             histories: Sequence[tuple[Ids, Ids]]) -> None:  # fmt: skip
    """Apply penalties in place to `rows`, each with its (prompt, output) token ids.

    Repetition (prompt and output): a positive logit is divided, a negative multiplied. Then, over the output, minus
    frequency * count and minus presence.
    """
    touched, row_of, repetition, subtracted = [], [], [], []
    for row, param, (prompt, output) in zip(rows, params, histories, strict=True):
        ids = np.unique(output if param.repetition_penalty == 1 else np.concatenate((prompt, output)))
        counts = np.bincount(np.searchsorted(ids, output), minlength=len(ids))
        touched.append(ids)
        row_of.append(np.full(len(ids), row))
        repetition.append(np.full(len(ids), param.repetition_penalty))
        subtracted.append(param.frequency_penalty * counts + param.presence_penalty * (counts > 0))

    def tensor(parts: Sequence[npt.NDArray[np.generic]], dtype: torch.dtype) -> torch.Tensor:
        return on_device(np.concatenate(parts), dtype, logits_SV.device)

    index = (tensor(row_of, torch.int64), tensor(touched, torch.int64))
    factor, amount = tensor(repetition, logits_SV.dtype), tensor(subtracted, logits_SV.dtype)
    values = logits_SV[index]
    logits_SV[index] = torch.where(values > 0, values / factor, values * factor) - amount


def keep_min_p(mass_RV: torch.Tensor, min_p_R1: torch.Tensor) -> torch.Tensor:
    """Keep tokens whose probability is at least `min_p` times the largest (whose mass is 1)."""
    return mass_RV.masked_fill(mass_RV < min_p_R1, 0)


def keep_top_k(mass_RV: torch.Tensor, top_k: Sequence[int], logits_RV: torch.Tensor) -> torch.Tensor:
    """Keep the k largest logits and those equal to the k-th; k = 0 keeps all. (At a high temperature their masses may be equal.)"""
    size = mass_RV.shape[1]
    counts = [min(k or size, size) for k in top_k]
    limited = [row for row, count in enumerate(counts) if count < size]
    if not limited:
        return mass_RV
    rows = on_device(limited, torch.int64, mass_RV.device)
    last = on_device([[counts[row] - 1] for row in limited], torch.int64, mass_RV.device)
    largest = logits_RV[rows].topk(max(counts[row] for row in limited), dim=-1).values
    floor_R1 = torch.full_like(logits_RV[:, :1], -torch.inf)
    floor_R1[rows] = largest.gather(1, last)
    return mass_RV.masked_fill(logits_RV < floor_R1, 0)


def take_top_k(logits_RV: torch.Tensor, top_k: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """The k largest logits of each row, as [R, max k] with -inf behind a shorter row's k, and their ids, ascending.

    Also, for each row, whether that is the same as `keep_top_k`: it is not where others equal the k-th.
    """
    size = logits_RV.shape[1]
    width = min(max(top_k), size)
    values, ids = logits_RV.topk(min(width + 1, size), dim=-1)
    counts_R1 = on_device(top_k, torch.int64, logits_RV.device).clamp(max=size)[:, None]
    border = values.gather(1, counts_R1 - 1), values.gather(1, counts_R1.clamp(max=values.shape[1] - 1))
    is_exact = ((border[0] != border[1]) | (counts_R1 == size)).flatten().tolist()
    ranks = torch.arange(width, device=logits_RV.device)
    values = values[:, :width].masked_fill(ranks >= counts_R1, -torch.inf)
    ids, order = ids[:, :width].sort(dim=-1)
    return values.gather(1, order), ids, is_exact


def keep_top_p(mass_RV: torch.Tensor, top_p_R1: torch.Tensor, order_RV: torch.Tensor | None = None,
               looks: bool | None = None) -> torch.Tensor:  # fmt: skip
    """Keep the fewest likely tokens whose probabilities reach `top_p`, at least one; of equals at the border the lower ids.

    `order_RV`: of equals first those with more here, then the lower ids. `looks`: look at results on the way to sort no more than is
    needed; by default where that is free. On a GPU the host would wait.
    """
    looks = mass_RV.device.type == "cpu" if looks is None else looks
    size = mass_RV.shape[1]
    enough_R1 = top_p_R1 * mass_RV.cumsum(dim=-1)[:, -1:]
    for guess in (*(guess for guess in NUCLEUS_GUESSES if looks and guess < size), size):
        sorted_Rk = mass_RV.topk(guess, dim=-1).values if guess < size else mass_RV.sort(dim=-1, descending=True).values
        stays_Rk = sorted_Rk.cumsum(dim=-1) - sorted_Rk < enough_R1  # a token stays if those before it are not enough
        stays_Rk[:, 0] = True
        if guess == size or not bool((stays_Rk[:, -1:] & (top_p_R1 < 1)).any()):
            break
    num_kept_R1 = torch.where(top_p_R1 < 1, stays_Rk.sum(dim=-1, keepdim=True), size)
    floor_R1 = sorted_Rk.gather(1, (num_kept_R1.clamp(max=sorted_Rk.shape[1]) - 1))
    below_RV = mass_RV < torch.where(top_p_R1 < 1, floor_R1, 0.0)
    num_surplus_R1 = size - below_RV.sum(dim=-1, keepdim=True) - num_kept_R1
    if not looks or bool((num_surplus_R1 > 0).any()):  # more tokens at the border than may stay: the last of them go
        ties_RV = mass_RV == floor_R1
        num_stay_R1 = ties_RV.sum(dim=-1, keepdim=True) - num_surplus_R1
        if order_RV is None:
            below_RV |= ties_RV & (ties_RV.cumsum(dim=-1) > num_stay_R1)
        else:
            order_RV = order_RV.masked_fill(~ties_RV, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
            ranks_RV = torch.empty_like(order_RV).scatter_(1, order_RV, torch.arange(size, device=order_RV.device).expand_as(order_RV))
            below_RV |= ties_RV & (ranks_RV >= num_stay_R1)
    return mass_RV.masked_fill(below_RV, 0)


def top_k_stable(values_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row (or all) and their ids, descending; of equals the lower id first (torch leaves that open)."""
    size = values_RV.shape[1]
    k = min(k, size)
    values, ids = values_RV.topk(min(k + 1, size), dim=-1)  # one more, to see a tie at the border
    if size > k:
        tied = (values[:, k - 1] == values[:, k]).nonzero().flatten()
        values, ids = values[:, :k], ids[:, :k]
        if len(tied):
            ids = ids.clone()
            ids[tied] = values_RV[tied].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    ids = ids.sort(dim=-1).values
    values, order = values_RV.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
