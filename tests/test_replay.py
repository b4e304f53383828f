"""kvlab.replay: cases by hand, inputs that are wrong, and the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.policies.eviction import Fifo, Lru, Random
from kvlab.replay import AccessTrace, replay
from kvlab.replay.__main__ import main
from kvlab.types import BlockView, IllegalDecision, Now, UserError


def test_hit_rates_by_hand() -> None:
    """Capacity 3, LRU. [1,2]: two misses. [1,3]: hit, miss. [4,2]: 4 evicts 2 (used before 1 and 3), then 2 evicts 1. [1,2]: miss
    (evicts 3), hit. A hit that follows a miss in its request is an object hit only.
    """
    result = replay([[1, 2], [1, 3], [4, 2], [1, 2]], "lru", capacity=3)
    assert list(result.num_blocks_per_request) == [2, 2, 2, 2]
    assert list(result.object_hits_per_request) == [0, 1, 0, 1]
    assert list(result.prefix_hits_per_request) == [0, 1, 0, 0]
    assert result.evicted == (b"2", b"1", b"3")
    assert (result.requests, result.accesses, result.object_hits, result.prefix_hits) == (4, 8, 2, 1)
    assert (result.object_hit_rate, result.prefix_hit_rate, result.request_hit_rate) == (0.25, 0.125, 0.125)
    assert result.token_hit_rate is None


def test_hit_rates_of_a_policy_that_hears_events_by_hand() -> None:
    """Capacity 3, FIFO. [1 2]: misses. [1 3]: hit, miss. [4 2]: 4 takes the place of 1; 2 is there, behind a miss. [1 2]: 1 for 2, then 2
    for 3; there are 4 1 2. [1 9 2 8]: hit; 9 for 4; 2 is there, behind a miss; 8 for 1. [5]: for 2."""
    result = replay([[1, 2], [1, 3], [4, 2], [1, 2], [1, 9, 2, 8], [5]], "fifo", capacity=3)
    assert list(result.object_hits_per_request) == [0, 1, 1, 0, 2, 0]
    assert list(result.prefix_hits_per_request) == [0, 1, 0, 0, 1, 0]
    assert result.evicted == (b"1", b"2", b"3", b"4", b"1", b"2")
    later = result.with_warmup(4)
    assert (later.requests, later.object_hits, later.prefix_hits, later.accesses) == (2, 2, 1, 5)


def test_what_a_block_says_of_times_and_of_the_block_before_it() -> None:
    """[7 8] at 1 s, [7 9] at 5 s, [6] at 8 s: 7 was used at 5 s, came in at 1 s; 9 continues 7, which was found; 6 begins a request, in
    the place of 8."""
    heard: list[tuple[Any, ...]] = []

    class Spy(Fifo):
        def insert(self, block: BlockView, now: Now) -> None:
            heard.append(("insert", block.content, block.parent, block.depth, block.inserted_s, block.used_s))

        def hit(self, block: BlockView, now: Now) -> None:
            heard.append(("hit", block.content, block.parent, block.depth, block.inserted_s, block.used_s))
            super().hit(block, now)

        def key(self, block: BlockView) -> tuple[float, ...]:
            return (block.content != b"8", block.inserted_tick)

    trace = AccessTrace("t", [[7, 8], [7, 9], [6]], [1.0, 5.0, 8.0])
    replay(trace, Spy, capacity=3)
    assert heard == [
        ("insert", b"7", None, 0, 1.0, 1.0),
        ("insert", b"8", b"7", 1, 1.0, 1.0),
        ("hit", b"7", None, 0, 1.0, 5.0),
        ("insert", b"9", b"7", 1, 5.0, 5.0),
        ("insert", b"6", None, 0, 8.0, 8.0),
    ]


def test_token_and_request_rates_differ_from_block_rates(tmp_path: Path) -> None:
    """512-token blocks. 700 tokens in [1,2]; 700 in [1,2] again (all 700 found); 600 in [1,3] (512 found); 512 in [9]."""
    path = tmp_path / "trace.jsonl"
    rows = [(0, 700, [1, 2]), (500, 700, [1, 2]), (900, 600, [1, 3]), (1000, 512, [9])]
    lines = [json.dumps({"timestamp": t, "input_length": n, "hash_ids": ids}) + "\n" for t, n, ids in rows]
    path.write_text("".join(lines), encoding="utf-8")
    result = replay(path, "lru", capacity=10)
    assert list(result.prefix_hits_per_request) == [0, 2, 1, 0]
    assert result.hit_tokens_per_request is not None
    assert list(result.hit_tokens_per_request) == [0, 700, 512, 0]
    assert result.token_hit_rate == 1212 / 2512
    assert result.prefix_hit_rate == 3 / 7
    assert result.request_hit_rate == (0 + 1 + 0.5 + 0) / 4
    row = result.row()
    assert (row["token_hit_rate_prefix"], row["block_hit_rate_prefix"], row["block_hit_rate_any"]) == (1212 / 2512, 3 / 7, 3 / 7)
    assert (row["request_hit_rate_prefix"], row["request_hit_rate_any"], row["warmup_requests"]) == (0.375, 0.375, 0)


def test_the_policy_hears_the_events_of_the_engine() -> None:
    """Capacity 1; accesses 7 (at 0 s), 7, 8: each event with what the block's record says at that moment."""
    heard: list[tuple[Any, ...]] = []

    class Spy(Lru):
        def insert(self, block: BlockView, now: Now) -> None:
            heard.append(("insert", block.content, block.parent, block.depth, block.ref_count, block.num_hits, block.used_tick))

        def hit(self, block: BlockView, now: Now) -> None:
            heard.append(("hit", block.content, block.ref_count, block.num_hits, block.counted_tick, block.used_tick, now))
            super().hit(block, now)

        def release(self, block: BlockView, now: Now, preempted: bool) -> None:
            heard.append(("release", block.content, block.ref_count, block.counted_tick, block.used_tick, preempted))
            super().release(block, now, preempted)

        def evict(self, block: BlockView, now: Now) -> None:
            heard.append(("evict", block.content, block.inserted_tick))
            super().evict(block, now)

    result = replay([[7], [7, 8]], Spy, capacity=1)
    assert heard == [
        ("insert", b"7", None, 0, 1, 0, 1),
        ("release", b"7", 0, 1, 2, False),
        ("hit", b"7", 1, 1, 3, 3, Now(1, 0.0)),
        ("release", b"7", 0, 3, 4, False),
        ("evict", b"7", 1),
        ("insert", b"8", b"7", 1, 1, 0, 5),
        ("release", b"8", 0, 5, 6, False),
    ]
    assert result.policy == "Spy"


