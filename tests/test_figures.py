"""Papers' figures: every committed figure follows from its results and its configuration; bad input is named and overwrites nothing."""

from __future__ import annotations

import errno
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from kvlab.figures import FigureSpec, Folder, actions, load, manifest, names
from kvlab.figures.__main__ import main
from kvlab.figures.points import hydra_points, kind_of, point_configs, read_sweep
from kvlab.figures.producing import produce
from kvlab.sweep_command import sweep_command
from kvlab.types import UserError

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
NUMBERED = ["hit_rate", "watermark_curve", "layouts", "recompute_tax", "block_size", "kernel_latency", "prefill_budget", "fairness",
            "length_prediction", "static_batching", "simulator_fidelity", "prefix_caching", "attention_sinks"]  # fmt: skip
"""F1 to F13."""
SIMULATED = [name for name in NUMBERED if name not in ("hit_rate", "block_size", "simulator_fidelity", "kernel_latency", "attention_sinks")]


@pytest.fixture
def copied(tmp_path: Path) -> Folder:
    """A figure's folder of its own, to spoil."""
    shutil.copytree(EXPERIMENTS / "kernel_latency", tmp_path / "kernel_latency")
    return Folder(tmp_path / "kernel_latency")


def content(folder: Folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.path.iterdir()) if path.is_file()}


# ----------------------------------------------------------------- what is committed


def test_the_figures_are_these_in_the_order_of_their_numbers() -> None:
    assert names() == ["first_light", *NUMBERED]
    assert [load(name).spec().number for name in NUMBERED] == [f"F{n}" for n in range(1, 14)]


@pytest.mark.parametrize("name", ["first_light", *NUMBERED])
def test_every_figure_follows_from_its_results_and_its_manifest_from_its_config(name: str) -> None:
    """Redrawn here, in another process than the committed files were: the same bytes."""
    assert actions.check(load(name)) == []


@pytest.mark.parametrize("name", NUMBERED)
def test_every_readme_says_what_agrees_and_what_does_not(name: str) -> None:
    text = (EXPERIMENTS / name / "README.md").read_text(encoding="utf-8")
    for part in ("**Claim.**", "**Source.**", "**What agrees.**", "**What does not.**", "**Assumptions.**", "figure.svg", *actions.MARKERS):
        assert part in text, part


@pytest.mark.parametrize("name", ["first_light", *NUMBERED])
def test_a_figure_is_small_and_short(name: str) -> None:
    folder = EXPERIMENTS / name
    assert (folder / "results.parquet").stat().st_size < 100_000
    assert len((folder / "figure.py").read_text(encoding="utf-8").splitlines()) < 100
    fonts = (folder / "figure.pdf").read_bytes()
    assert b"/Subtype /Type0" in fonts, "fonts are embedded as TrueType"
    assert b"/Type3" not in fonts
    assert b"CreationDate" not in fonts
    assert b"<dc:date>" not in (folder / "figure.svg").read_bytes()


@pytest.mark.parametrize("name", ["first_light", *NUMBERED])
def test_a_figure_fits_a_column_or_a_page_and_can_be_read_in_print(name: str) -> None:
    """8.5 or 17.5 cm wide, so that it is printed as it is, and no text below 6 pt."""
    pdf = (EXPERIMENTS / name / "figure.pdf").read_bytes()
    (width,) = {float(found) for found in re.findall(rb"/MediaBox \[ 0 0 ([0-9.]+) ", pdf)}
    assert width / 72 * 2.54 in (pytest.approx(8.5, abs=0.01), pytest.approx(17.5, abs=0.01))
    sizes = {float(found) for found in re.findall(rb"/F\d+ ([0-9.]+) Tf", pdf)}
    assert sizes
    assert min(sizes) >= 6


