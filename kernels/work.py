"""What a kernel must do at the least: bytes to and from memory, and floating-point operations. Predictions of time come from it."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Compulsory traffic and arithmetic of one call: each byte counted once, nothing for what caches or masks save or waste."""

    num_bytes: int
    num_flops: int

    def __add__(self, other: tuple[object, ...]) -> Work:
        """Both, one after the other."""
        if not isinstance(other, Work):
            return NotImplemented
        return Work(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def least_seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The roofline's time: whichever of memory and arithmetic takes longer."""
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)
