"""Triton helpers of the attention kernels: which slots a query sees, and where they lie in a paged cache.

Slots of a sequence are read in tiles of TILE, in the order of the sequence; a tile is a number of tokens, not of blocks, so any block
size works. Slot p lies at `table[p // B] * stride_block + (p % B) * stride_slot`, in 64 bits before the multiplication. Where B is a power
of two it is a compile-time constant (division by shifts); where it is also a multiple of TILE a tile lies inside one block, and one
look-up with one base address serves it. Otherwise each row of the tile looks up its own block: four bytes from a cache line that all
rows share, against the 2 D numbers of the slot that follow. Either way the D numbers of a slot and head are contiguous, so that K and V
are read in 128-bit pieces for every block size, 1 included.

Under a window only two ranges of slots are visible: the sinks at the front and the window at the end. The tiles between them are left out
by a jump: tile j starts at slot j where j is before the sinks' end, and at j + gap after it.
"""

from __future__ import annotations

import triton.language as tl

from kvlab.kernels.triton_common import Arg, jit


@jit
def window_gap(first_slot: Arg, num_sinks: Arg, TILE: tl.constexpr) -> Arg:
    """(end of the sinks' tiles, slots left out after them), both multiples of TILE, where `first_slot` is the window's first slot."""
    sinks_end = (num_sinks + TILE - 1) // TILE * TILE
    window_begin = tl.maximum(first_slot, 0) // TILE * TILE
    return sinks_end, tl.maximum(window_begin - sinks_end, 0)


@jit
def slot_offsets(
    table_ptr: Arg, start: Arg, end: Arg, block_size: Arg, stride_block: Arg, stride_slot: Arg,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
) -> Arg:  # fmt: skip
    """Offsets (int64 [TILE]) of the slots from `start` on; MASKED: those from `end` on have no table entry and get block 0's."""
    if BLOCK_SIZE % TILE == 0 and BLOCK_SIZE > 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        first = block * stride_block + (start % BLOCK_SIZE).to(tl.int64) * stride_slot
        return first + tl.arange(0, TILE).to(tl.int64) * stride_slot
    else:
        slots = start + tl.arange(0, TILE)
        if BLOCK_SIZE > 0:
            logical, within = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        else:
            logical, within = slots // block_size, slots % block_size
        if MASKED:
            block = tl.load(table_ptr + logical, mask=slots < end, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + logical).to(tl.int64)
        return block * stride_block + within.to(tl.int64) * stride_slot


@jit
def logits_log2(products: Arg, scale: Arg, soft_cap: Arg, SOFT_CAP: tl.constexpr) -> Arg:
    """Attention logits in units of log 2 (so that exp2, one instruction, makes weights): products * scale, capped to soft_cap *
    tanh(logit / soft_cap)."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if SOFT_CAP:
        x = products * (scale / soft_cap)
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        tanh = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0, -tanh, tanh) * (soft_cap * LOG2E)
    else:
        return products * (scale * LOG2E)
