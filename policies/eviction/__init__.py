"""Which cached block goes when the pool has no free one."""

from kvlab.policies.eviction.fifo import Fifo
from kvlab.policies.eviction.lfu import Lfu
from kvlab.policies.eviction.lru import Lru
from kvlab.policies.eviction.random import Random

__all__ = ["Fifo", "Lfu", "Lru", "Random"]
