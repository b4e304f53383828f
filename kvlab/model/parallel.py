"""Tensor parallelism of a Llama, after Megatron-LM (Shoeybi et al. 2019): each rank holds some heads and some columns of the MLP.

    q, k, v, gate, up    rows by heads (columns of the MLP): each is cut first and stacked then, so a rank's fused projection is its own
    o, down              columns: partial sums, added up over the ranks
    embedding, lm_head   rows, the vocabulary padded with zeros to a multiple of the ranks: a sum, and a gathering of logits

KV heads are replicated where there are more ranks than heads. Norms are whole everywhere. A bias of o or down is rank 0's, as sums add up.

Shapes: V vocabulary, H query heads, K KV heads, D head size, F intermediate size, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvlab.model.config import LlamaConfig
from kvlab.types import UserError

GetTensor = Callable[[str], torch.Tensor]


class Communicator(Protocol):
    """What ranks say to each other."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; may be in place."""

    def all_gather(self, x_SV: torch.Tensor) -> torch.Tensor:
        """Every rank's columns side by side, by rank."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`, and how it talks to the others."""

    rank: int
    size: int
    comm: Communicator

    def rows(self, num: int) -> slice:
        """This rank's share of `num` equal parts."""
        return slice(self.rank * (num // self.size), (self.rank + 1) * (num // self.size))


def check_divides(config: LlamaConfig, size: int) -> None:
    """Raise UserError for a model that `size` ranks can't share evenly."""
    for name, num in (("query heads", config.num_heads), ("columns of the MLP (intermediate_size)", config.intermediate_size)):
        if num % size:
            allowed = [n for n in range(1, config.num_heads + 1) if _divides(config, n)]
            raise UserError(f"tensor_parallel_size = {size} is not allowed: {num} {name} of this model can't be shared evenly. "
                            f"It takes {', '.join(map(str, allowed))}.")  # fmt: skip
    if config.num_kv_heads % size and size % config.num_kv_heads:
        allowed = [n for n in range(1, config.num_heads + 1) if _divides(config, n)]
        raise UserError(f"tensor_parallel_size = {size} is not allowed: {config.num_kv_heads} KV heads can neither be shared nor "
                        f"replicated evenly. This model takes {', '.join(map(str, allowed))}.")  # fmt: skip


def _divides(config: LlamaConfig, size: int) -> bool:
    kv = config.num_kv_heads
    return not (config.num_heads % size or config.intermediate_size % size or (kv % size and size % kv))


def rank_config(config: LlamaConfig, size: int) -> LlamaConfig:
    """The shape of what one rank holds. Sizes that don't differ between ranks (E, V) are the whole model's."""
    check_divides(config, size)
    return replace(config, num_heads=config.num_heads // size, num_kv_heads=max(1, config.num_kv_heads // size),
                   intermediate_size=config.intermediate_size // size)  # fmt: skip


def sharded(config: LlamaConfig, get: GetTensor, shard: Shard) -> GetTensor:
    """`get` of a whole checkpoint as that of one rank: its part of each tensor, for `Llama(rank_config(config, size), ...)`."""
    check_divides(config, shard.size)

    def part(name: str) -> torch.Tensor:
        return _part(name, get(name), config, shard).contiguous()

    return part


def _part(name: str, whole: torch.Tensor, config: LlamaConfig, shard: Shard) -> torch.Tensor:
    heads = shard.rows(config.num_heads)
    queries = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
    columns = shard.rows(config.intermediate_size)
    if ".q_proj." in name:
        return whole[queries]
    if ".k_proj." in name or ".v_proj." in name:
        kv = _kv_heads(config.num_kv_heads, shard)
        return whole[kv.start * config.head_dim : kv.stop * config.head_dim]
    if ".gate_proj." in name or ".up_proj." in name:
        return whole[columns]
    if ".o_proj." in name or ".down_proj." in name:
        if whole.dim() == 1:
            return whole if shard.rank == 0 else torch.zeros_like(whole)
        return whole[:, queries if ".o_proj." in name else columns]
    if "embed_tokens" in name or name.startswith("lm_head"):
        return _vocabulary_rows(whole, shard)
    return whole


def _kv_heads(num_kv_heads: int, shard: Shard) -> slice:
    if num_kv_heads >= shard.size:
        return shard.rows(num_kv_heads)
    head = shard.rank * num_kv_heads // shard.size
    return slice(head, head + 1)


def _vocabulary_rows(whole_VE: torch.Tensor, shard: Shard) -> torch.Tensor:
    """This rank's rows; beyond the vocabulary zeros."""
    num = -(-len(whole_VE) // shard.size)
    rows = whole_VE[shard.rank * num : (shard.rank + 1) * num]
    return torch.cat((rows, rows.new_zeros(num - len(rows), rows.shape[1]))) if len(rows) < num else rows


def embed(embed_VE: torch.Tensor, token_ids_T: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Embeddings [T, E] from each rank's rows."""
    local_T = token_ids_T - shard.rank * len(embed_VE)
    is_mine_T = (local_T >= 0) & (local_T < len(embed_VE))
    rows_TE = embed_VE[local_T.where(is_mine_T, 0)] * is_mine_T[:, None]
    return shard.comm.all_reduce(rows_TE)
