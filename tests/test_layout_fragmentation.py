"""What a layout wastes, by kind, in the engine's own columns: within blocks, in blocks set aside, in gaps that nothing fits into."""

from __future__ import annotations

import pytest
from engine_support import Forcer, make_engine, policies, prompt_of, reference_outputs, request, run_to_end, serve

from kvlab.policies.base import FreeView, LayoutPolicy
from kvlab.types import IllegalDecision, UserError

WASTE = {
    # used blocks, slots without a token, blocks without a token; of 2000 tokens in the pool
    "contiguous_max": (3 * 128, 3 * 2048 - 2000, 3 * 128 - (32 + 75 + 19), 67.4),
    "contiguous_pow2": (32 + 128 + 32, 192 * 16 - 2000, 192 - 126, 34.9),
    "contiguous_oracle": (32 + 76 + 19, 127 * 16 - 2000, 1, 1.6),
    "paged": (32 + 75 + 19, 16, 0, 0.8),
    "ring": (32 + 75 + 19, 16, 0, 0.8),
}


@pytest.mark.parametrize("layout", WASTE)
def test_three_requests_of_500_1200_and_300_tokens(layout: str) -> None:
    """The walkthrough's picture: regions of 2048 tokens waste 67.4 %, blocks of 16 waste 0.8 %. The oracle knows of 4 tokens more each."""
    engine, log = make_engine(400, 16, policies(layout=layout, prefix_cache="none"), max_model_len=2048, max_num_batched_tokens=2048)
    for name, length in (("a", 500), ("b", 1200), ("c", 300)):
        engine.add_request(request(name, prompt_of(length), 4))
    engine.step()
    stats = log.stats[0]
    used, unfilled, reserved, percent = WASTE[layout]
    assert stats.num_ctx_tokens == 2000
    assert (stats.kv_blocks_used, stats.internal_fragmentation_tokens, stats.kv_blocks_reserved) == (used, unfilled, reserved)
    assert round(100 * stats.internal_fragmentation_tokens / (16 * stats.kv_blocks_used), 1) == percent


# Blocks of 16, a pool of 8. Four prompts of 20 tokens (2 blocks each) fill it; the second and the fourth end after 2 tokens and leave two
# gaps of 2 blocks. A prompt of 50 needs 4: there are 4, and no 4 in a row until the first ends after 12 tokens.
@pytest.mark.parametrize("layout", ["contiguous_pow2", "contiguous_oracle"])
def test_admission_fails_though_blocks_suffice(layout: str) -> None:
    asked = [request(name, prompt_of(20, i), output) for i, (name, output) in enumerate((("a", 12), ("b", 2), ("c", 12), ("d", 2)))]
    asked.append(request("e", prompt_of(50, 9), 2))
    engine, log = make_engine(8, 16, policies(layout=layout, prefix_cache="none", admission="none"), max_model_len=128)
    for each in asked:
        engine.add_request(each)
    run_to_end(engine, 40)
    frames = [(s.kv_blocks_free, s.external_fragmentation_blocks, s.admission_blocked_by) for s in log.stats]
    assert frames[:2] == [(0, 0, "blocks"), (4, 2, "blocks")]  # b and d end with the second step
    assert frames[2:11] == [(4, 2, "fragmentation")] * 9
    assert frames[11] == (8, 0, "fragmentation")  # a and c end with the twelfth
    assert [plan.step for plan in log.plans for entry in plan.admitted if entry.request_id == "e"] == [12]
    assert log.outputs == reference_outputs(asked)


@pytest.mark.parametrize("layout", ["paged", "ring"])
def test_scattered_blocks_have_no_gaps(layout: str) -> None:
    """The same trace: the prompt enters as soon as 4 blocks are there."""
    engine, log = make_engine(8, 16, policies(layout=layout, prefix_cache="none", admission="none"), max_model_len=128)
    for i, (name, output) in enumerate((("a", 12), ("b", 2), ("c", 12), ("d", 2))):
        engine.add_request(request(name, prompt_of(20, i), output))
    engine.add_request(request("e", prompt_of(50, 9), 2))
    run_to_end(engine, 40)
    assert [plan.step for plan in log.plans for entry in plan.admitted if entry.request_id == "e"] == [2]
    assert {stats.external_fragmentation_blocks for stats in log.stats} == {0}
    assert "fragmentation" not in {stats.admission_blocked_by for stats in log.stats}


