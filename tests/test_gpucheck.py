"""The GPU check's own parts, and a dry run of the whole script."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from kvlab.engine import EngineConfig, PolicySet
from kvlab.engine.runners.cuda_streams import NoStreams
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.gpucheck import policies, timing
from kvlab.gpucheck.correctness import attended, pairwise, relative_error, tasks_of
from kvlab.gpucheck.pools import contiguous, make_pool
from kvlab.gpucheck.replays import TimedReplays, beside_replays
from kvlab.gpucheck.serving import Served, serve
from kvlab.gpucheck.sizes import DRY, FULL, Sizes
from kvlab.gpucheck.speed import _asked_share
from kvlab.gpucheck.throughput import over_theirs
from kvlab.gpucheck.timing import summary
from kvlab.gpucheck.tokens import agreement, prompts, spec_of, transformers_model
from kvlab.model.loading import load_model

CPU = torch.device("cpu")


def run_script(*args: str, cuda: bool = False) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "") if cuda else ""}
    return subprocess.run([sys.executable, "-m", "kvlab.gpucheck", *args], capture_output=True, encoding="utf-8", env=env, check=False)


@pytest.mark.slow
def test_a_dry_run_measures_every_section_and_writes_three_files(tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = run_script("--dry", "--out", str(out))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((out / "findings.json").read_text(encoding="utf-8"))
    assert report["failures"] == {}
    assert report["environment"]["dry"] is True
    frame = pd.read_parquet(out / "findings.parquet")
    assert set(frame["section"]) == {"card", "correctness", "swap", "decode", "prefill", "tokens", "policies", "graphs", "block size",
                                     "end to end"}  # fmt: skip
    assert len(frame) == len(report["findings"])
    judged = frame[frame["ok"].notna()]
    assert set(judged["section"]) == {"correctness", "swap", "tokens", "policies", "graphs"}  # a dry run's times mean nothing
    assert judged["ok"].all()
    page = (out / "README.md").read_text(encoding="utf-8")
    assert "Dry run on a CPU" in page
    assert page.count("| latency block_size=") == 4  # decode at 1 and 16, prefill at 16 and 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--sections", "decoed", "--dry"], "decode"),
        (["--sections", "swap"], "torch sees no CUDA device"),
        (["--dry", "--out", "OTHER"], "choose another folder"),
        (["--dry", "--sections", ","], "Unknown section ''"),
        (["--dry", "--sections", "tokens", "--model", "/nonexistent"], "no folder of a model"),
        (["--dry", "--out", "OTHER/thesis.tex"], "Choose another folder"),
        (["--dry", "--out", "REPORT"], "holds a report already"),
    ],
)
def test_what_can_not_start_is_said_in_words(args: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x", encoding="utf-8")
    report = tmp_path.with_name(f"{tmp_path.name}-report")
    report.mkdir()
    (report / "findings.json").write_text("{}", encoding="utf-8")
    done = run_script(*[arg.replace("OTHER", str(tmp_path)).replace("REPORT", str(report)) for arg in args])
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert [path.name for path in report.iterdir()] == ["findings.json"]


def test_a_pool_holds_each_sequence_once_and_nan_elsewhere() -> None:
    pool = make_pool([5, 1, 8], block_size=4, num_kv_heads=2, head_dim=3, dtype=torch.float32, device=CPU, seed=0, poison=True)
    blocks = [pool.tables_SM[0, :2].tolist(), pool.tables_SM[1, :1].tolist(), pool.tables_SM[2, :2].tolist()]
    assert len({block for row in blocks for block in row}) == 5
    assert pool.k_NBKD.shape == (8, 4, 2, 3)  # five blocks and three of nobody
    assert int(pool.k_NBKD.isnan().all(-1).all(-1).sum()) == 8 * 4 - (5 + 1 + 8)
    k, v = contiguous(pool, 0)
    assert k.shape == (5, 2, 3)
    assert not k.isnan().any()
    assert torch.equal(v[4], pool.v_NBKD[blocks[0][1], 0])


def test_other_types_than_bf16_take_a_part_of_the_grid_in_which_all_pairs_meet() -> None:
    axes = (FULL.grid_head_dims, FULL.grid_group_sizes, FULL.grid_block_sizes)
    cases = pairwise(*axes)
    assert len(cases) == 40  # of 200
    for a, b in itertools.combinations(range(3), 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(axes[a], axes[b]))
    assert len(pairwise((64,), (1, 3), (3, 16))) == 4
    tasks = tasks_of(FULL, 7)
    counts = Counter((task.kernel, task.dtype, task.storage) for task in tasks for _ in task.cases)
    assert counts.pop(("decode attention", torch.bfloat16, None)) == counts.pop(("prefill attention", torch.bfloat16, None)) == 200
    assert set(counts.values()) == {40}
    assert {kind[1:] for kind in counts} == {(torch.float32, None), (torch.float16, None), (torch.bfloat16, torch.float8_e4m3fn),
                                             (torch.bfloat16, torch.int8)}  # fmt: skip


def test_the_reference_is_causal_and_groups_heads() -> None:
    # Two new tokens over three slots; all scores equal (q = 0), so a result is the mean of the values seen.
    q = torch.zeros(2, 2, 1)
    v = torch.tensor([3.0, 6.0, 12.0]).view(3, 1, 1)
    out = attended(q, torch.ones(3, 1, 1), v, 1.0)
    assert out[:, 0, 0].tolist() == [4.5, 7.0]
    assert torch.equal(out[:, 0], out[:, 1])


def test_an_error_that_is_not_a_number_never_passes() -> None:
    wanted = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert not relative_error(torch.tensor([3.0, float("nan")]), wanted) <= 1e9


def test_differences_are_excused_only_where_float32_was_undecided() -> None:
    wanted = torch.tensor([[[1.0, 0.9, 0.0], [1.0, 0.0, 0.0]]])
    got = torch.tensor([[[0.9, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    yardstick = wanted + torch.tensor([0.1, 0.0, 0.0])
    found = agreement(got, wanted, yardstick)
    assert (found.num_differing, found.num_unexcused, found.top1) == (2, 1, 0.0)  # gaps 0.1 and 1.0, allowed 0.2


def test_random_weights_stand_in_for_a_model_that_can_not_be_fetched() -> None:
    loaded = load_model(spec_of("random", DRY), torch.float32, "cpu")
    assert loaded.name == "random_tiny"
    assert loaded.config.num_kv_heads == 4
    assert loaded.tokenizer is None
    assert prompts(loaded, DRY).shape == (2, 9)
    assert float(loaded.model.embed_VE.std()) == pytest.approx(64**-0.5, rel=0.05)


def test_transformers_keeps_its_rotary_frequencies_in_float32() -> None:
    """The yardstick is transformers as it is meant to run: in bf16 only weights are."""
    for name in ("", "random"):
        loaded = load_model(spec_of(name, DRY), torch.bfloat16, CPU)
        theirs = transformers_model(spec_of(name, DRY), loaded, torch.bfloat16, CPU)
        assert {parameter.dtype for parameter in theirs.parameters()} == {torch.bfloat16}
        assert {buffer.dtype for buffer in theirs.buffers()} == {torch.float32}
        assert theirs.model.rotary_emb.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)  # theta 10,000, heads of 8


def test_throughput_is_over_their_best_batch_and_needs_one() -> None:
    found = over_theirs(1200.0, [200.0, 300.0, 250.0])
    assert (found.value, found.ok) == (4.0, True)
    assert over_theirs(800.0, [200.0, 300.0]).ok is False
    none = over_theirs(1200.0, [])
    assert (none.value, none.ok) == (None, None)
    assert "none of transformers' batches" in none.note


def test_a_tie_may_turn_either_way_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests, one of which comes twice: the second differs where float32 was undecided, the third where it was not."""
    gaps = {(8, 2): 0.5, (9, 1): 3.0}
    monkeypatch.setattr(policies, "_gap", lambda loaded, ids: gaps[tuple(ids)])
    wanted = Served([[1, 2], [2, 3], [1, 3]], 1.0, [])
    nobody: Any = None
    compared = policies.Compared.of(Served([[1, 2], [2, 4], [1, 4], [1, 2]], 1.0, []), wanted, nobody, [[7], [8], [9]], 1.0)
    assert compared == (2, 1, 1, 1.0)
    assert not compared.ok
    assert policies.Compared(15, 1, 0, 1.0).ok
    assert not policies.Compared(14, 2, 0, 1.0).ok
    assert policies.Compared(30, 2, 0, 1.0).ok


