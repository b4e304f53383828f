"""Swap beside the computation: blocks move through pinned memory on a stream of their own.

    out   gather on the device, one copy into pinned memory, and from there into the cpu tier when it has arrived (before anything is read
          from that tier, or when a step is taken in)
    in    from the cpu tier into pinned memory, one copy, scatter on the device; the step's forward pass waits for it on the device

The forward pass waits for the gathering of what goes out (its blocks may be written in the same step), not for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlab.cache.tensors import KVTensors
from kvlab.engine.runners.cuda_streams import Mark, Streams
from kvlab.kernels.block_copy import gather_blocks, scatter_blocks
from kvlab.kernels.interface import Backend

Pair = tuple[int, int]


class BlockMover:
    """Moves blocks of `kv` between its tiers.

    Args:
        kv: tensors. backend: gathers and scatters on the device. streams: staging is pinned where they are real.
    """

    def __init__(self, kv: KVTensors, backend: Backend, streams: Streams) -> None:
        self._kv, self._backend, self._streams = kv, backend, streams
        self._arriving: list[tuple[Mark, torch.Tensor, list[int], torch.Tensor]] = []  # (when, cpu tier, block ids, pinned blocks)

    def _staging(self, like: torch.Tensor, device: str = "cpu") -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=device, pin_memory=self._streams.is_pinned)

    def swap_out(self, pairs: Sequence[Pair]) -> None:
        """(gpu source, cpu destination). What the computing stream is given afterwards may overwrite the sources."""
        if not pairs:
            return
        sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
        with self._streams.moving():
            gathered = [(cpu, self._backend.gather_blocks(gpu, sources)) for gpu, cpu in self._kv.tiers()]
            self._streams.compute_waits_for(self._streams.mark())
            moved = [(cpu, self._staging(blocks).copy_(blocks, non_blocking=True)) for cpu, blocks in gathered]
            mark = self._streams.mark()
        self._arriving += [(mark, cpu, destinations, blocks) for cpu, blocks in moved]

    def swap_in(self, pairs: Sequence[Pair]) -> None:
        """(cpu source, gpu destination). The computing stream waits for them."""
        if not pairs:
            return
        self.finish()
        sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
        found = [(gpu, gather_blocks(cpu, sources)) for gpu, cpu in self._kv.tiers()]
        with self._streams.moving():
            for gpu, blocks in found:
                pinned = self._staging(blocks).copy_(blocks)
                self._backend.scatter_blocks(gpu, destinations, pinned.to(gpu.device, non_blocking=True))
            self._streams.compute_waits_for(self._streams.mark())

    def finish(self) -> None:
        """Everything that left the device lies in the cpu tier."""
        for mark, cpu, block_ids, blocks in self._arriving:
            mark.wait()
            scatter_blocks(cpu, block_ids, blocks)
        self._arriving.clear()
