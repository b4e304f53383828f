"""Requests that are kept out of the prefix cache, or a part of them: `Request.cache` and `Request.cache_until`."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from engine_support import (
    VOCAB,
    Forcer,
    Log,
    copy_of,
    make_engine,
    policies,
    policy_names,
    prompt_of,
    reference_outputs,
    request,
    run_to_end,
    serve,
    step_bound,
)

from kvlab.engine import steady
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.prefix_cache import Hash, Radix
from kvlab.testing.late import LateRunner
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import Request, UserError

CACHES = {"hash": Hash(), "radix": Radix(), "radix_copies": Radix(partial_block_copy=True), "prompts_only": Hash(cache_generated=False)}


def keys(tokens: list[int] | tuple[int, ...], size: int, salt: str = "") -> list[str]:
    """Contents of the full blocks of a sequence, as block events have them."""
    key, found = Hash().root(salt), []
    for first in range(0, len(tokens) - size + 1, size):
        key = Hash().key(key, tokens[first : first + size])
        found.append(key.hex())
    return found


def published(log: Log) -> dict[str, list[str]]:
    """request id -> contents it published."""
    found: dict[str, list[str]] = {}
    for event in log.events:
        if event.kind == "publish":
            found.setdefault(event.request_id, []).append(event.content)
    return found


def contents(each: Request, log: Log, size: int) -> tuple[set[str], set[str]]:
    """Contents of a request's full blocks, of all its sequences: (those it may publish, the others)."""
    may, others = set[str](), set[str]()
    for tokens, _ in log.records[each.request_id].outputs:
        all_keys = keys([*each.prompt_token_ids, *tokens], size, each.cache_salt)
        num = len(all_keys) if each.cache and each.cache_until is None else (each.cache_until or 0) // size
        may.update(all_keys[:num])
        others.update(all_keys[num:])
    return may, others


def check_nothing_excluded_is_found(requests: list[Request], log: Log, size: int) -> int:
    """Nobody published what its request keeps out, and what nobody may publish was never hit. Returns how many such contents there were."""
    by_request = published(log)
    allowed, excluded = set[str](), set[str]()
    for each in requests:
        may, others = contents(each, log, size)
        assert set(by_request.get(each.request_id, ())) <= may, each.request_id
        allowed |= may
        excluded |= others
    nobodys = excluded - allowed
    hits = [event.content for event in log.events if event.kind == "hit"]
    assert not nobodys.intersection(hits)
    assert set(hits) <= {content for contents in by_request.values() for content in contents}
    return len(nobodys)


# -------------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize(
    ("params", "num_published"),
    [
        ({}, 5), ({"cache": False}, 0), ({"cache_until": 0}, 0), ({"cache_until": 3}, 0), ({"cache_until": 4}, 1), ({"cache_until": 7}, 1),
        ({"cache_until": 8}, 2), ({"cache_until": 9}, 2), ({"cache_until": 10}, 2), ({"cache_until": 12}, 3), ({"cache_until": 19}, 4),
        ({"cache_until": 20}, 5), ({"cache_until": 10**30}, 5),
    ],
)  # fmt: skip
def test_a_block_is_published_only_if_all_its_tokens_lie_before(cache: str, params: dict[str, Any], num_published: int) -> None:
    """B=4; a prompt of 10 tokens and 12 of output, of which 21 are computed: five full blocks. Of an equal prompt the next request finds
    what of its first 9 tokens is cached."""
    first = replace(request("first", range(10), 12), **params)
    engine, log = make_engine(40, 4, policies(prefix_cache=CACHES[cache]))
    serve(engine, [first])
    assert published(log).get("first", []) == keys([*range(10), *log.outputs["first"][0][0]], 4)[:num_published]
    assert log.records["first"].cache_until == (None if not params else 0 if params.get("cache") is False else params["cache_until"])
    assert engine.kv.pool.num_evictable == num_published
    serve(engine, [request("again", range(10), 1)])
    assert log.records["again"].num_cached_tokens == 4 * min(num_published, 2)
    assert log.records["again"].cache_until is None


