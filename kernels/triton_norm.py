"""Triton: RMSNorm, alone and with the residual sum before it, in one pass over memory. The reference is kvlab.kernels.norm.

One program a row; a row is kept in registers (E up to 16,384).
Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kvlab.kernels.launch import Launch, LaunchConfig
from kvlab.kernels.triton_common import Arg, cast, jit, next_power_of_2, require_device
from kvlab.kernels.work import Work

MAX_HIDDEN = 16384
"""Numbers of a row that one program can hold."""


@jit
def rms_norm_kernel(
    x_ptr: Arg, residual_ptr: Arg, weight_ptr: Arg, out_ptr: Arg, x_stride: Arg, residual_stride: Arg, num_columns: Arg, eps: Arg,
    HAS_RESIDUAL: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """out = norm(x) * weight, or residual += x; out = norm(residual) * weight. Half types are rounded where the reference rounds."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_E)
    mask = columns < num_columns
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        place = residual_ptr + row * residual_stride + columns
        total = tl.load(place, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)
        x = cast(total, kind)
        tl.store(place, x, mask=mask)
    wide = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / num_columns + eps)
    normed = cast(wide * factor, kind).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_columns + columns, cast(normed * weight, kind), mask=mask)


def num_warps(num_columns: int) -> int:
    """Warps of a row's program: 16 numbers a thread at most."""
    return max(1, min(16, next_power_of_2(num_columns) // 512))


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """See kvlab.kernels.norm.rms_norm; computes in float32. Rows of `x_TE` may be strided, columns not.

    Raises:
        ValueError: rows longer than MAX_HIDDEN, float64, or tensors where Triton can't run.
    """
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    launch(x_TE, None, weight_E, out_TE, eps).run()
    return out_TE


def add_rms_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See kvlab.kernels.norm.add_rms_norm; `residual_TE` is overwritten by the sum. Raises ValueError as `rms_norm` does."""
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    launch(x_TE, residual_TE, weight_E, out_TE, eps).run()
    return out_TE, residual_TE


def launch(x_TE: torch.Tensor, residual_TE: torch.Tensor | None, weight_E: torch.Tensor, out_TE: torch.Tensor, eps: float) -> Launch:
    """The launch of either function."""
    require_device(x_TE)
    num_rows, num_columns = x_TE.shape
    if num_columns > MAX_HIDDEN or x_TE.dtype.itemsize > 4 or x_TE.stride(1) != 1:
        raise ValueError(f"rms_norm takes rows of up to {MAX_HIDDEN} consecutive numbers of at most 4 bytes, not {list(x_TE.shape)} of "
                         f"{x_TE.dtype}")  # fmt: skip
    residual = x_TE if residual_TE is None else residual_TE
    args = {"x_ptr": x_TE, "residual_ptr": residual, "weight_ptr": weight_E, "out_ptr": out_TE, "x_stride": x_TE.stride(0),
            "residual_stride": residual.stride(0), "num_columns": num_columns, "eps": eps}  # fmt: skip
    constexprs = {"HAS_RESIDUAL": residual_TE is not None, "BLOCK_E": next_power_of_2(num_columns)}
    return Launch(rms_norm_kernel, (num_rows,), args, constexprs, LaunchConfig(16, num_warps(num_columns), 1))


def work(num_tokens: int, hidden_size: int, itemsize: int, with_residual: bool) -> Work:
    """x, the weight and the result once; the residual is read and written."""
    return Work(((4 if with_residual else 2) * num_tokens + 1) * hidden_size * itemsize, (4 + with_residual) * num_tokens * hidden_size)
