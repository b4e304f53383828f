"""Timeline, prefix tree, live view and pages, without a front end: their data against the engine's, and words where nothing is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from engine_support import make_engine, policies, prompt_of, request, run_to_end
from test_notebook_block_map import Copies, recorded, stems
from trace_examples import REQUESTS, STATS, stats

import kvlab
from kvlab.notebook import block_map, export_html, live, prefix_tree, timeline
from kvlab.notebook.export import save_page
from kvlab.notebook.live_view import MOST_POINTS, RunStopped, Series
from kvlab.notebook.packing import unpack
from kvlab.trace import RecordConfig
from kvlab.trace.frames import raw_frame, request_row
from kvlab.types import UserError


def run_of(folder: Path, **more: Any) -> tuple[Any, Copies]:
    return recorded(folder, 26, stems(9, 5), policies(prefix_cache="hash"), max_num_batched_tokens=12, **more)


# ------------------------------------------------------------------------------------------- timeline


def test_timeline_has_every_span_and_chunk(tmp_path):
    run, log = run_of(tmp_path)
    shown = timeline(run)
    data = unpack(shown.data, shown.meta["layout"])
    names = ["queue", "prefill", "decode", "preempted", "swapped"]
    columns = zip(*(data[k].tolist() for k in ("row", "state", "start", "stop")), strict=True)
    spans = [(shown.meta["requests"][r], names[s], a, b) for r, s, a, b in columns]
    assert spans == [(i, *span) for i in shown.meta["requests"] for span in log.records[i].spans]
    assert data["end_s"].tolist() == [s.end_s for s in log.stats]
    chunks = sorted(zip((shown.meta["requests"][r] for r in data["chunk_row"]), data["chunk_s"].tolist(), strict=True))
    owner = {}  # sequence -> request, from the engine's own starts
    by_group = {a.group_id: a.request_id for plan in log.plans for a in plan.admitted}
    for plan in log.plans:
        owner |= {start.seq_id: by_group[start.group_id] for start in plan.starts}
    expected = [(owner[s.seq_id], log.stats[p.step].end_s) for p in log.plans for s in p.scheduled if s.num_new_tokens > 1]
    assert chunks == sorted(expected)
    assert len(chunks) > len(log.records)  # some prompt took more than one


def test_timeline_and_map_move_together_and_the_figure_is_the_static_one(tmp_path):
    run, _ = run_of(tmp_path)
    bars, blocks = timeline(run), block_map(run)
    bars.step = 7
    assert blocks.step == 7
    assert {trace.name for trace in bars.figure().data} >= {"prefill", "decode"}


def test_a_run_without_requests_or_steps_is_said_in_words(tmp_path):
    run, _ = recorded(tmp_path, 26, stems(3, 5), policies(), RecordConfig(requests=False))
    assert "no request that has ended" in timeline(run).message
    assert timeline(run).figure().layout.annotations[0].text.startswith("This run recorded no request")
    other = tmp_path / "other"
    other.mkdir()
    run, _ = recorded(other, 26, stems(3, 5), policies(), RecordConfig(steps=False))
    assert "no steps" in timeline(run).message


WIDGETS = (block_map, prefix_tree, timeline)


@pytest.mark.parametrize("off", [(), ("blocks", "plans")])
def test_a_run_that_served_nobody_is_not_told_to_record_it_again(tmp_path, off):
    settings = [f"record.{table}={str(table not in off).lower()}" for table in ("blocks", "plans")]
    config = kvlab.compose("runner=simulated", "model=tiny", "cost_model=constant", "kv_cache_tokens=null", "workload=synthetic",
                           "workload.num_requests=3", "workload.prompt_len=90", "num_blocks=2", *settings)  # fmt: skip
    with pytest.raises(UserError, match="Every request"):
        kvlab.run(config, folder=tmp_path / "run", progress=False)
    for widget in WIDGETS:
        message = widget(tmp_path / "run").message
        assert message.startswith("Nothing was served in this run: 3 of 3 requests were refused (the first: Request 'synthetic-0' can")
        assert "record" not in message


def test_a_setting_is_asked_for_only_where_it_is_off(tmp_path):
    run, _ = recorded(tmp_path, 26, [], policies())
    run.config["record"] = {"steps": True, "requests": True, "blocks": True, "plans": True}
    assert [widget(run).message.split(": ")[0] for widget in WIDGETS] == ["Nothing was served in this run"] * 3
    run.config["record"] = {"blocks": False, "plans": True}
    assert "record.blocks=true" in block_map(run).message
    assert "record.plans" not in block_map(run).message
    aborted = tmp_path / "aborted"
    aborted.mkdir()
    run, _ = recorded(aborted, 26, [], policies())
    run._frames["requests"] = raw_frame("requests", [request_row(REQUESTS[2]._replace(first_scheduled_s=None))])
    assert [widget(run).message for widget in WIDGETS] == [
        "Nothing was served in this run: 1 of 1 requests were aborted (the client left)."] * 3  # fmt: skip


# ---------------------------------------------------------------------------------------- prefix tree


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_the_tree_holds_what_the_pool_held(prefix_cache, tmp_path):
    run, log = recorded(tmp_path, 22, stems(14, 6), policies(prefix_cache=prefix_cache), max_num_batched_tokens=24)
    shown = prefix_tree(run)
    tree = shown.tree
    for step in range(len(log.stats)):
        assert {tree.keys[i] for i in tree.cached(step)} == {c for c in log.contents[step] if c}, step
    hits = dict.fromkeys(tree.keys, 0)
    for event in log.events:
        if event.kind == "hit" and event.content:
            hits[event.content] += 1
    assert dict(zip(tree.keys, tree.hits.tolist(), strict=True)) == hits
    assert sum(hits.values()) > 0
    assert any(e.kind == "evict" for e in log.events)


def test_parents_are_the_blocks_before(tmp_path):
    requests = [request("a", prompt_of(13, 1), 2), request("b", prompt_of(13, 1)[:8] + prompt_of(6, 9), 2)]
    run, _ = recorded(tmp_path, 40, requests, policies(prefix_cache="hash"), max_num_batched_tokens=24)
    tree = prefix_tree(run).tree
    assert tree.depth.tolist() == [0, 1, 2, 2]  # two blocks in common, then a block each
    assert tree.parent.tolist() == [-1, 0, 1, 1]
    figure = prefix_tree(run).figure()
    boxes = dict(zip(figure.data[0].labels, figure.data[0]["values"], strict=False))
    assert boxes["2 blocks"] == 2
    assert sorted(figure.data[0]["values"]) == [0, 1, 1, 2]


def test_a_run_that_cached_nothing_is_said_in_words(tmp_path):
    run, _ = recorded(tmp_path, 40, stems(3, 5), policies(prefix_cache="none"))
    assert "Nothing was cached" in prefix_tree(run).message
    assert "record.blocks=true" in prefix_tree(recorded_plain(tmp_path / "plain")).message


def recorded_plain(folder: Path) -> Any:
    folder.mkdir()
    return recorded(folder, 40, stems(3, 5), policies(), RecordConfig())[0]


# ----------------------------------------------------------------------------------------------- live


def test_live_sums_are_those_of_the_run():
    engine, log = make_engine(26, 4, policies(), max_num_batched_tokens=24)
    view = live(engine)
    for each in stems(9, 5):
        engine.add_request(each)
    run_to_end(engine, 500)
    view.end()
    assert view.status["state"] == "finished"
    assert view.status["step"] == len(log.stats)
    assert view.status["ended"] == 9
    columns = np.frombuffer(view.data, dtype="<f4").reshape(11, -1)
    assert columns.shape[1] == view.status["num_points"]
    assert columns[9].sum() == log.total("num_output_tokens")
    assert columns[10].sum() == log.total("num_prompt_tokens_computed")
    assert columns[2].max() == max(s.kv_blocks_used for s in log.stats)
    assert view.figure().data[0].name == "used"
    assert view.num_updates <= 3  # a run of milliseconds: not one a step


def test_live_keeps_a_bounded_number_of_points_and_every_token():
    series = Series()
    for part in range(13):
        steps = range(part * 777, part * 777 + 777)
        series.extend([stats(i, i * 0.5, i * 0.5 + 0.25, num_output_tokens=1, kv_blocks_used=i % 7) for i in steps])
    points = series.points()
    assert series.num_steps == 13 * 777
    assert len(points) <= MOST_POINTS + 1
    assert points[:, 9].sum() == 13 * 777
    assert points[:, 1].sum() == 13 * 777 * 0.25
    assert points[-1, 0] == (13 * 777 - 1) * 0.5 + 0.25
    assert np.all(np.diff(points[:, 0]) > 0)
    assert points[:, 2].max() == 6


def test_the_stop_button_ends_a_run_that_stays_readable(tmp_path):
    view = live()

    class Press:
        wants_block_events = False

        def on_step(self, plan, outcome, stats):
            if stats.step == 20:
                view.stop = True
                view._wait_s = 0.0

        def on_request(self, record): ...

        def on_block(self, event): ...

    config = kvlab.compose("runner=simulated", "model=tiny", "workload=synthetic", "workload.num_requests=30")
    run = view.run(config, folder=tmp_path / "run", listeners=[Press()], progress=False)
    assert run.state == "interrupted"
    assert len(run.steps()) == 21
    assert view.status["state"] == "stopped"
    assert kvlab.load_runs(tmp_path).frame["status"].tolist() == ["interrupted"]
    assert issubclass(RunStopped, KeyboardInterrupt)


def test_live_wants_an_engine():
    with pytest.raises(UserError, match=r"live\(\).run\(config\)"):
        live("engine")
    assert live().figure().layout.annotations[0].text == "no step was heard"
    assert STATS[0].step == 0


# ---------------------------------------------------------------------------------------------- pages


def models_of(text: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="kvlab-models">(.*?)</script>', text, re.S).group(1))


def test_a_page_holds_all_it_needs(tmp_path):
    run, _ = run_of(tmp_path)
    blocks, bars = block_map(run, step=5), timeline(run)
    path = save_page([blocks, bars], tmp_path / "page.html", 'a <b> & "c"')
    text = path.read_text(encoding="utf-8")
    assert "<title>a &lt;b&gt; &amp; &quot;c&quot;</title>" in text
    assert not re.findall(r'(?:src|href)="', text)
    found = models_of(text)
    assert [m["state"]["step"] for m in found["models"].values()] == [5, 5]
    assert len(found["modules"]) == 2
    assert len(found["styles"]) == 1
    with pytest.raises(UserError, match="there is no folder"):
        blocks.save_html(tmp_path / "none" / "page.html")


def notebook(folder: Path, outputs: list[Any], state: dict[str, Any] | None = None) -> Path:
    cell = nbformat.v4.new_code_cell("1 + 1", outputs=outputs)
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title"), cell])
    if state:
        nb.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": state, "version_major": 2, "version_minor": 0}}
    nbformat.write(nb, folder / "some.ipynb")
    return folder / "some.ipynb"


def shown(mime: str, value: Any) -> Any:
    return nbformat.v4.new_output("display_data", data={mime: value, "text/plain": "Thing(1)"})


def test_an_exported_notebook_needs_no_network(tmp_path):
    view, plot = "application/vnd.jupyter.widget-view+json", "application/vnd.plotly.v1+json"
    state = {
        "m1": {"model_name": "AnyModel", "state": {"_esm": "export default {}", "step": 3},
               "buffers": [{"path": ["data"], "data": "AAAA"}]},
        "m2": {"model_name": "VBoxModel", "state": {"children": ["IPY_MODEL_m1", "IPY_MODEL_m3"]}},
        "m3": {"model_name": "FloatSliderModel", "state": {"value": 1.0}},
        "m4": {"model_name": "FigureModel", "state": {"_widget_data": [{"type": "scatter", "y": {"dtype": "float64", "shape": [2]}}],
                                                     "_widget_layout": {"title": {"text": "Live"}}},
               "buffers": [{"path": ["_widget_data", 0, "y", "value"], "data": "AAAAAAAA8D8AAAAAAAAAQA=="}]},
    }  # fmt: skip
    outputs = [shown(view, {"model_id": m}) for m in ("m2", "m4", "gone")]
    outputs.append(shown(plot, {"data": [{"type": "bar", "y": [1, 2]}], "layout": {}}))
    path = export_html(notebook(tmp_path, outputs, state))
    text = path.read_text(encoding="utf-8")
    assert path.name == "some.html"
    assert not re.findall(r'<(?:script|link)[^>]*(?:src|href)=', text)
    assert models_of(text)["models"]["m1"] == {"module": 0, "state": {"step": 3}, "buffers": {"data": "AAAA"}}
    assert text.count("it works with a running kernel only") == 1
    assert text.count("its state was not saved with the notebook") == 1
    assert text.count('id="kvlab-figure-') == 2
    assert '"bdata":"AAAAAAAA8D8AAAAAAAAAQA=="' in text.replace(": ", ":")


LATE = """import ipywidgets, numpy as np, plotly.graph_objects as go
plot = go.FigureWidget(layout={"title": {"text": "before"}})
bar = ipywidgets.HTML("half done")
controls = ipywidgets.HBox([ipywidgets.IntSlider(), ipywidgets.IntSlider(), plot, bar])
controls"""
LATER = """plot.add_scatter(y=np.array([1.0, 2.0]))
plot.add_scatter(x=np.array([5.0, 7.0]), y=[5, 7])
plot.update_layout(title_text="after")
plot.data = plot.data[1:]
bar.close()"""


@pytest.mark.slow
def test_an_executed_page_shows_figures_as_they_are_at_the_end_and_no_closed_bars(tmp_path):
    """A figure made empty and filled by a later cell; the first trace's buffer is left behind in the saved state when it goes."""
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LATE), nbformat.v4.new_code_cell(LATER)])
    nbformat.write(nb, tmp_path / "late.ipynb")
    text = export_html(tmp_path / "late.ipynb", execute=True).read_text(encoding="utf-8")
    (figure,) = re.findall(r'"kvlab-figure-1",\s*(\[.*?\]),\s*(\{.*?\}),\s*\{"responsive"', text, re.DOTALL)
    (trace,) = json.loads(figure[0])
    assert trace["y"] == [5, 7]
    assert trace["x"] == {"dtype": "float64", "shape": "2", "bdata": "AAAAAAAAFEAAAAAAAAAcQA=="}  # two float64 of eight bytes
    assert json.loads(figure[1])["title"] == {"text": "after"}
    assert "<div>half done" not in text
    assert text.count("it works with a running kernel only") == 1
    assert "_settle" not in text
    assert len(nbformat.read(tmp_path / "late.ipynb", as_version=4).cells) == 2


def test_buffers_of_what_is_no_longer_there_are_passed_over(tmp_path):
    """The saved state keeps a buffer for each path that ever had one: of a delivered message, of a trace that has gone or become a list."""
    paths = (["_py2js_update", "style_data", "y", 0, "value"], ["_widget_data", 0, "y", "value"], ["_widget_data", 3, "y", "value"])
    state = {"m": {"model_name": "FigureModel", "state": {"_py2js_update": None, "_widget_data": [{"y": [5, 7]}], "_widget_layout": {}},
                   "buffers": [{"path": path, "data": "AAAAAAAA8D8="} for path in paths]}}  # fmt: skip
    view = shown("application/vnd.jupyter.widget-view+json", {"model_id": "m"})
    text = export_html(notebook(tmp_path, [view], state)).read_text(encoding="utf-8")
    assert '[{"y":[5,7]}]' in text.replace(" ", "")
    assert "AAAAAAAA8D8=" not in text


def test_what_is_no_executed_notebook_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        export_html(tmp_path / "none.ipynb")
    (tmp_path / "bad.ipynb").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="is not a notebook"):
        export_html(tmp_path / "bad.ipynb")
    with pytest.raises(UserError, match="has no outputs"):
        export_html(notebook(tmp_path, []))