@pytest.mark.parametrize("cache", ["hash", "radix", "radix_copies"])
def test_it_finds_what_others_published_and_leaves_it_there(cache: str) -> None:
    """B=4, 14 tokens: 12 of them in full blocks; radix_copies finds the 13th in nobody's block: the fourth was never full."""
    engine, log = make_engine(40, 4, policies(prefix_cache=CACHES[cache]))
    for name, params in (("one", {}), ("out", {"cache": False}), ("part", {"cache_until": 4}), ("last", {})):
        serve(engine, [replace(request(name, range(14), 1), **params)])
    assert [log.records[name].num_cached_tokens for name in ("one", "out", "part", "last")] == [0, 12, 12, 12]
    assert published(log) == {"one": keys(range(14), 4)}


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_who_publishes_the_same_content_publishes_it_as_ever(cache: str) -> None:
    """Side by side, one of them kept out: the other's blocks are cached, whichever was first."""
    for order in (("out", "in"), ("in", "out")):
        engine, log = make_engine(40, 4, policies(prefix_cache=CACHES[cache]))
        serve(engine, [replace(request(name, range(14), 6), cache=name == "in") for name in order])
        assert list(published(log)) == ["in"]
        assert len(published(log)["in"]) == 4
        assert log.total("prefix_cache_hits") == 0
        serve(engine, [request("again", range(14), 1)])
        assert log.records["again"].num_cached_tokens == 12


def test_generated_tokens_stay_out_as_well_where_the_policy_says_so() -> None:
    """B=4, a prompt of 10 tokens: of positions 16 and up to it the smaller counts."""
    for until, num in ((16, 2), (5, 1), (None, 2)):
        engine, log = make_engine(40, 4, policies(prefix_cache=Hash(cache_generated=False)))
        serve(engine, [replace(request("a", range(10), 12), cache_until=until)])
        assert len(published(log)["a"]) == num


@pytest.mark.parametrize(("until", "cached"), [(None, 12), (8, 8), (0, 0)])
def test_after_a_recompute_preemption_what_was_not_published_is_computed_again(until: int | None, cached: int) -> None:
    """B=4, a prompt of 13 tokens, preempted after its third token with 15 computed: 12 are in full blocks."""
    engine, log = make_engine(40, 4, policies(prefix_cache="hash"))
    forcer = Forcer(engine)
    engine.add_request(replace(request("a", range(13), 6), cache_until=until))
    engine.add_request(request("other", [50, 51], 12))
    for _ in range(3):
        engine.step()
    forcer.before.append("a")
    run_to_end(engine, 50)
    assert forcer.num_forced == 1
    assert log.total("preempted_hits") == cached
    assert log.records["a"].num_wasted_tokens == 15 - cached
    assert log.outputs == reference_outputs([request("a", range(13), 6), request("other", [50, 51], 12)])


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_forks_publish_no_more_than_their_request_may(cache: str) -> None:
    """B=4; three samples of a prompt of 6 tokens share its blocks; until position 8 each has a second block of its own to publish."""
    for until, num in ((8, 4), (4, 1), (3, 0)):
        engine, log = make_engine(60, 4, policies(prefix_cache=CACHES[cache]))
        one = replace(request("a", range(6), 9, n=3, temperature=1.0), cache_until=until)
        serve(engine, [one])
        assert len({tokens for tokens, _ in log.outputs["a"]}) == 3
        assert len(published(log).get("a", [])) == num
        check_nothing_excluded_is_found([one], log, 4)


@pytest.mark.parametrize("params", [{"cache": False}, {"cache_until": 10}])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_slot_keeps_no_more_than_may_be_cached_and_what_others_left(params: dict[str, Any], depth: int) -> None:
    """ring: a slot keeps what was computed in it, token by token. First 20 tokens of a request that may be cached, then one that goes on
    after its first 12, then the first again: 12 are left, however little the second may leave (until 10: no more either)."""
    def cached(*requests: Request) -> list[int]:
        runner = LateRunner(PagedFakeRunner(VOCAB)) if depth else PagedFakeRunner(VOCAB)
        engine, log = make_engine(64, 1, policies(layout="ring", prefix_cache="none", admission="none"), depth=depth, runner=runner)
        for each in requests:
            serve(engine, [each])
        return [log.records[each.request_id].num_cached_tokens for each in requests]

    until = params.get("cache_until", 0)
    alone = replace(request("out", prompt_of(20), 4), **params)
    assert cached(alone, request("again", prompt_of(20), 1)) == [0, until]
    whole = request("one", prompt_of(20), 1)
    other = [*prompt_of(12), *prompt_of(8, seed=5)]
    assert cached(whole, replace(request("out", other, 4), **params), request("again", prompt_of(20), 1)) == [0, 12, 12]
    assert cached(whole, request("in", other, 4), request("again", other, 1)) == [0, 12, 19]


