"""What all Triton kernels share: the switch between compiling and Triton's interpreter, and the conversions that differ there.

The interpreter (TRITON_INTERPRET=1, set before triton is first imported) runs kernels on a CPU. Up to Triton 3.9 it is wrong on
bfloat16: products of bf16 tiles are garbage, and float32 -> bf16 cuts bits off instead of rounding. `dot` and `cast` go around both under
the compile-time switch INTERPRET; compiled code is the same as without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import triton
import triton.language as tl

from kvlab.kernels.interpreter import quicken

if TYPE_CHECKING:
    Arg: TypeAlias = Any
else:
    Arg = tl.tensor
"""Annotation of a kernel's run-time arguments. Triton's compiler looks annotations up and knows only names of its own: `Any` fails."""

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True in a process that interprets kernels. A process either interprets or compiles: it can't do both."""


def _check_one_mode() -> None:
    """Triton's own helpers (tl.zeros, tl.max ...) were fixed to one mode when it was imported; ours must be of the same."""
    if (type(tl.zeros).__name__ == "InterpretedFunction") != INTERPRET.value:
        raise RuntimeError(
            "TRITON_INTERPRET was changed after triton had been imported: set it in the environment before Python starts, "
            "or before the first import of triton"
        )


_check_one_mode()
if INTERPRET.value:
    quicken()


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, with a type that a strict type checker accepts."""
    return triton.jit(function)


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` that compiles once for all values of these arguments.

    Triton compiles a kernel anew for a number that is 1 or a multiple of 16, and for a pointer that is one. What differs from step to step
    (numbers of sequences and splits, the width of tables, where a batch's decodes end) would so compile for seconds amid a run.
    """
    return lambda function: triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


def require_device(tensor: torch.Tensor) -> None:
    """Raise ValueError where kernels can't run on the tensor's device: compiled ones need a GPU."""
    if tensor.device.type == "cpu" and not INTERPRET.value:
        raise ValueError(
            "Triton kernels run on a GPU; for tensors on the CPU use the torch backend, or set TRITON_INTERPRET=1 before Python starts"
        )


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for a CPU (the interpreter runs one program at a time)."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (9, 0) for a CPU: the interpreter knows every type."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


FP8_CAPABILITY = (8, 9)
"""The first compute capability with conversions from float8_e4m3fn; below it the bits are decoded by shifts."""


def fp8_readable(cache: torch.Tensor) -> torch.Tensor:
    """A cache as kernels of its device can read it: float8_e4m3fn as its bytes (uint8) where the GPU lacks the type."""
    if cache.dtype == torch.float8_e4m3fn and capability(cache.device) < FP8_CAPABILITY:
        return cache.view(torch.uint8)
    return cache


@jit
def dot(a: Arg, b: Arg, acc: Arg) -> Arg:
    """acc + a @ b, accumulated in float32. float32 tiles go through three tf32 products ("tf32x3": nearly float32's precision;
    "ieee" spills registers from 64 x 64 on)."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc)


@jit
def cast(x: Arg, dtype: tl.constexpr) -> Arg:
    """x in another float type, rounded to the nearest, ties to even."""
    if INTERPRET and dtype == tl.bfloat16:
        wide = x.to(tl.float32)
        bits = wide.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(wide == wide, rounded.to(tl.uint32).to(tl.float32, bitcast=True), wide).to(tl.bfloat16)
    else:
        return x.to(dtype)


@jit
def dequantise(raw: Arg, dtype: tl.constexpr) -> Arg:
    """A cache's stored numbers in the type that is computed in, without their scales.

    uint8 are the bits of float8_e4m3fn (for GPUs that lack the type). int8 and e4m3 are exact in float16, bfloat16 and float32, so a
    scale can be applied afterwards, to scores and weights.
    """
    if raw.dtype == tl.uint8:
        # s eeee mmm -> s 0eeee mmm0000000 is the number / 256, as float16 has 8 more in its exponent's bias; subnormals included.
        wide = raw.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits)  # NaN
        number = bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
        return cast(number.to(tl.float32), dtype)
    elif raw.dtype == tl.int8:
        return cast(raw.to(tl.float32), dtype)
    elif raw.dtype == dtype:
        return raw
    else:
        return cast(raw.to(tl.float32), dtype)


@jit
def load_kv(pointers: Arg, mask: Arg, dtype: tl.constexpr) -> Arg:
    """Stored K or V as `dtype`; zeros where `mask` (None: everywhere true) is false, whatever lies there: also NaN."""
    if mask is None:
        raw = tl.load(pointers)
    else:
        raw = tl.load(pointers, mask=mask, other=0.0)
    return dequantise(raw, dtype)