@pytest.mark.parametrize("sizes", [DRY, FULL], ids=["dry", "full"])
def test_every_mechanism_acts_on_prompts_that_share_nothing(sizes: Sizes) -> None:
    """Preemption, swap, chunks, prefix hits (of prompts that come twice) and depth, in the pools that the check takes; tokens stay."""
    runner: Any = SimulatedRunner()
    shape: Any = SimpleNamespace(tokenizer=None, config=SimpleNamespace(vocab_size=32_000))
    work = prompts(shape, sizes).tolist()
    room = 4 * sizes.num_prompts * (sizes.prompt_len + sizes.num_new)
    plain = EngineConfig(room, 16, max_num_seqs=len(work), max_model_len=policies.MAX_MODEL_LEN)
    wanted = serve(runner, torch.float32, plain, PolicySet(), work, sizes.num_new)
    for case in policies.cases(sizes):
        got = serve(runner, torch.float32, case.config, case.policies, work * case.num_rounds, sizes.num_new)
        assert case.acted(got, len(got.steps) - len(wanted.steps)) > 0, case.name
        assert got.tokens == wanted.tokens * case.num_rounds


def test_a_step_beside_its_replay() -> None:
    """Steps end at 1, 3, 6, 10 and 15 ms; the third and fourth decode both sequences, in graphs of 2 and 3.5 ms; the last only one."""
    counts = [(2, 0, 1), (2, 1, 3), (2, 2, 6), (2, 2, 10), (1, 1, 15)]
    steps: Any = [SimpleNamespace(num_scheduled_seqs=a, num_decode_seqs=b, end_s=1e-3 * end) for a, b, end in counts]
    assert beside_replays(steps, [2.0, 3.5, 1.0], 2) == pytest.approx([1.0, 0.5])
    assert beside_replays(steps, [2.0, 3.5], 2) == []  # one is missing: it is not known which


