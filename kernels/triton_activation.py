"""Triton: silu(gate) * up in one pass. The reference is kvlab.kernels.activation.

Shapes: T tokens, F intermediate size.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kvlab.kernels.launch import Launch, LaunchConfig
from kvlab.kernels.triton_common import Arg, cast, jit, next_power_of_2, require_device
from kvlab.kernels.work import Work

BLOCK_F = 1024
"""Numbers that a program makes."""


@jit
def silu_and_mul_kernel(gate_up_ptr: Arg, out_ptr: Arg, row_stride: Arg, num_columns: Arg, BLOCK_F: tl.constexpr) -> None:
    """One program: BLOCK_F results of a token. silu is rounded before the product, as the reference rounds it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = columns < num_columns
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    small = tl.exp(-tl.abs(gate))  # never overflows
    silu = cast(gate * tl.where(gate < 0, small, 1.0) / (1.0 + small), kind).to(tl.float32)
    tl.store(out_ptr + row * num_columns + columns, cast(silu * up, kind), mask=mask)


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """See kvlab.kernels.activation.silu_and_mul; computed in float32. Rows may be strided.

    Raises:
        ValueError: float64, or tensors where Triton can't run.
    """
    out_TF = torch.empty((gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    launch(gate_up_T2F, out_TF).run()
    return out_TF


def launch(gate_up_T2F: torch.Tensor, out_TF: torch.Tensor) -> Launch:
    """The launch of `silu_and_mul`."""
    require_device(gate_up_T2F)
    num_tokens, num_columns = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    if gate_up_T2F.dtype.itemsize > 4 or gate_up_T2F.stride(1) != 1:
        raise ValueError(f"silu_and_mul takes consecutive numbers of at most 4 bytes, not {gate_up_T2F.dtype}")
    block = min(BLOCK_F, next_power_of_2(num_columns))
    args = {"gate_up_ptr": gate_up_T2F, "out_ptr": out_TF, "row_stride": gate_up_T2F.stride(0), "num_columns": num_columns}
    return Launch(silu_and_mul_kernel, (num_tokens, -(-num_columns // block)), args, {"BLOCK_F": block}, LaunchConfig(16, 4, 1))


def work(num_tokens: int, intermediate_size: int, itemsize: int) -> Work:
    """Two rows read, one written."""
    return Work(3 * num_tokens * intermediate_size * itemsize, 5 * num_tokens * intermediate_size)
