"""What `policy_lab` starts from: a short policy for each seam that works, and published ones to race it against."""

from __future__ import annotations

TEMPLATES: dict[str, str] = {
    "eviction": '''
from kvlab.policies.base import KeyEviction

class Mine(KeyEviction):
    """Cached blocks that nobody hit yet go first, the deepest of them before the others."""

    def key(self, block):    # the smallest goes first; a tick at its end: no two are equal
        return (min(block.num_hits, 2), -block.depth, block.used_tick)
''',
    "eviction, with events": '''
from collections import OrderedDict
from kvlab.policies.base import EvictionPolicy

class Mine(EvictionPolicy):
    """Least recently used, by hand: a queue of the blocks that may go, kept up to date by events."""

    def __init__(self):
        self.reset()

    def reset(self):                 # as new
        self.queue = OrderedDict()

    def release(self, block, now, preempted):
        self.queue[block.block_id] = None        # a candidate from now on, the youngest

    def hit(self, block, now):
        self.queue.pop(block.block_id, None)     # held again

    def evict(self, block, now):
        self.queue.pop(block.block_id, None)     # gone

    def victim(self, now):           # must be a candidate, and must not be forgotten here
        return next(iter(self.queue))
''',
    "scheduling": '''
from kvlab.policies.base import SchedulingPolicy

class Mine(SchedulingPolicy):
    """Short prompts first, but a second of waiting is worth 200 tokens: nobody waits for ever."""

    def key(self, group, now):    # the smallest goes first; it must not change while a request waits
        return (group.num_prompt_tokens + 200 * group.arrival_s, group.arrival_s)
''',
    "batching": '''
from kvlab.policies.base import RUNNING, SWAPPED, WAITING, BatchingPolicy

class Mine(BatchingPolicy):
    """Mixed steps, but prompts in pieces of at most 256 tokens: those who decode wait less."""

    def phases(self, queues, now):
        return ((RUNNING, SWAPPED, WAITING),)

    def chunk(self, num_uncomputed, budget, max_num_batched_tokens):
        return min(num_uncomputed, budget, 256)
''',
    "admission": '''
from kvlab.policies.base import AdmissionPolicy

class Mine(AdmissionPolicy):
    """A request enters if its first piece fits and all that run could still grow by two blocks."""

    def admits(self, entry, pool, now):          # "" lets it in, any other word is recorded as the reason
        need = entry.blocks_for(entry.first_chunk_tokens)
        return "" if need + 2 * len(entry.running) <= entry.num_available_blocks else "growth"
''',
    "preemption": '''
from kvlab.policies.base import PreemptionPolicy

class Mine(PreemptionPolicy):
    """Whoever loses least gives way: fewest computed tokens for each block it gives back."""

    def victim(self, candidates, now):
        return min(candidates, key=lambda group: group.num_computed_tokens / max(1, group.num_unshared_blocks))
''',
    "preemption/mode": '''
from kvlab.policies.base import PreemptionMode

class Mine(PreemptionMode):
    """Long victims are swapped out, short ones computed again."""

    def mode(self, victim, now):
        return "swap" if victim.num_computed_tokens > 256 else "recompute"
''',
    "block_sizing": '''
from kvlab.policies.base import BlockSizingPolicy

class Mine(BlockSizingPolicy):
    """An eighth of the usual prompt, as a power of two between 4 and 64."""

    def foresee(self, shapes):       # the first requests of the workload, where they can be known
        self.lengths = sorted(shape.num_prompt_tokens for shape in shapes)

    def __init__(self):
        self.reset()

    def reset(self):
        self.lengths = []

    def block_size(self, prompt_lens, max_model_len):
        lengths = self.lengths or sorted(prompt_lens)
        usual = lengths[len(lengths) // 2] if lengths else 128
        return min(64, max(4, 1 << (max(1, usual // 8)).bit_length() - 1))
''',
}  # fmt: skip
"""Name in the menu -> source; the seam is the name up to the comma."""

RIVALS: dict[str, tuple[str, ...]] = {
    "eviction": ("lru", "fifo", "lfu", "s3fifo", "sieve", "arc"),
    "scheduling": ("fcfs", "sjf", "srpt_oracle"),
    "batching": ("chunked", "sarathi", "prefill_first"),
    "admission": ("watermark", "full_sequence", "past_future"),
    "preemption": ("lifo", "least_computed", "cost_aware"),
    "preemption/mode": ("recompute", "swap", "cheaper_of_both"),
    "block_sizing": ("fixed", "auto"),
}
"""Chosen at first; the menu has all of the seam."""

SAID_BY = {
    "victim": ("victim", "key"), "remembers": ("victim",), "total order": ("key",), "static key": ("key",),
    "held key": ("key_holds_until", "key"), "elementwise key": ("key",), "order": ("order",), "displacement": ("displaces",),
    "phases": ("phases",), "chunk range": ("chunk",), "progress": ("chunk",),
    "token budget": ("token_budget",), "admission answer": ("admits",), "headroom": ("headroom_blocks",), "mode": ("mode",),
    "block size": ("block_size",), "constructor": ("__init__",), "reset": ("reset",), "running order": ("running_order",),
}  # fmt: skip
"""Rule of the contract -> methods in which it is broken: where to look when no line of the cell raised anything."""
