"""Every policy keeps its seam's contract; policies broken on purpose are caught, and by the rule they break."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvlab.policies import base
from kvlab.policies.block_sizing import Fixed
from kvlab.policies.eviction import Lru, Pinned, Random
from kvlab.policies.preemption.mode import Recompute
from kvlab.policies.registry import list_policies
from kvlab.testing import RULES, check_policy
from kvlab.types import BlockView, GroupView, Now, PoolView, QueuesView, UserError


@pytest.mark.parametrize("row", list_policies(), ids=lambda row: f"{row.seam}-{row.name}")
def test_ours_keep_the_contract(row: Any) -> None:
    check_policy(row.cls, row.seam)


def test_factories_and_objects_are_checked_too() -> None:
    check_policy(lambda: Random(seed=7))
    check_policy(Fixed(tokens=3))
    with pytest.raises(AssertionError, match="'contract'.*no SchedulingPolicy"):
        check_policy(Fixed, "scheduling")
    with pytest.raises(UserError, match="no policy"):
        check_policy(42)
    with pytest.raises(UserError, match="int is no policy"):
        check_policy(int)
    with pytest.raises(UserError, match="Did you mean 'eviction'"):
        check_policy(Lru, "evicton")


# ------------------------------------------------------------------------------------------------------ broken on purpose


class Abstract(base.EvictionPolicy):
    pass


class ForgetsParameter(base.BlockSizingPolicy):
    def __init__(self, tokens: int = 16) -> None:
        self.size = tokens

    def block_size(self, prompt_lens: Sequence[int], max_model_len: int) -> int:
        return self.size


class ChangesParameter(base.BlockSizingPolicy):
    def __init__(self, tokens: int = 15) -> None:
        self.tokens = tokens + 1

    def block_size(self, prompt_lens: Sequence[int], max_model_len: int) -> int:
        return self.tokens


class ReadsClock(base.SchedulingPolicy):
    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (0.0 * time.monotonic(),)


class UsesGlobalRandom(base.PreemptionPolicy):
    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        return random.choice(candidates)


class UsesHash(base.SchedulingPolicy):
    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (hash(group.request_id),)


class RemembersInTheClass(base.SchedulingPolicy):
    is_static = False
    calls = 0

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        type(self).calls += 1
        return (group.group_id * self.calls % 7,)


class WritesToGroup(base.SchedulingPolicy):
    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        group.priority = 0  # type: ignore[misc]
        return (0.0,)


class WritesToBlock(Lru):
    def insert(self, block: BlockView, now: Now) -> None:
        block.freq = 1  # type: ignore[attr-defined]


class PeeksAtOutput(base.SchedulingPolicy):
    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (group.oracle_output_len or 0,)


class NotANumber(base.SchedulingPolicy):
    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (float("nan"),)


class NotANumberForABlock(base.KeyEviction):
    """A sort by NaN is no order: another policy would act, silently."""

    def key(self, block: BlockView) -> tuple[float, ...]:
        return (float("nan"), block.used_tick)


class KeepsItsCandidates(Lru):
    """Nothing is left of them when all were evicted, but a run may break off."""

    def reset(self) -> None:
        if not hasattr(self, "_order"):
            super().reset()


class NoReset(base.EvictionPolicy):
    """State, and no way to be as new."""

    def __init__(self) -> None:
        self.order: dict[int, None] = {}

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        self.order[block.block_id] = None

    def hit(self, block: BlockView, now: Now) -> None:
        self.order.pop(block.block_id, None)

    def evict(self, block: BlockView, now: Now) -> None:
        self.order.pop(block.block_id, None)

    def victim(self, now: Now) -> int:
        return next(iter(self.order))


class NotStatic(base.SchedulingPolicy):
    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (now.now_s - group.arrival_s,)


class HoldsTooLong(base.SchedulingPolicy):
    """Its keys change with every step, and it says that they hold for three."""

    is_static = False

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (now.step % 2,)

    def key_holds_until(self, group: GroupView, now: Now) -> float:
        return now.step + 3


class ChoosesByArrival(base.SchedulingPolicy):
    """An `if` over arrays."""

    is_static = False
    key_is_elementwise = True

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (0.0,) if group.arrival_s < 1.0 else (now.now_s,)


class OneForAll(base.SchedulingPolicy):
    """Of arrays it takes the sum, of a group its number."""

    is_static = False
    key_is_elementwise = True

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (sum([0.0, *getattr(group.group_id, "flat", [group.group_id])]),)


class LeavesOneOut(base.SchedulingPolicy):
    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (0.0,)

    def order(self, waiting: Sequence[GroupView], prefixes: base.PrefixesView, now: Now) -> Sequence[GroupView]:
        return waiting[1:]


class SendsAnyoneAway(base.SchedulingPolicy):
    """Whoever runs gives way to the head, though it comes before it in the queue and so enters again in its place."""

    preempted_first = False

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (group.arrival_s,)

    def displaces(self, head: GroupView, running: Sequence[GroupView], now: Now) -> GroupView | None:
        return running[0]


class NeverSettles(SendsAnyoneAway):
    """Who has not entered for longest goes first and sends the others away, whatever they have computed."""

    is_static = False

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (group.admitted_step,)

    def displaces(self, head: GroupView, running: Sequence[GroupView], now: Now) -> GroupView | None:
        later = [group for group in running if (group.admitted_step, group.group_id) > (head.admitted_step, head.group_id)]
        return later[0] if later else None


class UnknownQueue(base.BatchingPolicy):
    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        return (("running", "paused"),)

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        return min(num_uncomputed, budget)


class Idles(UnknownQueue):
    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        return (("running",),)


class ChunkOverBudget(UnknownQueue):
    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        return (("running", "swapped", "waiting"),)

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        return num_uncomputed


class NeverSplits(ChunkOverBudget):
    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        return num_uncomputed if num_uncomputed <= budget else 0


class ServesOneAlone(UnknownQueue):
    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        return (("running", "swapped", "waiting"),)

    def running_order(self, running: Sequence[GroupView], now: Now) -> Sequence[GroupView]:
        return running[:1]


class NoBudget(NeverSplits):
    def token_budget(self, queues: QueuesView, max_num_batched_tokens: int) -> int:
        return 0


class AnswersYes(base.AdmissionPolicy):
    def admits(self, entry: base.EntryView, pool: PoolView, now: Now) -> str:
        return True  # type: ignore[return-value]


class NegativeHeadroom(base.AdmissionPolicy):
    def admits(self, entry: base.EntryView, pool: PoolView, now: Now) -> str:
        return ""

    def headroom_blocks(self, pool: PoolView) -> int:
        return -1


class InventsVictim(base.PreemptionPolicy):
    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        return None  # type: ignore[return-value]


class ForgetsMode(base.PreemptionPolicy):
    def __init__(self) -> None:
        pass

    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        return candidates[0]


class OtherMode(base.PreemptionMode):
    def mode(self, victim: base.VictimView, now: Now) -> str:
        return "drop"


class EvictsHeld(Lru):
    """Takes hits for nothing: a block that is held again stays a candidate."""

    def hit(self, block: BlockView, now: Now) -> None:
        pass


class MiscountsPins(Lru):
    """Says that one block is pinned, and of none which."""

    @property
    def num_pinned(self) -> int:
        return 1


class KeepsPins(Pinned):
    """Never gives up a pin."""

    def give_up_pins(self, now: Now) -> bool:
        return False


class ForgetsVictim(base.EvictionPolicy):
    """Takes the victim from its list when asked, and never puts it back if it is not evicted."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        self.order.append(block.block_id)

    def hit(self, block: BlockView, now: Now) -> None:
        if block.block_id in self.order:
            self.order.remove(block.block_id)

    def victim(self, now: Now) -> int:
        return self.order.pop(0)

    def evict(self, block: BlockView, now: Now) -> None:
        if block.block_id in self.order:
            self.order.remove(block.block_id)


