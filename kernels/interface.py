"""The backend interface between a model, its paged KV cache and the device: write, attend, copy, gather, scatter, and the small
operations between matrix products.

Shapes: T tokens in the batch, S sequences, H query heads, K KV heads, D head size, N blocks, B block size, E hidden size,
F intermediate size, L layers, X keys and values (2).
A slot is block_id * B + offset. A sequence's slots are counted from its first kept token: slot index = position - dropped tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class AttentionMetadata:
    """Where a ragged batch's tokens lie. Sequences with one new token (decodes) come first, then those with more (prefill chunks).

    Attributes:
        slot_mapping_T: int64, pool slot of each new token; -1 is not written.
        block_tables_SM: int64 [S, max blocks in the batch], rows padded with 0; logical block 0 is the first kept block.
        context_lens_S: int64, kept slots of each sequence after this step's tokens are written (new ones included).
        context_lens, query_lens: the same and the new tokens per sequence, as Python ints (no device synchronisation).
        num_decodes: sequences at the front with exactly one new token; they are the first `num_decodes` tokens.
        block_size: B.
        window: a query at slot q sees slots (q - window, q]; None: all up to q. num_sink_tokens: first slots that it sees besides.
    """

    slot_mapping_T: torch.Tensor
    block_tables_SM: torch.Tensor
    context_lens_S: torch.Tensor
    context_lens: list[int]
    query_lens: list[int]
    num_decodes: int
    block_size: int
    window: int | None = None
    num_sink_tokens: int = 0
    derived: object = None
    """A backend's own: indices made from the above once a step, the same for every layer. Leave it None."""


@dataclass(slots=True)
class LayerCache:
    """K and V of one layer: views of the pool.

    Attributes:
        k_NBKD, v_NBKD: stored numbers; float types, float8_e4m3fn or int8.
        k_scale, v_scale: what a stored number is multiplied by, both or neither. None: by 1. float32 [1]: one scale for the layer (fp8).
            float16 [N, B, K]: one a slot and KV head, written with the slot (int8).
    """

    k_NBKD: torch.Tensor
    v_NBKD: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class UnsupportedError(ValueError):
    """A backend can't serve a shape, type or device; the message says what it can. A user's error, raised before work starts."""


class Backend(Protocol):
    """What a model and the KV tensors need of the device's kernels."""

    name: str
    paths: Counter[str]
    """Which way calls went (kernel and launch shape -> calls), where a backend has several; a CUDA graph's replays are not counted."""

    def check(self, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype,
              window: int | None, device: torch.device) -> None:  # fmt: skip
        """Raise UnsupportedError if some of it can't be served."""

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm with weight, [T, E]; float32 inside for half types."""

    def add_rms_norm(self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor,
                     eps: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """residual += x (in place), then its RMSNorm. Returns (normed, residual)."""

    def rotary(self, heads_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
        """Heads turned by their positions' angles; may be done in place. `sin` as kvlab.model.rope makes it: first half negated."""

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [T, F]."""

    def write_kv(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata) -> None:
        """Write new keys and values into their slots, rounded to the storage dtype (quantised where it has scales); slot -1 is
        skipped."""

    def attention(self, q_THD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
        """Causal attention of each new token over its sequence's slots, read from the cache. Returns [T, H, D]."""

    def copy_blocks(self, cache_LXN: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) of a tensor [L, 2, N, ...]; sources are read before any destination is written."""

    def gather_blocks(self, cache_LXN: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        """Blocks as one tensor [L, 2, n, ...] (for swap-out)."""

    def scatter_blocks(self, cache_LXN: torch.Tensor, block_ids: list[int], blocks_LXn: torch.Tensor) -> None:
        """Inverse of gather_blocks (for swap-in)."""
