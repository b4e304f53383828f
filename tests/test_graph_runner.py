"""The GPU's runner on a CPU: padding, buffers, ids that stay on the device, blocks that move beside the computation. The tokens are those
of the plain runner, and which way each step went is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_support import Log, policies, request, run_to_end, serve
from equality_support import tiny, tiny_engine
from torch.overrides import TorchFunctionMode

from kvlab.cache.tensors import KVTensors
from kvlab.engine import filters, sampler, steady
from kvlab.engine.runners import cuda_runner, cuda_sampling, torch_runner
from kvlab.engine.runners.base import RunnerConfig
from kvlab.engine.runners.cuda_runner import CudaRunner
from kvlab.engine.runners.cuda_sampling import choose, needs_host
from kvlab.engine.runners.cuda_streams import NoStreams
from kvlab.engine.runners.cuda_swap import BlockMover
from kvlab.engine.runners.decode_graphs import DecodeGraphs, StaticBatch, default_sizes
from kvlab.engine.runners.memory import Limits
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.engine.sampler import SamplingState, sample
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.kernels.transfer import on_device
from kvlab.model.config import LlamaConfig
from kvlab.model.loading import LoadedModel, load_model
from kvlab.types import LATE, Plan, SamplingParams, ScheduledSeq, SeqStart, UserError
from kvlab.types.columns import Decodes, OneEach

CPU = torch.device("cpu")

# ------------------------------------------------------------------ buffers and sizes


def test_sizes() -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert default_sizes(256)[-3:] == (240, 248, 256)
    assert default_sizes(400)[-4:] == (256, 320, 384, 400)


def test_a_batch_is_padded_with_rows_that_write_nowhere() -> None:
    """Two sequences in a batch of four, tables of two blocks in room for three. What an earlier batch left there is gone."""
    batch = StaticBatch(4, 3, 16, None, 48, CPU, is_exact=True)
    ones = np.ones(4, dtype=np.int64)
    batch.fill(4, 9 * ones, 9 * ones, 9 * ones, 9 * ones, np.full((4, 3), 9))
    views = batch.token_ids(4), batch.positions(4), batch.meta(4, 3)
    batch.fill(4, np.array([5, 6]), np.array([20, 3]), np.array([36, 3]), np.array([21, 4]), np.array([[1, 2], [0, 0]]))
    ids, positions, meta = views  # the same memory, as a graph holds it
    assert ids.tolist() == [5, 6, 0, 0]
    assert positions.tolist() == [20, 3, 0, 0]
    assert meta.slot_mapping_T.tolist() == [36, 3, -1, -1]
    assert meta.context_lens_S.tolist() == [21, 4, 1, 1]
    assert meta.block_tables_SM[:, :2].tolist() == [[1, 2], [0, 0], [0, 0], [0, 0]]
    assert batch.meta(4, 3).context_lens == [21, 4, 1, 1]
    assert batch.meta(4, 2).block_tables_SM.shape == (4, 2)
    assert StaticBatch(4, 3, 16, None, 48, CPU, is_exact=False).meta(2, 3).context_lens == [48, 48]


def test_long_contexts_have_graphs_of_their_own() -> None:
    """From 8,193 slots on. What is recorded for 4,096 sees a table of that many."""
    seen: list[tuple[int, int, int]] = []

    def forward(ids: torch.Tensor, positions: torch.Tensor, meta: Any) -> torch.Tensor:
        seen.append((len(ids), meta.block_tables_SM.shape[1], meta.context_lens[0]))
        return ids[:, None].double() * meta.block_tables_SM.shape[1]

    assert StaticBatch(2, 512, 16, None, 8192, CPU, is_exact=False).widths() == [512]
    batch = StaticBatch(2, 1024, 16, None, 16384, CPU, is_exact=False)
    graphs = DecodeGraphs(forward, batch, (1, 2), NoStreams())
    assert seen == [(2, 256, 4096), (2, 1024, 16384), (1, 256, 4096), (1, 1024, 16384)]
    ones = np.ones(2, dtype=np.int64)
    for num_blocks, width in [(1, 256), (256, 256), (257, 1024), (1024, 1024)]:
        batch.fill(2, ones, ones, ones, ones, np.ones((2, num_blocks), dtype=np.int64))
        assert graphs.replay(2, 2, num_blocks).tolist() == [[width], [width]]
    assert graphs.size_for(2, 1025) is None


def test_the_least_size_that_holds_a_batch() -> None:
    batch = StaticBatch(8, 3, 16, None, 48, CPU, is_exact=True)
    graphs = DecodeGraphs(lambda ids, positions, meta: ids[:, None].double() * 2, batch, (2, 4, 8), NoStreams())
    assert [graphs.size_for(num, 1) for num in (1, 2, 3, 4, 5, 8, 9)] == [2, 2, 4, 4, 8, 8, None]
    assert graphs.size_for(1, 4) is None  # a table wider than the buffer
    column = np.array([7, 8, 9])
    batch.fill(4, column, column, column, column, np.zeros((3, 1), dtype=np.int64))
    batch.token_ids(4)[1] = 50  # written on the device after the copy
    assert graphs.replay(4, 3, 1).tolist() == [[14.0], [100.0], [18.0]]
    assert graphs.paths == {"graph[4]": 1}
    for bad in ((), (0, 2), (4, 2), (2, 2)):
        with pytest.raises(UserError, match="ascending numbers of sequences"):
            DecodeGraphs(lambda ids, positions, meta: ids, batch, bad, NoStreams())


# ------------------------------------------------------------------ choosing without the host


def states_of(*params: SamplingParams) -> list[SamplingState]:
    return [SamplingState.of(SeqStart(i, i, "admit", p, 77 + i, 0, 4, (1, 2, 3, 4)), (3,)) for i, p in enumerate(params)]


def test_ids_chosen_on_the_device_are_those_of_the_sampler() -> None:
    logits = torch.randn(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logits[6, 3] = 100.0
    states = states_of(SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.8),
                       SamplingParams(temperature=2.0, min_p=0.05), SamplingParams(temperature=1.0, n=3),
                       SamplingParams(temperature=1.0, top_k=40), SamplingParams(min_tokens=9))  # fmt: skip
    positions, counts = [9, 8, 7, 6, 5, 6, 8], [1, 1, 1, 1, 3, 1, 1]
    ids = choose(logits, states, positions, counts)
    assert [tuple(row[:n]) for row, n in zip(ids.tolist(), counts, strict=True)] == sample(logits, states, positions, counts).tokens
    assert ids[6, 0] != 3  # EOS is masked below min_tokens


def test_rows_without_a_number_are_marked() -> None:
    logits = torch.zeros(3, 5)
    logits[0], logits[2] = torch.nan, -torch.inf
    assert choose(logits, states_of(*[SamplingParams()] * 3), [5] * 3, [1] * 3).tolist() == [[-1], [0], [-1]]
    assert choose(logits, states_of(*[SamplingParams(temperature=1.0)] * 3), [5] * 3, [1] * 3)[[0, 2]].tolist() == [[-1], [-1]]


class OnlyByTransfer(TorchFunctionMode):
    """Raises where numbers go to the device other than through `on_device`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_allowed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        waits = func in (torch.tensor, torch.as_tensor) and out.device.type == "meta"
        waits |= func is torch.Tensor.to and (args[0].device.type, out.device.type) == ("cpu", "meta")
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].device.type == "meta":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            waits |= any(isinstance(i, list) or (isinstance(i, torch.Tensor) and i.device.type == "cpu") for i in index)
        assert self.is_allowed or not waits, f"{func} takes numbers to the device, and the host would wait"
        return out

    def transfer(self, *args: Any) -> torch.Tensor:
        self.is_allowed = True
        moved = on_device(*args)
        self.is_allowed = False
        return moved


