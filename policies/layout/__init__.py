"""How a sequence's blocks lie in physical memory."""

from kvlab.policies.layout.contiguous_max import ContiguousMax
from kvlab.policies.layout.paged import Paged

__all__ = ["ContiguousMax", "Paged"]