class IgnoresResets(Lru):
    """Believes that only its own victims ever go."""

    def evict(self, block: BlockView, now: Now) -> None:
        assert_is_own = self.victim(now) == block.block_id
        if assert_is_own:
            super().evict(block, now)


class PilesUp(Lru):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[int, int]] = []

    def hit(self, block: BlockView, now: Now) -> None:
        super().hit(block, now)
        self.history.append((block.block_id, now.step))


class HalfReset(Random):
    def reset(self) -> None:
        if not hasattr(self, "_candidates"):
            super().reset()


class Unchained(base.PrefixCachePolicy):
    """The walkthrough's fault: a block's key is that of its own tokens alone."""

    def root(self, cache_salt: str) -> bytes:
        return cache_salt.encode()

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return b",".join(b"%d" % token for token in token_ids)


class Concatenated(base.PrefixCachePolicy):
    """Digits without a separator: (1, 23) looks like (12, 3)."""

    def root(self, cache_salt: str) -> bytes:
        return cache_salt.encode() + b"|"

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return parent + b"/" + b"".join(b"%d" % token for token in token_ids)


class Unsalted(Concatenated):
    def root(self, cache_salt: str) -> bytes:
        return b""

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return parent + b"/" + b",".join(b"%d" % token for token in token_ids)


class ZeroBlockSize(base.BlockSizingPolicy):
    def block_size(self, prompt_lens: Sequence[int], max_model_len: int) -> int:
        return len(prompt_lens)


class PlacesAnywhere(base.LayoutPolicy):
    def place(self, num_blocks: int, free: base.FreeView) -> list[int] | None:
        return list(range(num_blocks))


class NeverPlaces(base.LayoutPolicy):
    def place(self, num_blocks: int, free: base.FreeView) -> list[int] | None:
        return None


class ReservesTooLittle(base.LayoutPolicy):
    def reserve_blocks(self, need: base.RegionNeed) -> int:
        return 0

    def place(self, num_blocks: int, free: base.FreeView) -> list[int] | None:
        return free.lowest(num_blocks) if num_blocks <= len(free) else None


