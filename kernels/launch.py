"""A kernel's launch as a value: what to run, on which grid, with which arguments and options. The same value is run on a device or,
with tensors on the `meta` device, compiled ahead of time for a GPU that isn't there: what is checked is what is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a kernel's work is cut, chosen in Python from shapes and GPU (`default_config` of each kernel); never tuned while measuring.

    Attributes:
        tile: slots of K and V that a program reads at a time; a power of two, at least 16.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline of loads.
        rows: query rows (tokens times query heads of one KV head) of a program; a power of two, at least 16: what a matrix
            instruction takes.
    """

    tile: int
    num_warps: int
    num_stages: int
    rows: int = 16

    def __post_init__(self) -> None:
        """Raise ValueError for what no kernel can be compiled with."""
        for name in ("tile", "rows"):
            if (value := getattr(self, name)) < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two and at least 16, not {value}")
        if self.num_warps not in (1, 2, 4, 8, 16) or self.num_stages < 1:
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16 and num_stages positive, not {self.num_warps} and {self.num_stages}")


class Variant(NamedTuple):
    """One compilation of a kernel, in the arguments of triton.compiler.ASTSource and triton.compile."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    @property
    def label(self) -> str:
        """The kernel's name, the types it reads and the compile-time values that are switched on."""
        pointers = sorted({kind[1:] for kind in self.signature.values() if kind.startswith("*")})
        names = set(self.kernel.arg_names) & {name for name in self.constexprs if name.isupper()}
        values = " ".join(f"{name}={self.constexprs[name]}" for name in sorted(names) if self.constexprs[name])
        options = " ".join(f"{name.removeprefix('num_')}={value}" for name, value in self.options.items())
        return f"{self.kernel.__name__}[{','.join(pointers)}] {values} {options}"


_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch. `args` are given by name; those in `constexprs` are compile-time values (and named in capitals in the kernel)."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constexprs: dict[str, Any]
    config: LaunchConfig = field(default_factory=lambda: LaunchConfig(16, 4, 1))

    def run(self) -> None:
        """Launch it on the tensors' device, on the current stream."""
        if all(self.grid):
            self.kernel[self.grid](
                **self.args, **self.constexprs, num_warps=self.config.num_warps, num_stages=self.config.num_stages
            )  # fmt: skip

    def variant(self) -> Variant:
        """What Triton compiles for this launch: types from the arguments, None and 1 as constants, multiples of 16 as such (but for
        arguments that a kernel takes as they come: `kvlab.kernels.triton_common.jit_for_any`)."""
        signature: dict[str, str] = {}
        constexprs = dict(self.constexprs)
        attrs: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, name in enumerate(self.kernel.arg_names):
            value = constexprs.get(name) if name in constexprs else self.args[name]
            as_it_comes = self.kernel.params[index].do_not_specialize
            if name in constexprs or value is None or (isinstance(value, int) and value == 1 and not as_it_comes):
                signature[name], constexprs[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = _POINTERS[value.dtype]
                if value.data_ptr() % 16 == 0 and not as_it_comes:
                    attrs[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not as_it_comes:
                    attrs[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32"
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        return Variant(self.kernel, signature, constexprs, attrs, options)
