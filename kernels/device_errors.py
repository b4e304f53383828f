"""What the errors of a device mean, whoever raises them: torch, cuBLAS, the driver, Triton's launcher."""

from __future__ import annotations

import torch

_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory ended, here or in an error that this one followed: libraries have errors of their own for it, and a
    recording that breaks off complains about that."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError) or (isinstance(seen, RuntimeError) and any(sign in str(seen) for sign in _SIGNS)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
