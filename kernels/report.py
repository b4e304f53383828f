"""Every kernel compiled ahead of time, no GPU needed: `python -m kvlab.kernels.report`.

For sm_80 (A100) and sm_90 (H100, H200), at the shapes that are launched, and with all that can be 1 at 1 (Triton compiles other code then):
registers and stack of the machine code, shared memory against
the card's limit, and what the PTX must have: 128-bit loads (or cp.async of 16 bytes) where K and V or whole blocks are read, matrix
instructions in attention. Prints a table; exit status 1 when a variant falls short or doesn't compile, 2 for a wrong call.

Registers are shown, not judged: the machine code's STACK says whether they were enough.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvlab.kernels.attention_variants import ONES_SHAPES, QUICK_SHAPES, SHAPES, shipped_variants
from kvlab.kernels.launch import Variant
from kvlab.kernels.small_variants import small_variants
from kvlab.kernels.triton_common import INTERPRET

TARGETS = {"sm_80": 80, "sm_90": 90}
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one program may have (CUDA programming guide, table of compute capabilities)."""
STACK_LIMIT = 16
"""Bytes; healthy kernels sometimes park 8. More are spills."""

WIDE_LOAD = re.compile(r"cp\.async\.c[ag]\.shared\.global\b[^;]*,\s*(?:16|0x10)\b|ld\.global\S*\.(?:v4\.[bfu]32|v2\.[bfu]64)")
MATRIX = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async)")
WIDE_KERNELS = ("decode_kernel", "prefill_kernel", "move_blocks_kernel")
MATRIX_KERNELS = ("decode_kernel", "prefill_kernel")


class Row(NamedTuple):
    """One variant on one target; `faults` is empty when all is well."""

    target: str
    label: str
    registers: int
    stack: int
    shared: int
    has_wide_loads: bool
    matrix: str
    faults: tuple[str, ...]


def variants_of(capability: tuple[int, int], every: bool) -> list[Variant]:
    """What is checked for a compute capability: a choice that has each kernel, or `every` shipped variant."""
    return [*shipped_variants(capability, (*SHAPES, *ONES_SHAPES) if every else QUICK_SHAPES), *small_variants(capability, every)]


def check(variant: Variant, target: str) -> Row:
    """Compile a variant and look at what came out."""
    capability = TARGETS[target]
    try:
        source = ASTSource(fn=variant.kernel, signature=variant.signature, constexprs=variant.constexprs, attrs=variant.attrs)
        compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options)
    except Exception as error:  # Triton's compiler raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return Row(target, variant.label, 0, 0, 0, False, "", (f"does not compile: {reason}",))
    registers, stack = resources(compiled.asm["cubin"])
    ptx: str = compiled.asm["ptx"]
    shared = int(compiled.metadata.shared)
    matrix = sorted({found.split(".")[0] for found in MATRIX.findall(ptx)})
    is_wide = WIDE_LOAD.search(ptx) is not None
    name = variant.kernel.__name__
    faults = []
    if stack > STACK_LIMIT:
        faults.append(f"{stack} bytes of stack, more than {STACK_LIMIT}: registers spill")
    if shared > SHARED_LIMIT[capability]:
        faults.append(f"{shared} bytes of shared memory, more than the card's {SHARED_LIMIT[capability]}")
    if name in WIDE_KERNELS and not is_wide and variant.constexprs.get("block_words") != 1:
        faults.append("no 128-bit loads")
    if name in MATRIX_KERNELS and not matrix:
        faults.append("no matrix instructions")
    return Row(target, variant.label, registers, stack, shared, is_wide, " ".join(matrix), tuple(faults))


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, stack bytes) of the kernel in a cubin, from the cuobjdump that comes with Triton.

    Raises:
        RuntimeError: cuobjdump is missing or prints something else.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([str(tool), "--dump-resource-usage", file.name], capture_output=True, encoding="utf-8", check=False)
    found = re.search(r"REG:(\d+) STACK:(\d+)", out.stdout)
    if found is None:
        raise RuntimeError(f"{tool} said nothing of registers: {out.stdout or out.stderr}")
    return int(found[1]), int(found[2])


def table(rows: Sequence[Row]) -> str:
    """A line a variant, faults below it."""
    lines = [f"{'target':7}{'regs':>5}{'stack':>6}{'shared':>8}  {'128-bit':8}{'matrix':7} kernel"]
    for row in rows:
        wide = "yes" if row.has_wide_loads else "-"
        lines.append(f"{row.target:7}{row.registers:5}{row.stack:6}{row.shared:8}  {wide:8}{row.matrix or '-':7} {row.label}")
        lines += [f"       FAULT: {fault}" for fault in row.faults]
    num_short = sum(bool(row.faults) for row in rows)
    lines.append(f"{len(rows)} compilations, {num_short} fall short")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.kernels.report", description="Compile all kernels ahead of time; check them.")
    parser.add_argument("--all", action="store_true", help="every shipped variant, not only a choice with each kernel")
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="sm_80 or sm_90; both unless given")
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this text")
    given = parser.parse_args(arguments)
    if INTERPRET.value:
        print("TRITON_INTERPRET is set: this process can only interpret kernels. Unset it.", file=sys.stderr)
        return 2
    rows = []
    for target in given.target or list(TARGETS):
        capability = divmod(TARGETS[target], 10)
        for variant in variants_of(capability, given.all):
            if given.kernel in variant.kernel.__name__:
                rows.append(check(variant, target))
    if not rows:
        print(f"No kernel's name holds {given.kernel!r}.", file=sys.stderr)
        return 2
    print(table(rows))
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    sys.exit(main())
