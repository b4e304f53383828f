"""The contracts of all seams. A policy is one class in one file and one yaml of the same name under conf/.

Rules for every policy:
- The constructor only stores and checks parameters; `reset()` (if any state) makes it as new. Deterministic: randomness only from
  a seed parameter.
- It sees read-only views, with the step and the engine's time in `Now`; it never reads a clock nor changes an engine object. (Views are
  the engine's own objects: the queues can't be changed through them, a request's facts are compared when it ends, and `check_policy`
  notices every write.)
- It owns its metadata and nothing else. The engine checks each decision: an `IllegalDecision` names the policy that erred.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeGuard

from kvlab.types import BlockView, GroupView, IllegalDecision, MissingOracle, Now, PoolView, QueuesView, RequestShape, UserError


def require(ok: bool, policy: object, name: str, value: object, allowed: str) -> None:
    """Check a constructor's parameter; a UserError names the policy, the parameter and what is allowed."""
    if not ok:
        raise UserError(f"{type(policy).__name__}.{name} = {value!r} is not allowed: {allowed}.")


def is_number(value: object) -> TypeGuard[float]:
    """A finite number that is no truth value and small enough to reckon with (a constructor's parameter)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e18 <= value <= 1e18


def is_whole(value: object) -> TypeGuard[int]:
    """An integer that is no truth value (a constructor's parameter)."""
    return isinstance(value, int) and not isinstance(value, bool)


def true_output_len(policy: object, group: GroupView) -> int:
    """`oracle_output_len`, for policies with `reads_oracle`. MissingOracle where the workload does not know it."""
    length = group.oracle_output_len
    if length is None:
        raise MissingOracle(f"{type(policy).__name__} needs the true output length, and request {group.request_id!r} has none "
                            "(oracle_output_len). Take a workload that knows it (a trace, synthetic lengths, prompts with "
                            "ignore_eos and no stop), or a policy without oracle or predictor.")  # fmt: skip
    return length


def is_decoding(group: GroupView) -> bool:
    """A running group that has nothing to compute but its latest tokens. (It has produced a token since it entered.)"""
    return group.num_output_tokens > 0 and group.num_uncomputed_tokens <= group.num_sequences


class EngineEvents:
    """What scheduling, batching, admission and preemption policies may hear of the engine. Implement those you need; others cost nothing.

    All are deterministic facts of the run, told in the order in which they happen.
    """

    reads_oracle: ClassVar[bool] = False
    """True: it may read `oracle_output_len` (an oracle, or a predictor that is made of one), by `true_output_len`."""

    def arrived(self, group: GroupView, queues: QueuesView, now: Now) -> None:
        """A request was submitted; `queues` do not hold it yet."""

    def entered(self, group: GroupView, kind: str, now: Now) -> None:
        """It enters running in the step being made. `kind`: "new", "resumed" or "swapped_in"."""

    def computed(self, group: GroupView, num_computed_tokens: int, num_output_tokens: int, now: Now) -> None:
        """After a commit, once for each group of the step: tokens computed (again, where it had been preempted) and output tokens
        accepted in this step, over all its sequences. Told before `ended`."""

    def preempted(self, group: GroupView, mode: str, now: Now) -> None:
        """It gave way. `mode`: "recompute" or "swap"."""

    def ended(self, group: GroupView, now: Now) -> None:
        """It finished, was aborted or outgrew the pool."""


# ---------------------------------------------------------------- scheduling


class PrefixesView(Protocol):
    """The prefix cache as a scheduling policy sees it. Looking changes nothing."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
    def keys(self, group: GroupView) -> Sequence[bytes]:
        """Content keys of the group's full blocks (prompt and output so far) up to its last token but one; empty without a prefix cache."""
    def num_cached_tokens(self, group: GroupView) -> int:
        """Tokens of its longest cached prefix: what it would not have to compute if it entered now."""


class SchedulingPolicy(EngineEvents, ABC):
    """Who goes first: the order of the waiting queue."""

    is_static: ClassVar[bool] = True
    """True: a group's key never changes while it waits, so it is taken once; False: taken anew each step, for all that wait. Where
    thousands do, say how that can be done with less: `key_holds_until` or `key_is_elementwise`."""

    key_is_elementwise: ClassVar[bool] = False
    """True, of keys that change with time: `key` is arithmetic on numbers of its group (`+ - * /`, no `if`, no `max`), so it is asked once
    for all that wait, with a group whose every attribute is a float64 array, and answers with a tuple of arrays."""

    preempted_first: ClassVar[bool] = True
    """True: a preempted group stands before all that wait, and nobody overtakes a swapped one. False: both are sorted by key with
    the others (policies that displace running groups want this)."""

    @abstractmethod
    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """Sort key, smallest first. Ties go to the earlier submission."""

    def key_holds_until(self, group: GroupView, now: Now) -> float:
        """The first step in which the key of a group that waits may be another than `now` (`math.inf`: never), whatever happens to others.
        Where a policy implements it only groups whose step has come are asked for their key again."""
        return math.inf if self.is_static else now.step + 1

    def order(self, waiting: Sequence[GroupView], prefixes: PrefixesView, now: Now) -> Iterable[GroupView]:
        """The queue in the order in which it is served: a permutation of `waiting`, which is in order of submission. Implement it
        where a key for each group alone is not enough; it is asked once a step, and `key` then orders nothing. (This default is not
        asked: keys order the queue.)

        A generator is asked for no more groups than the step looks at. Others enter meanwhile: it reads what may change (the cache, its
        own counts) before it gives the first."""
        return waiting

    def displaces(self, head: GroupView, running: Sequence[GroupView], now: Now) -> GroupView | None:
        """A group of `running` that gives way so that `head` (waiting or swapped), which found no room, can enter; None: it waits.

        Asked again until the head enters. Groups that entered in this step are not in `running`. Only with `preempted_first` False, and
        only for a group that stands behind the head by `key`: else it would come back in its place. Must not go in circles: whoever
        is displaced may not displace in turn the one it gave way to, unless that one has got on meanwhile."""
        return None


# ------------------------------------------------------------------ batching

RUNNING, WAITING, SWAPPED = "running", "waiting", "swapped"
NO_TOKEN_LIMIT = 2**31 - 1
"""Token budget of systems that bound a step by sequences and blocks only."""


class BatchingPolicy(EngineEvents, ABC):
    """What a step is made of."""

    has_token_limit: ClassVar[bool] = True
    """False: `token_budget` is NO_TOKEN_LIMIT whatever max_num_batched_tokens says, which a run that sets it is told."""

    @abstractmethod
    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        """Alternatives, tried in order until one schedules something; each is an order of queues (RUNNING, WAITING, SWAPPED).

        A queue that is left out is not served in this step. Entries are skipped by the engine in a step that preempted.
        """

    def token_budget(self, queues: QueuesView, max_num_batched_tokens: int) -> int:
        """Tokens this step may compute. Default: the engine's limit; NO_TOKEN_LIMIT if its system has none."""
        return max_num_batched_tokens

    def running_order(self, running: Sequence[GroupView], now: Now) -> Sequence[GroupView]:
        """The order in which running groups get their tokens: a permutation of `running` (in order of entry, the default)."""
        return running

    @abstractmethod
    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        """How many of a sequence's `num_uncomputed` tokens to compute now: in [0, min(num_uncomputed, budget)], budget >= 1.

        0 leaves it out of this step. Called for decodes too (num_uncomputed = 1).
        """


# ----------------------------------------------------------------- admission


class EntryView(Protocol):
    """A group that wants to enter running, and what it would take. Blocks it would hit in the cache are not needed anew."""

    @property
    def group(self) -> GroupView:
        """The group."""
    @property
    def kind(self) -> str:
        """"new", "resumed" or "swapped_in"."""
    @property
    def first_chunk_tokens(self) -> int:
        """Tokens (cached ones included) that its tables would cover after its first chunk."""
    @property
    def num_available_blocks(self) -> int:
        """free + evictable blocks that this group does not hit."""
    @property
    def running(self) -> Sequence[GroupView]:
        """Groups running now."""

    def blocks_for(self, num_tokens: int) -> int:
        """New blocks needed to hold `num_tokens` tokens of each of its sequences, beyond those cached or shared between them."""


class AdmissionPolicy(EngineEvents, ABC):
    """May a group enter running now? Asked for first admission, readmission and swap-in; not for growth, nor if nothing runs."""

    @abstractmethod
    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """"" lets it in; any other word keeps it out and is recorded as the reason (`admission_blocked_by`), e.g. "watermark"."""

    def headroom_blocks(self, pool: PoolView) -> int:
        """Blocks it keeps free for running sequences, for the record (`watermark_blocks`)."""
        return 0


# ---------------------------------------------------------------- preemption


class VictimView(NamedTuple):
    """What a preemption mode is told about a victim: tokens to recompute (shared ones once), blocks to move, and the swap space
    free (blocks)."""

    group: GroupView
    num_computed_tokens: int
    num_swap_blocks: int
    num_free_swap_blocks: int
    block_bytes: int


class PreemptionMode(ABC):
    """How a victim gives way."""

    @abstractmethod
    def mode(self, victim: VictimView, now: Now) -> str:
        """"recompute" or "swap". Where swap space is short the engine falls back to recompute and records both."""


class PreemptionPolicy(EngineEvents, ABC):
    """Who gives way when a running sequence can't grow.

    Args:
        mode: how (a PreemptionMode).
        protect_oldest: the earliest-admitted running group is never a candidate, so it always ends: no livelock, whoever the victims
            are. Without it victims may take turns at losing their work, and nothing bounds the steps of a run: for comparisons of
            victims only.
    """

    def __init__(self, mode: PreemptionMode, protect_oldest: bool = True) -> None:
        require(isinstance(mode, PreemptionMode), self, "mode", mode, "a preemption mode (recompute, swap, cheaper_of_both)")
        require(isinstance(protect_oldest, bool), self, "protect_oldest", protect_oldest, "true or false")
        self.mode = mode
        self.protect_oldest = protect_oldest

    @abstractmethod
    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        """One of `candidates` (never empty; in order of entry into running, latest last)."""


# ------------------------------------------------------------------ eviction


class EvictionPolicy(ABC):
    """Which cached block goes. Candidates are published blocks with ref_count 0.

    Events come in this order for a block: insert (published, still held), any number of release (ref_count fell to 0: a candidate
    from now on) and hit (reused: no candidate while it is held), at last evict (gone, by this policy or by a reset). Policies
    with queues skip blocks whose ref_count is above 0 without changing their state.

    Which blocks are candidates is known from these events, not from `ref_count`: a policy that wraps another one keeps a `release` to
    itself for as long as the inner one is not to choose the block, perhaps until its `evict`.
    """

    sees_future: bool = False
    """True: works only where the future is known (replay), and `foresee` tells it before the run."""

    queue_depth: int = 0
    """How many waiting groups `waiting` is told of; 0: it is never called. An instance may set its own."""

    def waiting(self, prefixes: Sequence[Sequence[bytes]], now: Now) -> None:  # noqa: B027 - optional event
        """Before each step: for the first `queue_depth` waiting groups, in order, the content keys of their full blocks."""

    def foresee(self, accesses: Iterable[Sequence[bytes]]) -> None:  # noqa: B027 - optional
        """The future, before `bind`, to policies with `sees_future`: content keys of each request in order of access. `now.step` of an
        event is then the number of its request."""

    def bind(self, num_blocks: int) -> None:  # noqa: B027 - optional
        """Blocks in the pool that it serves. Called once, before all events, on a policy as new."""

    def miss(self, content: bytes, now: Now) -> None:  # noqa: B027 - optional event
        """`content` was looked for and is the next to be inserted; said before `victim`, where a cache knows it so early (semantics
        access of replay). An engine makes room before it knows what a block will hold, and does not say."""

    def insert(self, block: BlockView, now: Now) -> None:  # noqa: B027 - optional event
        """`block` was published. It is held by a table."""

    def hit(self, block: BlockView, now: Now) -> None:  # noqa: B027
        """A request found `block` and holds it. Called after the allocation succeeded, head to tail."""

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:  # noqa: B027
        """The last table let go of `block` (`preempted`: because its request was preempted). Called tail first."""

    @property
    def num_pinned(self) -> int:
        """Blocks that no table holds and that it refuses to give up for now: to the pool they are in use, no candidates. May change with
        `release`, `hit`, `evict`, `waiting` and `give_up_pins` only; no release pins another block."""
        return 0

    def is_pinned(self, block_id: int) -> bool:
        """Whether it is one of the `num_pinned`."""
        return False

    def give_up_pins(self, now: Now) -> bool:
        """Nobody else could give way and a request would end for want of blocks: what is pinned becomes candidates. Whether there was
        any."""
        return False

    def withhold(self, block: BlockView, now: Now) -> None:
        """`block`, a candidate, is none until its next release, though nobody was served by it: a policy that wraps this one keeps it to
        itself, or a table took it in place of its own block with the same content (prefix_cache=radix). By default as if it were hit;
        where a hit does more than that, implement it."""
        self.hit(block, now)

    @abstractmethod
    def victim(self, now: Now) -> int:
        """Block id of the next candidate to evict; called only when there is one. Must not forget it: `evict` follows."""

    def evict(self, block: BlockView, now: Now) -> None:  # noqa: B027
        """`block` is gone from the cache."""


class KeyEviction(EvictionPolicy):
    """For policies that are a sort: implement `key`, the smallest goes. O(log n) an event.

    The key of a block may depend on the block's own record only (it is taken at release and stays valid until its next hit).
    A subclass with a constructor calls `super().__init__()`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._heap: list[tuple[float, ...]] = []  # keys with the block id behind; some are stale
        self._live: dict[int, tuple[float, ...]] = {}  # candidate's block id -> its entry in the heap

    @abstractmethod
    def key(self, block: BlockView) -> tuple[float, ...]:
        """Sort key of a candidate; the smallest is evicted first. A tuple of numbers, unique to the block (end it with a tick)."""

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """Make it a candidate."""
        self._rank(block.block_id, self.key(block))

    def _rank(self, block_id: int, key: tuple[float, ...]) -> None:
        """A candidate from now on, or one whose key has changed. IllegalDecision: the key is no tuple, or can't be compared."""
        try:
            self._live[block_id] = entry = (*key, block_id)
            for part in key:
                if part != part:
                    raise IllegalDecision("eviction", self, f"the key of block {block_id} is {key!r}", "a tuple of numbers, no NaN")
            heapq.heappush(self._heap, entry)
            if len(self._heap) > 2 * len(self._live) + 32:  # stale entries would pile up in a pool that seldom evicts
                self._heap = list(self._live.values())
                heapq.heapify(self._heap)
        except TypeError as error:  # caught, not checked for: this is done for every block
            raise self._bad_key(f"the key of block {block_id} is {key!r}", error) from error

    def _bad_key(self, what: str, error: TypeError) -> IllegalDecision:
        return IllegalDecision("eviction", self, f"{what} ({error})", "a tuple of numbers; for a single one write (block.used_tick,)")

    def hit(self, block: BlockView, now: Now) -> None:
        """Held again: no candidate."""
        self._live.pop(block.block_id, None)

    def withhold(self, block: BlockView, now: Now) -> None:
        """No candidate; a hit may mean more to a subclass."""
        self._live.pop(block.block_id, None)

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone."""
        self._live.pop(block.block_id, None)

    def victim(self, now: Now) -> int:
        """The candidate with the smallest key; stale entries are dropped on the way. IllegalDecision: keys that can't be compared."""
        heap, live = self._heap, self._live
        try:
            while live.get(block_id := int(heap[0][-1])) is not heap[0]:
                heapq.heappop(heap)
        except TypeError as error:
            raise self._bad_key("its keys can't be compared", error) from error
        return block_id


# -------------------------------------------------------------- prefix cache


class PrefixCachePolicy(ABC):
    """What counts as the same prefix."""

    enabled: ClassVar[bool] = True

    token_tree: ClassVar[bool] = False
    """True: a prefix is found by walking a tree of tokens, leaves are evicted first, and a block whose content is cached already gives
    way to the first. False: it is found by the keys of its blocks, whatever their order of eviction, and duplicates stay."""

    min_match_tokens: int = 0
    """A cached prefix of fewer tokens is not used."""

    cache_generated: bool = True
    """False: only blocks that lie wholly inside a prompt are published."""

    partial_block_copy: bool = False
    """True (trees only): the shared first tokens of the next cached block are copied into the request's own block, and are hits."""

    @abstractmethod
    def root(self, cache_salt: str) -> bytes:
        """Key that stands before the first block. Different salts must give different roots."""

    @abstractmethod
    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Key of a full block after `parent`. Equal keys mean equal tokens from the prompt's start: no collisions in practice."""


# -------------------------------------------------------------- block sizing


class BlockSizingPolicy(ABC):
    """Tokens per block."""

    def foresee(self, shapes: Sequence[RequestShape]) -> None:  # noqa: B027 - optional
        """What the first requests of the workload look like, where that can be known. Told before `block_size`, once a run."""

    def explain(self) -> Sequence[str]:
        """Why it chose as it did: lines for the log, the run's folder and the printed table. Asked after `block_size`."""
        return ()

    @abstractmethod
    def block_size(self, prompt_lens: Sequence[int], max_model_len: int) -> int:
        """A positive integer, chosen once before the pool is made. `prompt_lens` may be empty."""


# -------------------------------------------------------------------- layout


class RegionNeed(NamedTuple):
    """A sequence that needs memory, as a layout is told of it.

    `num_blocks`: needed now. `max_tokens`: limit of its output. `oracle_output_len`: its true output length where the workload knows
    it; only layouts that say so in their name may read it.
    """

    num_blocks: int
    num_prompt_tokens: int
    max_tokens: int
    oracle_output_len: int | None
    max_model_len: int
    block_size: int


class LayoutPolicy(ABC):
    """How a sequence's blocks lie in physical memory.

    A layout that shares blocks places them one at a time, wherever there are enough. One that doesn't gives each sequence a region of
    its own at entry; a sequence that outgrows it is regrown, and what lies elsewhere afterwards is copied.
    """

    shares_blocks: ClassVar[bool] = True
    """False: blocks can't be shared (forks copy, prefix caching is refused): each sequence owns one region."""

    is_contiguous: ClassVar[bool] = False
    """True: the block ids of a sequence are consecutive; the engine holds the layout to it."""

    def reserve_blocks(self, need: RegionNeed) -> int:
        """Blocks to take for a sequence that needs `need.num_blocks` now. Default: no more than needed. Asked where blocks aren't
        shared. UserError: the layout can't say (an oracle without a prophecy)."""
        return need.num_blocks

    @abstractmethod
    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        """Choose `num_blocks` free block ids, in table order; None exactly if that is more than `largest_region(free)`. Changes nothing,
        and may be asked without anything coming of it."""

    def regrow(self, region: Sequence[int], num_blocks: int, free: FreeView) -> list[int] | None:
        """Where a region that was outgrown goes on: `num_blocks` ids in table order, free ones or its own; None: no room. What changes
        its place is copied (all is read before anything is written). Default: placed anew, over its own blocks too."""
        return self.place(num_blocks, free.also(region))

    def largest_region(self, free: FreeView) -> int:
        """The most blocks that `place` could find. What is free beyond it is external fragmentation. Default: all that is free."""
        return len(free)

    def took(self, block_ids: Sequence[int]) -> None:  # noqa: B027 - optional event
        """These blocks of the gpu tier are in use from now on."""

    def gave(self, block_id: int) -> None:  # noqa: B027
        """This block is free again."""


class SlotView(NamedTuple):
    """A slot that nobody uses, as a layout with slots sees it: tokens kept in it from its last sequence, how many of them the new
    sequence begins with, and the rank of its last release among all releases (-1: never used)."""

    slot_id: int
    num_kept_tokens: int
    num_shared_tokens: int
    released: int


class SlotLayout(LayoutPolicy):
    """A layout with a fixed number of slots. Each running sequence takes one; what it leaves there is kept until the slot is given to
    another sequence, which goes on after the tokens that both begin with, or until blocks are short. Counted like a prefix cache."""

    shares_blocks = False

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Sequences that may hold blocks at once."""

    @abstractmethod
    def choose_slot(self, num_tokens: int, slots: Sequence[SlotView]) -> int:
        """`slot_id` of one of the unused `slots` (never empty, by id) for a sequence of `num_tokens` tokens. Changes nothing."""

    def purge_slot(self, slots: Sequence[SlotView]) -> int:
        """`slot_id` of the unused slot (each keeps something) that is emptied because blocks are short. Default: the first."""
        return slots[0].slot_id


class FreeView(Protocol):
    """The free blocks of a pool (nothing in them)."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool, free or not: ids are 0 to this - 1."""
    def __len__(self) -> int:
        """How many are free."""
    def lowest(self, num_blocks: int) -> list[int]:
        """The lowest ids, ascending."""
    def first_run(self, num_blocks: int, start: int = 0) -> int | None:
        """First id of the lowest run of `num_blocks` consecutive free blocks from id `start` on; None when there is none."""
    def runs(self) -> list[tuple[int, int]]:
        """(first id, length) of each longest run of consecutive free blocks, ascending."""
    def also(self, block_ids: Sequence[int]) -> FreeView:
        """What is free if these (in use now) are as well."""


# --------------------------------------------------------------- compression


class CompressionPolicy(ABC):
    """Which tokens of a sequence stay in the cache. Lossless when it keeps all."""

    lossless: ClassVar[bool] = True
    attention_window: int | None = None
    """Each query sees at most this many latest positions, itself included; None: all."""
    num_sink_tokens: int = 0
    """First tokens that every query sees besides its window; their blocks stay. 0 without a window."""

    @abstractmethod
    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        """Tokens at the head that no later query will read, but for the sinks. The engine frees whole blocks of them."""


# ------------------------------------------------------------------ kv dtype


class KVDtypePolicy(ABC):
    """How K and V are stored."""

    lossless: ClassVar[bool] = True
    """Nothing is lost under a float32 model; `lossless_for` answers for any dtype."""

    @abstractmethod
    def storage(self, model_dtype: str) -> str:
        """Storage dtype ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int8") for a model computing in `model_dtype`."""

    def scales(self) -> tuple[float | tuple[float, ...], float | tuple[float, ...]]:
        """What stored K and V are multiplied by, one number or one a layer; anything but 1.0 needs fp8. (int8 finds its own.)"""
        return 1.0, 1.0

    def lossless_for(self, model_dtype: str) -> bool:
        """Whether every number of `model_dtype` is stored exactly: exponent and significand bits are as many or more."""
        stored, model = _BITS[self.storage(model_dtype)], _BITS[model_dtype]
        return stored[0] >= model[0] and stored[1] >= model[1]


_BITS = {"float64": (11, 53), "float32": (8, 24), "float16": (5, 11), "bfloat16": (8, 8), "float8_e4m3fn": (4, 4), "int8": (0, 7)}
