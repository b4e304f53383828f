"""What counts as the same prefix."""

from kvlab.policies.prefix_cache.hash import Hash
from kvlab.policies.prefix_cache.none import NoCache
from kvlab.policies.prefix_cache.radix import Radix

__all__ = ["Hash", "NoCache", "Radix"]
