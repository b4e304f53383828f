"""Input that nobody should give: a clear error, never a traceback, a hang or a silent repair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvlab
from kvlab.cache.pool import MAX_BLOCKS
from kvlab.engine.config import EngineConfig
from kvlab.policies.eviction import Clock, Fifo
from kvlab.policies.registry import list_policies
from kvlab.replay import AccessTrace, Served, replay
from kvlab.types import BlockView, Now, Request, SamplingParams, UserError

SMALL = ("runner=simulated", "model=tiny", "workload=synthetic", "workload.num_requests=4", "workload.prompt_len=8",
         "workload.output_len=4")  # fmt: skip


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (None, "trace = None is not allowed: a path, a trace's name"),
        (5, "trace = 5 is not allowed"),
        ([[[1]]], "block ids of the types list: whole numbers, or texts, or bytes"),
        ([[1, "1"]], "block ids of the types int, str"),
        ([[1, 1.0]], "block ids of the types float, int"),
        ([[True]], "block ids of the types bool"),
        ([[None]], "block ids of the types NoneType"),
    ],
)
def test_a_trace_that_is_none(trace: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replay(trace)


def test_ids_of_an_access_trace_are_of_one_kind_too() -> None:
    with pytest.raises(UserError, match="The trace mine has block ids of the types int, str"):
        AccessTrace("mine", [[1], ["1"]], [0.0, 0.0])


def test_ids_with_leading_zeros_are_other_ids(tmp_path: Path) -> None:
    """007 and 7 are two blocks; a file of numbers alone is numbers."""
    (tmp_path / "texts.txt").write_text("007\n7\n007\n", encoding="utf-8")
    (tmp_path / "numbers.txt").write_text("70\n7\n70\n", encoding="utf-8")
    for name in ("texts", "numbers"):
        result = replay(tmp_path / f"{name}.txt", capacity=1)
        assert (result.row()["object_hits"], result.evicted[0]) == (0, b"007" if name == "texts" else b"70")


@pytest.mark.parametrize("policy", [row.name for row in list_policies("eviction")])
def test_a_cache_larger_than_any_trace_evicts_nothing(policy: str) -> None:
    """Some policies set a byte a block aside."""
    result = replay([[1, 2], [1, 2, 3]], policy, 10**30)
    assert (result.capacity, result.row()["object_hits"], result.evicted) == (10**30, 2, ())


def test_a_pool_has_an_upper_limit() -> None:
    served = Served(Request("a", [1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0)), [1])
    with pytest.raises(UserError, match=f"{10**30} blocks are not allowed in a pool: 33,554,432 at most"):
        replay([served], "lru", 10**30, "engine")
    with pytest.raises(UserError, match=f"{MAX_BLOCKS + 1} blocks are not allowed"):
        kvlab.run(kvlab.compose(*SMALL, f"num_blocks={MAX_BLOCKS + 1}"), progress=False)


def test_a_pool_that_holds_no_block_is_not_made_larger() -> None:
    with pytest.raises(UserError, match="kv_cache_tokens = 31 holds no block of 32 tokens"):
        kvlab.run(kvlab.compose(*SMALL, "kv_cache_tokens=31", "block_size=32"), progress=False)


def test_true_is_no_number_of_blocks() -> None:
    with pytest.raises(UserError, match="num_cpu_blocks = True is not allowed"):
        EngineConfig(num_blocks=4, num_cpu_blocks=True)


def test_an_object_that_has_served_is_replayed_as_new() -> None:
    """Its metadata are those of another cache: block 5 is not in this one."""
    for policy in (Fifo(), Clock()):
        policy.bind(8)
        block: BlockView = BLOCK(5)
        policy.insert(block, Now(0, 0.0))
        policy.release(block, Now(0, 0.0), False)
        assert replay([[1], [2], [1]], policy, 1).evicted == (b"1", b"2")


class BLOCK:
    """A block of another cache."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.num_tokens, self.content, self.parent = block_id, 16, b"x", None
        self.depth = self.num_hits = self.ref_count = 0
        self.inserted_tick = self.counted_tick = self.used_tick = 0
        self.inserted_s = self.used_s = 0.0


MOONCAKE = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output_length": 10**30}, "line 2: output length 1000000000000000000000000000000 is no length"),
        ({"timestamp": 10**400}, "line 2: timestamp = 1000.* is not allowed"),
    ],
)
def test_numbers_that_no_array_holds(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    (tmp_path / "m.jsonl").write_text(json.dumps(MOONCAKE) + "\n" + json.dumps(MOONCAKE | changed) + "\n", encoding="utf-8")
    for semantics in ("access", "engine"):
        with pytest.raises(UserError, match=message):
            replay(tmp_path / "m.jsonl", semantics=semantics)


def test_json_that_is_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(json.dumps(MOONCAKE) + "\n" + "[" * 200_000 + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 2: broken JSON"):
        replay(tmp_path / "m.jsonl")


@pytest.mark.parametrize("value", ["1000000000000000000000000000000", "-1000000000000000000000000000000"])
def test_lengths_of_csv_files_that_no_array_holds(tmp_path: Path, value: str) -> None:
    azure = tmp_path / "a.csv"
    azure.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.680000,{value},5\n", encoding="utf-8")
    burst = tmp_path / "b.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    burst.write_text(f"{header}\n5,ChatGPT,{value},18,490,Conversation log\n", encoding="utf-8")
    for path in (azure, burst):
        with pytest.raises(UserError, match=rf"line 2: (ContextTokens|Request tokens) = {value} is (no length|negative)"):
            replay(path)


@pytest.mark.parametrize("command", [["kvlab.policies", "--long"], ["kvlab.trace"]])
def test_a_reader_may_stop_reading(command: list[str]) -> None:
    """As `| head -1` does: no traceback, and the exit code of a program that SIGPIPE ended."""
    process = subprocess.Popen([sys.executable, "-u", "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
