"""Run folders that are damaged, half-written, of another version or none at all: every widget says so in words."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kvlab
from kvlab.notebook import block_map, prefix_tree, sweep_explorer, timeline
from kvlab.notebook.explorer_plot import curves
from kvlab.results import Run, load_runs
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
    (tmp_path / "file").write_text("x", encoding="utf-8")
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
    (copied / "config.yaml").write_text(content, encoding="utf-8")
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
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    (folder / "status.json").write_text(json.dumps({**status, "state": "running", "pid": 2**30}), encoding="utf-8")
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


# ------------------------------------------------- every file x everything that may befall it x every door

FILES = ("steps.parquet", "requests.parquet", "blocks.parquet", "plans.parquet", "config.yaml", "status.json", "summary.json")
MISHAPS = {
    "deleted": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "torn": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "garbled": lambda file: file.write_bytes(bytes(b ^ 0x5A if i % 97 > 40 else b for i, b in enumerate(file.read_bytes()))),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "of null": lambda file: file.write_text("null", encoding="utf-8"),
}
TABLE_MISHAPS = {
    "no rows": lambda frame: frame.iloc[:0],
    "other columns": lambda frame: frame.rename(columns=lambda name: f"x_{name}"),
    "text": lambda frame: frame.assign(**dict.fromkeys(frame, "x")),
    "null": lambda frame: frame.assign(**dict.fromkeys(frame)),
    "negative": lambda frame: frame.assign(**{c: -5 for c in frame if pd.api.types.is_integer_dtype(frame[c])}),
    "huge": lambda frame: frame.assign(**{c: 2**62 for c in frame if pd.api.types.is_integer_dtype(frame[c])}),
    "infinite": lambda frame: frame.assign(**{c: math.inf for c in frame if pd.api.types.is_numeric_dtype(frame[c])}),
}
JSON_MISHAPS = {
    "other types": '{"state": {"a": 1}, "error": 7, "pid": "x", "num_steps": "x", "mean_ttft_ms": [1], "num_refused": "some"}',
    "a list": "[1, 2]",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    config = kvlab.compose("runner=simulated", "model=tiny", "cost_model=cpu", "kv_cache_tokens=null", "workload=synthetic",
                           "workload.num_requests=3", "workload.arrivals.kind=all_at_once", "workload.arrivals.rate=null",
                           "workload.prompt_len=20", "workload.output_len=4", "num_blocks=8", "record.blocks=true",
                           "record.plans=true")  # fmt: skip
    return kvlab.run(config, folder=tmp_path_factory.mktemp("fuzz") / "small", progress=False).folder


@pytest.fixture(scope="module")
def pinning():
    explorer = sweep_explorer(workloads={"one": ("workload=synthetic", "workload.num_requests=1")}, num_blocks=64)
    explorer.toggle_frame()
    yield explorer
    explorer.close()


def befallen(small: Path, folder: Path, name: str):
    """(what happened, the folder after it), one mishap after the other."""
    mishaps = dict(MISHAPS)
    if name.endswith(".parquet"):
        whole = pd.read_parquet(small / name)
        mishaps |= {what: lambda file, change=change: change(whole).to_parquet(file) for what, change in TABLE_MISHAPS.items()}
    else:
        mishaps |= {what: lambda file, text=text: file.write_text(text, encoding="utf-8") for what, text in JSON_MISHAPS.items()}
    for what, befall in mishaps.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(small, folder)
        befall(folder / name)
        yield what, folder


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", FILES)
def test_whatever_befalls_a_file_nothing_but_words_comes_of_it(small, tmp_path, pinning, name):
    for what, folder in befallen(small, tmp_path / "run", name):
        runs = load_runs(folder)
        assert len(runs.frame) == len(runs) == 1, what
        assert repr(runs[0]), what
        texts = [kvlab.explain(folder).text]
        for widget in WIDGETS:
            made = widget(folder)
            assert made.message or made.num_steps > 0, what
            assert made.figure().layout.height > 0, what
            texts += [made.message, *made.meta.get("notes", [])]
        for pair in ((small, folder), (folder, small)):
            try:
                texts.append(str(kvlab.compare(*pair)))
            except UserError as error:
                texts.append(str(error))
        pinning.run = runs[0]
        pinning.pin()
        assert len(pinning.frame) == 2, what  # drawn and pinned
        pinning.clear_pins()
        assert not any(word in text for text in texts for word in ("Traceback", "KeyError", "ArrowInvalid")), (what, texts)


def test_what_is_gone_is_called_missing(copied, small, tmp_path):
    """A table that was recorded: not "record it again", but where it was."""
    (copied / "blocks.parquet").unlink()
    assert block_map(copied).message == f"blocks.parquet is missing: it has been removed from {copied}"
    assert "blocks.parquet is missing" in kvlab.explain(copied).text
    gone = Run.load(shutil.copytree(small, tmp_path / "gone"))
    shutil.rmtree(gone.folder)
    for widget, table in ((block_map, "blocks"), (timeline, "requests"), (prefix_tree, "blocks")):
        assert widget(gone).message == f"{table}.parquet is missing: {gone.folder} has been removed"
    assert "steps.parquet is missing" in kvlab.explain(gone).text
    assert "steps.parquet is missing" in str(kvlab.compare(small, gone))


def test_a_pinned_run_whose_folder_goes_stays_as_it_was(small, tmp_path, pinning):
    pinning.run = Run.load(shutil.copytree(small, tmp_path / "run"))
    pinning.pin()
    drawn = np.asarray(pinning.fig.data[6].y).copy()
    shutil.rmtree(pinning.run.folder)
    pinning.run = Run.load(shutil.copytree(small, tmp_path / "other"))
    (pinning.run.folder / "steps.parquet").unlink()
    pinning.pin()
    assert len(pinning.pins) == 2
    assert np.array_equal(np.asarray(pinning.fig.data[6].y), drawn)
    assert len(drawn) > 0
    assert len(pinning.frame) == 3
    pinning.clear_pins()
