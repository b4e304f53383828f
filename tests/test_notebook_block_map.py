"""The block map against the engine's own pool: a listener copies the pool after each step, and the map must show just that.

The run is recorded as any other (events and plans, to a folder) and read back; nothing of the copy goes into the map.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import Log, make_engine, policies, prompt_of, request, run_to_end

from kvlab.notebook import block_map
from kvlab.notebook.block_log import CACHED, FREE, RESERVED, SHARED, SWAPPED, USED
from kvlab.notebook.packing import pack, unpack
from kvlab.policies.compression import Streaming, Window
from kvlab.results import Run
from kvlab.trace import RecordConfig, Recorder
from kvlab.types import BlockEvent, Outcome, Plan, RequestRecord, StepStats, UserError

BLOCK = 4


class Copies(Log):
    """Hands everything to a recorder and keeps, for each step, what the pools and tables hold."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.engine: Any = None
        self.refs: list[list[int]] = []
        self.is_free: list[list[bool]] = []
        self.contents: list[list[str]] = []
        self.cpu_used: list[list[bool]] = []
        self.fills: list[dict[int, int]] = []
        self.holders: list[dict[int, list[str]]] = []

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        super().on_step(plan, outcome, stats)
        self.recorder.on_step(plan, outcome, stats)
        kv = self.engine.kv
        self.refs.append([b.ref_count for b in kv.pool.blocks])
        self.is_free.append([b in kv.pool.free for b in range(kv.pool.num_blocks)])
        self.contents.append([b.content.hex() for b in kv.pool.blocks])
        self.cpu_used.append([b not in kv.cpu_pool.free for b in range(kv.cpu_pool.num_blocks)])
        fills: dict[int, int] = {}
        holders: dict[int, list[str]] = {}
        for seq in self.engine.sequences.values():
            if seq.table is None or seq.group.status != "running":
                continue
            filled = seq.num_computed - seq.table.num_dropped_blocks * BLOCK
            for i, block_id in enumerate(seq.table.block_ids):
                fills[block_id] = max(fills.get(block_id, 0), max(0, min(BLOCK, filled - i * BLOCK)))
                holders.setdefault(block_id, []).append(seq.group.request_id)
        fills |= {destination: 0 for _, _, destination in kv.pending_copies}  # copied in the next step, empty until then
        self.fills.append(fills)
        self.holders.append(holders)

    def on_request(self, record: RequestRecord) -> None:
        super().on_request(record)
        self.recorder.on_request(record)

    def on_block(self, event: BlockEvent) -> None:
        super().on_block(event)
        if self.recorder.wants_block_events:
            self.recorder.on_block(event)


def recorded(folder: Path, num_blocks: int, requests: list[Any], policy_set: Any, record: RecordConfig | None = None,
             **limits: Any) -> tuple[Run, Copies]:  # fmt: skip
    """Serve requests; the run read back from its folder, and the copies."""
    with Recorder(folder, record or RecordConfig(blocks=True, plans=True), buffer_rows=64) as recorder:
        log = Copies(recorder)
        engine, _ = make_engine(num_blocks, BLOCK, policy_set, log=log, **limits)
        log.engine = engine
        for each in requests:
            engine.add_request(each)
        run_to_end(engine, 2000)
    config = {"block_size": BLOCK, "num_blocks": num_blocks, "num_cpu_blocks": limits.get("num_cpu_blocks", 0)}
    return Run("test", folder=folder, config=config), log


def stems(num: int, length: int, **sampling: Any) -> list[Any]:
    """Requests in three families that begin alike."""
    return [request(f"r{i}", prompt_of(9, i % 3) + prompt_of(length + i % 4, 10 + i), 7 + i % 5, **sampling) for i in range(num)]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any], set[str]]] = {
    "forks and swap": ({"mode": "swap", "prefix_cache": "hash"}, {"num_cpu_blocks": 60}, stems(9, 5, n=3, temperature=1.0),
                       {"share", "unshare", "copy", "swap_out", "swap_in", "publish", "hit", "evict"}),
    "beams": ({"prefix_cache": "hash"}, {}, stems(5, 6, beam_width=3), {"share", "unshare", "copy", "evict"}),
    "radix": ({"prefix_cache": "radix"}, {}, [*(request(f"twin{i}", prompt_of(11, 50), 5) for i in range(2)), *stems(14, 6)],
              {"share", "hit", "release", "evict", "free"}),
    "window": ({"prefix_cache": "none", "compression": "window"}, {}, [request(f"r{i}", prompt_of(9, i), 40) for i in range(4)],
               {"drop"}),
    "streaming": ({"prefix_cache": "none", "compression": "streaming"}, {}, [request(f"r{i}", prompt_of(9, i), 40) for i in range(4)],
                  {"drop"}),
    "pow2 regions": ({"layout": "contiguous_pow2", "prefix_cache": "none"}, {}, stems(7, 6, n=2, temperature=1.0), {"allocate", "free"}),
    "ring": ({"layout": "ring", "prefix_cache": "none"}, {}, stems(10, 6), {"hit", "release"}),
}  # fmt: skip


