"""How a sequence's blocks lie in physical memory."""

from kvlab.policies.layout.contiguous_max import ContiguousMax
from kvlab.policies.layout.contiguous_oracle import ContiguousOracle
from kvlab.policies.layout.contiguous_pow2 import ContiguousPow2
from kvlab.policies.layout.paged import Paged
from kvlab.policies.layout.ring import Ring

__all__ = ["ContiguousMax", "ContiguousOracle", "ContiguousPow2", "Paged", "Ring"]
