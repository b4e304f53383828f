"""The recorder: the same frames from memory and from a folder, bounded memory, exact round trips, and disks that refuse."""

import errno
import itertools
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from trace_examples import BLOCKS, OUTCOMES, REQUESTS, STATS, plan, request, stats

from kvlab.trace import RecordConfig, Recorder, read_outcomes, read_plans, store
from kvlab.types import Candidate, Outcome, UserError

ALL = RecordConfig(blocks=True, outcomes=True, plans=True)


class Memory:
    """A runner's measured bytes."""

    kv_bytes_allocated = 4096

    def device_memory(self):
        return (10, 20)


def feed(recorder: Recorder) -> None:
    for step, row in enumerate(STATS):
        recorder.on_step(plan(step), OUTCOMES[step], row)
    for record in REQUESTS:
        recorder.on_request(record)
    if recorder.wants_block_events:
        for event in BLOCKS:
            recorder.on_block(event)


def test_step_rows_and_derived_columns():
    recorder = Recorder(None)
    feed(recorder)
    steps = recorder.steps()
    assert list(steps["step"]) == [0, 1, 2]
    assert list(steps["step_ms"]) == [500, 500, 1000]
    assert list(steps["output_tokens_per_s"]) == [4, 4, 1]
    assert list(steps["prompt_tokens_per_s"]) == [80, 0, 0]
    assert list(steps["kv_cache_usage"]) == [0.4, 0.8, 0.2]  # cached but unheld blocks are not used
    assert list(steps["admission_blocked_by"]) == ["", "watermark", ""]
    assert (steps["kv_blocks_used"] + steps["kv_blocks_evictable"] + steps["kv_blocks_free"] == steps["kv_blocks_total"]).all()
    assert (steps["record_ms"] > 0).all()


def test_overlapping_steps_and_empty_pools_give_no_nonsense():
    recorder = Recorder(None)
    recorder.on_step(plan(0), OUTCOMES[0], stats(0, 0.0, 2.0, num_output_tokens=4, kv_blocks_total=0, kv_blocks_free=0))
    recorder.on_step(plan(1), OUTCOMES[1], stats(1, 1.0, 4.0, num_output_tokens=4))  # planned while step 0 ran: 2 s of its own
    recorder.on_step(plan(2), OUTCOMES[2], stats(2, 4.0, 4.0, num_output_tokens=4))  # a virtual step without length
    steps = recorder.steps()
    assert list(steps["step_ms"]) == [2000, 2000, 0]
    assert list(steps["output_tokens_per_s"])[:2] == [2, 2]
    assert math.isnan(steps["output_tokens_per_s"][2])
    assert steps["kv_cache_usage"][0] == 0


def test_a_step_that_begins_before_the_one_in_the_part_before_it_ended(tmp_path):
    """The same three steps, two in one part file and one in the next: step 2 was planned at 3.5 s and step 1 ended at 4 s."""
    recorder = Recorder(tmp_path, RecordConfig(requests=False), buffer_rows=2)
    for step, (now_s, end_s) in enumerate([(0.0, 2.0), (1.0, 4.0), (3.5, 5.0)]):
        recorder.on_step(plan(step), OUTCOMES[step], stats(step, now_s, end_s))
    assert [path.name for path in store.part_paths(tmp_path, "steps")] == ["steps-00001.parquet"]
    recorder.close()
    assert list(store.read_table(tmp_path, "steps")["step_ms"]) == [2000, 2000, 1000]