def seams_of(name: str) -> Any:
    seams = dict(CASES[name][0])
    if "compression" in seams:
        seams["compression"] = {"window": Window(12), "streaming": Streaming(3, 9)}[seams["compression"]]
    return policies(**seams)


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_what_the_pool_was(name, tmp_path):
    _, limits, requests, kinds = CASES[name]
    run, log = recorded(tmp_path, 26, requests, seams_of(name), max_num_batched_tokens=24, **limits)
    assert kinds <= {e.kind for e in log.events}, "the mechanism did not fire: this case proves nothing"
    shown = block_map(run)
    assert shown.message == ""
    assert shown.num_steps == len(log.stats)
    gpu = shown.events.tiers["gpu"]
    for step in range(len(log.stats)):
        refs, is_free = np.array(log.refs[step]), np.array(log.is_free[step])
        expected = np.where(is_free, FREE, np.where(refs > 1, SHARED, np.where(refs == 1, USED, CACHED)))
        assert gpu.states([step])[0].tolist() == expected.tolist(), step
        assert gpu.ref_counts(step).tolist() == refs.tolist(), step
        fills = gpu.fills(step)
        assert {b: int(fills[b]) for b in log.fills[step]} == log.fills[step], step
        if "cpu" in shown.events.tiers:
            assert (shown.states(step, "cpu") == SWAPPED).tolist() == log.cpu_used[step], step


def test_owners_are_those_of_the_tables(tmp_path):
    _, limits, requests, _ = CASES["forks and swap"]
    run, log = recorded(tmp_path, 26, requests, seams_of("forks and swap"), max_num_batched_tokens=24, **limits)
    shown = block_map(run)
    names = shown.events.requests
    most = 0
    for step in range(0, len(log.stats), 3):
        for block_id, holders in log.holders[step].items():
            found = [names[i] for i in shown.events.tiers["gpu"].holders(block_id, step)]
            assert sorted(found) == sorted(holders), (step, block_id)
            most = max(most, len(set(found)))
    assert most > 1  # some block was held by several requests


def test_the_watermark_is_drawn_on_the_highest_free_blocks(tmp_path):
    run, log = recorded(tmp_path, 40, stems(4, 5), policies(admission="watermark"), max_num_batched_tokens=24)
    shown = block_map(run)
    shown.watermark[:] = 3
    for step in range(shown.num_steps):
        free = np.flatnonzero(log.is_free[step])
        assert np.flatnonzero(shown.states(step) == RESERVED).tolist() == free[-3:].tolist()


def test_what_the_browser_gets_is_what_was_recorded(tmp_path):
    run, log = recorded(tmp_path, 26, stems(9, 5), policies(prefix_cache="hash"), max_num_batched_tokens=24)
    shown = block_map(run, step=4, color_by="owner")
    data = unpack(shown.data, shown.meta["layout"])
    gpu = [e for e in log.events if e.tier == "gpu"]
    assert data["gpu_block"].tolist() == [e.block_id for e in gpu]
    assert data["gpu_ref_count"].tolist() == [e.ref_count for e in gpu]
    assert [shown.meta["requests"][i] for i in data["gpu_request"]] == [e.request_id for e in gpu]
    assert data["gpu_content"].tolist() == [int(e.content[:8] or "0", 16) for e in gpu]
    starts = data["gpu_starts"].tolist()
    assert [starts[s + 1] - starts[s] for s in range(shown.num_steps)] == [sum(e.step == s for e in gpu) for s in range(shown.num_steps)]
    assert data["running"].tolist() == [s.num_running_reqs for s in log.stats]
    assert (shown.step, shown.color_by) == (4, "owner")
    json.dumps(shown.meta, allow_nan=False)


def test_step_stays_within_the_run_and_widgets_of_a_run_move_together(tmp_path):
    run, _ = recorded(tmp_path, 26, stems(5, 5), policies(), max_num_batched_tokens=24)
    first, second = block_map(run), block_map(tmp_path)
    first.step = 3
    assert second.step == 3
    second.step = 10_000
    assert first.step == second.step == first.num_steps - 1
    other = block_map(recorded_again(tmp_path / "other"))
    first.step = 0
    assert other.step != 0 or other.channel != first.channel
    assert other.channel != first.channel