def test_nothing_is_asked_of_the_device_while_ids_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has no numbers at all; every way of choosing that may run there."""
    watch = OnlyByTransfer()
    for module in (cuda_sampling, sampler, filters):
        monkeypatch.setattr(module, "on_device", watch.transfer)
    states = states_of(SamplingParams(min_tokens=9), SamplingParams(temperature=1.0, n=3), SamplingParams(temperature=0.7, top_p=0.8),
                       SamplingParams(temperature=2.0, min_p=0.05), SamplingParams(temperature=1.0, top_k=2, top_p=0.5))  # fmt: skip
    with watch:
        ids = choose(torch.empty(5, 3000, device="meta"), states, [9] * 5, [1, 3, 1, 1, 1])
        assert ids.shape == (5, 3)
        for wrong in ("torch.tensor([1, 2], device='meta')", "ids[[0, 1]]", "torch.zeros(3).to('meta')"):
            with pytest.raises(AssertionError, match="host would wait"):
                eval(wrong)
        with pytest.raises(RuntimeError):  # numbers that a host asks for: there are none
            bool((ids > 0).any())


def test_who_needs_the_host() -> None:
    params = SamplingParams(), SamplingParams(temperature=1.0, top_k=3), SamplingParams(n=4, temperature=1.0), SamplingParams(logprobs=0)
    more = SamplingParams(presence_penalty=1.0), SamplingParams(beam_width=2)
    assert [needs_host(state) for state in states_of(*params, *more)] == [False, False, False, True, True, True]


# ------------------------------------------------------------------ moving blocks


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_blocks_move_as_they_do_at_once(dtype: torch.dtype) -> None:
    """Out, overwritten at once, out again, in elsewhere; int8 with its scales."""
    sides = [KVTensors(2, 6, 3, 2, 4, dtype, CPU, num_cpu_blocks=5) for _ in range(2)]
    for kv in sides:
        for gpu, _ in kv.tiers():
            gpu.copy_(torch.arange(gpu.numel()).view(gpu.shape) % 100)
    backend = TorchBackend()
    plain, mover = sides[0], BlockMover(sides[1], backend, NoStreams())
    for out, back in [([(0, 4), (3, 0)], []), ([(5, 2)], [(4, 1), (0, 0)]), ([], [(2, 3)])]:
        plain.swap_out(out, backend)
        mover.swap_out(out)
        for kv in sides:
            for gpu, _ in kv.tiers():
                gpu[:, :, [source for source, _ in out]] = 0
        plain.swap_in(back, backend)
        mover.swap_in(back)
    mover.finish()
    for (gpu, cpu), (gpu_too, cpu_too) in zip(sides[0].tiers(), sides[1].tiers(), strict=True):
        assert torch.equal(gpu, gpu_too)
        assert torch.equal(cpu, cpu_too)


# ------------------------------------------------------------------ an engine over it


class Unsynchronised(NoStreams):
    """Counts how often the host waits."""

    def __init__(self) -> None:
        self.num_waits = 0

    def mark(self) -> Any:
        outer, mark = self, super().mark()

        class Mark(type(mark)):  # type: ignore[misc]
            def wait(self) -> None:
                outer.num_waits += 1

        return Mark()


KINDS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.9}, {"n": 2, "temperature": 1.3}, {}, {"temperature": 0.5}]
HOST: list[dict[str, Any]] = [{"logprobs": 2}, {"beam_width": 2}, {"presence_penalty": 1.5, "temperature": 1.0}]


def served(runner: TorchRunner, kinds: list[dict[str, Any]], depth: int, **more: Any) -> Log:
    limits = {"num_cpu_blocks": 20, "max_num_seqs": 16, **more}
    engine, log = tiny_engine(26, 3, policies(mode="swap", admission="none"), runner=runner, depth=depth, **limits)
    serve(engine, [request(f"r{i}", range(5 + i, 18 + i), 9, **kind) for i, kind in enumerate(kinds)])
    return log


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("sizes", "expected"), [((), {"eager"}), (None, {"graph[1]", "graph[2]", "graph[4]", "graph[8]", "eager"}),
                                                 ((2, 4), {"graph[2]", "graph[4]", "eager"})])  # fmt: skip
def test_tokens_are_those_of_the_plain_runner(depth: int, sizes: tuple[int, ...] | None, expected: set[str]) -> None:
    """Chunks, samples, swap; decodes padded from 3 to 4 and from 5 to 8, or without a graph where none is large enough."""
    streams = Unsynchronised()
    runner = CudaRunner(tiny(), streams=streams, graph_sizes=sizes)
    plain, log = served(TorchRunner(tiny()), KINDS, depth), served(runner, KINDS, depth)
    assert log.outputs == plain.outputs
    assert [plan.decisions() for plan in log.plans] == [plan.decisions() for plan in plain.plans]
    assert log.total("swapped_in_blocks") > 0
    assert set(runner.paths) == expected
    assert streams.num_waits == len(log.plans) + sum(bool(plan.swap_out) for plan in log.plans)  # one a step; what goes out arrives
    assert depth == 0 or any(ids == (LATE,) for plan in log.plans for ids in plan.token_ids)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("sizes", [(), (4, 16)])
def test_decodes_in_columns_have_the_tokens_of_those_on_their_own(depth: int, sizes: tuple[int, ...],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Twelve requests of other lengths, greedy and drawn, some of which end early; two come later, one of them samples twice."""
    logs = []
    for fewest in (8, 10**9):
        monkeypatch.setattr(steady, "FEWEST", fewest)
        loaded = tiny(torch.float64)
        plain = fewest > 8
        runner = TorchRunner(loaded) if plain else CudaRunner(loaded, TorchBackend(), graph_sizes=sizes)
        engine, log = tiny_engine(90, 3, policies(), runner=runner, depth=0 if plain else depth, max_model_len=60, max_num_seqs=16)
        for i in range(14):
            kind = {"n": 2} if i == 13 else {"stop_token_ids": tuple(range(0, 256, 2))} if i % 4 == 1 else {}
            if i == 12:
                for _ in range(5):
                    engine.step()
            engine.add_request(request(f"r{i}", range(3, 5 + i), 9 + i % 3, temperature=float(i % 2), **kind))
        run_to_end(engine, 60)
        logs.append(log)
    columns, plain_log = logs
    assert columns.outputs == plain_log.outputs
    assert {reason for outputs in columns.outputs.values() for _, reason in outputs} == {"stop", "length"}
    steps = [(plan.scheduled, outcome.tokens) for plan, outcome in zip(columns.plans, columns.outcomes, strict=True)]
    assert sum(isinstance(scheduled, Decodes) and isinstance(tokens, OneEach) for scheduled, tokens in steps) >= 4
    assert any(isinstance(scheduled, Decodes) and scheduled.rest for scheduled, _ in steps)
    assert not any(isinstance(plan.scheduled, Decodes) for plan in plain_log.plans)