def test_the_time_of_recording_is_that_of_a_step_and_the_requests_since_the_last(monkeypatch):
    """A clock that goes on by a second whenever it is read: a step takes one, a request one."""
    seconds = itertools.count()
    monkeypatch.setattr("kvlab.trace.recorder.time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    recorder = Recorder(None)
    recorder.on_step(plan(0), OUTCOMES[0], STATS[0])
    recorder.on_request(REQUESTS[0])
    recorder.on_request(REQUESTS[1])
    recorder.on_step(plan(1), OUTCOMES[1], STATS[1])
    recorder.on_step(plan(2), OUTCOMES[2], STATS[2])
    assert list(recorder.steps()["record_ms"]) == [1000, 3000, 1000]


def test_measured_bytes_are_null_when_not_measured_and_never_in_anothers_column():
    recorder = Recorder(None)
    feed(recorder)
    steps = recorder.steps()
    assert steps[["kv_bytes_allocated", "device_memory_allocated_bytes", "device_memory_reserved_bytes"]].isna().all(axis=None)
    if os.path.exists("/proc/self/statm"):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert steps["process_rss_bytes"].between(10 << 20, peak + (64 << 20)).all()
    recorder = Recorder(None, memory=Memory())
    feed(recorder)
    steps = recorder.steps()
    assert list(steps["kv_bytes_allocated"]) == [4096] * 3
    assert list(steps["device_memory_allocated_bytes"]) == [10] * 3
    assert list(steps["device_memory_reserved_bytes"]) == [20] * 3


def test_request_rows_and_derived_columns():
    recorder = Recorder(None)
    feed(recorder)
    a, b, c, d = (row for _, row in recorder.requests().iterrows())
    assert (a.ttft_s, a.tpot_s, a.itl_mean_s, a.itl_max_s, a.e2el_s, a.queue_time_s) == (0.5, 0.75, 0.75, 1.0, 2.0, 0.25)
    assert a.itl_p99_s == pytest.approx(0.5 + 0.99 * 0.5)  # linear between the two gaps 0.5 and 1.0
    assert (a.span_states, list(a.span_ends_s), a.output_texts) == (["queue", "prefill", "decode"], [1.25, 1.5, 3.0], ["Hi"])
    assert (b.ttft_s, b.session_id, b.turn, b.output_token_ids) == (0.5, "s", 2, [[7], [8]])
    assert math.isnan(b.tpot_s)
    assert math.isnan(b.itl_max_s)
    assert c.finish_reason == "abort"
    assert all(math.isnan(v) for v in (d.ttft_s, d.queue_time_s, d.first_scheduled_s))
    assert pd.isna(d.session_id)
    assert d.detail == "needs 12 blocks, the pool has 10"


@pytest.mark.parametrize("buffer_rows", [1, 2, 4096])
def test_a_folder_holds_the_same_frames_as_memory(tmp_path, buffer_rows):
    """Also where parts were cut between steps that overlap: a derived column looks across the cut."""
    memory = Recorder(None, RecordConfig(blocks=True))
    disk = Recorder(tmp_path, ALL, buffer_rows=buffer_rows)
    feed(memory)
    feed(disk)
    measured = ["record_ms", "process_rss_bytes"]
    for when in ("running", "closed"):
        for table in ("steps", "requests", "blocks"):
            want = getattr(memory, table)().drop(columns=measured, errors="ignore")
            got = getattr(disk, table)() if when == "running" else store.read_table(tmp_path, table)
            pd.testing.assert_frame_equal(got.drop(columns=measured, errors="ignore"), want)
        disk.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "blocks.parquet", "outcomes.parquet", "plans.parquet", "requests.parquet", "steps.parquet",
    ]  # fmt: skip
    assert list(pd.read_parquet(tmp_path / "steps.parquet")["step_ms"]) == [500, 500, 1000]  # readable by pandas alone


def test_without_pyarrow_tables_are_json_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "pq", None)
    memory = Recorder(None)
    disk = Recorder(tmp_path, buffer_rows=2)
    feed(memory)
    feed(disk)
    disk.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["requests.jsonl", "steps.jsonl"]
    pd.testing.assert_frame_equal(store.read_table(tmp_path, "requests"), memory.requests())
    columns = [c for c in memory.steps().columns if c not in ("record_ms", "process_rss_bytes")]
    pd.testing.assert_frame_equal(store.read_table(tmp_path, "steps")[columns], memory.steps()[columns])


