"""Decode steps as recorded graphs: static buffers of a few batch sizes, filled in place; smaller batches are padded.

A padded row computes token 0 at position 0 with one slot of context, reads block 0 and writes nowhere (slot -1); its logits are not looked
at. Launch shapes are recorded with the graph, so they are chosen for the longest context there may be; where that is long, each size is
recorded for contexts of up to SHORT_CONTEXT slots as well, lest steps of short ones launch dozens of splits without work.

Shapes: S sequences (rows of a size), M blocks of the longest sequence, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kvlab.engine.runners.cuda_streams import Captured, Streams
from kvlab.engine.runners.rows import Ints
from kvlab.kernels.interface import AttentionMetadata
from kvlab.types import UserError

SHORT_CONTEXT = 4096


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every eighth up to 256, every 64th beyond, as far as `max_num_seqs`, which is always the last."""
    steps = [1, 2, 4, *range(8, 257, 8), *range(320, max_num_seqs + 1, 64)]
    return (*[size for size in steps if size < max_num_seqs], max_num_seqs)


def check_sizes(sizes: Sequence[int]) -> None:
    """UserError unless they ascend from at least 1."""
    if any(not isinstance(size, int) or size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
        raise UserError(f"Sizes of CUDA graphs = {list(sizes)} are not allowed: ascending numbers of sequences, from 1 on.")


class StaticBatch:
    """Inputs of a decode batch that stay in place.

    Args:
        max_rows: rows of the largest size. max_blocks: M. block_size, window, num_sink_tokens: of the run. max_context: slots of the
            longest sequence.
        is_exact: tell the backend each row's own context in Python too, anew for every call. Else (a graph is recorded once) the longest.
    """

    NUM_COLUMNS = 4
    """Beside the table: token, position, slot, context."""

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, window: int | None, max_context: int, device: torch.device,
                 is_exact: bool, num_sink_tokens: int = 0) -> None:  # fmt: skip
        self._block_size, self._max_context, self._is_exact = block_size, max_context, is_exact
        self._window, self._num_sink_tokens = window, num_sink_tokens
        self.max_blocks = max_blocks
        pinned = device.type == "cuda"
        # Two, in turn: a step's copy may still be under way when the next is written.
        self._hosts = [torch.zeros(max_rows * (self.NUM_COLUMNS + max_blocks), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._inputs = {name: torch.zeros(max_rows, dtype=torch.int64, device=device) for name in ("token", "position", "slot", "context")}
        self._tables_SM = torch.zeros(max_rows, max_blocks, dtype=torch.int64, device=device)
        self._is_cuda = pinned

    def fill(self, size: int, token_ids_S: Ints, positions_S: Ints, slots_S: Ints, context_S: Ints, tables_SM: Ints) -> None:
        """Write a batch of at most `size` rows and pad it; one copy to the device, which the host does not wait for."""
        num, width = tables_SM.shape
        host = self._hosts[self._turn]
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        width = max(1, width)
        rows = host.numpy()[: size * (self.NUM_COLUMNS + width)]
        columns = rows[: size * self.NUM_COLUMNS].reshape(self.NUM_COLUMNS, size)
        columns[:, num:] = [[0], [0], [-1], [1]]
        columns[:, :num] = token_ids_S, positions_S, slots_S, context_S
        table = rows[size * self.NUM_COLUMNS :].reshape(size, width)
        table[num:] = 0
        table[:num, : tables_SM.shape[1]] = tables_SM
        moved = host[: len(rows)].to(self._tables_SM.device, non_blocking=True)
        for i, buffer in enumerate(self._inputs.values()):
            buffer[:size].copy_(moved[i * size : (i + 1) * size])
        # What an earlier batch left to the right of it is not read: no context here is longer.
        self._tables_SM[:size, :width].copy_(moved[size * self.NUM_COLUMNS :].view(size, width))
        if self._is_cuda:
            self._copied[self._turn] = torch.cuda.current_stream().record_event()
        self._turn = 1 - self._turn

    def token_ids(self, size: int) -> torch.Tensor:
        """int64 [size], to be overwritten where a token is known on the device only."""
        return self._inputs["token"][:size]

    def positions(self, size: int) -> torch.Tensor:
        """int64 [size]."""
        return self._inputs["position"][:size]

    def widths(self) -> list[int]:
        """Blocks of a table, ascending, that graphs are recorded for."""
        short = -(-SHORT_CONTEXT // self._block_size)
        return [short, self.max_blocks] if self._max_context > 2 * SHORT_CONTEXT else [self.max_blocks]

    def meta(self, size: int, width: int) -> AttentionMetadata:
        """Views of the buffers, of contexts in at most `width` blocks."""
        context_S = self._inputs["context"][:size]
        lens = context_S.tolist() if self._is_exact else [min(self._max_context, width * self._block_size)] * size
        return AttentionMetadata(self._inputs["slot"][:size], self._tables_SM[:size, :width], context_S, lens, [1] * size, size,
                                 self._block_size, self._window, self._num_sink_tokens)  # fmt: skip


class DecodeGraphs:
    """One graph a size and width of table.

    Args:
        forward: (token ids, positions, metadata) -> logits [S, V].
        sizes: rows, ascending.

    Attributes:
        paths: "graph[SIZE]" -> steps that replayed it.
    """

    def __init__(self, forward: Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor], batch: StaticBatch,
                 sizes: Sequence[int], streams: Streams) -> None:  # fmt: skip
        if not sizes:
            raise UserError("Sizes of CUDA graphs = [] are not allowed here: ascending numbers of sequences, from 1 on.")
        check_sizes(sizes)
        self.batch, self.sizes, self.paths = batch, tuple(sizes), Counter[str]()
        self._forward = forward
        self._logits: torch.Tensor | None = None
        self._widths = batch.widths()
        self._graphs: dict[tuple[int, int], Captured] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            empty = np.zeros(0, dtype=np.int64)
            batch.fill(size, empty, empty, empty, empty, np.zeros((0, 0), dtype=np.int64))
            for width in self._widths:
                self._graphs[size, width] = streams.captured(partial(self._run, size, width))

    def _run(self, size: int, width: int) -> torch.Tensor:
        logits_SV = self._forward(self.batch.token_ids(size), self.batch.positions(size), self.batch.meta(size, width))
        if self._logits is None:
            self._logits = torch.empty_like(logits_SV)
        # One place for all sizes: logits kept by each graph of 256 sequences and fewer would take 2 GB with Llama 3's vocabulary.
        return self._logits[:size].copy_(logits_SV)

    def size_for(self, num_rows: int, num_blocks: int) -> int | None:
        """The least size that holds a batch; None: none does, or a table is too wide."""
        place = bisect_left(self.sizes, num_rows)
        return self.sizes[place] if place < len(self.sizes) and num_blocks <= self.batch.max_blocks else None

    def replay(self, size: int, num_rows: int, num_blocks: int) -> torch.Tensor:
        """Logits [num_rows, V] of what was filled in, a table of `num_blocks` columns; they stay until the next replay."""
        graph = self._graphs[size, self._widths[bisect_left(self._widths, num_blocks)]]
        graph.replay()
        self.paths[f"graph[{size}]"] += 1
        return graph.output[:num_rows]
