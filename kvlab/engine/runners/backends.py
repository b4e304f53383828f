"""Which kernels a run uses: `backend=auto|torch|triton`."""

from __future__ import annotations

import importlib.util

import torch

from kvlab.kernels.interface import Backend, UnsupportedError
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.types import UserError, unknown_name

BACKENDS = ("auto", "torch", "triton")


def use_device(device: torch.device) -> None:
    """Make a CUDA device (cuda:1) the current one: kernels, events and graphs go to that, wherever their tensors lie."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def make_backend(name: str, device: torch.device) -> Backend:
    """The backend of that name for a device; "auto" is triton on CUDA and torch elsewhere. Triton is imported only when it is used.

    Raises:
        UserError: an unknown name, Triton isn't installed, or it can't run on this device.
    """
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    use_device(device)
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TorchBackend()
    if importlib.util.find_spec("triton") is None:
        raise UserError(f"backend={name} on {device.type} needs the package triton, which isn't installed: pip install triton, or use "
                        "backend=torch.")  # fmt: skip
    from kvlab.kernels.triton_backend import TritonBackend

    try:
        return TritonBackend(device)
    except UnsupportedError as error:
        raise UserError(str(error)) from error
