"""What counts as the same prefix."""

from kvlab.policies.prefix_cache.hash import Hash
from kvlab.policies.prefix_cache.none import NoCache

__all__ = ["Hash", "NoCache"]
