"""Which tokens of a sequence stay in the cache."""

from kvlab.policies.compression.full import Full
from kvlab.policies.compression.streaming import Streaming
from kvlab.policies.compression.window import Window

__all__ = ["Full", "Streaming", "Window"]
