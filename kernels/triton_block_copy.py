"""Triton: moving whole blocks, within the pool (copy-on-write) and between the pool and a staging buffer (swap), in one launch for all
layers, K and V. The reference is kvlab.kernels.block_copy.

Content is moved as 32-bit words where a block is made of them and lies on their boundaries, else as bytes; so every storage type (int8 and
fp8, and int8's scales) goes the same way.
Shapes: L layers, X keys and values (2), N blocks, n blocks moved; [L, 2, N, ...] is P = 2 L planes of N blocks.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kvlab.kernels.launch import Launch, LaunchConfig
from kvlab.kernels.transfer import on_device
from kvlab.kernels.triton_common import Arg, jit_for_any, require_device
from kvlab.kernels.work import Work

WORDS = 1024
"""Words that a program moves."""


@jit_for_any("sources_ptr", "targets_ptr", "source_blocks", "target_blocks")
def move_blocks_kernel(
    source_ptr: Arg, target_ptr: Arg, sources_ptr: Arg, targets_ptr: Arg, block_words: Arg, source_blocks: Arg, target_blocks: Arg,
    HAS_SOURCES: tl.constexpr, HAS_TARGETS: tl.constexpr, WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: WORDS words of one block of one plane. Without ids, block i of that side is the i-th. `source_blocks` and
    `target_blocks` are those of a plane: any number, which block_words then makes a multiple of 16 where it is one."""
    pair = tl.program_id(0)
    plane = tl.program_id(2).to(tl.int64)
    if HAS_SOURCES:
        source = tl.load(sources_ptr + pair).to(tl.int64)
    else:
        source = pair.to(tl.int64)
    if HAS_TARGETS:
        target = tl.load(targets_ptr + pair).to(tl.int64)
    else:
        target = pair.to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = words < block_words
    moved = tl.load(source_ptr + (plane * source_blocks + source) * block_words + words, mask=mask)
    tl.store(target_ptr + (plane * target_blocks + target) * block_words + words, moved, mask=mask)


def gather_blocks(cache_LXN: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    """A copy of the named blocks, [L, 2, n, ...]; see kvlab.kernels.block_copy.gather_blocks.

    Raises:
        ValueError: a tensor that isn't contiguous, or lies where Triton can't run.
    """
    out = torch.empty((*cache_LXN.shape[:2], len(block_ids), *cache_LXN.shape[3:]), dtype=cache_LXN.dtype, device=cache_LXN.device)
    launch(cache_LXN, out, _ids(block_ids, cache_LXN.device), None, len(block_ids)).run()
    return out


def scatter_blocks(cache_LXN: torch.Tensor, block_ids: list[int], blocks_LXn: torch.Tensor) -> None:
    """Write blocks [L, 2, n, ...] into the named ones, which must be distinct. Raises ValueError as `gather_blocks` does."""
    launch(blocks_LXn.contiguous(), cache_LXN, None, _ids(block_ids, cache_LXN.device), len(block_ids)).run()


def copy_blocks(cache_LXN: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy (source, destination) blocks; all sources are read before any destination is written, destinations must be distinct.

    Where no destination is also a source, one launch copies directly; programs of a launch run in no order, so that otherwise the sources
    go through a staging buffer (a gather, then a scatter).
    """
    if not pairs:
        return
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    if set(targets).isdisjoint(sources):
        ids = _ids(sources + targets, cache_LXN.device)
        launch(cache_LXN, cache_LXN, ids[: len(pairs)], ids[len(pairs) :], len(pairs)).run()
    else:
        scatter_blocks(cache_LXN, targets, gather_blocks(cache_LXN, sources))


def _ids(block_ids: list[int], device: torch.device) -> torch.Tensor:
    return on_device(block_ids, torch.int64, device)


def launch(source: torch.Tensor, target: torch.Tensor, sources: torch.Tensor | None, targets: torch.Tensor | None, count: int) -> Launch:
    """The launch that moves `count` blocks from `source` to `target`, both [L, 2, any number of blocks, ...]."""
    require_device(target)
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("blocks are moved between contiguous tensors only")
    num_planes, source_blocks, target_blocks = source.shape[0] * source.shape[1], source.shape[2], target.shape[2]
    block_bytes = source.shape[3:].numel() * source.dtype.itemsize
    word = torch.int32 if block_bytes % 4 == 0 and source.data_ptr() % 4 == 0 and target.data_ptr() % 4 == 0 else torch.uint8
    source, target = source.view(-1).view(word), target.view(-1).view(word)
    block_words = block_bytes // word.itemsize
    args = {"source_ptr": source, "target_ptr": target, "sources_ptr": source if sources is None else sources,
            "targets_ptr": target if targets is None else targets, "block_words": block_words,
            "source_blocks": source_blocks, "target_blocks": target_blocks}  # fmt: skip
    constexprs = {"HAS_SOURCES": sources is not None, "HAS_TARGETS": targets is not None, "WORDS": WORDS}
    return Launch(move_blocks_kernel, (count, -(-block_words // WORDS), num_planes), args, constexprs, LaunchConfig(16, 4, 1))


def work(num_blocks_moved: int, block_bytes: int) -> Work:
    """Each block (all layers, K and V) read and written."""
    return Work(2 * num_blocks_moved * block_bytes, 0)
