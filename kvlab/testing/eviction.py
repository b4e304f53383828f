"""A tiny pool of its own, independent of kvlab.cache, that drives an eviction policy through legal events."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from random import Random

from kvlab.policies.base import EvictionPolicy, KeyEviction
from kvlab.testing.rules import Rules, is_int
from kvlab.testing.views import View, set_view
from kvlab.types import IllegalDecision, Now


class Block(View):
    """A BlockView."""

    block_id: int
    content: bytes
    parent: bytes | None
    depth: int
    num_tokens: int
    ref_count: int
    num_hits: int
    inserted_tick: int
    counted_tick: int
    used_tick: int
    inserted_s: float
    used_s: float


class ModelPool:
    """Blocks that requests hold, share and let go; asks the policy whom to evict and checks the answer."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int, rules: Rules) -> None:
        self.policy = policy
        self.rules = rules
        self.free = list(range(num_blocks))
        self.cached: dict[bytes, Block] = {}
        self.tick = 0
        self.now = Now(0, 0.0)
        self.decisions: list[object] = []
        policy.bind(num_blocks)

    def candidates(self) -> list[int]:
        """Ids of cached blocks that nobody holds and that the policy has not pinned, ascending."""
        unheld = self.unheld()
        pinned = [block_id for block_id in unheld if self.policy.is_pinned(block_id)]
        what = f"num_pinned is {self.policy.num_pinned}; of the blocks that nobody holds {pinned} are pinned"
        self.rules.require(len(pinned) == self.policy.num_pinned, "pins", what)
        return [block_id for block_id in unheld if block_id not in pinned]

    def unheld(self) -> list[int]:
        """Ids of cached blocks that nobody holds, ascending."""
        return sorted(block.block_id for block in self.cached.values() if not block.ref_count)

    def ask(self) -> int:
        """A checked victim; nothing is evicted yet."""
        with self._ordered():
            victim = self.policy.victim(self.now)
        candidates = self.candidates()
        legal = is_int(victim) and victim in candidates
        self.rules.require(legal, "victim", f"{victim!r} is none of the candidates {candidates}")
        return victim

    def evict(self, block_id: int) -> None:
        """Drop a candidate and tell so."""
        block = next(block for block in self.cached.values() if block.block_id == block_id)
        del self.cached[block.content]
        self.free.append(block_id)
        self.free.sort()
        self.policy.evict(block, self.now)
        self.decisions.append(block_id)

    def acquire(self, contents: list[bytes]) -> list[Block] | None:
        """Hold the blocks of a prompt: hit the longest cached prefix, insert the rest. None when there is no room for it."""
        found: list[Block] = []
        for content in contents:
            if content not in self.cached:
                break
            found.append(self.cached[content])
        rest = contents[len(found) :]
        hit_ids = {block.block_id for block in found}
        if any(content in self.cached for content in rest):
            return None  # its tail is cached without its head: keep the model simple
        if len(rest) > len(self.free) + sum(block_id not in hit_ids for block_id in self.candidates()):
            return None
        for block in found:
            self.tick += 1
            set_view(block, ref_count=block.ref_count + 1, num_hits=block.num_hits + 1)
            set_view(block, counted_tick=self.tick, used_tick=self.tick, used_s=self.now.now_s)
            self.policy.hit(block, self.now)
        if len(rest) == 1 and self.tick % 2:  # a policy has to do with and without being told
            self.policy.miss(rest[0], self.now)
        while len(self.free) < len(rest):
            self.evict(self.ask())
        for depth, content in enumerate(rest, len(found)):
            self.tick += 1
            block = Block(block_id=self.free.pop(0), content=content, parent=contents[depth - 1] if depth else None, depth=depth,
                          num_tokens=16, ref_count=1, num_hits=0, inserted_tick=self.tick, counted_tick=self.tick,
                          used_tick=self.tick, inserted_s=self.now.now_s, used_s=self.now.now_s)  # fmt: skip
            self.cached[content] = block
            self.policy.insert(block, self.now)
            found.append(block)
        return found

    def release(self, blocks: list[Block], preempted: bool) -> None:
        """A request lets go, tail first."""
        for block in reversed(blocks):
            set_view(block, ref_count=block.ref_count - 1)
            if not block.ref_count:
                self.tick += 1
                set_view(block, used_tick=self.tick, used_s=self.now.now_s)
                before = set(self.candidates()) - {block.block_id} if self.policy.num_pinned else set()
                with self._ordered():
                    self.policy.release(block, self.now, preempted)
                if isinstance(self.policy, KeyEviction):
                    key = self.policy.key(block)
                    numbers = isinstance(key, tuple) and all(isinstance(part, (int, float)) and part == part for part in key)
                    self.rules.require(numbers, "total order", f"key of block {block.block_id} is {key!r}")
                lost = before - set(self.candidates())
                self.rules.require(not lost, "pins", f"the release of block {block.block_id} pinned {sorted(lost)}")

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """What KeyEviction says of a key is a rule broken."""
        try:
            yield
        except IllegalDecision as error:
            raise self.rules.broken("total order", str(error)) from error

    def give_up_pins(self) -> None:
        """Ask for the pins: none is left, and the answer says whether there were any."""
        unheld, num_pinned = self.unheld(), self.policy.num_pinned
        had_some = self.policy.give_up_pins(self.now)
        self.rules.require(had_some is (num_pinned > 0), "pins", f"of {num_pinned} pins give_up_pins() says {had_some!r}")
        self.rules.require(self.candidates() == unheld, "pins", f"candidates are {self.candidates()}, nobody holds {unheld}")

    def drain(self) -> None:
        """Evict every candidate, one after the other, each exactly once; then those that were pinned."""
        self._evict_all()
        self.give_up_pins()
        self._evict_all()

    def _evict_all(self) -> None:
        expected = self.candidates()
        gone = []
        while self.candidates():
            gone.append(self.ask())
            self.evict(gone[-1])
        self.rules.require(sorted(gone) == expected, "remembers", f"candidates {expected}, evicted {gone}")


