"""Indices into the pool that are the same for every layer of a step: made once a step, kept in the batch's metadata.

A batch is cut into *groups*: decodes of similar context length are one group, each prefill chunk is one of its own.
Shapes: S sequences of a group, Q query rows of each, L slots read by the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.kernels.interface import AttentionMetadata

MAX_PADDING = 512
"""Padded slots a group of decodes may have: about what a further group costs (its calls, in every layer) on a 2-core CPU."""


@dataclass(slots=True)
class Group:
    """Sequences whose attention is one call.

    Attributes:
        rows: int64 [S * Q], their rows in the batch, or a slice when they are consecutive.
        num_seqs, num_queries: S, Q. length: L.
        slots: int64 [S * L]; where a sequence has fewer than L slots its first one is repeated, and `mask` hides it: unused
            slots of the pool are never read, so whatever they hold (NaN too) can't leak.
        mask: bool [S, 1, Q, L], True where a query sees a slot; None: every query sees all (decodes of equal length).
        is_causal: a whole prompt: query i sees slots 0..i, no mask needed.
    """

    rows: torch.Tensor | slice
    num_seqs: int
    num_queries: int
    length: int
    slots: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool = False
    _bias: torch.Tensor | None = None
    _head_rows: torch.Tensor | None = None
    _head_bags: tuple[torch.Tensor, torch.Tensor] | None = None

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """`mask` as what is added to scores, 0 or -inf. Made once a step (attention would make it from a mask in every layer)."""
        if self.mask is not None and (self._bias is None or self._bias.dtype != dtype):
            self._bias = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device).masked_fill_(~self.mask, -torch.inf)
        return self._bias

    def head_rows(self, num_kv_heads: int) -> torch.Tensor:
        """int64 [S * K * L]: `slots` by sequence and KV head, as rows of a pool that is seen as [slots * K, D]. Made once a step."""
        if self._head_rows is None:
            heads_K1 = torch.arange(num_kv_heads, device=self.slots.device)[:, None]
            self._head_rows = (self.slots.view(-1, 1, self.length) * num_kv_heads + heads_K1).flatten()
        return self._head_rows

    def head_bags(self, num_kv_heads: int, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(`head_rows` for each of the `num_queries` query heads of a KV head [S * H * L], where each head's begin [S * H]). Made once a
        step."""
        if self._head_bags is None:
            rows_X1L = self.head_rows(num_kv_heads).view(-1, 1, self.length)
            rows = rows_X1L.expand(-1, num_queries, -1).flatten()
            self._head_bags = rows, torch.arange(0, len(rows), self.length, device=rows.device)
        return self._head_bags


@dataclass(slots=True)
class BatchIndex:
    """`written_rows`: rows with a slot (None: all), `written_slots`: their slots; `groups`: attention calls."""

    written_rows: torch.Tensor | None
    written_slots: torch.Tensor
    groups: list[Group]
    _scratch: torch.Tensor | None = None

    def scratch(self, cache_NBKD: torch.Tensor) -> torch.Tensor:
        """Room for the K and V that a group reads, [2, max S * L * K, D], of the dtype and device of `cache_NBKD`. It is made once a step
        and serves all groups and layers in turn: fresh memory for each costs a CPU four times the copying itself."""
        if self._scratch is None or self._scratch.dtype != cache_NBKD.dtype or self._scratch.device != cache_NBKD.device:
            most = max(len(group.slots) for group in self.groups)
            self._scratch = cache_NBKD.new_empty((2, most * cache_NBKD.shape[2], cache_NBKD.shape[3]))
        return self._scratch


def batch_index(meta: AttentionMetadata) -> BatchIndex:
    """The indices of a batch; built at the first call of a step."""
    if not isinstance(meta.derived, BatchIndex):
        meta.derived = _build(meta)
    return meta.derived


