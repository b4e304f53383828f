"""Choosing tokens without the host looking: ids stay on the device until a step is taken in.

Shapes: S rows, V vocabulary, n samples of the row that has most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlab.engine.sampler import MAX_ELEMENTS, SamplingState, draw_ids, processed
from kvlab.kernels.transfer import on_device


def needs_host(state: SamplingState) -> bool:
    """Beams, log-probabilities, and penalties (whose history is the host's) are chosen the other way: `kvlab.engine.sampler.sample`."""
    return bool(state.sampling.beam_width) or state.history is not None or state.sampling.logprobs is not None


@torch.inference_mode()
def choose(logits_SV: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int],
           num_samples: Sequence[int]) -> torch.Tensor:  # fmt: skip
    """Ids [S, n], int64, of rows that don't need the host; -1 where the logits hold no number.

    As `sample` does: the same masks, filters and random numbers. Deviation: a small top_k is filtered among all ids too (there, where the
    sums may be rounded otherwise, among the k largest), for whether that is exact is known on the device only.
    """
    work_SV = processed(logits_SV, states, positions)
    values_S, ids_S = work_SV.max(dim=-1)
    ids_Sn = torch.where(values_S > -torch.inf, ids_S, -1)[:, None].repeat(1, max(num_samples))
    drawn = [row for row, state in enumerate(states) if state.sampling.temperature > 0]
    chunk = max(1, MAX_ELEMENTS[logits_SV.device.type == "cuda"] // logits_SV.shape[1])
    for first in range(0, len(drawn), chunk):
        rows = drawn[first : first + chunk]
        rows_R = on_device(rows, torch.int64, logits_SV.device)
        logits_RV = work_SV if len(rows) == len(states) else work_SV.index_select(0, rows_R)
        drawn_Rn = draw_ids(logits_RV, None, [states[row] for row in rows], [positions[row] for row in rows], ids_Sn.shape[1])
        ids_Sn.index_copy_(0, rows_R, drawn_Rn)
    return ids_Sn