def test_manifests_say_where_results_come_from() -> None:
    for name in NUMBERED:
        made = json.loads((EXPERIMENTS / name / "manifest.json").read_text(encoding="utf-8"))
        assert made["number"] == load(name).spec().number
        for key in ("date", "seconds", "points", "device", "seeds", "config_hash", "kvlab", "git_commit", "python", "versions", "config"):
            assert key in made, (name, key)
        assert made["versions"]["numpy"]


def test_the_grid_is_that_of_hydra_with_the_last_key_fastest() -> None:
    folder = load("watermark_curve")
    points = hydra_points(folder, folder.sweeps()[0])
    assert len(points) == 5 * 5
    assert points[1].shared == ("+experiment=watermark_curve",)
    assert points[1].words == ("seed=0", "max_num_batched_tokens=8192", "watermark=0.02")
    assert points[-1].values == {"seed": 4, "max_num_batched_tokens": 8192, "watermark": 0.15}


def test_the_command_in_a_sweeps_header_runs_the_same_points(tmp_path: Path) -> None:
    """`python -m kvlab.experiment -m +experiment=NAME`: the preset brings its grid along, and words of the command line win."""
    folder = load("fairness")
    command = sweep_command(["+experiment=fairness", f"hydra.sweep.dir={tmp_path / 'all'}"], {})
    assert command is not None
    assert [point.config for point in command.points] == point_configs(hydra_points(folder, folder.sweeps()[0]))
    assert [point.label for point in command.points] == ["scheduling=fcfs", "scheduling=vtc"]
    command = sweep_command(["+experiment=fairness", "scheduling=vtc", "seed=1,2", f"hydra.sweep.dir={tmp_path / 'one'}"], {})
    assert command is not None
    assert [point.label for point in command.points] == ["seed=1", "seed=2"]


def test_a_sweep_lies_in_the_group_that_its_command_names() -> None:
    for name in names():
        for path in load(name).sweeps():
            if kind_of(read_sweep(path)) == "hydra":
                assert path.resolve() == ROOT / "conf" / "experiment" / f"{name}{path.stem.removeprefix('sweep')}.yaml"


def test_hit_rate_of_lfu_and_sieve_is_equal_at_every_committed_capacity_and_the_readme_says_so() -> None:
    """No other pair is: slru parts from both at 10,000 blocks of conversation (38,329 hits, not 38,013)."""
    hits = manifest.read_results(load("hit_rate")).set_index(["trace", "capacity_blocks"]).pivot(columns="policy", values="object_hits")
    assert hits.index.levels[1].tolist() == [1000, 2000, 5000, 10000, 20000, 50000, 100000]
    equal = [(a, b) for a, b in itertools.combinations(sorted(hits), 2) if (hits[a] == hits[b]).all()]
    assert equal == [("lfu", "sieve")]
    assert hits.loc[("mooncake_conversation", 10000), ["lfu", "sieve", "slru"]].tolist() == [38013, 38013, 38329]
    assert hits.loc[("mooncake_synthetic", 20000), ["lfu", "sieve"]].tolist() == [72106, 72106]
    text = (EXPERIMENTS / "hit_rate" / "README.md").read_text(encoding="utf-8")
    assert "lfu and sieve make the same number of hits at every capacity shown" in text


# ------------------------------------------------------------- results made again