def test_an_object_can_be_replayed_again_and_a_share_is_a_capacity() -> None:
    policy = Random(seed=1)
    requests = [[number % 40] for number in range(400)]
    first = replay(requests, policy, 10)
    assert replay(requests, policy, 10).evicted == first.evicted
    assert replay(requests, policy, 0.25).evicted == first.evicted  # a quarter of 40 distinct blocks
    assert replay(requests, Fifo(), 0.001).capacity == 1
    assert replay(requests, "lru", 10, limit=25).requests == 25


def test_no_eviction_while_there_is_room() -> None:
    result = replay([[1, 2, 3], [1, 2, 3]], "lru", capacity=3)
    assert (result.object_hits, result.evicted) == (3, ())
    assert np.array_equal(result.prefix_hits_per_request, [0, 3])


@pytest.mark.parametrize("capacity", [0, -5, 1.0, 0.0, 2.5, True, "0", "1.5", "many", float("nan"), None])
def test_a_wrong_capacity_is_refused(capacity: Any) -> None:
    with pytest.raises(UserError, match="is not allowed: blocks"):
        replay([[1]], "lru", capacity)


def test_unknown_names_are_refused_before_the_trace_is_read() -> None:
    with pytest.raises(UserError, match="Did you mean 'lru'"):
        replay("no/such/file", "lrru", 3)
    with pytest.raises(UserError, match="Unknown semantics 'acess'. Did you mean 'access'"):
        replay("no/such/file", "lru", 3, semantics="acess")
    with pytest.raises(UserError, match="is not allowed: a name such as"):
        replay([[1]], 5, 3)  # type: ignore[arg-type]