@pytest.mark.parametrize("depth", [0, 1])
def test_what_needs_the_host_is_chosen_there(depth: int) -> None:
    runner = CudaRunner(tiny())
    plain, log = served(TorchRunner(tiny()), KINDS + HOST, depth), served(runner, KINDS + HOST, depth)
    assert log.outputs == plain.outputs
    assert [outcome.logprobs for outcome in log.outcomes] == [outcome.logprobs for outcome in plain.outcomes]
    assert runner.paths["host"] > 0
    assert sum(runner.paths.values()) == sum(bool(plan.scheduled) for plan in log.plans)


def test_the_outcome_may_be_asked_for_late_and_twice() -> None:
    """Two steps are queued before the first is asked for; the second takes its token from the device."""
    runner, plain = CudaRunner(tiny(), graph_sizes=(1,)), TorchRunner(tiny())
    start = SeqStart(0, 0, "admit", SamplingParams(max_tokens=5), 0, 0, 3, (5, 6, 7))
    first = Plan(0, 0.0, (ScheduledSeq(0, 0, 3),), ((5, 6, 7),), (start,), {}, {0: (2, 1)})
    for each in (runner, plain):
        each.initialize(RunnerConfig(4, 0, 4, 4, 64, kv_dtype="float64", depth=1))
    one, two = runner.submit(first), runner.submit(Plan(1, 0.0, (ScheduledSeq(0, 3, 1),), ((LATE,),)))
    token = plain.submit(first).result().tokens[0][0]
    other = plain.submit(Plan(1, 0.0, (ScheduledSeq(0, 3, 1),), ((token,),))).result().tokens
    assert two.result().tokens == other
    assert one.result().tokens == ((token,),)
    assert one.result() is one.result()
    assert runner.paths == {"eager": 1, "graph[1]": 1}


