"""Tensor parallelism: what each rank holds, the same tokens as one rank, and ends that are never a hang."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import Log, policies, request, serve
from equality_support import tiny, tiny_engine

import kvlab
from kvlab.cache.tensors import KVTensors
from kvlab.engine.runners.base import RunnerConfig
from kvlab.engine.runners.parallel_runner import ParallelRunner
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.kernels.interface import AttentionMetadata
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.model.config import LlamaConfig
from kvlab.model.llama import Llama, tensor_shapes
from kvlab.model.parallel import Shard, check_divides, rank_config, sharded
from kvlab.model.random_weights import TINY
from kvlab.model.specs import hf
from kvlab.model.specs import tiny as tiny_spec
from kvlab.types import Plan, SamplingParams, ScheduledSeq, SeqStart, UserError

# ------------------------------------------------------------------ layouts, by hand


class Threads:
    """Ranks as threads of this process: sums and gatherings at a barrier."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = threading.Barrier(size, timeout=20), [torch.empty(0)] * size

    def of(self, rank: int) -> Any:
        return _Rank(self, rank)


class _Rank:
    def __init__(self, group: Threads, rank: int) -> None:
        self.group, self.rank = group, rank

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.group.parts[self.rank] = x.clone()
        self.group.barrier.wait()
        parts = list(self.group.parts)
        self.group.barrier.wait()
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=1)


CONFIG = dataclasses.replace(TINY, vocab_size=13, hidden_size=12, intermediate_size=8, num_heads=4, num_kv_heads=2, head_dim=2,
                             num_layers=2, attention_bias=True, mlp_bias=True)  # fmt: skip


