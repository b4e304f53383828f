"""Checks of lengths that every workload makes before a run begins."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvlab.types import UserError
from kvlab.workload.base import WorkloadContext

Ints = npt.NDArray[np.int64]


def check_lengths(ctx: WorkloadContext, prompt_lens: Ints, output_lens: Ints, notes: list[str], advice: str) -> Ints:
    """Output lengths that can be reached: at most max_model_len - prompt; the requests this cuts are counted in a note.

    UserError if a prompt leaves no room for one token; `advice` says what to do about it.
    """
    longest = int(prompt_lens.max(initial=0))
    if longest >= ctx.max_model_len:
        count = int((prompt_lens >= ctx.max_model_len).sum())
        raise UserError(
            f"{count} of {len(prompt_lens)} prompts leave no room for a token within max_model_len={ctx.max_model_len}"
            f" (the longest has {longest} tokens). {advice}"
        )
    reachable = np.minimum(output_lens, ctx.max_model_len - prompt_lens)
    num_cut = int((reachable < output_lens).sum())
    if num_cut:
        limit = f"max_model_len={ctx.max_model_len}"
        notes.append(f"{num_cut} of {len(prompt_lens)} requests will end at {limit}, before their max_tokens.")
    return reachable


def clip(name: str, lengths: Ints, maximum: int | None, notes: list[str]) -> Ints:
    """Lengths of at most `maximum` (None: as they are); how many were clipped is noted."""
    if maximum is None:
        return lengths
    num_clipped = int((lengths > maximum).sum())
    if num_clipped:
        notes.append(f"{name}={maximum} clipped {num_clipped} of {len(lengths)} requests.")
    return np.minimum(lengths, maximum)
