"""kvlab.replay as a callable, warm-up, sweeps in several processes, and what the command line writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import kvlab
from kvlab.policies.eviction import Lru
from kvlab.replay import Sweep, replay, sweep
from kvlab.replay.__main__ import main
from kvlab.types import KvlabError, Now, UserError

REQUESTS = [[1, 2], [1, 3], [4, 2], [1, 2]]


class Wild(Lru):
    """Evicts what isn't there."""

    def victim(self, now: Now) -> int:
        return 99


class Broken(Lru):
    """Has a fault of its own."""

    def victim(self, now: Now) -> int:
        raise KeyError("oh")


def test_the_module_can_be_called() -> None:
    result = kvlab.replay(REQUESTS, eviction="lru", capacity=3)
    assert (result.object_hits, result.prefix_hits) == (2, 1)
    assert kvlab.replay.replay(REQUESTS, "lru", 3).evicted == result.evicted
    assert kvlab.replay.AccessTrace.__name__ == "AccessTrace"


@pytest.mark.slow
def test_the_module_can_be_called_in_a_process_that_imported_kvlab_only() -> None:
    command = "import kvlab; r = kvlab.replay([[1], [1]]); from kvlab.replay import replay; print(r.object_hits, replay([[1]]).requests)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split() == ["1", "1"]


def test_a_warm_up_is_in_no_figure() -> None:
    """Hits by request are 0, 1, 0, 1 of 2 blocks each; unbroken ones 0, 1, 0, 0."""
    result = replay(REQUESTS, "lru", 3, warmup=1)
    assert (result.warmup, result.requests, result.accesses, result.object_hits, result.prefix_hits) == (1, 3, 6, 2, 1)
    assert (result.request_hit_rate, result.request_hit_rate_any) == (pytest.approx(1 / 6), pytest.approx(1 / 3))
    assert result.object_hits_per_request.tolist() == [0, 1, 0, 1]
    assert replay(REQUESTS, "lru", 3, warmup=0.5).row()["warmup_requests"] == 2
    assert result.with_warmup(0).object_hit_rate == 0.25
    assert list(result.frame["is_warmup"]) == [True, False, False, False]
    for warmup, message in [(4, "leaves none of the 4"), (-1, "not allowed"), (1.0, "not allowed"), (float("nan"), "not allowed")]:
        with pytest.raises(UserError, match=message):
            replay(REQUESTS, "lru", 3, warmup=warmup)


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_results_come_in_the_order_asked_for(jobs: int) -> None:
    requests = [[number * 7 % 40] for number in range(400)]
    done = sweep(requests, ["lru", "fifo", Lru()], [10, 0.5, "5"], jobs=jobs)
    assert [(result.policy, result.capacity) for result in done] == [
        (policy, capacity) for policy in ("lru", "fifo", "Lru") for capacity in (10, 20, 5)
    ]
    assert done[0].evicted == replay(requests, "lru", 10).evicted
    assert list(done.frame["capacity_blocks"]) == [10, 20, 5] * 3
    assert isinstance(done, Sweep)
    assert (len(done), done.failures) == (9, ())


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_names_the_policy(jobs: int) -> None:
    with pytest.raises(KvlabError, match=r"eviction=Wild capacity=1: eviction policy Wild made an illegal decision: evict block 99"):
        sweep(REQUESTS, ["lru", Wild], 1, jobs=jobs)
    with pytest.raises(KvlabError, match=r"eviction=Broken capacity=1: KeyError: 'oh'\nTraceback"):
        sweep(REQUESTS, ["lru", Broken], 1, jobs=jobs)
    done = sweep(REQUESTS, [Wild, "lru"], 1, jobs=jobs, keep_going=True)
    assert [result.policy for result in done] == ["lru"]
    assert [failure.policy for failure in done.failures] == ["Wild"]


def test_wrong_points_end_a_sweep_before_the_trace_is_read() -> None:
    for arguments, message in [
        ({"eviction": ["lru", "lrru"]}, "Did you mean 'lru'"),
        ({"capacity": [1, 0]}, "capacity = 0 is not allowed"),
        ({"capacity": []}, "at least one eviction policy and one capacity"),
    ]:
        with pytest.raises(UserError, match=message):
            sweep("no/such/file", **arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="jobs = 0 is not allowed"):
        sweep(REQUESTS, "lru", 3, jobs=0)


def test_semantics_engine_in_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 32, "hash_ids": [1, 2]}\n' * 3, encoding="utf-8")
    done = sweep(path, ["lru", "fifo"], 50, "engine", jobs=2)
    assert [result.prefix_hits_per_request.tolist() for result in done] == [[0, 1, 1], [0, 1, 1]]


def test_rows_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "words.txt"
    trace.write_text("a\nb\na\nc\na\nb\n", encoding="utf-8")
    out = tmp_path / "deep" / "hits.csv"
    assert main([str(trace), "eviction=lru,fifo", "capacity=2", "warmup=1", "jobs=2", f"out={out}"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0] == "words.txt: 5 requests, 5 blocks; semantics access, after a warm-up of 1 requests"
    assert text[1].startswith("hit rates: per block of any place, and in unbroken runs from a prompt's start (prefix)")
    frame = pd.read_csv(out)
    assert list(frame["policy"]) == ["lru", "fifo"]
    assert list(frame["object_hits"]) == [2, 1]
    assert list(frame["warmup_requests"]) == [1, 1]
    assert main([str(trace), "curve=true", f"out={tmp_path / 'curve.parquet'}"]) == 0
    assert [line.split()[1:4] for line in capsys.readouterr().out.splitlines()[3:-1]] == [["1", "0", "0"], ["2", "2", "2"], ["3", "3", "3"]]
    assert list(pd.read_parquet(tmp_path / "curve.parquet")["object_hits"]) == [0, 2, 3]


def test_all_policies_and_the_public_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(f'{{"hash_ids": [{number % 5}, {number % 5 + 10}], "input_length": 1000}}\n' for number in range(40)),
        encoding="utf-8",
    )
    assert main([str(trace), "eviction=all", "capacity=4"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:]]
    assert {"lru", "fifo", "lfu", "random"} <= set(names)
    assert names == sorted(names)
    assert main(["--list"]) == 0
    assert "mooncake_conversation" in capsys.readouterr().out