def same_as_committed(name: str, only: Mapping[str, Any]) -> None:
    """The rows of some points, made again, are the committed ones: bit for bit where simulated, the decisions where real."""
    folder, spec = load(name), load(name).spec()
    committed = manifest.read_results(folder)
    for column, value in only.items():
        committed = committed[committed[column] == value]
    assert len(committed), only

    def wanted(values: Mapping[str, Any]) -> bool:
        return all(values.get(column) == value for column, value in only.items())

    new = produce(folder, spec, only=wanted, progress=False).frame
    assert actions.compare(committed.reset_index(drop=True)[list(new.columns)], new, spec.measured) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("watermark_curve", {"seed": 0, "max_num_batched_tokens": 8192, "watermark": 0.15}),
        ("recompute_tax", {"prefix_cache": "none", "preemption": "lifo", "num_blocks": 800, "seed": 1}),
        ("layouts", {"layout": "contiguous_oracle", "seed": 1}),
        ("prefill_budget", {"cost_model": "h100", "batching.chunk_size": 512, "seed": 1}),
        ("fairness", {"scheduling": "vtc"}),
        ("length_prediction", {"scheduling.tau": 0.6, "workload.arrivals.rate": 14.0, "seed": 1}),
        ("static_batching", {"batching": "static", "workload.output_len.cv": 1.0, "seed": 1}),
        ("prefix_caching", {"eviction": "lfu", "num_blocks": 2000, "seed": 1}),
    ],
)
def test_a_simulated_point_made_again_is_the_committed_one_bit_for_bit(name: str, point: dict[str, Any]) -> None:
    same_as_committed(name, point)


@pytest.mark.slow
def test_a_real_point_made_again_takes_the_same_decisions() -> None:
    same_as_committed("block_size", {"seed": 1, "block_size": 32})


def test_a_computed_figure_made_again_is_the_same() -> None:
    assert actions.verify(load("kernel_latency")) == []


@pytest.mark.traces
def test_replayed_points_made_again_are_the_same() -> None:
    folder = load("hit_rate")
    committed = manifest.read_results(folder)
    chosen = committed[(committed["trace"] == "mooncake_synthetic") & committed["policy"].isin(["lru", "belady"])]
    new = produce(folder, folder.spec(), only=lambda p: p["trace"] == "mooncake_synthetic" and p["eviction"] in ("lru", "belady")).frame
    assert actions.compare(chosen.reset_index(drop=True), new) == []


@pytest.mark.full
@pytest.mark.parametrize("name", SIMULATED)
def test_all_results_made_again_are_the_same(name: str) -> None:
    assert actions.verify(load(name)) == []


@pytest.mark.full
def test_all_real_decisions_made_again_are_the_same() -> None:
    assert actions.verify(load("block_size")) == []


def test_a_replay_sweep_runs_over_each_trace(tmp_path: Path) -> None:
    """Three ids through a cache of one block: a, a, b hits once; a, b, a never. By hand."""
    for name, accesses in (("near", "a\na\nb\n"), ("far", "a\nb\na\n")):
        (tmp_path / f"{name}.txt").write_text(accesses, encoding="utf-8")
    folder = Folder(tmp_path)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"replay": {
        "traces": [str(tmp_path / "near.txt"), str(tmp_path / "far.txt")], "eviction": ["lru", "fifo"], "capacity": [1],
        "semantics": "access", "columns": ["trace", "policy", "object_hits"],
    }}), encoding="utf-8")  # fmt: skip
    spec = FigureSpec(number="F99", title="", draw=lambda _: pytest.fail("not drawn here"))
    rows = produce(folder, spec, progress=False).frame.to_numpy().tolist()
    assert rows == [["near", "lru", 1], ["near", "fifo", 1], ["far", "lru", 0], ["far", "fifo", 0]]


def test_a_difference_is_told_by_column_and_row_and_clocks_are_left_out() -> None:
    old = pd.DataFrame({"seed": [0, 1], "hits": [3, 4], "ms": [1.0, float("nan")]})
    assert actions.compare(old, old.copy()) == []
    new = pd.DataFrame({"seed": [0, 1], "hits": [3, 5], "ms": [9.0, float("nan")]})
    assert actions.compare(old, new, ("ms",)) == ["hits: 1 of 2 rows differ, first row 1: np.int64(4) committed, np.int64(5) now"]
    assert actions.compare(old, new.head(1)) == ["rows: 2 committed, 1 now"]


# ----------------------------------------------------------------------- bad input


