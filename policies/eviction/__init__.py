"""Which cached block goes when the pool has no free one."""

from kvlab.policies.eviction.arc import Arc
from kvlab.policies.eviction.belady import Belady
from kvlab.policies.eviction.clock import Clock
from kvlab.policies.eviction.cost_aware import CostAware
from kvlab.policies.eviction.fifo import Fifo
from kvlab.policies.eviction.filo import Filo
from kvlab.policies.eviction.gdsf import Gdsf
from kvlab.policies.eviction.leaf_first import LeafFirst
from kvlab.policies.eviction.length_aware import LengthAware
from kvlab.policies.eviction.lfu import Lfu
from kvlab.policies.eviction.lirs import Lirs
from kvlab.policies.eviction.lru import Lru
from kvlab.policies.eviction.marconi import Marconi
from kvlab.policies.eviction.mru import Mru
from kvlab.policies.eviction.never_hit_first import NeverHitFirst
from kvlab.policies.eviction.pinned import Pinned
from kvlab.policies.eviction.queue_informed import QueueInformed
from kvlab.policies.eviction.random import Random
from kvlab.policies.eviction.s3fifo import S3Fifo
from kvlab.policies.eviction.sieve import Sieve
from kvlab.policies.eviction.slru import Slru
from kvlab.policies.eviction.tlru import Tlru
from kvlab.policies.eviction.ttl import Ttl
from kvlab.policies.eviction.two_q import TwoQ
from kvlab.policies.eviction.w_tinylfu import WTinyLfu

__all__ = [
    "Arc", "Belady", "Clock", "CostAware", "Fifo", "Filo", "Gdsf", "LeafFirst", "LengthAware", "Lfu", "Lirs", "Lru", "Marconi", "Mru",
    "NeverHitFirst", "Pinned", "QueueInformed", "Random", "S3Fifo", "Sieve", "Slru", "Tlru", "Ttl", "TwoQ", "WTinyLfu",
]  # fmt: skip
