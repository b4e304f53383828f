"""A real run replayed: with its tokens and its clock the scheduler decides the same, step for step. Beside the simulator too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from engine_support import Log, request
from equality_support import modes, recording, tiny, tiny_engine

import kvlab
from kvlab.engine.driver import drive
from kvlab.trace.plans import read_plans
from kvlab.types import Request, UserError
from kvlab.workload import FixedWorkload, WorkloadContext

EOS = 257

REAL = [
    "model=tiny", "threads=1", "workload=multi_turn", "workload.num_sessions=20", "workload.turns=2", "workload.think_s=0.02",
    "workload.prompt_len=20", "workload.turn_len=6", "workload.output_len=24",
    "workload.prefix={depth: 1, branching: 2, tokens_per_node: 12}", "workload.arrivals.rate=200", "workload.ignore_eos=false",
    "workload.sampling={n: 4, temperature: 1.5, stop: [e, t, a]}", "workload.abort={fraction: 0.3, after_s: 0.01}",
    "preemption/mode=swap", "num_cpu_blocks=24", "num_blocks=70", "block_size=4", "max_num_batched_tokens=48", "max_num_seqs=40",
    "record.outcomes=true", "record.plans=true", "record.blocks=true",
]  # fmt: skip
"""Everything that could make a replay go astray. The swap space is too small for everybody, so some are recomputed."""


def check_everything_happened(log: Log) -> None:
    """Ends of every kind, both ways of preemption, sharing, eviction, later turns."""
    records = log.records.values()
    ends = [(tokens[-1] if tokens else None, reason) for record in records for tokens, reason in record.outputs]
    assert any(reason == "stop" and token == EOS for token, reason in ends), "no end of text"
    assert any(reason == "stop" and token != EOS for token, reason in ends), "no stop string"
    assert any(reason == "length" for _, reason in ends)
    assert any(record.finish_reason == "abort" for record in records)
    assert any(record.turn == 1 for record in records)
    assert all(len(record.outputs) == 4 for record in records if record.finish_reason != "abort")
    assert set(modes(log)) == {"swap", "recompute"}
    for column in ("cow_copies", "prefix_cache_hits", "num_evicted_blocks", "swapped_in_blocks", "recomputed_tokens"):
        assert log.total(column) > 0, column


@pytest.mark.parametrize("concurrency", [None, 8], ids=["open loop", "closed loop"])
def test_a_real_run_replayed_decides_the_same(tmp_path: Path, concurrency: int | None) -> None:
    config = [*REAL, f"workload.concurrency={concurrency or 'null'}"]
    real, again = Log(), Log()
    first = kvlab.run(kvlab.compose(*config), folder=tmp_path / "real", listeners=[real], progress=False)
    check_everything_happened(real)
    second = kvlab.run(kvlab.compose(*config, "runner=recorded", f"run={tmp_path / 'real'}"), folder=tmp_path / "again",
                       listeners=[again], progress=False)  # fmt: skip
    assert [plan.decisions() for plan in real.plans] == [plan.decisions() for plan in again.plans]
    assert [plan.now_s for plan in real.plans] == [plan.now_s for plan in again.plans]
    assert list(read_plans(tmp_path / "real")) == list(read_plans(tmp_path / "again"))
    pd.testing.assert_frame_equal(first.requests(), second.requests())
    pd.testing.assert_frame_equal(first.blocks(), second.blocks())
    measured = ["schedule_ms", "execute_ms", "commit_ms", "record_ms", "process_rss_bytes", "kv_bytes_allocated"]
    pd.testing.assert_frame_equal(first.steps().drop(columns=measured), second.steps().drop(columns=measured))


def test_a_run_with_prompts_that_are_kept_out_of_the_cache_replayed(tmp_path: Path) -> None:
    """Blocks of 4. Four prompts of 13 tokens three times over, one request at a time: a is cached, b is not, c is until position 9, d
    begins as a does and is kept out itself. The requests table says from where on."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_token_ids": list(range(first, first + 13)), **more}
            for first, more in ((0, {}), (20, {"cache": False}), (40, {"cache_until": 9}), (0, {"cache": False}))]  # fmt: skip
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = ["model=tiny", "threads=1", "workload=prompts", f"workload.path={prompts}", "workload.repeat=3", "workload.concurrency=1",
              "workload.sampling={max_tokens: 4}", "block_size=4", "num_blocks=40", "record.outcomes=true",
              "record.plans=true"]  # fmt: skip
    first = kvlab.run(kvlab.compose(*config), folder=tmp_path / "real", progress=False)
    second = kvlab.run(kvlab.compose(*config, "runner=recorded", f"run={tmp_path / 'real'}"), folder=tmp_path / "again", progress=False)
    simulated = kvlab.run(kvlab.compose(*config, "runner=simulated"), folder=tmp_path / "simulated", progress=False)
    assert list(read_plans(tmp_path / "real")) == list(read_plans(tmp_path / "again"))
    for run in (first, second, simulated):
        requests = run.requests()
        assert requests["num_cached_tokens"].tolist() == [0, 0, 0, 12, 12, 0, 8, 12, 12, 0, 8, 12]
        assert [None if pd.isna(until) else until for until in requests["cache_until"]] == [None, 0, 9, 0] * 3
    pd.testing.assert_frame_equal(first.requests(), second.requests())