def test_a_swapped_request_waits_for_a_gap_too() -> None:
    """`v` holds 0-1, six others a block each. It is swapped out, and the first of the others doubles into its place and leaves block 2;
    the third ends and leaves block 4: two blocks, and no pair of buddies."""
    engine, log = make_engine(8, 4, policies(layout="contiguous_pow2", prefix_cache="none", admission="none", mode="swap"),
                              num_cpu_blocks=8, max_model_len=64)  # fmt: skip
    asked = [request("v", prompt_of(6, 0), 3), request("1", prompt_of(4, 1), 4), request("2", prompt_of(1, 2), 4),
             request("3", prompt_of(1, 3), 2), *(request(name, prompt_of(1, int(name)), 4) for name in "456")]  # fmt: skip
    forcer = Forcer(engine)
    for each in asked:
        engine.add_request(each)
    engine.step()
    assert log.plans[0].fresh_tables == {0: (0, 1), 1: (2,), 2: (3,), 3: (4,), 4: (5,), 5: (6,), 6: (7,)}
    forcer.before.append("v")
    engine.step()
    assert log.plans[1].fresh_tables == {1: (0, 1)}
    assert (log.stats[1].swapped_out_blocks, log.stats[1].relocated_blocks) == (2, 1)
    run_to_end(engine, 20)
    assert [(entry.request_id, entry.by) for entry in log.plans[2].blocked] == [("v", "fragmentation")]
    assert (log.stats[1].kv_blocks_free, log.stats[1].external_fragmentation_blocks) == (2, 1)
    assert log.outputs == reference_outputs(asked)


def test_a_region_that_is_outgrown_doubles_in_place() -> None:
    """Alone in 8 blocks of 4: 1, 2, 4, 8 blocks from the start of the pool on, and nothing is copied."""
    engine, log = make_engine(8, 4, policies(layout="contiguous_pow2", prefix_cache="none"), max_model_len=64)
    serve(engine, [request("alone", prompt_of(3, 1), 20)])
    assert log.plans[0].fresh_tables == {0: (0,)}
    assert [plan.tables[0] for plan in log.plans if plan.tables] == [(1,), (2, 3), (4, 5, 6, 7)]
    assert log.total("relocated_blocks") == log.total("cow_copies") == 0


def test_a_region_that_is_outgrown_moves_where_its_buddy_is_taken() -> None:
    """Blocks 0 and 1. The second ends at once, the first doubles to 0-1 and the third gets block 2, then 2-3. For 9 tokens the first
    needs four: it moves to 4-7 and its two blocks are copied."""
    engine, log = make_engine(8, 4, policies(layout="contiguous_pow2", prefix_cache="none"), max_model_len=64)
    asked = [request("first", prompt_of(4, 1), 8), request("second", prompt_of(4, 2), 1), request("third", prompt_of(3, 3), 6)]
    for each in asked[:2]:
        engine.add_request(each)
    engine.step()
    engine.add_request(asked[2])
    run_to_end(engine, 20)
    assert [(plan.step, plan.fresh_tables) for plan in log.plans if plan.fresh_tables] == [
        (0, {0: (0,), 1: (1,)}), (1, {2: (2,)}), (5, {0: (4, 5, 6, 7)})]  # fmt: skip
    assert [(plan.step, plan.tables) for plan in log.plans if plan.tables] == [(1, {0: (1,)}), (3, {2: (3,)})]
    assert [tuple(copy) for copy in log.plans[5].copies] == [(0, 4), (1, 5)]
    assert [stats.step for stats in log.stats if stats.relocated_blocks] == [5]
    assert (log.total("relocated_blocks"), log.total("cow_copies")) == (2, 0)
    assert log.outputs == reference_outputs(asked)


def test_a_region_may_move_over_its_own_place() -> None:
    """8 blocks of 4: three fill 0, 1 and 2-3, the last 4-7 (13 tokens). Alone, it needs 8 blocks for its 17th token: 0-7, of which 4-7 are
    its own; every block is read before one is written."""
    engine, log = make_engine(8, 4, policies(layout="contiguous_pow2", prefix_cache="none"), max_model_len=64)
    asked = [request("a", prompt_of(4, 1), 1), request("b", prompt_of(4, 2), 1), request("c", prompt_of(8, 3), 1),
             request("d", prompt_of(13, 4), 9)]  # fmt: skip
    serve(engine, asked)
    assert log.plans[0].fresh_tables == {0: (0,), 1: (1,), 2: (2, 3), 3: (4, 5, 6, 7)}
    assert [(plan.step, plan.fresh_tables) for plan in log.plans[1:] if plan.fresh_tables] == [(4, {3: (0, 1, 2, 3, 4, 5, 6, 7)})]
    assert [tuple(copy) for copy in log.plans[4].copies] == [(4, 0), (5, 1), (6, 2), (7, 3)]
    assert log.outputs == reference_outputs(asked)