def test_replays_are_timed_and_nothing_else() -> None:
    streams = TimedReplays(NoStreams())
    graph = streams.captured(lambda: torch.ones(2))
    assert streams.milliseconds() == []
    graph.replay()
    graph.replay()
    assert graph.output.tolist() == [1.0, 1.0]
    assert len(streams.milliseconds()) == 2
    assert min(streams.milliseconds()) >= 0
    streams.forget()
    assert streams.marks == []


def test_what_is_timed_is_queued_while_the_device_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three repeats over two sets of buffers on a device that says how long each took; the host waits before and after, not between."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    monkeypatch.setattr(timing, "WARM_S", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    calls = [lambda: log.append("a"), lambda: log.append("b")]
    assert timing.timed(calls, torch.device("cuda"), 3, num_warmup=1) == (1.0, 1.0, 1.0)
    assert log == ["a", "b", "wait", "sleep", *["event", "a", "event"], *["event", "b", "event"], *["event", "a", "event"], "wait"]


def test_times_are_medians_and_shares_grow_with_the_block() -> None:
    assert summary([5.0, 1.0, 9.0, 2.0, 3.0]) == (3.0, 1.0, 9.0)
    assert [_asked_share(b) for b in (1, 4, 16, 256)] == [0.60, 0.725, 0.85, 0.85]
    assert FULL.grid_head_dims == (64, 80, 96, 128, 256)
    assert FULL.grid_group_sizes == (1, 3, 5, 8, 32)
    assert set(FULL.block_sizes) >= {1, 16, 256}
