"""Numbers that the host made, on their way to a device that must not stop for them.

`torch.tensor(numbers, device="cuda")` and indexing with a Python list copy from pageable memory, and the host waits until all that was
queued before is done. From pinned memory nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def on_device(numbers: Sequence[Any] | npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers (a list, nested or not, or an array), on the current stream of a CUDA device without waiting for it.

    On a CPU it may share an array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(numbers)) if isinstance(numbers, np.ndarray) else torch.tensor(numbers, dtype=dtype)
    tensor = tensor.to(dtype)
    if device.type == "cuda":
        # Torch's allocator of pinned memory gives a buffer to somebody else only when the copies out of it are done.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