def test_logits_without_a_number_are_an_error_when_the_outcome_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CudaRunner(tiny(), graph_sizes=())
    runner.initialize(RunnerConfig(4, 0, 4, 4, 64, kv_dtype="float64"))
    monkeypatch.setattr(type(tiny().model), "logits", lambda self, hidden: torch.full((len(hidden), 320), torch.nan))
    start = SeqStart(0, 0, "admit", SamplingParams(), 0, 0, 1, (5,))
    pending = runner.submit(Plan(0, 0.0, (ScheduledSeq(0, 0, 1),), ((5,),), (start,), {}, {0: (0,)}))
    with pytest.raises(RuntimeError, match="NaN .* in 1 of 1 rows"):
        pending.result()


def test_all_kernels_have_run_before_the_first_step() -> None:
    """Decodes of one and of all sequences, of the narrowest and the widest table; chunks up to 128; and nothing is left of it."""
    seen: list[tuple[int, int, int]] = []
    moved: list[str] = []

    class Watched(TorchBackend):
        def attention(self, q_THD: torch.Tensor, cache: Any, meta: Any, scale: float) -> torch.Tensor:
            seen.append((len(meta.query_lens), meta.query_lens[0], meta.block_tables_SM.shape[1]))
            self.paths["attention"] += 1
            return super().attention(q_THD, cache, meta, scale)

        def gather_blocks(self, cache_LXN: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
            moved.append("gather")
            return super().gather_blocks(cache_LXN, block_ids)

        def scatter_blocks(self, cache_LXN: torch.Tensor, block_ids: list[int], blocks_LXn: torch.Tensor) -> None:
            moved.append("scatter")
            super().scatter_blocks(cache_LXN, block_ids, blocks_LXn)

    backend = Watched()
    runner = CudaRunner(tiny(), backend, graph_sizes=())
    runner.initialize(RunnerConfig(4, 2, 17, 6, 100, kv_dtype="float64"))
    assert seen == []  # on a CPU nothing is compiled
    runner.warm_up()
    chunks, decodes = [(1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 16, 1), (1, 32, 2), (1, 64, 4)], [(1, 1, 1), (1, 1, 6), (6, 1, 1)]
    assert list(dict.fromkeys(seen)) == chunks + decodes
    assert moved == ["gather", "scatter"]
    assert backend.paths == {}
    assert runner._kv is not None
    assert not runner._kv.gpu.any()


def broken_recording() -> RuntimeError:
    """What a recording leaves behind that ran out of memory."""
    broken = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    broken.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    return broken


MEMORY_ENDS = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), broken_recording(),
               RuntimeError("Triton Error [CUDA]: out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `f`")]


