"""Two runs side by side, and exports: Perfetto, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweep_support import SIMULATED

import kvlab
from kvlab import export
from kvlab.calibration import calibrate
from kvlab.compare import main
from kvlab.comparing import told_apart
from kvlab.confidence import bootstrap, correlation_time, mean_interval, t_quantile_975
from kvlab.exporting import escape_latex, trace_events
from kvlab.results import Run, Runs
from kvlab.types import UserError

WORDS = [*SIMULATED, "workload.num_requests=30", "num_blocks=16", "record.plans=true"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Three runs of 30 requests of 24 tokens: a and again alike, b with half of the pool kept free at admission."""
    root = tmp_path_factory.mktemp("runs")
    words = {"a": [], "again": [], "b": ["watermark=0.5"], "bare": ["record.plans=false"]}
    return {
        name: kvlab.run(kvlab.compose(*WORDS, *more), folder=root / name, name=name, progress=False) for name, more in words.items()
    }


# -------------------------------------------------------------------------- confidence


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423), (1000, 1.9623)]
)
def test_t_quantiles_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert t_quantile_975(degrees) == pytest.approx(value, abs=5e-5)


def test_intervals_of_a_mean_and_the_bootstrap() -> None:
    """1, 2, 3: mean 2, deviation 1, t(2) = 4.3027, half width 4.3027 / sqrt(3) = 2.4841."""
    interval = mean_interval(np.array([1.0, 2.0, 3.0]))
    assert (interval.value, interval.low, interval.high) == pytest.approx((2, 2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert math.isnan(mean_interval(np.array([5.0])).low)
    rng = np.random.default_rng(1)
    sample = rng.normal(10, 2, 400)
    drawn = bootstrap(lambda rows: rows.mean(axis=1), sample, draws=2000)
    assert np.std(drawn) == pytest.approx(2 / 20, rel=0.1)  # the standard error of the mean
    pairs = bootstrap(lambda x, y: (y - x).mean(axis=1), sample, sample + 1, draws=50, paired=True)
    assert pairs == pytest.approx(np.ones(50))


# --------------------------------------------------------------------------- comparing


QUICK = ["workload=synthetic", "runner=simulated", "model=dummy_llama3_8b", "cost_model=h100", "num_blocks=400",
         "workload.num_requests=200", "workload.output_len=8"]  # fmt: skip


def verdicts(tmp_path: Path, *words: str, seeds: int = 3) -> list[Any]:
    """Of pairs of runs that differ in nothing but their seed."""
    made = [kvlab.run(kvlab.compose(*QUICK, *words, f"seed={s}"), folder=tmp_path / str(s), progress=False) for s in range(seeds)]
    figures = [kvlab.compare(a, b).figures for a, b in itertools.combinations(made, 2)]
    return [row.beyond_noise for frame in figures for row in frame.itertuples() if not math.isnan(row.low)]


def test_what_differs_and_whether_it_is_beyond_noise(runs: dict[str, Run], tmp_path: Path) -> None:
    found = kvlab.compare(runs["a"], str(runs["b"].folder))
    assert found.paired
    assert found.config.values.tolist() == [["watermark", 0.01, 0.5], ["admission.fraction", 0.01, 0.5]]
    figures = found.figures.set_index("figure")
    ttft = figures.loc["mean_ttft_ms"]
    mean = [run.requests()["ttft_s"].mean() * 1e3 for run in (runs["a"], runs["b"])]
    assert [ttft["a"], ttft["b"], ttft["difference"]] == pytest.approx([*mean, mean[1] - mean[0]])
    assert ttft["beyond_noise"] is None  # 30 requests in one queue: each waits for those before it
    assert ttft["low"] < ttft["difference"] < ttft["high"]
    assert "unknown" in next(line for line in str(found).splitlines() if line.startswith("mean_ttft_ms"))
    throughput = figures.loc["output_token_throughput_per_s"]
    assert throughput["beyond_noise"] is None
    assert math.isnan(throughput["low"])


def test_a_difference_is_found_and_what_a_queue_makes_is_not_called_one(tmp_path: Path) -> None:
    """Pairs of seeds: nothing differs but chance. One verdict in twenty at most may be wrong, whether requests queue or not."""
    queued = verdicts(tmp_path / "queued", "workload.arrivals.rate=15", "max_num_seqs=1")
    assert queued.count(True) == 0
    idle = verdicts(tmp_path / "idle", "workload.arrivals.rate=1")
    assert idle.count(True) <= 0.05 * len(idle)
    assert idle.count(False) > len(idle) / 2
    slower = kvlab.compose(*QUICK, "workload.arrivals.rate=1", "seed=0", "cost_model.memory_efficiency=0.4")
    found = kvlab.compare(tmp_path / "idle" / "0", kvlab.run(slower, folder=tmp_path / "slow", progress=False))
    assert found.paired
    assert bool(found.figures.set_index("figure").loc["mean_tpot_ms", "beyond_noise"])


@pytest.mark.parametrize("words", [["workload.output_len=5"], ["workload.arrivals.kind=fixed", "workload.arrivals.rate=1000"]])
def test_other_outputs_or_arrivals_are_other_requests(runs: dict[str, Run], words: list[str], tmp_path: Path) -> None:
    found = kvlab.compare(runs["a"], kvlab.run(kvlab.compose(*WORDS, *words), folder=tmp_path / "c", progress=False))
    assert not found.paired
    assert "the same requests in both" not in str(found)


def test_neighbours_are_drawn_together_and_how_long_they_resemble_each_other() -> None:
    """AR(1) with 0.8: correlations 0.8^k, so 1 + 2 x 0.8 / 0.2 = 9, and a mean 3 times as uncertain as of independent values."""
    rng = np.random.default_rng(0)
    series = np.zeros(20_000)
    for i, noise in enumerate(rng.normal(size=len(series))):
        series[i] = 0.8 * series[i - 1] + noise
    assert correlation_time(series) == pytest.approx(9, rel=0.15)
    assert correlation_time(rng.normal(size=5000)) == 1.0
    assert correlation_time(np.full(50, 0.1)) == 1.0
    wide, narrow = (np.std(bootstrap(lambda rows: rows.mean(axis=1), series, draws=500, stretch=length)) for length in (200, 1))
    assert wide / narrow == pytest.approx(3, rel=0.15)


def test_the_first_different_decision_and_why(runs: dict[str, Run]) -> None:
    """16 blocks, 24 tokens a prompt: two blocks each. Run a admits 8 at once; b keeps 8 blocks free and admits 4."""
    decisions = kvlab.compare(runs["a"], runs["b"]).decisions
    assert decisions is not None
    assert decisions.step == 0
    text = str(decisions)
    assert "admitted: a alone: synthetic-4 (new, 24 tokens, 0 of them cached)" in text
    assert "b alone: synthetic-4 (by watermark)" in text
    same = kvlab.compare(runs["a"], runs["again"])
    assert same.decisions is not None
    assert (same.decisions.step, same.decisions.num_steps) == (None, runs["a"].summary["num_steps"])
    assert same.config.empty
    assert not any(same.figures["beyond_noise"])
    assert not any(same.figures[~same.figures["figure"].str.contains("schedule|rss")]["difference"])


def test_a_later_difference_shows_the_state_that_both_were_in(tmp_path: Path) -> None:
    words = [*SIMULATED, "workload=shared_prefix", "workload.num_requests=24", "workload.arrivals.kind=all_at_once", "num_blocks=64",
             "record.plans=true"]  # fmt: skip
    left_out = ("workload=synthetic", "workload.num_requests=4", "workload.prompt_len=24", "workload.output_len=4")
    words = [word for word in words if word not in left_out]
    made = [kvlab.run(kvlab.compose(*words, f"eviction={e}"), folder=tmp_path / e, progress=False) for e in ("lru", "mru")]
    decisions = kvlab.compare(*made).decisions
    assert decisions is not None
    assert decisions.step
    assert decisions.lines[-1].startswith("Until then, in both: num_running_reqs ")


def test_states_that_differ_at_the_first_different_decision_are_told_of_each(tmp_path: Path) -> None:
    """Pools of 16 and 12 blocks: the first decisions are the same, and after the same steps there are four free blocks less."""
    words = [*SIMULATED, "workload.num_requests=8", "workload.arrivals.kind=fixed", "workload.arrivals.rate=100", "max_num_seqs=8",
             "workload.output_len=40", "record.plans=true"]  # fmt: skip
    made = [kvlab.run(kvlab.compose(*words, f"num_blocks={n}"), folder=tmp_path / f"of{n}", progress=False) for n in (16, 12)]
    decisions = kvlab.compare(*made).decisions
    assert decisions is not None
    assert decisions.step
    free = [int(run.steps()["kv_blocks_free"][decisions.step - 1]) for run in made]
    assert free[0] == free[1] + 4
    assert decisions.lines[-1].startswith("Until then: ")
    assert f"kv_blocks_free {free[0]} in of16, {free[1]} in of12" in decisions.lines[-1]


def test_namesakes_are_told_apart_wherever_they_are_named(runs: dict[str, Run], tmp_path: Path) -> None:
    """Point 0 of two sweeps, and of two folders of sweeps: as many folders in front as it takes."""
    def namesake(original: str, place: str) -> Path:
        return Path(shutil.copytree(str(runs[original].folder), tmp_path / place))

    found = kvlab.compare(namesake("a", "low/0"), namesake("b", "high/0"))
    assert found.names == ("low/0", "high/0")
    text = str(found)
    assert text.startswith("a: low/0\nb: high/0\n")
    assert "admitted: low/0 alone: synthetic-4 (new" in text
    assert "high/0 alone: synthetic-4 (by watermark)" in text
    inner = kvlab.compare(namesake("a", "monday/s/0"), namesake("b", "tuesday/s/0"))
    assert inner.names == ("monday/s/0", "tuesday/s/0")
    assert told_apart(Run("x"), Run("y")) == ("x", "y")
    assert told_apart(Run("0", status={"name": "w=0"}), Run("0", status={"name": "w=1"})) == ("0 (w=0)", "0 (w=1)")
    assert told_apart(Run("0"), Run("0", folder=tmp_path / "low/0")) == ("0 (a)", "0 (b)")
    same = Run("0", folder=tmp_path / "low/0")
    assert told_apart(same, same) == ("0 (a)", "0 (b)")
    far = Run("0")
    far.source = "s3://bucket/sweep/0"
    assert told_apart(far, same) == ("sweep/0", "low/0")


def test_comparing_says_what_is_missing(runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = kvlab.compare(runs["a"], runs["bare"])
    assert found.decisions is None
    assert "holds no plans. Record the run again with record.plans=true." in str(found)
    (tmp_path / "empty").mkdir()
    for words, say in (
        (["one"], "Two run folders are needed, 1 were given"),
        ([str(runs["a"].folder), "nowhere"], "nowhere is not a folder"),
        ([str(runs["a"].folder), str(tmp_path / "empty")], "has no figures to compare (empty)"),
    ):
        assert main(words) == 2
        assert say in capsys.readouterr().err
    assert main([str(runs["a"].folder), str(runs["b"].folder)]) == 0
    out = capsys.readouterr().out
    assert "watermark           0.01  0.5" in out
    assert "The first different decision is in step 0" in out
    assert main(["--help"]) == 0


# ----------------------------------------------------------------------------- exports


def test_a_perfetto_timeline_follows_the_trace_event_format(runs: dict[str, Run], tmp_path: Path) -> None:
    path = runs["a"].to_perfetto(tmp_path / "trace.json")
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    events = trace["traceEvents"]
    needed = {"M": {"args"}, "X": {"ts", "dur", "cat"}, "C": {"ts", "args"}, "i": {"ts", "s"}}
    for event in events:
        assert {"ph", "name", "pid", "tid", *needed[event["ph"]]} <= set(event), event
        assert all(isinstance(event[k], int) for k in ("pid", "tid"))
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[1, 1] == "steps"
    assert sorted(v for k, v in names.items() if k[0] == 2) == sorted(runs["a"].requests()["request_id"])
    tracks: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for spans in tracks.values():  # spans of a track never overlap
        spans.sort(key=lambda e: (e["ts"], e["dur"]))
        for before, after in itertools.pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    assert len(tracks[1, 1]) == runs["a"].summary["num_steps"]
    blocks = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "KV blocks"]
    assert {sum(args.values()) for args in blocks} == {16}
    assert len([e for e in events if e["ph"] == "i" and e["name"] == "length"]) == 30
    with pytest.raises(UserError, match="is there already"):
        runs["a"].to_perfetto(path)
    with pytest.raises(UserError, match="neither steps nor requests"):
        list(trace_events(Run("nothing")))


def test_a_perfetto_timeline_keeps_the_formats_rules(runs: dict[str, Run], tmp_path: Path) -> None:
    """Google's "Trace Event Format": numbers where numbers belong, finite; names of processes and threads as metadata, once each, for
    whatever has events; spans of a thread nest; a counter has the same series at each of its times, and times do not go back."""

    def number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    trace = json.loads(runs["a"].to_perfetto(tmp_path / "trace.json").read_text(encoding="utf-8"), parse_constant=refuse)
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert {e["ph"] for e in events} == {"M", "X", "C", "i"}
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(isinstance(event[key], int) and not isinstance(event[key], bool) and event[key] >= 0 for key in ("pid", "tid"))
        assert number(event["ts"])
        assert isinstance(event.get("args", {}), dict)
        assert ("dur" in event) == (event["ph"] == "X")
        assert number(event.get("dur", 0))
        assert event["ph"] != "i" or event["s"] in ("g", "p", "t")
        assert event["ph"] != "C" or all(number(value) for value in event["args"].values())
    named = [(e["name"], e["pid"], e["tid"] if e["name"] != "process_name" else 0) for e in events if e["ph"] == "M"]
    assert len(set(named)) == len(named)
    for event in events:
        if event["ph"] == "M":
            what = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}[event["name"]]
            assert isinstance(event["args"][what], int if what == "sort_index" else str)
        else:
            assert {("process_name", event["pid"], 0), ("thread_name", event["pid"], event["tid"])} <= set(named)
    for _, track in threads(e for e in events if e["ph"] == "X"):
        ends: list[float] = []  # of the spans that are open
        for span in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= span["ts"] + 1e-3:
                ends.pop()
            assert not ends or span["ts"] + span["dur"] <= ends[-1] + 1e-3
            ends.append(span["ts"] + span["dur"])
    for name in {e["name"] for e in events if e["ph"] == "C"}:
        samples = [e for e in events if e["ph"] == "C" and e["name"] == name]
        assert len({frozenset(e["args"]) for e in samples}) == 1
        assert [e["ts"] for e in samples] == sorted(e["ts"] for e in samples)


def threads(events: Iterable[dict[str, Any]]) -> Iterable[tuple[Any, list[dict[str, Any]]]]:
    """Events by process and thread."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found.items()


def test_csv_holds_what_the_frames_hold(runs: dict[str, Run], tmp_path: Path) -> None:
    paths = runs["a"].to_csv(tmp_path / "csv")
    assert [p.name for p in paths] == ["steps.csv", "requests.csv", "summary.csv"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "csv" / "requests.csv").read_text(encoding="utf-8"))))
    frame = runs["a"].requests()
    assert [row["request_id"] for row in rows] == frame["request_id"].tolist()
    assert [json.loads(row["token_times_s"]) for row in rows] == [list(times) for times in frame["token_times_s"]]
    assert json.loads(rows[0]["output_token_ids"]) == [list(map(int, ids)) for ids in frame["output_token_ids"][0]]
    assert float(rows[3]["ttft_s"]) == frame["ttft_s"][3]
    text = (tmp_path / "csv" / "summary.csv").read_text(encoding="utf-8")
    summary = {row["figure"]: row["value"] for row in csv.DictReader(io.StringIO(text))}
    assert int(summary["num_steps"]) == runs["a"].summary["num_steps"]


def test_a_latex_table_is_escaped_booktabs(runs: dict[str, Run]) -> None:
    assert escape_latex("50 % of a_b & {c} \\ ~|") == r"50 \% of a\_b \& \{c\} \textbackslash{} \textasciitilde{}\textbar{}"
    table = Runs([runs["a"], runs["b"]]).booktabs(None, "num_finished", "num_evicted_blocks")
    assert table == "\n".join([
        r"\begin{tabular}{rrr}", r"\toprule", r"watermark & Finished requests & Evicted blocks (blocks) \\", r"\midrule",
        rf"0.01 & 30 & {runs['a'].summary['num_evicted_blocks']} \\", rf"0.5 & 30 & {runs['b'].summary['num_evicted_blocks']} \\",
        r"\bottomrule", r"\end{tabular}", "",
    ])  # fmt: skip
    with pytest.raises(UserError, match="Did you mean 'block_size'"):
        Runs([runs["a"]]).booktabs(["blok_size"])


def repeat(watermark: Any, seed: int, ttft_ms: float | None = None, state: str = "finished", **summary: Any) -> Run:
    config = {"watermark": watermark, "seed": seed, "workload": {"seed": seed}}
    figures = {"num_finished": 4, **({} if ttft_ms is None else {"mean_ttft_ms": ttft_ms}), **summary}
    return Run("r", config=config, summary=figures, status={"state": state})


def test_a_latex_table_of_repeats_is_means_with_their_interval() -> None:
    """1, 2, 3: mean 2, half width 4.3027 / sqrt(3) = 2.484. 1000, 1400: mean 1200, 12.706 x 282.84 / sqrt(2) = 2541."""
    made = [repeat(0.1, s, v) for s, v in enumerate((1.0, 2.0, 3.0))] + [repeat(0.2, s, v) for s, v in enumerate((1000.0, 1400.0))]
    made += [repeat(0.3, 0, 5.25), repeat(0.3, 1, 7.0, "failed"), *(repeat(0.4, s) for s in (0, 1))]
    assert Runs(made).booktabs(None, "num_finished", "mean_ttft_ms").splitlines() == [
        "% Mean and half of its 95 % interval (Student's t) over n runs. Runs that did not finish are left out: 1.",
        r"\begin{tabular}{rrrr}", r"\toprule", r"watermark & $n$ & Finished requests & Mean TTFT (ms) \\", r"\midrule",
        r"0.1 & 3 & $4 \pm 0$ & $2.0 \pm 2.5$ \\", r"0.2 & 2 & $4 \pm 0$ & $1200 \pm 2500$ \\", r"0.3 & 1 & 4 & 5.25 \\",
        r"0.4 & 2 & $4 \pm 0$ & -- \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
    other = Runs([repeat("x", 0, 1.0), repeat("x", 1, 3.0), repeat("y", 0, 100.0), repeat("y", 1, 104.0)])
    rows = other.booktabs(["seed"], "mean_ttft_ms").splitlines()  # asked for by name: a row a run
    assert rows[4:8] == [r"0 & 1 \\", r"1 & 3 \\", r"0 & 100 \\", r"1 & 104 \\"]
    rows = other.booktabs(["workload.seed"], "mean_ttft_ms").splitlines()
    assert len(rows) == 10
    assert len(Runs([repeat(0.1, 0, 1.0), repeat(0.1, 1, 3.0)]).booktabs([], "mean_ttft_ms").splitlines()) == 8
    kept = other.booktabs([], "mean_ttft_ms").splitlines()  # what is not shown is never averaged over
    assert kept[5:7] == [r"2 & $2 \pm 13$ \\", r"2 & $102 \pm 25$ \\"]


@pytest.mark.parametrize(("values", "cell"), [
    ((0.5, 0.5, 0.5), r"$0.5 \pm 0$"), ((1e4 + 1, 1e4 + 1), r"$10001 \pm 0$"), ((12.345, 12.345 + 1e-9), r"$12.3 \pm 0$"),
    ((10.0, 10.0 + 0.0996 * 2 / 12.7062), r"$10.01 \pm 0.10$"), ((-1.0, -3.0), r"$-2 \pm 13$"),
    ((0.00012, 0.00014), r"$0.00013 \pm 0.00013$"), ((1e6, 1e6 + 4e4), r"$1020000 \pm 250000$"),
])  # fmt: skip
def test_an_interval_has_two_digits_and_its_mean_as_many_places(values: tuple[float, ...], cell: str) -> None:
    rows = Runs([repeat(0.1, seed, value) for seed, value in enumerate(values)]).booktabs([], "mean_ttft_ms").splitlines()
    assert rows[-3] == rf"{len(values)} & {cell} \\"


def test_a_latex_table_of_repeats_may_tell_them_apart_by_their_seed() -> None:
    rows = Runs([repeat(w, s) for w in (0.1, 0.2) for s in (0, 1)]).booktabs(None, "num_finished", each=True).splitlines()
    assert rows[2] == r"watermark & seed & Finished requests \\"
    assert rows[4:8] == [rf"{w} & {s} & 4 \\" for w in (0.1, 0.2) for s in (0, 1)]
    alone = Runs([repeat(0.1, 0), repeat(0.2, 1)]).booktabs(None, "num_finished").splitlines()
    assert alone[2] == r"watermark & Finished requests \\"


@pytest.mark.parametrize("each", [False, True])
def test_what_a_latex_table_holds_can_be_set(each: bool) -> None:
    """Without TeX: environments and braces balance, rows have a cell a column, dollars pair, and nothing special stands unescaped."""
    odd = "50%_{a}&b#~^\\$<x>|{"
    made = [repeat(w, s, v, num_preemptions=7 * s) for w in (odd, 0.1) for s, v in enumerate((0.02, 0.031, 1234.5))]
    text = Runs(made).booktabs(None, "mean_ttft_ms", "num_preemptions", each=each)
    body = [line for line in text.splitlines() if not line.startswith("%")]
    begins = [re.findall(r"\\(begin|end)\{(\w+)\}", line) for line in body]
    assert [found[0] for found in begins if found] == [("begin", "tabular"), ("end", "tabular")]
    spec = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", body[0])
    assert spec is not None
    rows = [line for line in body if line.endswith(r" \\")]
    assert len(rows) == len(body) - 5 == (7 if each else 3)
    for row in rows:
        bare = re.sub(r"\\(textbackslash|textasciitilde|textasciicircum|textless|textgreater|textbar)\{\}", "", row.removesuffix(r" \\"))
        bare = re.sub(r"\\[&%$#_{}]", "", bare)
        assert bare.count("&") == len(spec[1]) - 1
        for cell in bare.split(" & "):
            assert re.fullmatch(r"[^\\&%$#_{}~^<>|]*|\$n\$|\$-?[\d.]+ \\pm [\d.]+\$", cell), (row, cell)


def test_the_export_command(runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(runs["a"].folder)
    out = str(tmp_path / "t.json")
    assert export.main([folder, "--to", "perfetto", "--out", out]) == 0
    assert export.main([folder, "--to", "perfetto", "--out", out]) == 2
    assert "--force" in capsys.readouterr().err
    assert export.main([folder, "--to", "perfetto", "--out", out, "--force"]) == 0
    assert export.main([str(Path(folder).parent), "--to", "latex"]) == 0
    assert r"watermark & record.plans & $n$ & " in capsys.readouterr().out
    assert export.main([str(Path(folder).parent), "--to", "latex", "--each"]) == 0
    assert capsys.readouterr().out.count(r"0.01 & True & 30 & ") == 2
    for words, say in (
        ([folder, "--to", "perfeto"], "Did you mean 'perfetto'"),
        ([str(Path(folder).parent), "--to", "csv"], "holds 4 runs; csv takes one"),
        (["nowhere", "--to", "csv"], "nowhere is not a folder"),
        ([str(tmp_path), "--to", "csv"], "holds no run with results"),
    ):
        assert export.main(words) == 2
        assert say in capsys.readouterr().err


def test_a_sweeps_folder_is_said_to_be_one_and_two_of_its_runs_are_named(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "sweeps" / "s"
    for number in ("2", "10"):
        shutil.copytree(runs["a"].folder or "", root / number)
    for words in ([root], [root, root], [root / "2", root]):
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr().err
        assert f"{root} is a sweep's folder (2 runs): name two of its runs, e.g. python -m kvlab.compare {root}/2 {root}/10" in said
        assert f"{root}/{{2,10}}" in said
        assert "foreign" not in said
    shutil.copytree(root, tmp_path / "sweeps" / "t")
    assert main([str(tmp_path / "sweeps"), str(root / "2")]) == 2
    assert f"{tmp_path / 'sweeps'} holds 4 runs: name two" in capsys.readouterr().err
    for read in (kvlab.explain, Run.load, calibrate):
        with pytest.raises(UserError, match=r"a sweep's folder \(2 runs\), and one run is wanted: give a run's own folder, e.g. .*s/2"):
            read(root)
    assert main([str(root / "2")]) == 2
    assert "Two run folders are needed, 1 were given" in capsys.readouterr().err
    shutil.rmtree(root / "2")
    with pytest.raises(UserError, match=r"is a sweep's folder \(1 run\), and one run is wanted: give a run's own folder, e.g. .*s/10"):
        kvlab.compare(root, runs["a"])


def test_a_run_that_was_cut_off_is_compared_and_exported_with_a_remark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = kvlab.run(kvlab.compose(*SIMULATED, "num_blocks=40"), folder=tmp_path / "whole", progress=False)
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole", half)
    (half / "summary.json").unlink()
    status = json.loads((half / "status.json").read_text(encoding="utf-8"))
    (half / "status.json").write_text(json.dumps({**status, "state": "running", "pid": 1 << 30}), encoding="utf-8")
    steps = (half / "steps.parquet").read_bytes()
    (half / "steps.parquet").write_bytes(steps[: len(steps) // 2])
    told = str(kvlab.compare(whole, half)).splitlines()
    assert told[0] == "a: whole"
    assert told[1].startswith("b: half (killed: steps.parquet is damaged: ")
    assert told[1].endswith("summary made from 0 recorded steps and 4 requests)")
    assert export.main([str(half), "--to", "csv", "--out", str(tmp_path / "csv")]) == 0
    assert "run half (killed: steps.parquet is damaged" in capsys.readouterr().err