def test_flushed_rows_leave_memory(tmp_path):
    recorder = Recorder(tmp_path, buffer_rows=100)
    for step in range(1050):
        recorder.on_step(plan(0), OUTCOMES[0], stats(step, step, step + 1))
    assert sum(len(rows) for rows in recorder._rows.values()) <= 100
    assert len(recorder.steps()) == 1050
    recorder.close()
    assert list(store.read_table(tmp_path, "steps")["step"]) == list(range(1050))


def test_only_what_was_asked_for_is_kept(tmp_path):
    recorder = Recorder(tmp_path, RecordConfig(steps=False, requests=True))
    feed(recorder)
    recorder.close()
    assert [p.name for p in tmp_path.iterdir()] == ["requests.parquet"]
    assert len(recorder.steps()) == 0
    assert not recorder.wants_block_events


# ------------------------------------------------------------------ outcomes and plans


def test_outcomes_and_plans_come_back_exactly(tmp_path):
    with Recorder(tmp_path, ALL) as recorder:
        feed(recorder)
    back = list(read_outcomes(tmp_path))
    assert [r.outcome for r in back] == list(OUTCOMES)
    assert [(r.now_s, r.end_s) for r in back] == [(1.0, 1.5), (1.5, 2.0), (2.0, 3.0)]
    assert back[0].seq_ids == (7, 8)
    assert back[0].num_new_tokens == (1, 2)
    assert list(read_plans(tmp_path)) == [plan(step).decisions() for step in range(3)]


def test_floats_are_exact(tmp_path):
    values = (0.1 + 0.2, 1e-323, -1.7976931348623157e308, np.nextafter(1.0, 2.0).item())
    with Recorder(tmp_path, ALL) as recorder:
        for step, value in enumerate(values):
            candidates = {3: (Candidate(1, value), Candidate(2, float("-inf")))}
            recorder.on_step(plan(0), Outcome(step, (), candidates=candidates, execute_s=value), STATS[0]._replace(end_s=value))
    back = list(read_outcomes(tmp_path))
    assert [r.outcome.execute_s for r in back] == list(values)
    assert [r.end_s for r in back] == list(values)
    assert [r.outcome.candidates[3][0].logprob for r in back] == list(values)


@pytest.mark.parametrize("pyarrow", [True, False])
def test_outcomes_and_plans_of_a_running_or_killed_run_are_readable(tmp_path, monkeypatch, pyarrow):
    if not pyarrow:
        monkeypatch.setattr(store, "pq", None)
    recorder = Recorder(tmp_path, ALL, buffer_rows=1)
    feed(recorder)  # each step is written by the next one
    assert [r.outcome for r in read_outcomes(tmp_path)] == list(OUTCOMES[:2])
    assert [d[0] for d in read_plans(tmp_path)] == [0, 1]
    recorder.close()
    assert [r.outcome for r in read_outcomes(tmp_path)] == list(OUTCOMES)


def test_outcomes_that_are_missing_or_damaged_are_a_users_error(tmp_path):
    with pytest.raises(UserError, match=r"record\.outcomes=true"):
        list(read_outcomes(tmp_path))
    with pytest.raises(UserError, match=r"record\.plans=true"):
        list(read_plans(tmp_path))
    with Recorder(tmp_path, ALL) as recorder:
        feed(recorder)
    path = tmp_path / "outcomes.parquet"
    twice = pd.read_parquet(path).iloc[[0, 1, 1, 2]]
    twice.to_parquet(path)
    with pytest.raises(UserError, match=r"holds the outcome of step 1 after that of step 1\."):
        list(read_outcomes(tmp_path))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"outcomes\.parquet can't be read"):
        list(read_outcomes(tmp_path))


# ------------------------------------------------------------------ disks that refuse, runs that die