def test_results_edited_by_hand_are_named_and_nothing_is_overwritten(copied: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    frame = manifest.read_results(copied)
    frame.loc[3, "microseconds"] = 1.0
    (copied.path / "results.parquet").write_bytes(manifest.results_bytes(frame))
    before = content(copied)
    for command in ("draw", "run"):
        assert main([command, "kernel_latency", "--root", str(copied.path.parent)]) == 2
        told = capsys.readouterr().err
        assert "results.parquet is not the file that manifest.json names" in told
        assert "edited by hand? Nothing was overwritten. Restore it (git checkout" in told
    assert main(["check", "--root", str(copied.path.parent)]) == 1
    assert "edited by hand" in capsys.readouterr().out
    assert content(copied) == before


def test_a_damaged_or_missing_manifest_is_named(copied: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied.path / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8")[:40], encoding="utf-8")
    assert main(["draw", "kernel_latency", "--root", str(copied.path.parent)]) == 2
    assert "manifest.json is damaged" in capsys.readouterr().err
    path.unlink()
    for command, status in (("draw", 2), ("check", 1)):
        assert main([command, "kernel_latency", "--root", str(copied.path.parent)]) == status
        told = "".join(capsys.readouterr())
        assert "nothing says where results.parquet comes from. Restore it (git checkout" in told
        assert "or run: python -m kvlab.figures run kernel_latency" in told


def test_without_a_manifest_run_makes_new_results_and_loses_no_old_ones(copied: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    root, results, kept = str(copied.path.parent), copied.path / "results.parquet", copied.path / actions.UNVOUCHED
    (copied.path / "manifest.json").unlink()
    assert main(["run", "kernel_latency", "--root", root]) == 0, "what check says to do works"
    assert manifest.differences(copied, copied.spec()) == []
    assert not kept.exists(), "the same results"
    (copied.path / "manifest.json").unlink()
    results.write_bytes(b"somebody's")
    assert main(["run", "kernel_latency", "--root", root]) == 0
    assert manifest.differences(copied, copied.spec()) == []
    assert kept.read_bytes() == b"somebody's"
    (copied.path / "manifest.json").unlink()
    before = content(copied)
    assert main(["run", "kernel_latency", "--root", root]) == 2
    assert "results.unvouched.parquet is there already" in capsys.readouterr().err
    assert content(copied) == before


def test_damaged_markers_of_a_table_are_named_by_every_command(copied: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody would see that a number of the table was edited."""
    readme = copied.path / "README.md"
    text = readme.read_text(encoding="utf-8")
    begin, end = actions.MARKERS
    spec, frame = copied.spec(), manifest.read_results(copied)
    swapped = text.replace(begin, "x-").replace(end, begin).replace("x-", end, 1)
    for damaged in (swapped, text.replace(end, ""), f"{begin}\n\n| a |\n\n{end}\n{text}", text.replace(begin, f"see {begin}"), ""):
        with pytest.raises(UserError, match="README.md: the markers of its table are missing or damaged"):
            actions.with_table(damaged, spec, frame)
    readme.write_text(text.replace(begin, "<!-- tabel -->").replace("28.2", "28.3"), encoding="utf-8")
    before = content(copied)
    for command, status in (("check", 1), ("draw", 2), ("run", 2)):
        assert main([command, "kernel_latency", "--root", str(copied.path.parent)]) == status
        assert "README.md: the markers of its table are missing or damaged" in "".join(capsys.readouterr())
    assert content(copied) == before


def test_seeds_of_a_manifest_are_the_distinct_ones_in_order() -> None:
    folder = load("fairness")
    made = produce(folder, folder.spec(), more=("workload.num_requests=8",), progress=False)
    assert (made.num_points, made.seeds) == (2, [0])


def another(value: Any) -> Any:
    """A value of the same kind that is not this one."""
    if isinstance(value, dict):
        return {**value, "one more": 1}
    if isinstance(value, list):
        return [*value, 1]
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else f"{value}."


@pytest.mark.parametrize("field", json.loads((EXPERIMENTS / "kernel_latency" / "manifest.json").read_text(encoding="utf-8")))
def test_each_field_of_a_manifest_that_was_edited_by_hand_is_named(copied: Folder, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Changed and taken away: `draw` and `check` refuse; nothing is overwritten."""
    path, before = copied.path / "manifest.json", manifest.read(copied)
    changed, gone = {**before, field: another(before[field])}, {name: value for name, value in before.items() if name != field}
    for spoilt, named in ((changed, "one more" if field == manifest.CHECKSUMS else field), (gone, field)):
        path.write_text(json.dumps(spoilt, indent=1) + "\n", encoding="utf-8")
        now = content(copied)
        told = f"manifest.json: {named} is not what was written there: edited by hand? Nothing was overwritten. Restore it (git checkout"
        if "results" not in spoilt:
            told = "manifest.json is damaged: it has no 'results'."
        assert main(["draw", "kernel_latency", "--root", str(copied.path.parent)]) == 2
        assert told in capsys.readouterr().err
        assert main(["check", "--root", str(copied.path.parent)]) == 1
        assert told in capsys.readouterr().out
        assert content(copied) == now
    assert main(["list", "--root", str(copied.path.parent)]) == 0
    assert "(its manifest is damaged: see check)" in capsys.readouterr().out


def test_a_manifest_is_checked_by_what_it_says_not_by_how_it_is_written(copied: Folder) -> None:
    """Other spaces and another order are no edit; a number inside a nested field is."""
    path, before = copied.path / "manifest.json", manifest.read(copied)
    path.write_text(json.dumps(dict(reversed(before.items())), indent=4), encoding="utf-8")
    assert manifest.read(copied) == before
    path.write_text(json.dumps({**before, "results": {**before["results"], "rows": 13}, "by": "me"}), encoding="utf-8")
    with pytest.raises(UserError, match="manifest.json: results, by is not what was written there"):
        manifest.read(copied)


def test_a_new_runs_manifest_has_its_checksums(copied: Folder) -> None:
    (copied.path / "manifest.json").unlink()
    (copied.path / "results.parquet").unlink()
    actions.run(copied)
    assert manifest.differences(copied, copied.spec()) == []
    assert set(manifest.read(copied)) == set(manifest.read(load("kernel_latency")))


def test_another_figures_manifest_fails_the_check(copied: Folder) -> None:
    path, before = copied.path / "manifest.json", manifest.read(copied)
    for change, say in (
        ({"number": "F7"}, "the manifest says number = 'F7', which is 'F6'"),
        ({"figure": "layouts"}, "the manifest says figure = 'layouts', which is 'kernel_latency'"),
    ):
        path.write_text(json.dumps(manifest.sealed({**before, **change})), encoding="utf-8")
        assert manifest.differences(copied, copied.spec()) == [say]


def test_a_sweep_or_measuring_code_that_changed_after_the_results_fails_the_check(copied: Folder) -> None:
    assert actions.check(copied) == []
    sweep, code = copied.path / "sweep.yaml", copied.path / "figure.py"
    text = sweep.read_text(encoding="utf-8")
    sweep.write_text("# another comment\n" + text, encoding="utf-8")
    assert actions.check(copied) == [], "comments don't count"
    sweep.write_text(text.replace("[512, 4096]", "[512, 8192]"), encoding="utf-8")
    assert "sweep.yaml or the measuring code of figure.py changed" in actions.check(copied)[0]
    sweep.write_text(text, encoding="utf-8")
    code.write_text(code.read_text(encoding="utf-8").replace("* 4\n", "* 8\n"), encoding="utf-8")
    assert "sweep.yaml or the measuring code of figure.py changed" in actions.check(copied)[0]


MEASURING = """
import math as mean
from kvlab.figures import FigureSpec
WEIGHT, OTHER = 2.0, 1.0
SHOWN = 3
TABLE: dict = {}
TABLE["a"] = 4
if OTHER:
    LIMIT = 5

def half(value):
    return value / WEIGHT

def helper(value):
    return half(value) + LIMIT

def measure(run: SHOWN) -> dict:
    return {"x": helper(run.summary["x"]) + TABLE["a"] + mean.pi}

def draw(results):
    return SHOWN * OTHER

FIGURE = FigureSpec(number="F99", title="", draw=draw, measure=measure)
"""


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("2.0, 1.0", "5.0, 1.0", True), ("value / WEIGHT", "value * WEIGHT", True), ("+ LIMIT", "- LIMIT", True),
        ("LIMIT = 5", "LIMIT = 6", True),
        ('["a"] = 4', '["a"] = 7', True), ("math as mean", "cmath as mean", True), ("title=\"\"", "title=\"\", keep=('y',)", True),
        ("measure=measure", "measure=lambda run: helper(run)", True), ("SHOWN = 3", "SHOWN = 4", False), ("SHOWN * OTHER", "SHOWN", False),
    ],
)  # fmt: skip
def test_what_measuring_code_uses_belongs_to_the_hash_and_what_draws_does_not(tmp_path: Path, old: str, new: str, counts: bool) -> None:
    """Constants, helpers of helpers, imports, values changed in place; not what only `draw` or an annotation names."""
    (tmp_path / "sweep.yaml").write_text("compute: {x: [1]}", encoding="utf-8")
    hashes = []
    for text in (MEASURING, MEASURING.replace(old, new)):
        (tmp_path / "figure.py").write_text(text, encoding="utf-8")
        hashes.append(manifest.config_hash(Folder(tmp_path), Folder(tmp_path).spec()))
    assert (hashes[0] != hashes[1]) is counts


def test_a_lambda_reaches_its_own_names_only(tmp_path: Path) -> None:
    code = MEASURING.replace("draw=draw, measure=measure", "draw=draw,\n    measure=lambda run: {'x': half(run)})  # noqa\nREST = (1")
    (tmp_path / "figure.py").write_text(code, encoding="utf-8")
    assert [part.split("\n")[0] for part in Folder(tmp_path).spec().sources()[2:]] == ["WEIGHT, OTHER = 2.0, 1.0", "def half(value):"]
    (tmp_path / "figure.py").write_text(MEASURING.replace("measure=measure", "measure=print"), encoding="utf-8")
    with pytest.raises(UserError, match="measure, collect and compute must be functions that are written in figure.py, not <built-in"):
        Folder(tmp_path).spec().sources()


def test_a_constant_of_a_committed_figures_measuring_code_fails_the_check(tmp_path: Path) -> None:
    shutil.copytree(EXPERIMENTS / "fairness", tmp_path / "fairness")
    folder = Folder(tmp_path / "fairness")
    assert manifest.differences(folder, folder.spec()) == []
    code = folder.path / "figure.py"
    code.write_text(code.read_text(encoding="utf-8").replace("OUTPUT_WEIGHT = 1.0, 2.0", "OUTPUT_WEIGHT = 1.0, 5.0"), encoding="utf-8")
    assert "the measuring code of figure.py changed" in manifest.differences(folder, folder.spec())[0]


def test_a_default_that_changed_after_the_results_fails_the_check() -> None:
    """The manifest keeps the configuration as it resolved; keys that came later don't count, values that changed do."""
    folder, spec = load("recompute_tax"), load("recompute_tax").spec()
    kept = manifest.read(folder)["config"]["recompute_tax"]
    assert kept["preemption"]["protect_oldest"] is False
    assert manifest._drift({"a": {"b": 1}}, {"a": {"b": 2, "new": 3}}, "") == ["a.b is 2 today, was 1 when the results were made"]
    assert manifest.differences(folder, spec) == []


def test_a_figure_that_no_longer_follows_from_its_results_fails_the_check(copied: Folder) -> None:
    code = copied.path / "figure.py"
    code.write_text(code.read_text(encoding="utf-8").replace('"block size (tokens)"', '"block size (tokens), renamed"'), encoding="utf-8")
    assert [line.split(" ")[0] for line in actions.check(copied)] == ["figure.pdf", "figure.svg"]
    actions.draw(copied)
    assert actions.check(copied) == []
    readme = copied.path / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8").replace("28.2", "28.3"), encoding="utf-8")
    assert "the table in README.md does not follow from results.parquet" in actions.check(copied)[0]
    svg = copied.path / "figure.svg"
    svg.write_bytes(svg.read_bytes().replace(b"Matplotlib v3", b"Matplotlib v2"))
    assert "figure.svg was drawn with matplotlib 2" in actions.check(copied)[0]


def garble(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\xff\xfe")


@pytest.mark.parametrize(
    ("file", "spoil", "said", "commands"),
    [
        ("README.md", garble, "README.md is garbled", ("draw", "check")), ("sweep.yaml", garble, "sweep.yaml is garbled", ("check", "run")),
        ("figure.py", garble, "figure.py can't be imported: SyntaxError", ("list", "draw", "check", "run")),
        ("figure.py", lambda path: path.write_text("def (", encoding="utf-8"),
         "figure.py can't be imported: SyntaxError", ("list", "draw", "check", "run")),
    ],
)  # fmt: skip
def test_a_garbled_file_is_named_and_the_other_figures_go_on(
    copied: Folder, capsys: pytest.CaptureFixture[str], file: str, spoil: Any, said: str, commands: tuple[str, ...]
) -> None:
    root = copied.path.parent
    shutil.copytree(copied.path, root / "bad")
    (root / "kernel_latency").rename(root / "good")
    for name in ("bad", "good"):
        folder = Folder(root / name)
        (folder.path / "manifest.json").write_text(
            json.dumps(manifest.sealed({**manifest.read(folder), "figure": name, "config": manifest.resolved(folder)}))
        , encoding="utf-8")
    spoil(root / "bad" / file)
    for command in commands:
        given = ["bad", "good"] if command == "run" else []
        assert main([command, *given, "--root", str(root)]) == (1 if command == "check" else 2), command
        told = capsys.readouterr()
        assert str(root / "bad" / said.split(" ")[0]) + " " + said.split(" ", 1)[1] in told.out + told.err, command
        assert re.search({"list": r"F6 +good ", "check": "good: ok"}.get(command, "good: "), told.out), command
        assert "bad: ok" not in told.out


FIGURE_CODE = """from kvlab.figures import FigureSpec

def draw(results):
    return results["p50"] if "p50" in results else [].plot()

def table(results):
    return 1 / 0

def compute(values):
    return {"cost": [][values["n"]]}

FIGURE = FigureSpec(number="F6", title="", draw=draw, table=table, compute=compute)
"""


def test_a_slip_in_a_figures_own_code_is_named_by_its_line_and_the_other_figures_go_on(
    copied: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copied.path.parent
    shutil.copytree(copied.path, root / "bad")
    (root / "bad" / "figure.py").write_text(FIGURE_CODE.replace(", table=table, compute=compute", ""), encoding="utf-8")
    said = "figure.py, line 4 (draw): AttributeError: 'list' object has no attribute 'plot'."
    assert main(["check", "--root", str(root)]) == 1
    told = capsys.readouterr().out
    assert f"bad: FAILED\n  {said}" in told
    assert "kernel_latency: ok\n1 of 2 figures" in told
    assert main(["draw", "--root", str(root), "--out", str(root / "out")]) == 2
    told = capsys.readouterr()
    assert f"kvlab.figures: bad: {said}" in told.err
    assert told.out.startswith("kernel_latency: figure.pdf")


def test_each_part_of_a_figures_code_that_fails_is_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "figure.py").write_text(FIGURE_CODE, encoding="utf-8")
    (tmp_path / "sweep.yaml").write_text("compute:\n  n: [0]\n", encoding="utf-8")
    spec = folder.spec()
    text = "\n".join(actions.MARKERS)
    with pytest.raises(UserError, match=r"^figure.py, line 7 \(table\): ZeroDivisionError: division by zero\.$"):
        actions.with_table(text, spec, pd.DataFrame())
    with pytest.raises(UserError, match=r"^figure.py, line 10 \(compute\): IndexError: list index out of range\.$"):
        produce(folder, spec, progress=False)
    lacking = FigureSpec(number="F6", title="", draw=lambda results: results["p50"])
    with pytest.raises(UserError, match=r"figure.py \(draw\): the results lack 'p50'\. If they were made for another figure.py, run the"):
        actions.drawn(lacking, pd.DataFrame())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_is_named_and_overwrites_nothing(copied: Folder, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    before = content(copied)
    write = Path.write_bytes

    def refuse(path: Path, data: bytes) -> int:
        if path.name == ".figure.svg.new":
            raise OSError(error, "no", str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(UserError, match=r"(No space left|No permission) to write .*figure\.svg.*Nothing was overwritten"):
        actions.draw(copied)
    assert content(copied) == before


def test_without_matplotlib_the_package_is_named_before_anything_runs(copied: Folder) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from kvlab.figures.__main__ import main; raise SystemExit(main(sys.argv[1:]))"
    before = content(copied)
    for command in ("draw", "run"):
        words = [sys.executable, "-c", code, command, "kernel_latency", "--root", str(copied.path.parent)]
        done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=120)
        assert done.returncode == 2, done.stderr
        assert "Drawing needs the package 'matplotlib', which is not installed: pip install 'kvlab[figures]'" in done.stderr
    assert content(copied) == before


def test_a_run_that_fails_names_its_point_and_leaves_the_results(tmp_path: Path) -> None:
    folder, spec = load("recompute_tax"), load("recompute_tax").spec()
    point = {"prefix_cache": "none", "preemption": "lifo", "num_blocks": 400, "seed": 0}
    with pytest.raises(UserError, match=r"The run prefix_cache=none, preemption=lifo, num_blocks=400, seed=0 (failed|did not finish)"):
        produce(folder, spec, more=("max_model_len=64",), only=lambda values: dict(values) == point, progress=False)


def test_a_sweep_that_is_changed_while_it_runs_is_no_result(copied: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = copied.path / "sweep.yaml"
    text, made = sweep.read_text(encoding="utf-8"), actions.produce

    def change(folder: Folder, spec: FigureSpec) -> Any:
        sweep.write_text(text.replace("[512, 4096]", "[512]"), encoding="utf-8")
        return made(folder, spec)

    before = content(copied)
    monkeypatch.setattr(actions, "produce", change)
    with pytest.raises(UserError, match="was changed while it ran. Nothing was overwritten"):
        actions.run(copied)
    sweep.write_text(text, encoding="utf-8")
    assert content(copied) == before


def test_names_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["draw", "watermark_curv"]) == 2
    assert "watermark_curve" in capsys.readouterr().err
    assert main(["list", "--root", str(tmp_path / "nowhere")]) == 2
    assert "Figures live in a checkout's experiments/" in capsys.readouterr().err
    assert main(["run"]) == 2
    assert "run needs names: first_light, hit_rate" in capsys.readouterr().err


def test_drawing_elsewhere_leaves_the_folder_alone(copied: Folder, tmp_path: Path) -> None:
    before = content(copied)
    assert main(["draw", "kernel_latency", "--root", str(copied.path.parent), "--out", str(tmp_path / "out")]) == 0
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "out" / "kernel_latency").iterdir()}
    assert drawn == {name: before[name] for name in ("figure.pdf", "figure.svg")}
    assert content(copied) == before


def test_users_settings_of_matplotlib_change_nothing(copied: Folder) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "lines.linewidth": 9}):
        assert actions.check(copied) == []