def drive_eviction(policy: EvictionPolicy, rng: Random, rules: Rules, to_the_end: bool = True) -> list[object]:
    """Requests with shared prefixes that overlap, are preempted, and a reset of the cache in between. Without `to_the_end` it breaks off,
    with blocks held and cached."""
    if policy.sees_future:  # a future that comes otherwise: a policy may be misled, never err
        foreseen = Random(rng.randint(0, 99))
        policy.foresee([_contents(foreseen) for _ in range(60)])
    pool = ModelPool(policy, rng.randint(1, 9), rules)
    held: list[list[Block]] = []
    for step in range(80):
        pool.now = Now(step, step * 0.25)
        if policy.queue_depth:
            policy.waiting([_contents(rng) for _ in range(rng.randint(0, policy.queue_depth))], pool.now)
        if rng.random() < 0.03:
            pool.give_up_pins()
        action = rng.random()
        if action < 0.6:
            blocks = pool.acquire(_contents(rng))
            if blocks:
                held.append(blocks)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))), preempted=rng.random() < 0.3)
        if rng.random() < 0.1 and pool.candidates():
            pool.ask()  # and nothing is evicted: it stays a candidate
        if rng.random() < 0.03 and not held:  # the cache is reset: blocks go that the policy did not choose
            for block_id in pool.unheld():
                pool.evict(block_id)
    if not to_the_end:
        return pool.decisions
    for blocks in held:
        pool.release(blocks, preempted=False)
    pool.drain()
    return pool.decisions


def _contents(rng: Random) -> list[bytes]:
    """The blocks of a prompt: those of its family up to a point, then its own."""
    family, length = rng.randint(0, 3), rng.randint(1, 4)
    split = rng.randint(0, length)
    tail = rng.randint(0, 2)
    return [b"%d/%d" % (family, d) if d < split else b"%d/%d/%d/%d" % (family, split, tail, d) for d in range(length)]


def check_metadata_is_bounded(policy: EvictionPolicy, rules: Rules) -> None:
    """4 blocks hit and let go 500 times each, without an eviction: what the policy keeps must not grow with that."""
    if policy.sees_future:
        policy.foresee([[b"0"]])
    pool = ModelPool(policy, 4, rules)
    prompts = [[b"%d" % number] for number in range(4)]
    for _ in range(500):
        for prompt in prompts:
            blocks = pool.acquire(prompt)
            assert blocks is not None
            pool.release(blocks, preempted=False)
    size = _num_elements(policy)
    rules.require(size <= 400, "bounded metadata", f"{size} entries are kept for 4 blocks after 2,000 hits")


def _num_elements(value: object, depth: int = 4) -> int:
    """Elements in nested containers."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        return _num_elements(vars(value), depth - 1) if hasattr(value, "__dict__") and depth else 0
    children = value.values() if isinstance(value, Mapping) else value
    return len(value) + (sum(_num_elements(child, depth - 1) for child in children) if depth else 0)