def test_a_folder_that_cant_be_written_fails_before_work_starts(tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(UserError, match="file"):
        Recorder(tmp_path / "file")


def test_a_folder_with_another_runs_records_is_refused(tmp_path):
    with Recorder(tmp_path) as recorder:
        feed(recorder)
    with pytest.raises(UserError, match="another run"):
        Recorder(tmp_path)


def test_a_full_disk_in_mid_run_is_one_clear_error_and_loses_nothing_written(tmp_path):
    """A real refusal by the system: the process may not make files larger than 128 KiB, and a part grows past that."""
    script = textwrap.dedent(
        f"""
        import resource, sys
        sys.path[:0] = {[str(p) for p in Path(__file__).parents[:2]]!r}
        from pathlib import Path
        from kvlab.trace import Recorder
        from kvlab.types import UserError
        from trace_examples import OUTCOMES, STATS, plan, request
        resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, 128 << 10))
        recorder = Recorder(Path({str(tmp_path)!r}), buffer_rows=50)
        for step in range(50):
            recorder.on_step(plan(0), OUTCOMES[0], STATS[0]._replace(step=step))
        recorder.on_step(plan(0), OUTCOMES[0], STATS[0]._replace(step=50))
        recorder.on_request(request("big", 0.0, tuple(i * 0.7371 ** 0.5 for i in range(200_000))))
        try:
            recorder.flush()
        except UserError as error:
            print(error)
            recorder.close()
            sys.exit(3)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 3, done.stderr
    assert "No space left to write" in done.stdout
    assert str(tmp_path) in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert len(store.read_table(tmp_path, "steps")) == 51
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_disk_that_fills_up_at_the_end_leaves_the_parts(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, buffer_rows=1)
    feed(recorder)
    recorder.flush()

    def refuse(source, destination):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "replace", refuse)
    with pytest.raises(UserError, match=r"No space left to write .*steps\.parquet"):
        recorder.close()
    assert list(store.read_table(tmp_path, "steps")["step"]) == [0, 1, 2]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_killed_process_leaves_what_it_had(tmp_path):
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        sys.path[:0] = {[str(p) for p in Path(__file__).parents[:2]]!r}
        from pathlib import Path
        from kvlab.trace import RecordConfig, Recorder
        from trace_examples import OUTCOMES, STATS, plan
        recorder = Recorder(Path({str(tmp_path)!r}), RecordConfig(outcomes=True), buffer_rows=10)
        for step in range(25):
            recorder.on_step(plan(0), OUTCOMES[0]._replace(step=step), STATS[0]._replace(step=step))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(store.read_table(tmp_path, "steps")["step"]) == list(range(20))
    assert [r.outcome.step for r in read_outcomes(tmp_path)] == list(range(24))  # long rows are kept a sixteenth as long


def test_damaged_parts_are_noted_and_the_others_read(tmp_path):
    recorder = Recorder(tmp_path, buffer_rows=1)
    feed(recorder)
    recorder.flush()
    (tmp_path / ".parts" / "steps-00002.parquet").write_bytes(b"PAR1 not really")
    notes: list[str] = []
    assert list(store.read_table(tmp_path, "steps", notes.append)["step"]) == [0, 2]
    assert len(notes) == 1
    assert notes[0].startswith("steps-00002.parquet is damaged")
    with pytest.raises(UserError, match="steps-00002"):
        store.read_table(tmp_path, "steps")


def test_many_tokens_and_unicode_round_trip(tmp_path):
    records = [request(f"r{i}", 0.0, tuple(float(t) for t in range(i)), texts=("héé 日本 🙂\n\x00",)) for i in range(300)]
    with Recorder(tmp_path, buffer_rows=64) as recorder:
        for step, record in enumerate(records):
            recorder.on_request(record)
            recorder.on_step(plan(0), OUTCOMES[0], stats(step, step, step))
    back = store.read_table(tmp_path, "requests")
    assert [len(t) for t in back["token_times_s"]] == list(range(300))
    assert set(back["output_texts"].str[0]) == {"héé 日本 🙂\n\x00"}
    assert list(back["output_token_ids"][5]) == [[0, 1, 2, 3, 4]]
