"""The device that is checked: what it is, whether it can serve, and the rates everything else is measured against."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvlab.gpucheck.findings import Finding
from kvlab.gpucheck.timing import timed
from kvlab.types import UserError

OLDEST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the card itself reaches. bytes_per_s: a device-to-device copy, bytes read plus written. flops_per_s: a bf16 product."""

    bytes_per_s: float
    flops_per_s: float


def find_device(dry: bool) -> torch.device:
    """CUDA, or with `dry` the CPU.

    UserError: no CUDA device, or one that is too old.
    """
    if dry:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device (a CPU build of torch, or no driver). Run this on a machine with an NVIDIA GPU, or try "
                        "the script itself with --dry.")  # fmt: skip
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        raise UserError(f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; the kernels need "
                        f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} (Ampere) or newer.")  # fmt: skip
    return torch.device("cuda")


def environment(device: torch.device, dry: bool) -> dict[str, Any]:
    """Card, driver and versions, as written beside the results."""
    versions = {name: _version(name) for name in ("torch", "triton", "transformers", "pandas", "pyarrow", "safetensors", "kvlab")}
    found: dict[str, Any] = {"dry": dry, "python": platform.python_version(), "versions": versions, "argv": sys.argv[1:]}
    if device.type != "cuda":
        return {**found, "card": "CPU, Triton's interpreter"}
    properties = torch.cuda.get_device_properties(device)
    return {
        **found,
        "card": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The driver's version as the CUDA library says it; None where torch has no way to ask."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if ask is None else str(ask())


def measure_rates(device: torch.device, copy_bytes: int, matrix_size: int, num_repeats: int) -> tuple[Rates, list[Finding]]:
    """Copy bandwidth and matrix rate, on random data (zeros run faster)."""
    buffers = [torch.randn(copy_bytes // 4, device=device) for _ in range(3)]
    pairs = [(buffers[i], buffers[(i + 1) % 3]) for i in range(3)]
    copy = timed([partial(b.copy_, a) for a, b in pairs], device, num_repeats)
    del buffers, pairs
    matrices = [torch.randn(matrix_size, matrix_size, device=device).to(torch.bfloat16) for _ in range(2)]
    product = timed([lambda: matrices[0] @ matrices[1], lambda: matrices[1] @ matrices[0]], device, num_repeats)
    rates = Rates(2 * copy_bytes / copy.seconds, 2 * matrix_size**3 / product.seconds)
    return rates, [
        Finding("card", "copy bandwidth", rates.bytes_per_s / 1e9, "GB/s", {"bytes": copy_bytes}, note="bytes read plus written"),
        Finding("card", "bf16 matrix rate", rates.flops_per_s / 1e12, "TFLOP/s", {"size": matrix_size}),
    ]