def test_a_prompt_for_which_no_region_exists_is_refused() -> None:
    """12 blocks are buddies of 8 and 4: 8 blocks fit once, 16 never do."""
    engine, _ = make_engine(12, 4, policies(layout="contiguous_pow2", prefix_cache="none"), max_model_len=64)
    engine.check_request(request("a", prompt_of(32), 1))
    with pytest.raises(UserError, match="takes 16 blocks of 4 for each of 1 sequences, there are 12"):
        engine.check_request(request("a", prompt_of(33), 1))
    with pytest.raises(UserError, match="takes 8 blocks of 4 for each of 2 sequences"):
        engine.check_request(request("a", prompt_of(17), 1, n=2))


def test_a_workload_without_an_oracle_is_refused_by_the_layouts_name() -> None:
    """Nothing is reserved by guessing."""
    engine, _ = make_engine(12, 4, policies(layout="contiguous_oracle", prefix_cache="none"), max_model_len=32)
    asked = request("a", prompt_of(5), 3, ignore_eos=False)
    asked.oracle_output_len = None
    with pytest.raises(UserError, match="layout contiguous_oracle reserves a request's true output length"):
        engine.add_request(asked)
    assert not engine.has_work


def test_an_oracle_that_errs_costs_a_move_and_no_token() -> None:
    """Foretold 2 tokens, there are 9: the region of 2 blocks is followed by another's, so it moves."""
    engine, log = make_engine(12, 4, policies(layout="contiguous_oracle", prefix_cache="none"), max_model_len=32)
    asked = [request("a", prompt_of(6, 1), 9), request("b", prompt_of(6, 2), 4)]
    asked[0].oracle_output_len = 2
    for each in asked:
        engine.add_request(each)
    run_to_end(engine, 40)
    assert log.plans[0].fresh_tables == {0: (0, 1), 1: (2, 3, 4)}
    assert log.plans[3].fresh_tables == {0: (5, 6, 7)}
    assert [tuple(copy) for copy in log.plans[3].copies] == [(0, 5), (1, 6)]
    assert [(stats.step, stats.relocated_blocks) for stats in log.stats if stats.relocated_blocks] == [(3, 2)]
    assert log.plans[7].tables == {0: (8,)}  # the block behind it is free: it stays
    assert log.total("cow_copies") == 0
    assert log.outputs == reference_outputs(asked)


class Thirds(LayoutPolicy):
    """Regions begin at multiples of three."""

    shares_blocks = False
    is_contiguous = True

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        firsts = (first for first in range(0, free.num_blocks, 3) if free.first_run(num_blocks, first) == first)
        first = next(firsts, None)
        return None if first is None else list(range(first, first + num_blocks))

    def largest_region(self, free: FreeView) -> int:
        return max((n for n in range(len(free) + 1) if self.place(n, free) is not None), default=0)


class Refuses(LayoutPolicy):
    """Shares blocks, and finds no place for the second of them."""

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        return free.lowest(num_blocks) if 0 in free.lowest(1) else None


def test_a_layout_of_ones_own_may_find_no_place() -> None:
    """9 blocks, regions at 0, 3 and 6: of four prompts of one block three run, with six blocks free. A refusal leaves no event behind."""
    engine, log = make_engine(9, 4, policies(layout=Thirds(), prefix_cache="none", admission="none"), max_model_len=16)
    asked = [request(name, prompt_of(3, i), 4) for i, name in enumerate("abcd")]
    for each in asked:
        engine.add_request(each)
    engine.step()
    assert [entry.request_id for entry in log.plans[0].admitted] == ["a", "b", "c"]
    assert [(entry.request_id, entry.by) for entry in log.plans[0].blocked] == [("d", "fragmentation")]
    assert [event.request_id for event in log.events] == ["a", "b", "c"]
    run_to_end(engine, 40)
    assert log.outputs == reference_outputs(asked)


def test_a_layout_that_shares_blocks_may_not() -> None:
    """Evicting for it can't be undone: it must place wherever there are enough."""
    engine, _ = make_engine(9, 4, policies(layout=Refuses()))
    for name in "ab":
        engine.add_request(request(name, prompt_of(3), 4))
    with pytest.raises(IllegalDecision, match="Refuses.*no place for 1 of 8 free blocks"):
        engine.step()