@pytest.mark.parametrize("error", MEMORY_ENDS)
def test_a_device_that_is_full_says_how_many_blocks_would_fit(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ends while graphs are recorded, unless the pool is of one block: then 10,000 bytes are free."""
    runner = CudaRunner(tiny(), graph_sizes=(1,))
    prepare = runner._prepare

    def short(config: RunnerConfig) -> None:
        if config.num_blocks > 1:
            raise error
        prepare(config)

    monkeypatch.setattr(runner, "_prepare", short)
    monkeypatch.setattr(cuda_runner, "free_memory", lambda device: 10_000)
    with pytest.raises(UserError, match=r"num_blocks = 40 leaves too little .*: 2 blocks would fit"):
        runner.initialize(RunnerConfig(40, 0, 4, 4, 64, kv_dtype="float64"))  # 2 layers x 2 x 4 slots x 4 heads x 8 numbers x 8 bytes
    assert runner.kv_bytes_allocated == 0


def test_another_error_at_the_start_is_not_taken_for_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CudaRunner(tiny(), graph_sizes=(1,))
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")

    def fails(config: RunnerConfig) -> None:
        raise broken

    monkeypatch.setattr(runner, "_prepare", fails)
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        runner.initialize(RunnerConfig(40, 0, 4, 4, 64, kv_dtype="float64"))
    assert raised.value is broken


@pytest.mark.parametrize("error", MEMORY_ENDS)
def test_a_step_that_does_not_fit_beside_the_weights_says_what_to_lower(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise error

    runner = CudaRunner(tiny(), graph_sizes=(1,))
    monkeypatch.setattr(torch_runner, "cuda_budget", fails)
    runner._device = torch.device("cuda")
    with pytest.raises(UserError, match=r"step of max_num_batched_tokens = 4096 and max_num_seqs = 8, .*: lower these"):
        runner.kv_budget(Limits(0.9, 0.5, 4096, 8, 64))


def test_weights_that_do_not_fit_are_counted() -> None:
    class Full:
        def load(self, *_: object) -> LoadedModel:
            raise MEMORY_ENDS[0]

        def shape(self) -> LlamaConfig:
            return LlamaConfig(vocab_size=1_000_000, hidden_size=1_000, intermediate_size=1_000, num_layers=1, num_heads=10,
                               num_kv_heads=10, head_dim=100)  # fmt: skip

        def text(self) -> tuple[None, tuple[int, ...]]:
            return None, ()

    # 2 x 10^9 of vocabulary, 4 x 10^6 of attention, 3 x 10^6 of the MLP, 3 norms of 1,000.
    with pytest.raises(UserError, match=r"2\.01 billion weights, of 8 bytes each 15\.0 GiB"):
        load_model(Full(), "float64", "cpu")