# ------------------------------------------------------------------------------------------------ under every eviction


def many(draw: Random, num: int) -> list[Request]:
    """Prompts from a few families, some kept out as a whole or in part, also n > 1 and stop ids."""
    families = [prompt_of(30, seed=i) for i in range(3)]
    requests = []
    for i in range(num):
        prompt = [*families[i % 3][: draw.randint(8, 30)], *prompt_of(draw.randint(1, 12), seed=100 + draw.randrange(4))]
        sampling = draw.choice([{}, {}, {"temperature": 1.0}, {"n": 2, "temperature": 1.0}, {"stop_token_ids": (5, 7)}])
        params = draw.choice([{}, {}, {"cache": False}, {"cache_until": draw.randrange(60)}])
        each = request(f"r{i}", prompt, draw.randint(1, 16), **sampling)
        requests.append(replace(each, **params))
    return requests


@pytest.mark.parametrize(("cache", "depth"), [("hash", 0), ("radix", 1)])
@pytest.mark.parametrize("eviction", policy_names("eviction"))
def test_nothing_excluded_is_found_under_any_eviction(eviction: str, cache: str, depth: int) -> None:
    """Chunked prefill, evictions, preemptions of both modes. Tokens are those of an engine without cache and preemption."""
    check_a_scene(eviction, cache, depth, ["recompute", "swap"][depth])


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("cache", "depth"), [("radix_copies", 0), ("radix_copies", 1), ("prompts_only", 0), ("prompts_only", 1)])
def test_nothing_excluded_is_found_with_other_caches(cache: str, depth: int, mode: str) -> None:
    check_a_scene("lru", cache, depth, mode)


