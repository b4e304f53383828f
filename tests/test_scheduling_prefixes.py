"""lpm and dfs_weight: orders of a queue over a cache, worked out by hand, and what putting off saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_support import make_engine, policies, prompt_of, reference_outputs, request, run_to_end

from kvlab.policies.registry import by_name
from kvlab.policies.scheduling import DfsWeight, Lpm
from kvlab.types import Now, UserError

NOW = Now(0, 0.0)


class Cache:
    """Prompts are words, a letter is a block of 16 tokens; some beginnings are cached."""

    block_size = 16

    def __init__(self, *cached: str) -> None:
        self.cached = {word[: i + 1] for word in cached for i in range(len(word))}

    def keys(self, group: Any) -> list[bytes]:
        return [group.request_id[: i + 1].encode() for i in range(len(group.request_id))]

    def num_cached_tokens(self, group: Any) -> int:
        return 16 * sum(group.request_id[: i + 1] in self.cached for i in range(len(group.request_id)))


def ordered(policy: Any, cache: Any, *words: str) -> list[str]:
    """The queue of requests with these words, in order of arrival."""
    waiting = [SimpleNamespace(group_id=i, request_id=word, arrival_s=float(i), num_cacheable_tokens=10**9) for i, word in enumerate(words)]
    return [group.request_id for group in policy.order(waiting, cache, NOW)]


# -------------------------------------------------------------------------------------------------------- order


def test_lpm_longest_cached_prefix_first_then_arrival() -> None:
    """xyz 48 tokens; abc, abd 32 (put off? both begin with 32 tokens that are cached: only the first may go, as in SGLang); q none."""
    assert ordered(Lpm(check_tokens=-1), Cache("ab", "xyz"), "q", "abc", "xyz", "abd") == ["xyz", "abc", "abd", "q"]
    assert ordered(Lpm(), Cache("ab", "xyz"), "q", "abc", "xyz", "abd") == ["xyz", "abc", "q", "abd"]
    assert ordered(Lpm(check_tokens=31), Cache("ab", "xyz"), "q", "abc", "xyz", "abd") == ["xyz", "abc", "abd", "q"]


def test_who_shares_an_uncached_beginning_waits_for_the_first() -> None:
    """Nothing is cached. abc, abd and abe share 32 tokens, ax shares 16 with them; k and kk nothing that is long enough."""
    words = ("abc", "abd", "ax", "abe", "k", "kk")
    for policy in (Lpm(), DfsWeight()):
        assert ordered(policy, Cache(), *words) == ["abc", "ax", "k", "kk", "abd", "abe"]
        assert ordered(type(policy)(check_tokens=-1), Cache(), *words) == list(words)
        assert ordered(type(policy)(defer_tokens=16), Cache(), *words) == ["abc", "k", "abd", "ax", "abe", "kk"]
        assert ordered(type(policy)(defer_tokens=33), Cache(), *words) == list(words)  # three blocks alike: nobody


def test_who_is_put_off_puts_nobody_off_and_who_has_enough_cached_is_not_looked_at() -> None:
    """xyza and xyzb have 48 tokens cached: they are neither put off nor in anybody's way."""
    assert ordered(Lpm(), Cache("xyz"), "xyza", "xyzb", "xyzc") == ["xyza", "xyzb", "xyzc"]


def test_with_more_than_max_waiting_lpm_is_fcfs() -> None:
    cache = Cache("zz")
    words = [f"q{i}" for i in range(127)]
    assert ordered(Lpm(), cache, *words, "zz")[0] == "zz"  # 128 wait
    assert ordered(Lpm(), cache, *words, "w", "zz") == [*words, "w", "zz"]
    assert ordered(Lpm(max_waiting=1), cache, "w", "zz") == ["w", "zz"]


def test_dfs_weight_goes_branch_by_branch() -> None:
    """Cached: ab, ac, d. Weights: a 5 = ab 3 + ac 1 + one that matches a alone; d 2; two match nothing.

    Depth first, the heavier child first, a node's own after its children: ab's three, ac's, a's own, d's, then the two.
    """
    words = ("q", "d1", "a1", "ab1", "ac1", "d2", "ab2", "r", "ab3")
    wanted = ["ab1", "ab2", "ab3", "ac1", "a1", "d1", "d2", "q", "r"]
    assert ordered(DfsWeight(check_tokens=-1), Cache("ab", "ac", "d"), *words) == wanted
    # lpm has no branches: 32 tokens, then 16, then none, each in order of arrival.
    assert ordered(Lpm(check_tokens=-1), Cache("ab", "ac", "d"), *words) == ["ab1", "ac1", "ab2", "ab3", "d1", "a1", "d2", "q", "r"]


def test_dfs_weight_follows_thousands_of_blocks() -> None:
    long = "a" * 3000
    assert ordered(DfsWeight(), Cache(long), "b", long + "x", long + "y") == [long + "x", long + "y", "b"]


@pytest.mark.parametrize("name", ["lpm", "dfs_weight"])
@pytest.mark.parametrize("parameters", [{"check_tokens": -2}, {"defer_tokens": 0}, {"defer_tokens": 1.5}])
def test_a_parameter_out_of_range(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(parameters))} = .* is not allowed: a whole number, at least"):
        by_name("scheduling", name, **parameters)


# ------------------------------------------------------------------------------------------------- in the engine


@pytest.mark.parametrize("name", ["lpm", "dfs_weight"])
def test_putting_off_computes_a_shared_beginning_once(name: str) -> None:
    """Four requests begin with the same 64 tokens, two step places: fcfs computes them twice at once, lpm and dfs_weight once.

    Blocks of 16, steps of 200 tokens: two prompts of 70 fit into the first. fcfs: 2 * 70 + 2 * 6 = 152 prompt tokens. Put off:
    70 + 3 * 6 = 88.
    """
    shared = prompt_of(64, 1)
    requests = [request(f"r{i}", shared + prompt_of(6, 10 + i), 3) for i in range(4)]
    computed = {}
    for scheduling in ("fcfs", name):
        engine, log = make_engine(60, 16, policies(scheduling=scheduling), max_num_batched_tokens=140, max_num_seqs=2)
        engine.add_request(requests[0])
        engine.add_request(requests[1])
        engine.add_request(request("other", prompt_of(70, 2), 3))
        for each in requests[2:]:
            engine.add_request(each)
        run_to_end(engine, 60)
        computed[scheduling] = log.total("num_prompt_tokens_computed") - 70
        assert {r.request_id: log.outputs[r.request_id] for r in requests} == reference_outputs(requests)
    assert computed == {"fcfs": 152, name: 88}


def test_without_a_prefix_cache_all_are_equal() -> None:
    for scheduling in ("lpm", "dfs_weight"):
        engine, log = make_engine(60, 16, policies(scheduling=scheduling, prefix_cache="none"), max_num_seqs=1)
        for number, arrival in enumerate((3.0, 1.0, 2.0)):
            engine.add_request(request(f"r{number}", [*prompt_of(64, 1), number], 1, arrival))
        run_to_end(engine, 20)
        assert list(log.records) == ["r1", "r2", "r0"]