class PlacesApart(base.LayoutPolicy):
    """Says that its regions are runs, and takes the lowest blocks."""

    shares_blocks = False
    is_contiguous = True

    def place(self, num_blocks: int, free: base.FreeView) -> list[int] | None:
        return free.lowest(num_blocks) if num_blocks <= len(free) else None


class LooksAhead(PlacesApart):
    """Reads the oracle, and does not say so in its name."""

    is_contiguous = False

    def reserve_blocks(self, need: base.RegionNeed) -> int:
        return need.num_blocks + (need.oracle_output_len or 0)


class ChoosesNoSlot(base.SlotLayout):
    @property
    def num_slots(self) -> int:
        return 2

    def place(self, num_blocks: int, free: base.FreeView) -> list[int] | None:
        return free.lowest(num_blocks) if num_blocks <= len(free) else None

    def choose_slot(self, num_tokens: int, slots: Sequence[base.SlotView]) -> int:
        return len(slots)


class WindowOffByOne(base.CompressionPolicy):
    """Drops the one token that the next query still reads."""

    lossless = False
    attention_window = 8

    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 8 + 2)


class LosslessWindow(base.CompressionPolicy):
    attention_window = 8

    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        return 0


class SinksWithoutWindow(base.CompressionPolicy):
    lossless = False
    num_sink_tokens = 4

    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        return 0


class DropsWhatAllSee(base.CompressionPolicy):
    """Without a window every query reads every token."""

    lossless = False

    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 7)


class MoreSinksLater(base.CompressionPolicy):
    """Whoever reads the number does so once."""

    lossless = False
    attention_window = 8

    def __init__(self) -> None:
        self.num_sink_tokens = 2

    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        self.num_sink_tokens = 2 if num_computed_tokens < 30 else 3
        return max(0, num_computed_tokens - 7)


class UnknownStorage(base.KVDtypePolicy):
    def storage(self, model_dtype: str) -> str:
        return "int4"


class SecretlyHalf(base.KVDtypePolicy):
    def storage(self, model_dtype: str) -> str:
        return "float16"


BROKEN: list[tuple[Callable[..., Any], str]] = [
    (Abstract, "contract"), (ForgetsParameter, "constructor"), (ChangesParameter, "constructor"), (ReadsClock, "no clock"),
    (UsesGlobalRandom, "seeded"), (UsesHash, "determinism"), (RemembersInTheClass, "determinism"), (WritesToGroup, "read-only"),
    (WritesToBlock, "read-only"), (PeeksAtOutput, "no oracle"), (NotANumber, "total order"), (NotANumberForABlock, "total order"),
    (KeepsItsCandidates, "reset"), (NoReset, "reset"), (NotStatic, "static key"),
    (HoldsTooLong, "held key"), (ChoosesByArrival, "elementwise key"), (OneForAll, "elementwise key"),
    (UnknownQueue, "phases"), (Idles, "work conserving"), (ChunkOverBudget, "chunk range"), (NeverSplits, "progress"),
    (LeavesOneOut, "order"), (SendsAnyoneAway, "displacement"), (NeverSettles, "drains"), (ServesOneAlone, "running order"),
    (NoBudget, "token budget"), (AnswersYes, "admission answer"), (NegativeHeadroom, "headroom"), (InventsVictim, "victim"),
    (ForgetsMode, "mode"), (OtherMode, "mode"), (EvictsHeld, "victim"), (ForgetsVictim, "never fails|remembers"),
    (MiscountsPins, "pins"), (KeepsPins, "pins"),
    (IgnoresResets, "never fails|victim"), (PilesUp, "bounded metadata"), (HalfReset, "reset"), (Unchained, "keys"),
    (Concatenated, "keys"), (Unsalted, "keys"), (ZeroBlockSize, "block size"), (PlacesAnywhere, "placement"),
    (NeverPlaces, "placement"), (ReservesTooLittle, "reservation"), (PlacesApart, "placement"),
    (LooksAhead, "no oracle"), (ChoosesNoSlot, "slots"), (WindowOffByOne, "droppable"), (LosslessWindow, "droppable"),
    (SinksWithoutWindow, "droppable"), (DropsWhatAllSee, "droppable"), (MoreSinksLater, "droppable"),
    (UnknownStorage, "storage"), (SecretlyHalf, "storage"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_policy_is_caught_by_the_rule_it_breaks(policy: type, rule: str) -> None:
    with pytest.raises(AssertionError, match=f"policy {policy.__name__} breaks the rule '({rule})'"):
        check_policy(policy)


def test_every_rule_has_a_policy_that_breaks_it() -> None:
    broken = {name for _, rule in BROKEN for name in rule.split("|")}
    assert broken == set(RULES)


def test_a_policy_with_a_fault_in_mode_names_itself() -> None:
    class Crashes(base.PreemptionPolicy):
        def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
            return candidates[9]

    with pytest.raises(AssertionError, match="preemption policy Crashes breaks the rule 'never fails'.*IndexError"):
        check_policy(lambda: Crashes(mode=Recompute()))