def numbered(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every row's numbers say which row it is."""
    return torch.arange(shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()


def part(name: str, config: LlamaConfig, rank: int, size: int, columns: bool = False) -> list[float]:
    shape = tensor_shapes(config)[name]
    whole = numbered(name, shape[::-1]).T if columns else numbered(name, shape)
    found = sharded(config, lambda _: whole, Shard(rank, size, Threads(1).of(0)))(name)
    return (found[0] if columns else found.flatten(1)[:, 0] if found.dim() > 1 else found).tolist()


def test_each_rank_has_its_heads_columns_and_words() -> None:
    """4 query heads of 2, 2 KV heads, 8 columns, 13 words; 2 ranks."""
    layer = "model.layers.0."
    assert part(layer + "self_attn.q_proj.weight", CONFIG, 1, 2) == [4, 5, 6, 7]
    assert part(layer + "self_attn.k_proj.weight", CONFIG, 1, 2) == [2, 3]
    assert part(layer + "self_attn.v_proj.bias", CONFIG, 0, 2) == [0, 1]
    assert part(layer + "mlp.gate_proj.weight", CONFIG, 1, 2) == part(layer + "mlp.up_proj.bias", CONFIG, 1, 2) == [4, 5, 6, 7]
    assert part(layer + "self_attn.o_proj.weight", CONFIG, 1, 2, columns=True) == [4, 5, 6, 7]
    assert part(layer + "mlp.down_proj.weight", CONFIG, 0, 2, columns=True) == [0, 1, 2, 3]
    assert part("lm_head.weight", CONFIG, 0, 2) == part("model.embed_tokens.weight", CONFIG, 0, 2) == [0, 1, 2, 3, 4, 5, 6]
    assert part("lm_head.weight", CONFIG, 1, 2) == [7, 8, 9, 10, 11, 12, 0]  # padded
    assert part("model.norm.weight", CONFIG, 1, 2) == list(range(12))
    assert sum(part(layer + "mlp.down_proj.bias", CONFIG, 1, 2)) == 0  # rank 0 has it


def test_more_ranks_than_kv_heads_have_copies() -> None:
    assert [part("model.layers.0.self_attn.k_proj.weight", CONFIG, rank, 4) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert rank_config(CONFIG, 4).num_kv_heads == 1


def test_what_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"tensor_parallel_size = 3 is not allowed: 4 query heads .* It takes 1, 2, 4\."):
        check_divides(CONFIG, 3)
    with pytest.raises(UserError, match="6 columns of the MLP"):
        check_divides(dataclasses.replace(CONFIG, intermediate_size=6), 4)
    shape = dataclasses.replace(CONFIG, num_heads=12, num_kv_heads=6, intermediate_size=24)
    with pytest.raises(UserError, match=r"6 KV heads can neither be shared nor replicated evenly. This model takes 1, 2, 3, 6, 12\."):
        check_divides(shape, 4)
    with pytest.raises(UserError, match="8 query heads"):
        kvlab.run(kvlab.compose("model=tiny", "tensor_parallel_size=5"), progress=False)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_whole_model(size: int, tied: bool) -> None:
    """Biases, a vocabulary that is padded, KV heads that are replicated (4 ranks); float64."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    draw = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in tensor_shapes(config).items()}
    ids, num = torch.tensor([1, 12, 7, 0, 6]), 5

    def logits(model: Llama) -> torch.Tensor:
        held = model.config
        kv = KVTensors(held.num_layers, 2, 4, held.num_kv_heads, held.head_dim, torch.float64)
        meta = AttentionMetadata(torch.arange(num), torch.tensor([[0, 1]]), torch.tensor([num]), [num], [num], 0, 4)
        return model.logits(model.forward(ids, torch.arange(num), kv, meta, TorchBackend()))

    group, found = Threads(size), [torch.empty(0)] * size

    def run(rank: int) -> None:
        shard = Shard(rank, size, group.of(rank))
        found[rank] = logits(Llama(config, sharded(config, weights.__getitem__, shard), shard))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = logits(Llama(config, weights.__getitem__))
    assert whole.shape == (5, 13)
    for logits_of_rank in found:
        assert torch.equal(logits_of_rank, found[0])
        torch.testing.assert_close(logits_of_rank, whole, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ two processes, gloo


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ParallelRunner]:
    runner = ParallelRunner(tiny_spec(), 2, "float64", "cpu", num_threads=2, timeout_s=120)
    yield runner
    runner.close()


def served(runner: Any, **more: Any) -> Log:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "logprobs": 1}, {"n": 2, "temperature": 1.0}, {"beam_width": 2}]
    engine, log = tiny_engine(24, 3, policies(mode="swap", admission="none"), runner=runner, num_cpu_blocks=20, **more)
    serve(engine, [request(f"r{i}", range(5 + i, 20 + i), 8, **kind) for i, kind in enumerate(kinds)])
    return log


@pytest.mark.slow
def test_two_ranks_say_what_one_says(two_ranks: ParallelRunner) -> None:
    alone = served(TorchRunner(tiny()))
    assert alone.total("num_preemptions") > 0
    assert alone.total("swapped_in_blocks") > 0
    both = served(two_ranks)
    assert both.outputs == alone.outputs
    assert [plan.decisions() for plan in both.plans] == [plan.decisions() for plan in alone.plans]
    assert served(two_ranks, depth=1).outputs == alone.outputs
    tokens_bytes = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 8
    assert two_ranks.kv_bytes_allocated == 24 * 3 * tokens_bytes // 2


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_with_its_traceback(two_ranks: ParallelRunner) -> None:
    """A plan that schedules a token without a block; afterwards no rank lives."""
    two_ranks.initialize(RunnerConfig(4, 0, 4, 4, 64, kv_dtype="float64"))
    start = SeqStart(0, 0, "admit", SamplingParams(), 0, 0, 1, (1,))
    processes = list(two_ranks._processes)
    step = two_ranks.submit(Plan(0, 0.0, (ScheduledSeq(0, 0, 1),), ((1,),), (start,)))
    with pytest.raises(RuntimeError, match="rank [01] failed; the other ranks were ended") as found:
        step.result()
    assert "for which its tables hold no block" in found.value.__notes__[0]
    assert all(process.poll() is not None for process in processes)
    with pytest.raises(RuntimeError, match="ended"):
        two_ranks.submit(Plan(1, 0.0))


@pytest.mark.slow
def test_a_rank_that_dies_or_stays_silent_is_no_hang() -> None:
    runner = ParallelRunner(tiny_spec(), 2, "float32", "cpu", num_threads=2, timeout_s=60)
    runner.initialize(RunnerConfig(4, 0, 4, 4, 64))
    runner._timeout_s = 0.5
    os.kill(runner._processes[1].pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"rank 1 has not answered for 0\.5 s"):
        runner.submit(Plan(0, 0.0)).result()


@pytest.mark.full
def test_errors_of_loading_are_the_users(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        ParallelRunner(hf(path=str(tmp_path)), 2, timeout_s=120)


@pytest.mark.slow
def test_the_door(tmp_path: Path) -> None:
    """As `python -m kvlab.experiment tensor_parallel_size=2` runs it; the pool is measured, half of it a rank's."""
    small = ["model=tiny", "dtype=float64", "threads=2", "workload=synthetic", "workload.num_requests=3", "workload.prompt_len=8",
             "workload.output_len=6", "workload.arrivals.kind=all_at_once", "max_model_len=64"]  # fmt: skip
    logs = [Log(), Log()]
    for size, log in zip((1, 2), logs, strict=True):
        run = kvlab.run(kvlab.compose(*small, f"tensor_parallel_size={size}", "kv_cache_bytes=163840"), folder=tmp_path / str(size),
                        listeners=[log], progress=False)  # fmt: skip
        assert run.config["num_blocks"] == 10 * size  # 16,384 bytes a block of 16, shared by the ranks
    assert logs[0].outputs == logs[1].outputs