def pretend(folder: Path, change: str) -> None:
    """Edit a recording's configuration, so that only its plans show that it was another run."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    path, value = change.split("=")
    node = config
    for key in path.split(".")[:-1]:
        node = node[key]
    node[path.split(".")[-1]] = int(value)
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["block_size=8"], ["block_size = 8 (recorded: 4)"]),
        (["eviction=fifo", "seed=1"], ["eviction._target_ = 'kvlab.policies.eviction.fifo.Fifo' (recorded: ", "; seed = 1 (recorded: 0)"]),
        (["preemption/mode=swap"], ["preemption.mode._target_ ="]),
        (["workload.output_len=20"], ["workload.output_len = 20 (recorded: 12)"]),
        (["num_blocks=null", "kv_cache_tokens=80"], ["kv_cache_tokens = 80 (recorded: 4096)"]),
    ],
)  # fmt: skip
def test_a_replay_with_another_configuration_is_refused_before_it_starts(tmp_path: Path, changes: list[str], named: list[str]) -> None:
    """With an ample pool another block size or eviction policy would run through and look like the recorded run."""
    base = ["model=tiny", "threads=1", "workload=synthetic", "workload.num_requests=2", "workload.arrivals.kind=all_at_once",
            "workload.prompt_len=8", "workload.output_len=12", "block_size=4", "num_blocks=40", "record.outcomes=true"]  # fmt: skip
    kvlab.run(kvlab.compose(*base), folder=tmp_path / "real", progress=False)
    replay = ["runner=recorded", f"run={tmp_path / 'real'}"]
    with pytest.raises(UserError, match="configured otherwise") as found:
        kvlab.run(kvlab.compose(*base, *changes, *replay), folder=tmp_path / "again", progress=False)
    assert all(text in str(found.value) for text in named), found.value
    kvlab.run(kvlab.compose(*base, "threads=2", "num_blocks=null", "record.plans=true", *replay), folder=tmp_path / "same", progress=False)
    by_object = kvlab.run(kvlab.compose(*base, *replay), folder=tmp_path / "object", eviction="lru", progress=False)
    assert by_object.summary["num_finished"] == 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("max_num_batched_tokens=17", r"Step 0 of this replay schedules sequences \(0, 1, 2\) with \(8, 8, 1\) tokens, .* had "
                                      r"\(0, 1, 2, 3\) with \(8, 8, 8, 8\)"),
        ("num_blocks=6", r"Step \d+ of this replay schedules sequences"),
        ("workload.num_requests=5", r"Step \d+ of this replay schedules sequences"),
        ("workload.output_len=20", r"has \d+ steps and this replay needs more"),
    ],
)  # fmt: skip
def test_a_replay_of_something_else_says_where_it_differs(tmp_path: Path, change: str, what: str) -> None:
    base = ["model=tiny", "threads=1", "workload=synthetic", "workload.num_requests=4", "workload.arrivals.kind=all_at_once",
            "workload.prompt_len=8", "workload.output_len=12", "block_size=4", "num_blocks=40", "max_num_batched_tokens=64",
            "record.outcomes=true"]  # fmt: skip
    kvlab.run(kvlab.compose(*base), folder=tmp_path / "real", progress=False)
    pretend(tmp_path / "real", change)
    log = Log()
    with pytest.raises(UserError, match=what) as found:
        kvlab.run(kvlab.compose(*base, change, "runner=recorded", f"run={tmp_path / 'real'}"), folder=tmp_path / "again", listeners=[log],
                  progress=False)  # fmt: skip
    assert "the configuration, the workload or a policy's code differs" in str(found.value)
    step = re.match(r"Step (\d+)", str(found.value))
    if step is not None:
        assert len(log.plans) == int(step.group(1))  # nothing of the step that differs was made up


# ------------------------------------------------- ends outside a step: times that both clocks know


def fixed(requests: list[Request], runner: Any = None, clock: Any = None) -> Log:
    engine, log = tiny_engine(40, 4, loaded=tiny(torch.float32), runner=runner, clock=clock, max_model_len=600)
    workload = FixedWorkload(requests)
    workload.start(WorkloadContext(tiny().tokenizer, 320, 600, 0, ()))
    drive(engine, workload)
    return log


def leaving(name: str, length: int, max_tokens: int, arrival_s: float, abort_at_s: float | None = None) -> Request:
    made = request(name, [7] * length, max_tokens, arrival_s)
    made.abort_at_s = abort_at_s
    return made


FIRST, LATER = leaving("first", 5, 3, 0.0), leaving("later", 5, 4, 0.1)
GONE_AT_ONCE, TOO_LONG = leaving("gone", 5, 100, 0.05, 0.05), leaving("long", 500, 10, 0.05)


@pytest.mark.parametrize(
    ("requests", "reasons"),
    [
        ([leaving("first", 5, 120, 0.0, 0.01), LATER], {"first": "abort", "later": "length"}),
        ([leaving("first", 5, 120, 0.0, 0.01)], {"first": "abort"}),
        ([FIRST, GONE_AT_ONCE, LATER], {"first": "length", "gone": "abort", "later": "length"}),
        ([FIRST, GONE_AT_ONCE], {"first": "length", "gone": "abort"}),
        ([FIRST, TOO_LONG, LATER], {"first": "length", "long": "refused", "later": "length"}),
        ([FIRST, TOO_LONG], {"first": "length", "long": "refused"}),
    ],
    ids=["abort, idle, work", "abort, end", "gone at once, work", "gone at once, end", "refused, work", "refused, end"],
)
def test_what_ends_outside_a_step_ends_at_the_same_time_in_a_replay(requests: list[Request], reasons: dict[str, str]) -> None:
    real = fixed(requests)
    runner = recording(real)
    again = fixed(requests, runner, runner.clock())
    assert {name: record.finish_reason for name, record in real.records.items()} == reasons
    assert [plan.decisions() for plan in real.plans] == [plan.decisions() for plan in again.plans]
    assert real.records == again.records


# ------------------------------------------------------------------------------ the simulator

SIMULATED = [
    "model=tiny", "threads=1", "workload=shared_prefix", "workload.num_requests=16", "workload.arrivals.kind=all_at_once",
    "workload.prompt_len={kind: uniform, min: 3, max: 30}", "workload.output_len={kind: uniform, min: 2, max: 25}",
    "workload.prefix={depth: 2, branching: 2, tokens_per_node: 9}", "workload.ignore_eos=true", "num_blocks=30", "block_size=5",
    "max_num_batched_tokens=40", "cost_model=constant", "record.plans=true", "watermark=0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("choices", "must_happen"),
    [
        (["prefix_cache=none"], ["num_preemptions", "recomputed_tokens"]),
        (["prefix_cache=none", "preemption/mode=swap", "num_cpu_blocks=100"], ["num_preemptions", "swapped_in_blocks"]),
        (["prefix_cache=none", "batching=walkthrough", "preemption=least_computed"], ["num_preemptions"]),
        # Swap, for a group that is recomputed shares again what its samples have in common, and that depends on their tokens.
        (["prefix_cache=none", "scheduling=sjf", "batching=prefill_first", "workload.sampling={n: 3, temperature: 1.0}",
          "preemption/mode=swap", "num_cpu_blocks=200"], ["num_preemptions", "cow_copies", "swapped_in_blocks"]),
        # Blocks of prompts alone are ever found: what was said after them is hashed, kept and evicted, but never asked for.
        (["prefix_cache=hash", "num_blocks=60"], ["prefix_cache_hits", "num_evicted_blocks"]),
    ],
    ids=["recompute", "swap", "walkthrough", "samples", "hash"],
)  # fmt: skip
def test_the_simulator_decides_as_the_real_run_does(tmp_path: Path, choices: list[str], must_happen: list[str]) -> None:
    logs = {"torch": Log(), "simulated": Log()}
    for runner, log in logs.items():
        kvlab.run(kvlab.compose(*SIMULATED, *choices, f"runner={runner}"), folder=tmp_path / runner, listeners=[log], progress=False)
    real, simulated = logs.values()
    for column in must_happen:
        assert real.total(column) > 0, column
    assert any(len(plan.scheduled) > 1 for plan in real.plans)
    assert [plan.decisions() for plan in real.plans] == [plan.decisions() for plan in simulated.plans]
    assert list(read_plans(tmp_path / "torch")) == list(read_plans(tmp_path / "simulated"))
    assert len({record.outputs for record in real.records.values()} & {record.outputs for record in simulated.records.values()}) == 0