def _build(meta: AttentionMetadata) -> BatchIndex:
    is_written = meta.slot_mapping_T >= 0
    rows = None if bool(is_written.all()) else is_written.nonzero().flatten()
    slots = meta.slot_mapping_T if rows is None else meta.slot_mapping_T[rows]
    groups = [_decode_group(meta, seqs) for seqs in _similar_lengths(meta)]
    row = meta.num_decodes
    for seq in range(meta.num_decodes, len(meta.query_lens)):
        groups.append(_prefill_group(meta, seq, row))
        row += meta.query_lens[seq]
    return BatchIndex(rows, slots, groups)


def _read_span(meta: AttentionMetadata, seq: int) -> tuple[int, int, int]:
    """What any query of a sequence reads: the first slots (sinks), and from one slot to the end. (number of sinks, slot, end)"""
    end = meta.context_lens[seq]
    if meta.window is None:
        return 0, 0, end
    start = max(0, end - meta.query_lens[seq] - meta.window + 1)
    return min(meta.num_sink_tokens, start), start, end


def _similar_lengths(meta: AttentionMetadata) -> list[list[int]]:
    """Decodes, longest first, cut so that no group pads more than MAX_PADDING slots in all. A function of the lengths alone."""
    lengths = [sinks + end - start for sinks, start, end in (_read_span(meta, seq) for seq in range(meta.num_decodes))]
    groups: list[list[int]] = []
    longest, padding = 0, 0
    for seq in sorted(range(meta.num_decodes), key=lambda seq: -lengths[seq]):
        padding += longest - lengths[seq]
        if not groups or padding > MAX_PADDING:
            groups.append([])
            longest, padding = lengths[seq], 0
        groups[-1].append(seq)
    return groups


def _decode_group(meta: AttentionMetadata, seqs: list[int]) -> Group:
    """One query each. Each sequence's sinks come first, then its window, without the slots in between."""
    device = meta.block_tables_SM.device
    spans = [_read_span(meta, seq) for seq in seqs]
    lengths = [sinks + end - start for sinks, start, end in spans]
    longest = max(lengths)
    index = torch.arange(longest, device=device)[None, :]
    length_S1 = torch.tensor(lengths, device=device)[:, None]
    sinks_S1 = torch.tensor([sinks for sinks, _, _ in spans], device=device)[:, None]
    gap_S1 = torch.tensor([start - sinks for sinks, start, _ in spans], device=device)[:, None]
    is_seen = index < length_S1
    positions_SL = torch.where(is_seen, index, 0)
    positions_SL = positions_SL + torch.where(positions_SL < sinks_S1, 0, gap_S1)
    seqs_S = torch.tensor(seqs, device=device)
    tables = meta.block_tables_SM[seqs_S]
    slots = tables.gather(1, positions_SL // meta.block_size) * meta.block_size + positions_SL % meta.block_size
    mask = None if min(lengths) == longest else is_seen[:, None, None, :]
    is_run = seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    rows = slice(seqs[0], seqs[0] + len(seqs)) if is_run else seqs_S
    return Group(rows, len(seqs), 1, longest, slots.flatten(), mask)


def _prefill_group(meta: AttentionMetadata, seq: int, row: int) -> Group:
    """One sequence, several queries: the last `query_lens[seq]` of its slots."""
    device = meta.block_tables_SM.device
    num_queries = meta.query_lens[seq]
    num_sinks, start, end = _read_span(meta, seq)
    positions_L = torch.arange(start, end, device=device)
    if num_sinks:
        positions_L = torch.cat((torch.arange(num_sinks, device=device), positions_L))
    slots = meta.block_tables_SM[seq, positions_L // meta.block_size] * meta.block_size + positions_L % meta.block_size
    rows = slice(row, row + num_queries)
    if num_queries == end and meta.window is None:
        return Group(rows, 1, num_queries, end, slots, None, is_causal=True)
    query_Q1 = torch.arange(end - num_queries, end, device=device)[:, None]
    mask_QL = positions_L[None, :] <= query_Q1
    if meta.window is not None:
        mask_QL &= (positions_L[None, :] > query_Q1 - meta.window) | (positions_L[None, :] < meta.num_sink_tokens)
    return Group(rows, 1, num_queries, len(positions_L), slots, mask_QL[None, None])