def recorded_again(folder: Path) -> Run:
    folder.mkdir()
    return recorded(folder, 26, stems(5, 5), policies(), max_num_batched_tokens=24)[0]


def test_figure_shows_the_same_states(tmp_path):
    run, _ = recorded(tmp_path, 26, stems(9, 5), policies(), max_num_batched_tokens=24)
    shown = block_map(run)
    heat = shown.figure().data[0]
    assert np.asarray(heat.z).shape == (26, shown.num_steps)
    for step in (0, 5, shown.num_steps - 1):
        assert np.asarray(heat.z)[:, step].tolist() == shown.states(step).tolist()
    grids = shown.figure(steps=[0, 5])
    cells = np.asarray(grids.data[1].z).ravel()[:26]
    assert cells.tolist() == shown.states(5).tolist()
    with pytest.raises(UserError, match=r"no step 99999: this run has steps 0 to"):
        shown.figure(steps=[99999])


# ---------------------------------------------------------------------------------------- bad input


def test_a_run_without_block_events_says_how_to_get_them(tmp_path):
    run, _ = recorded(tmp_path, 26, stems(3, 5), policies(), RecordConfig())
    shown = block_map(run)
    assert "record.blocks=true" in shown.message
    assert "record.blocks=true" in shown.figure().layout.annotations[0].text
    with pytest.raises(UserError, match="block events"):
        shown.states(0)


def test_without_plans_tokens_are_unknown_and_the_widget_says_so(tmp_path):
    run, _ = recorded(tmp_path, 26, stems(3, 5), policies(), RecordConfig(blocks=True))
    assert "record.plans=true" in " ".join(block_map(run).meta["notes"])


@pytest.mark.parametrize(("what", "words"), [("missing", "is not a folder"), ("empty", "folder (empty)"), ("foreign", "folder (foreign)")])
def test_what_is_no_run_is_said_in_words(what, words, tmp_path):
    folder = tmp_path / what
    if what != "missing":
        folder.mkdir()
    if what == "foreign":
        (folder / "notes.txt").write_text("hello", encoding="utf-8")
    assert words in block_map(folder).message


def test_a_damaged_file_is_said_in_words(tmp_path):
    recorded(tmp_path, 26, stems(3, 5), policies())
    (tmp_path / "blocks.parquet").write_bytes(b"PAR1 nonsense")
    assert block_map(tmp_path).message.startswith("blocks.parquet is damaged: ")


def test_a_half_written_run_shows_what_is_there(tmp_path):
    recorder = Recorder(tmp_path, RecordConfig(blocks=True, plans=True), buffer_rows=16)
    log = Copies(recorder)
    engine, _ = make_engine(26, BLOCK, policies(), log=log, max_num_batched_tokens=24)
    log.engine = engine
    for each in stems(5, 5):
        engine.add_request(each)
    for _ in range(8):
        engine.step()
    recorder.flush()  # and no close(): the process was killed
    shown = block_map(tmp_path)
    assert shown.num_steps == 8
    refs = np.array(log.refs[7])
    assert ((shown.states(7) == USED) | (shown.states(7) == SHARED)).tolist() == (refs > 0).tolist()
    assert "partial" in " ".join(shown.meta["notes"])


def test_an_older_run_without_parents_is_shown(tmp_path):
    import pandas as pd

    recorded(tmp_path, 26, stems(5, 5), policies())
    path = tmp_path / "blocks.parquet"
    pd.read_parquet(path).drop(columns="parent").to_parquet(path)
    shown = block_map(tmp_path)
    assert shown.message == ""
    assert "older version" in " ".join(shown.meta["notes"])


def test_wrong_arguments():
    with pytest.raises(UserError, match="not int"):
        block_map(42)
    with pytest.raises(UserError, match="'state' or 'owner'"):
        block_map("x", color_by="mood")


def test_packing_round_trip():
    arrays = {"a": np.arange(5, dtype=np.uint8), "b": np.array([1.5, np.nan]), "c": np.zeros(0, dtype=np.uint32)}
    data, layout = pack(arrays)
    assert layout == {"a": ["uint8", 0, 5], "b": ["float64", 8, 2], "c": ["uint32", 24, 0]}
    back = unpack(data, layout)
    assert back["a"].tolist() == [0, 1, 2, 3, 4]
    assert back["b"][0] == 1.5
    assert np.isnan(back["b"][1])
    assert len(back["c"]) == 0