def test_an_illegal_victim_is_reported_with_the_policys_name() -> None:
    class Wild(Lru):
        def victim(self, now: Now) -> int:
            return 99

    with pytest.raises(IllegalDecision, match="eviction policy Wild made an illegal decision: evict block 99. Allowed"):
        replay([[1], [2]], Wild, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hash_ids": [1]}\n{"hash_ids": [1}\n', r"line 2: broken JSON .* column 16"),
        ('{"hash_ids": [1]}\n\n{"timestamp": 3}\n', r"line 3: the field 'hash_ids' is missing"),
        ('{"hash_ids": [1]}\n[1, 2]\n', r"line 2: a JSON object is expected, not list"),
        ('{"hash_ids": [1, "a"]}\n', r"line 1: hash_ids must be a list of whole numbers >= 0"),
        ('{"hash_ids": [1, true]}\n', r"line 1: hash_ids must be a list of whole numbers >= 0"),
        ('{"hash_ids": 7}\n', r"line 1: hash_ids must be a list of whole numbers >= 0"),
        ('{"hash_ids": [1], "timestamp": "now"}\n', r"line 1: timestamp = 'now' is not allowed: milliseconds"),
        ('{"hash_ids": [1], "input_length": -1}\n', r"line 1: input length -1 is negative"),
        ('{"hash_ids": [1], "input_length": 513}\n', r"line 1: 1 hash_ids for 513 input tokens; there must be one per 512 tokens"),
        ('{"hash_ids": [1, 2], "input_length": 32}\n', r"The ids fit blocks of 16 tokens: say trace_block_tokens=16 if that"),
        (
            '{"hash_ids": [1], "input_length": 32}\n{"hash_ids": [1, 2], "input_length": 32}\n',
            r"line 2: .* They fit blocks of 16 tokens: one trace can't mix block sizes",
        ),
        ('{"hash_ids": [1], "input_length": 9}\n{"hash_ids": [1]}\n', r"line 2: no input_length, unlike the rows before"),
        ('{"hash_ids": [1]}\n{"hash_ids": [1], "input_length": 9}\n', r"line 2: an input_length, unlike the rows before"),
        ("when,what\n5,6\n", r"'when,what' is no header of a known CSV format"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", r"is a Git LFS pointer"),
        ("5\n6\n7 8\n", r"line 3: '7 8' is not one block id"),
        ("\n\n", r"holds no requests"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        replay(path, "lru", 3)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no trace '.*missing.jsonl'"):
        replay(tmp_path / "missing.jsonl", "lru", 3)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"hash_ids": [1]}\n' * 200)[:-12])
    with pytest.raises(UserError, match="damaged gzip data"):
        replay(cut, "lru", 3)
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_text('{"hash_ids": [1]}\n', encoding="utf-8")
    with pytest.raises(UserError, match="damaged gzip data"):
        replay(plain, "lru", 3)
    with pytest.raises(UserError, match="The trace requests holds no requests"):
        replay([], "lru", 3)
    with pytest.raises(UserError, match=r"single accesses: \[\[1\], \[2\]\]"):
        replay([1, 2], "lru", 3)  # type: ignore[list-item]
    with pytest.raises(UserError, match="Each request of a trace is a sequence of block ids"):
        replay(["ab", "c"], "lru", 3)
    with pytest.raises(UserError, match="limit = 0"):
        replay([[1]], "lru", 3, limit=0)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "words.txt"
    path.write_text("a\nb\na\nc\na\nb\n", encoding="utf-8")
    assert main([str(path), "eviction=lru,fifo", "capacity=2,0.99"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "words.txt: 6 requests, 6 blocks; semantics access, no warm-up left out"
    # LRU: a, b, hit a, c evicts b, hit a, b. FIFO: a, b, hit a, c evicts a, a evicts b, b evicts c. 0.99 of 3 distinct: 2 blocks.
    assert [line.split()[:4] for line in lines[3:]] == [
        ["lru", "2", "2", "2"], ["lru", "2", "2", "2"], ["fifo", "2", "1", "1"], ["fifo", "2", "1", "1"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace.txt", "eviction=lrru"], "Did you mean 'lru'"),
        (["trace.txt", "policy=lru"], "Unknown option 'policy'"),
        (["trace.txt", "capacity=many"], "capacity = 'many' is not allowed: blocks"),
        (["trace.txt", "capacity=0"], "capacity = '0' is not allowed"),
        (["one.txt", "two.txt"], "One trace is needed, 2 were given"),
        (["missing.txt"], "There is no trace 'missing.txt'"),
        (["trace.txt", "semantics=engin"], "Did you mean 'engine'"),
        (["trace.txt", "block_size=16"], "block_size has no effect on trace.txt, a trace of the format accesses"),
        (["trace.txt", "block_tokens=16"], "block_tokens has no effect with semantics access"),
        (["trace.txt", "warmup=-1"], "warmup = -1 is not allowed"),
        (["trace.txt", "warmup=1"], "warmup = 1 leaves none of the 1 requests"),
        (["trace.txt", "jobs=0"], "jobs = 0 is not allowed"),
        (["trace.txt", "jobs=1.5"], "jobs = '1.5' is not a whole number"),
        (["trace.txt", "limit=x"], "limit = 'x' is not a number"),
        (["trace.txt", "curve=yes"], "curve = 'yes' is not allowed: true or false"),
        (["trace.txt", "curve=true", "capacity=3"], "capacity has no effect with curve=true"),
        (["trace.txt", "curve=true", "eviction=fifo"], "curve=true is for eviction=lru"),
        (["trace.txt", "out=hits.xlsx"], "a file called .csv or .parquet"),
        (["trace.txt", "capacity=8GiB"], "bytes need a model"),
        (["trace.txt", "capacity=8GiB", "model=llama9"], "Unknown model 'llama9'"),
        (["trace.txt", "capacity=100tok"], "this trace has no lengths"),
        (["trace.txt", "semantics=engine", "block_size=0"], "block_size = 0 is not allowed"),
        (["trace.txt", "semantics=engine", "capacity=0.5"], "semantics engine takes blocks (an integer)"),
        (["trace.txt", "semantics=engine"], "Semantics engine needs lengths and tokens"),
    ],
)
def test_command_line_errors_are_one_message(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.txt").write_text("1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
