"""Cost models against figures worked out by hand, and what a simulated run tells of its times."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import kvlab
from kvlab import assembly
from kvlab.building import build
from kvlab.config import to_plain
from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import VirtualClock
from kvlab.engine.cost import Constant, Linear, ModelShape, Roofline, StepWork, step_work
from kvlab.engine.driver import drive
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.trace import Recorder, summarize
from kvlab.trace.summary import REQUEST_COLUMNS, STEP_COLUMNS, Goals
from kvlab.types import BlockCopy, BlockTransfer, Plan, Request, SamplingParams, ScheduledSeq, UserError
from kvlab.workload.base import WorkloadContext
from kvlab.workload.fixed import FixedWorkload
from kvlab.workload.synthetic import SyntheticWorkload

SHAPE = ModelShape(num_parameters=10**9, head_parameters=10**8, bytes_per_parameter=2, num_layers=10, kv_bytes_per_token=10**5,
                   attention_flops=10**6, block_bytes=1_600_000)  # fmt: skip
DECODES = Plan(0, 0.0, (ScheduledSeq(1, 99, 1), ScheduledSeq(2, 199, 1)), ((5,), (6,)))
PROMPT = Plan(0, 0.0, (ScheduledSeq(1, 0, 1000),), (tuple(range(1000)),))
MIXED = Plan(
    0, 0.0, (ScheduledSeq(1, 9, 1), ScheduledSeq(2, 4, 3, 0), ScheduledSeq(3, 32, 2, 1, 16)), ((1,), (1, 2, 3), (1, 2)),
    swap_in=(BlockTransfer("cpu", 0, "gpu", 1, 16),) * 3, swap_out=(BlockTransfer("gpu", 0, "cpu", 1, 16),) * 2, copies=(BlockCopy(1, 2),),
)  # fmt: skip


def test_the_work_of_a_step() -> None:
    """Contexts 10; 7, of which 3 queries see 5, 6 and 7; 34 less 16 dropped = 18, of which 2 queries see 17 and 18."""
    assert step_work(MIXED) == StepWork(6, 3, 1, 2, 10 + 7 + 18, 10 + 18 + 35, 5, 1)
    assert step_work(DECODES) == StepWork(2, 2, 2, 2, 300, 300, 0, 0)
    assert step_work(PROMPT) == StepWork(1000, 1, 0, 1, 1000, 500_500, 0, 0)
    assert step_work(MIXED._replace(attention_window=6)) == StepWork(6, 3, 1, 2, 6 + 7 + 7, 6 + (5 + 6 + 6) + 2 * 6, 5, 1)
    assert step_work(PROMPT._replace(attention_window=16)) == StepWork(1000, 1, 0, 1, 1000, 16 * 17 // 2 + 984 * 16, 0, 0)
    # Two sinks besides: 6 + 2; 5, 6 and (1 to 6 and sink 0) 7 pairs; twice 6 + 2 pairs over 27 to 33 and 2 sinks.
    sinks = MIXED._replace(attention_window=6, num_sink_tokens=2)
    assert step_work(sinks) == StepWork(6, 3, 1, 2, 8 + 7 + 9, 8 + (5 + 6 + 7) + 2 * 8, 5, 1)
    sinks = PROMPT._replace(attention_window=16, num_sink_tokens=4)  # positions 16, 17 and 18 see one to three of them besides
    assert step_work(sinks) == StepWork(1000, 1, 0, 1, 1000, 16 * 17 // 2 + 984 * 16 + (1 + 2 + 3) + 981 * 4, 0, 0)
    assert step_work(Plan(3, 0.0)) == StepWork(0, 0, 0, 0, 0, 0, 0, 0)


def roofline(**more: float) -> Roofline:
    """100 TFLOPS, 1 TB/s, 10 GB/s between tiers, 1 ms a step and 20 us a layer."""
    cost = Roofline(**{"tflops": 100, "gb_per_s": 1000, "transfer_gb_per_s": 10, "overhead_ms": 1, "layer_overhead_us": 20, **more})
    cost.bind(SHAPE)
    return cost


def test_roofline_by_hand() -> None:
    """Overheads are 1 + 10 x 0.02 ms. Decodes read 1.1e9 weights of 2 bytes (2.2 ms) and 302 tokens of K and V (30.2 us); the prompt's
    2e12 + 2e8 FLOPs take 20.002 ms, its 500,500 pairs 5.005 ms."""
    assert roofline().step_s(DECODES) == pytest.approx(1.2e-3 + 2.2e-3 + 30.2e-6, rel=1e-12)
    assert roofline().step_s(PROMPT) == pytest.approx(1.2e-3 + 20.002e-3 + 5.005e-3, rel=1e-12)
    assert roofline(compute_efficiency=0.5).step_s(PROMPT) == pytest.approx(1.2e-3 + 2 * 25.007e-3, rel=1e-12)
    assert roofline(memory_efficiency=0.5).step_s(DECODES) == pytest.approx(1.2e-3 + 2 * 2.2302e-3, rel=1e-12)


def test_roofline_of_transfers_and_of_chunks_that_sample_nothing() -> None:
    """Five blocks at 10 GB/s take 0.8 ms (1.6 at half of it), a copy reads and writes 1.6 MB at 1 TB/s; without samples the head is not
    read; a step that computes nothing launches no layer."""
    moves = Plan(0, 0.0, swap_in=MIXED.swap_in, swap_out=MIXED.swap_out, copies=MIXED.copies)
    assert roofline().step_s(moves) == pytest.approx(1e-3 + 0.8e-3 + 3.2e-6, rel=1e-12)
    assert roofline(transfer_efficiency=0.5).step_s(moves) == pytest.approx(1e-3 + 1.6e-3 + 3.2e-6, rel=1e-12)
    chunk = Plan(0, 0.0, (ScheduledSeq(1, 0, 2, 0),), ((1, 2),))
    assert roofline().step_s(chunk) == pytest.approx(1.2e-3 + 2e-3 + 0.4e-6, rel=1e-12)


def test_linear_by_hand() -> None:
    """MIXED: two chunks of five tokens, one decode, 35 entries, 63 pairs, six blocks."""
    cost = Linear(step_ms=1, chunk_ms=2, chunk_token_us=30, decode_seq_us=40, kv_token_ns=500, pair_ns=600, block_us=70)
    assert cost.step_s(MIXED) == pytest.approx(1e-3 + 4e-3 + 150e-6 + 40e-6 + 17.5e-6 + 37.8e-6 + 420e-6, rel=1e-12)
    assert Linear(0, 0, 0, 1, 0).step_s(PROMPT) == 1e-9, "a clock that stands still orders nothing"


@pytest.mark.parametrize(("make", "name"), [
    (lambda: Constant(0), "Constant.step_ms"), (lambda: Constant(float("nan")), "Constant.step_ms"),
    (lambda: Constant("fast"), "Constant.step_ms"),  # type: ignore[arg-type]
    (lambda: Roofline(tflops=0), "Roofline.tflops"), (lambda: Roofline(gb_per_s=-1), "Roofline.gb_per_s"),
    (lambda: Roofline(gb_per_s=float("inf")), "Roofline.gb_per_s"), (lambda: Roofline(overhead_ms=-0.1), "Roofline.overhead_ms"),
    (lambda: Roofline(compute_efficiency=1.1), "Roofline.compute_efficiency"), (lambda: Roofline(memory_efficiency=0), "memory_efficiency"),
    (lambda: Linear(step_ms=-1), "Linear.step_ms"), (lambda: Linear(pair_ns=True), "Linear.pair_ns"),
    (lambda: Linear(0, 0, 0, 0, 0), "is 0"),
])  # fmt: skip
def test_parameters_out_of_range(make: Any, name: str) -> None:
    with pytest.raises(UserError, match=name):
        make()


def test_a_roofline_without_a_model() -> None:
    with pytest.raises(UserError, match=r"bind\(shape\)"):
        Roofline().step_s(DECODES)


# ----------------------------------------------------------------------------- devices


def llama3_8b_step_ms(cost_model: str, plan: Plan) -> float:
    """A step of model=dummy_llama3_8b in bfloat16 under a configured cost model."""
    config = to_plain(kvlab.compose("runner=simulated", "model=dummy_llama3_8b", f"cost_model={cost_model}", "num_blocks=100"))
    policies = assembly.policy_set(config, {})
    parts = assembly.simulated_parts(config, build(config["model"]))
    assembly.make_engine(assembly.engine_config(config, policies, parts), policies, parts)
    assert isinstance(parts.runner, SimulatedRunner)
    return parts.runner.cost.step_s(plan) * 1e3


def test_devices_are_bound_by_what_bounds_them() -> None:
    """A decode step reads 2 x 7,504,924,672 bytes at 0.8 x 3.35 TB/s (5.6 ms), and K and V of 302 tokens; 0.5 ms + 32 x 15 us come on top.
    A prompt is as quick on an H200 as on an H100, whose arithmetic is the same."""
    h100 = llama3_8b_step_ms("h100", DECODES)
    assert h100 == pytest.approx(0.98 + 2 * 7_504_924_672 / (0.8 * 3.35e12) * 1e3 + 302 * 131_072 / (0.8 * 3.35e12) * 1e3, rel=1e-9)
    decode = [llama3_8b_step_ms(name, DECODES) for name in ("h200", "h100", "a100", "l4", "cpu")]
    assert decode == sorted(decode)
    prompt = {name: llama3_8b_step_ms(name, PROMPT) for name in ("h200", "h100", "a100", "l4")}
    assert prompt["h200"] == prompt["h100"]
    assert prompt["a100"] / prompt["h100"] == pytest.approx(989.4 / 312, rel=0.1)
    assert prompt["l4"] / prompt["h100"] == pytest.approx(989.4 * 0.6 / (121 * 0.5), rel=0.1)


def test_a_simulated_run_builds_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were built")

    monkeypatch.setattr(assembly, "load_model", refuse)
    monkeypatch.setattr("kvlab.model.specs.dummy_model", refuse)
    config = kvlab.compose("runner=simulated", "model=dummy_llama3_8b", "cost_model=h100", "workload=synthetic", "workload.num_requests=3")
    run = kvlab.run(config, folder=tmp_path / "run", progress=False)
    assert run.summary["num_finished"] == 3
    assert run.summary["step_cost"]["name"] == "Roofline"
    assert run.summary["step_cost"]["gb_per_s"] == 3350.0


def test_prompts_with_the_models_tokenizer(tmp_path: Path) -> None:
    """The same token counts as the real run has; without the tokenizer they are bytes without its chat markers."""
    common = ("model=tiny", "workload=chat", "workload.limit=3", "workload.sampling.max_tokens=4", "workload.sampling.ignore_eos=true")
    counts = {}
    for name, more in (("real", ()), ("simulated", ("runner=simulated", "runner.tokenizer=true"))):
        run = kvlab.run(kvlab.compose(*common, *more), folder=tmp_path / name, progress=False)
        counts[name] = sorted(zip(run.requests()["request_id"], run.requests()["num_prompt_tokens"], strict=True))
    assert counts["simulated"] == counts["real"]


# ---------------------------------------------------------------------------- latencies


def ask(name: str, prompt_len: int, max_tokens: int, arrival_s: float) -> Request:
    """A request of its own tokens."""
    return Request(name, list(range(prompt_len)), SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                   arrival_s=arrival_s)  # fmt: skip


def test_latencies_by_hand(tmp_path: Path) -> None:
    """10 ms a step, four tokens a step. a (6 tokens, at 0): 4 + 2 prompt tokens, tokens at 20, 30, 40 ms. b (2 tokens, at 15 ms): seen at
    20 ms, tokens at 30, 40 ms. c (2 tokens, at 1 s): the clock jumps; one token at 1.01 s."""
    requests = [ask("a", 6, 3, 0.0), ask("b", 2, 2, 0.015), ask("c", 2, 1, 1.0)]
    with Recorder(tmp_path) as recorder:
        engine = Engine(EngineConfig(num_blocks=20, block_size=4, max_num_batched_tokens=4, max_model_len=32), PolicySet(),
                        SimulatedRunner(97, Constant(10.0)), VirtualClock(), listeners=[recorder])  # fmt: skip
        workload = FixedWorkload(requests)
        workload.start(WorkloadContext(None, 97, 32, 0))
        drive(engine, workload)
    frame = recorder.requests().set_index("request_id").loc[["a", "b", "c"]]
    for column, values in {
        "ttft_s": [0.02, 0.015, 0.01], "e2el_s": [0.04, 0.025, 0.01], "queue_time_s": [0.0, 0.005, 0.0], "finish_s": [0.04, 0.04, 1.01],
    }.items():  # fmt: skip
        assert frame[column].tolist() == pytest.approx(values, abs=1e-12), column
    assert frame["tpot_s"].tolist() == pytest.approx([0.01, 0.01, float("nan")], nan_ok=True)
    assert frame["token_times_s"]["a"].tolist() == pytest.approx([0.02, 0.03, 0.04])
    steps = recorder.steps()
    assert steps["num_prompt_tokens_computed"].tolist() == [4, 2, 2, 0, 2]
    assert steps["num_scheduled_seqs"].tolist() == [1, 1, 2, 2, 1]
    assert steps["num_decode_seqs"].tolist() == [0, 0, 1, 2, 0]
    assert steps["num_kv_tokens_read"].tolist() == [4, 6, 7 + 2, 8 + 3, 2]
    assert steps["num_attention_pairs"].tolist() == [10, 5 + 6, 7 + 3, 8 + 3, 3]
    assert steps["step_ms"].tolist() == pytest.approx([10.0] * 5)
    summary = summarize(recorder.steps(STEP_COLUMNS), recorder.requests(REQUEST_COLUMNS), Goals(ttft_ms=18, tpot_ms=10.5))
    assert summary["duration_s"] == pytest.approx(1.01)
    assert summary["mean_ttft_ms"] == pytest.approx(15.0)
    assert summary["median_itl_ms"] == pytest.approx(10.0)
    assert summary["request_goodput_per_s"] == pytest.approx(2 / 1.01), "b and c; a's first token came after 20 ms"
    assert summary["output_token_throughput_per_s"] == pytest.approx(6 / 1.01)
    assert summary == summarize(recorder.steps(), recorder.requests(), Goals(ttft_ms=18, tpot_ms=10.5))


# ------------------------------------------------------------------------------- memory


def live_objects(num_requests: int, folder: Path) -> int:
    """Objects alive, with engine, workload and recorder still there, after so many requests in a pool that is full of cached blocks."""
    folder.mkdir()
    recorder = Recorder(folder, buffer_rows=64)
    runner = SimulatedRunner(997)
    engine = Engine(EngineConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_model_len=64), PolicySet(), runner, VirtualClock(),
                    listeners=[recorder])  # fmt: skip
    workload = SyntheticWorkload(num_requests, 9, 6, concurrency=8)
    workload.start(WorkloadContext(None, 997, 64, 0))
    drive(engine, workload)
    recorder.flush()
    assert not engine.groups
    assert not engine.sequences
    gc.collect()
    number = len(gc.get_objects())
    assert recorder.requests(("request_id",)).shape == (num_requests, 1)
    return number


def test_nothing_of_a_finished_request_stays(tmp_path: Path) -> None:
    """A single object a request would be 900 more."""
    live_objects(100, tmp_path / "warm")
    few = live_objects(300, tmp_path / "few")
    assert live_objects(1200, tmp_path / "many") - few < 450
