"""Run folders that are damaged, half-written, of another version or none at all: every widget says so in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kvlab
from kvlab.notebook import block_map, prefix_tree, timeline
from kvlab.notebook.explorer_plot import curves
from kvlab.results import Run
from kvlab.types import UserError

WIDGETS = (block_map, timeline, prefix_tree)
TABLES = ("steps", "requests", "blocks")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Eight prompts with common beginnings through 24 blocks: preempted, cached, all of it recorded."""
    config = kvlab.compose("runner=simulated", "model=tiny", "cost_model=cpu", "kv_cache_tokens=null", "workload=shared_prefix",
                           "workload.num_requests=8", "workload.arrivals.rate=150", "num_blocks=48", "record.blocks=true",
                           "record.plans=true")  # fmt: skip
    folder = tmp_path_factory.mktemp("bad") / "good"
    kvlab.run(config, folder=folder, progress=False)
    return folder


@pytest.fixture
def copied(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def shown(folder: Path) -> dict[str, str]:
    """What each widget says, and that its static figure can be drawn: its message, else its notes."""
    said = {}
    for widget in WIDGETS:
        made = widget(folder)
        assert made.figure().layout.height > 0
        said[widget.__name__] = made.message or "; ".join(made.meta["notes"])
    said["explain"] = kvlab.explain(folder).text
    return said


def test_what_is_no_run_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, words in (("nowhere", "is not a folder"), ("file", "is not a folder"), ("empty", "is not a run's folder")):
        for widget in WIDGETS:
            assert words in widget(tmp_path / name).message, (name, widget)
    for value in (3, None, [Run("a")], pd.DataFrame()):
        for widget in (*WIDGETS, kvlab.explain):
            with pytest.raises(UserError, match="run"):
                widget(value)


@pytest.mark.parametrize("table", TABLES)
def test_a_torn_file_is_named(copied, table):
    file = copied / f"{table}.parquet"
    file.write_bytes(file.read_bytes()[:100])
    said = shown(copied)
    of = {"steps": "timeline", "requests": "timeline", "blocks": "block_map"}[table]
    assert said[of].startswith(f"{table}.parquet is damaged")
    if table != "blocks":
        assert f"{table}.parquet is damaged" in said["explain"]


@pytest.mark.parametrize("table", TABLES)
def test_columns_that_another_version_lacks_or_means_otherwise(copied, table):
    """Each column in turn missing or of text: something is shown or said, nothing raised."""
    whole = pd.read_parquet(copied / f"{table}.parquet")
    spans = [c for c in whole if c.startswith("span_")]
    for column in [*spans, *[c for c in whole if c not in spans][::7]]:
        for other in (None, "x"):
            frame = whole.drop(columns=column) if other is None else whole.assign(**{column: other})
            frame.to_parquet(copied / f"{table}.parquet")
            assert not any("Error" in text for text in shown(copied).values()), column


def test_a_list_column_that_holds_text_is_named(copied):
    requests = pd.read_parquet(copied / "requests.parquet").assign(span_starts_s="x")
    requests.to_parquet(copied / "requests.parquet")
    run = Run.load(copied)
    assert run.requests().empty
    assert any("span_starts_s holds" in note and "not lists" in note for note in run.notes)
    requests.drop(columns="span_starts_s").to_parquet(copied / "requests.parquet")
    starts = Run.load(copied).requests()["span_starts_s"]
    assert len(starts) == 8
    assert all(isinstance(cell, np.ndarray) and cell.shape == (0,) for cell in starts)


@pytest.mark.parametrize("content", ["", "[1, 2]", "{[: nonsense", "block_size: many\nnum_blocks: -3\neviction: 7\n"])
def test_a_configuration_that_says_nothing(copied, content):
    (copied / "config.yaml").write_text(content)
    assert block_map(copied).events is not None
    assert "Chunks of a prefill" in shown(copied)["timeline"]  # they need the block size


def test_a_run_that_was_killed_is_shown_as_far_as_it_got(good, tmp_path):
    """As it lies there before its tables are merged: a status that says running, of a process that is gone."""
    from kvlab.trace.store import PARTS

    folder = Path(shutil.copytree(good, tmp_path / "killed"))
    (folder / PARTS).mkdir()
    for table in (*TABLES, "plans"):
        (folder / f"{table}.parquet").rename(folder / PARTS / f"{table}-00001.parquet")
    (folder / PARTS / "steps-00002.parquet").write_bytes(b"PAR1 torn")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "state": "running", "pid": 2**30}))
    (folder / "summary.json").unlink()
    said = shown(folder)
    assert "This run is killed" in said["block_map"]
    assert "steps-00002.parquet is damaged" in said["block_map"]
    assert "what it had recorded is shown" in said["block_map"]
    assert block_map(folder).num_steps == block_map(good).num_steps


def test_the_explorers_curves_name_what_is_missing(copied):
    run = Run.load(copied)
    with pytest.raises(UserError, match="no column watermark_blocks"):
        curves(run.steps().drop(columns="watermark_blocks"), run.requests())
    with pytest.raises(UserError, match="no column token_times_s"):
        curves(run.steps(), run.requests().drop(columns="token_times_s"))