def check_a_scene(eviction: str, cache: str, depth: int, mode: str) -> None:
    requests = many(Random(3), 12)
    runner = LateRunner(PagedFakeRunner(VOCAB)) if depth else PagedFakeRunner(VOCAB)
    seams = {"eviction": eviction, "prefix_cache": CACHES[cache], "mode": mode}
    engine, log = make_engine(24, 4, policies(**seams), depth=depth, runner=runner, num_cpu_blocks=20, max_num_batched_tokens=24,
                              max_num_seqs=8)  # fmt: skip
    heard: list[bytes] = []
    insert = engine.kv.pool.eviction.insert  # type: ignore[union-attr]

    def told(block: Any, now: Any) -> None:
        heard.append(block.content)
        insert(block, now)

    engine.kv.pool.eviction.insert = told  # type: ignore[union-attr, method-assign]
    serve(engine, requests)
    assert [content.hex() for content in heard] == [event.content for event in log.events if event.kind == "publish"]
    assert check_nothing_excluded_is_found(requests, log, 4) > 12
    assert log.outputs == reference_outputs(requests)
    for column in ("prefix_cache_hits", "num_evicted_blocks", "num_preemptions"):
        assert log.total(column) > 0, column


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cache", ["hash", "radix", "radix_copies"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_all_kept_out_decides_as_no_cache_at_all(cache: str, mode: str, depth: int) -> None:
    """Step for step and block for block: forks, beams, preemptions, copies."""
    decisions = []
    for prefix_cache, params in ((CACHES[cache], {"cache": False}), ("none", {}), (CACHES[cache], {})):
        requests = [replace(each, cache=True, cache_until=None) for each in many(Random(7), 12)]
        requests += [request(f"beam{i}", prompt_of(9, seed=i), 7, beam_width=2) for i in range(3)]
        runner = LateRunner(PagedFakeRunner(VOCAB)) if depth else PagedFakeRunner(VOCAB)
        engine, log = make_engine(28, 4, policies(prefix_cache=prefix_cache, mode=mode), depth=depth, runner=runner, num_cpu_blocks=20,
                                  max_num_batched_tokens=24, max_num_seqs=8)  # fmt: skip
        serve(engine, [replace(each, **params) for each in requests])
        assert log.total("num_preemptions") > 0
        decisions.append([plan.decisions() for plan in log.plans])
        assert bool(published(log)) == (not params and prefix_cache != "none")
    assert decisions[0] == decisions[1] != decisions[2]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_lanes_decide_the_same_and_publish_the_same(cache: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that only decode are kept in columns: twelve of them here, each third kept out from a position within its output on."""
    logs, lanes = [], []
    take = steady.Lanes.plan
    for fewest in (4, 10**9):
        monkeypatch.setattr(steady, "FEWEST", fewest)
        most: list[int] = []
        monkeypatch.setattr(steady.Lanes, "plan", lambda self, *rest, seen=most: (seen.append(len(self)), take(self, *rest))[1])
        requests = [replace(request(f"r{i}", prompt_of(9 + i % 4, seed=i % 5), 25), cache_until=(None, 0, 21)[i % 3]) for i in range(12)]
        engine, log = make_engine(150, 4, policies(prefix_cache=CACHES[cache]), depth=depth, runner=SimulatedRunner(97))
        serve(engine, requests)
        check_nothing_excluded_is_found(requests, log, 4)
        logs.append(log)
        lanes.append(max(most, default=0))
    assert lanes[0] >= 8
    assert lanes[1] == 0
    assert [plan.decisions() for plan in logs[0].plans] == [plan.decisions() for plan in logs[1].plans]
    assert logs[0].events == logs[1].events
    assert max(map(len, (published(logs[0])[f"r{i}"] for i in (2, 5, 8, 11)))) == 5  # 21 // 4


def test_lpm_waits_for_nobody_who_publishes_nothing() -> None:
    """Three requests with the same 32 tokens and nothing cached. lpm puts off those behind the first, so that they find its blocks; behind
    one that is kept out there would be nothing to find."""
    for first_is_out, order in ((False, ["a", "x", "b"]), (True, ["a", "b", "x"])):
        engine, log = make_engine(60, 16, policies(scheduling="lpm", prefix_cache="hash"))
        same = list(range(40))
        serve(engine, [replace(request("a", same, 1), cache=not first_is_out), request("b", same, 1), request("x", range(50, 90), 1)])
        assert [admitted.request_id for plan in log.plans for admitted in plan.admitted] == order


# ------------------------------------------------------------------------------------------------------- wrong values


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"cache": 1}, "Request 'a': cache = 1 is not allowed: true or false."),
        ({"cache": "no"}, "Request 'a': cache = 'no' is not allowed: true or false."),
        ({"cache": None}, "Request 'a': cache = None is not allowed: true or false."),
        ({"cache_until": -1}, "Request 'a': cache_until = -1 is not allowed: a position in tokens, 0 (nothing may be cached) or more, or"),
        ({"cache_until": True}, "Request 'a': cache_until = True is not allowed: a position in tokens, 0"),
        ({"cache_until": 4.0}, "Request 'a': cache_until = 4.0 is not allowed: a position in tokens, 0"),
        ({"cache_until": "4"}, "Request 'a': cache_until = '4' is not allowed: a position in tokens, 0"),
        ({"cache": False, "cache_until": 4}, "Request 'a': cache = false and cache_until = 4 are two answers to one question: give one"),
    ],
)
def test_a_wrong_value_is_one_sentence_and_changes_nothing(params: dict[str, Any], message: str) -> None:
    engine, log = make_engine(40, 4)
    with pytest.raises(UserError) as error:
        engine.add_request(replace(request("a", range(10)), **params))
    assert str(error.value).startswith(message)
    assert not engine.groups
    assert not log.events


def test_copies_keep_the_fields() -> None:
    assert copy_of(replace(request("a", [1]), cache_until=3)).cache_until == 3
    assert step_bound([request("a", [1])]) > 0
