"""How many blocks a pool has: asked for, or measured; and what is said when they don't fit."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch
from equality_support import tiny

import kvlab
from kvlab.engine.runners.base import RunnerConfig
from kvlab.engine.runners.memory import Limits, check_fits, cuda_budget
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.types import UserError

SMALL = ["model=tiny", "threads=1", "workload=synthetic", "workload.num_requests=2", "workload.arrivals.kind=all_at_once",
         "workload.prompt_len=8", "workload.output_len=4", "max_model_len=64"]  # fmt: skip
GIB = 2**30


@dataclass
class Card:
    """A device of 80 GiB: weights take 16, somebody else 2, a profiling step 3 more at its peak."""

    calls: list[str] = field(default_factory=list)
    allocated: int = 16 * GIB
    peak: int = 40 * GIB  # of loading
    cached: int = 30 * GIB

    def empty_cache(self) -> None:
        self.cached = 0
        self.calls.append("empty")

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated
        self.calls.append("reset")

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("wait")

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def memory_reserved(self, device: torch.device) -> int:
        return self.allocated + self.cached

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 80 * GIB - self.memory_reserved(device) - 2 * GIB, 80 * GIB

    def profile(self) -> None:
        self.peak, self.cached = self.allocated + 3 * GIB, 5 * GIB
        self.calls.append("profile")


def test_a_card_has_what_its_share_leaves_after_weights_activations_and_others() -> None:
    """0.9 of 80 is 72, less 16 + 3 at the peak and 2 of somebody else: 51. What the allocator merely caches is not held."""
    card = Card()
    assert cuda_budget(card.profile, torch.device("cuda"), 0.9, card) == 51 * GIB
    assert card.calls == ["wait", "empty", "reset", "profile", "wait", "empty"]
    assert cuda_budget(card.profile, torch.device("cuda"), 0.25, card) == -1 * GIB


def test_the_profiling_step_is_as_large_as_a_step_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 tokens for at most 8 sequences of at most 20 tokens; then 5 for 8."""
    seen: list[Any] = []

    class Watching(TorchBackend):
        def attention(self, q_THD: torch.Tensor, cache: Any, meta: Any, scale: float) -> torch.Tensor:
            seen.append((len(q_THD), meta.query_lens, meta.num_decodes, meta.block_tables_SM.shape))
            return super().attention(q_THD, cache, meta, scale)

    loaded = tiny()
    runner, rows = TorchRunner(loaded, Watching()), []
    logits = type(loaded.model).logits
    monkeypatch.setattr(type(loaded.model), "logits", lambda self, hidden: rows.append(len(hidden)) or logits(self, hidden))
    runner.profile(Limits(0.9, 0.5, 100, 8, 20))
    runner.profile(Limits(0.9, 0.5, 100, 3, 20))
    runner.profile(Limits(0.9, 0.5, 5, 8, 20))
    num_layers = loaded.config.num_layers
    assert [call[0] for call in seen[::num_layers]] == [100, 100, 5]
    assert seen[0][1] == [12, 13, 12, 13, 12, 13, 12, 13]
    assert seen[num_layers][1] == [20] * 5  # three would be longer than a sequence may be
    assert seen[2 * num_layers][1:] == ([1] * 5, 5, (5, 1))
    assert rows == [8, 5, 5]


def test_sizes_that_are_asked_for_go_before_measured_ones() -> None:
    """A block of 16 tokens of tiny in float32: 2 * 2 layers * 4 heads * 8 * 4 bytes * 16 = 8,192 bytes."""
    for given, wanted in [
        (["kv_cache_bytes=100000"], 12), (["kv_cache_bytes=100000", "num_blocks=7"], 7), (["kv_cache_tokens=200"], 12),
        (["kv_cache_bytes=100000", "kv_dtype=fp16"], 24), (["kv_cache_bytes=100000", "block_size=3"], 65),
    ]:  # fmt: skip
        assert kvlab.run(kvlab.compose(*SMALL, *given), progress=False).config["num_blocks"] == wanted, given


def test_bytes_that_hold_no_block_are_refused() -> None:
    with pytest.raises(UserError, match=r"8,191 bytes for the KV pool hold no block of 16 tokens \(8,192 bytes\): raise kv_cache_bytes"):
        kvlab.run(kvlab.compose(*SMALL, "kv_cache_bytes=8191"), progress=False)
    for bad in ("kv_cache_bytes=0", "kv_cache_bytes=-1", "gpu_memory_utilization=0", "gpu_memory_utilization=1.5",
                "tensor_parallel_size=0"):  # fmt: skip
        with pytest.raises(UserError, match="is not allowed"):
            kvlab.run(kvlab.compose(*SMALL, bad), progress=False)


def test_a_cpu_gives_a_share_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1_000_000, total=2_000_000))
    assert TorchRunner(tiny(torch.float32)).kv_budget(Limits(0.9, 0.25, 64, 8, 64)) == 250_000


def test_a_pool_that_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 bytes a block in float64: 1,000,000 hold 61."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1_000_000, total=2_000_000))
    runner = TorchRunner(tiny())
    config = {"block_size": 16, "max_num_seqs": 4, "max_model_len": 64, "kv_dtype": "float64"}
    with pytest.raises(UserError, match=r"num_blocks = 62 needs .* on cpu, .* at most 61 blocks of 16,384 bytes fit. Lower num"):
        runner.initialize(RunnerConfig(62, 0, **config))
    runner.initialize(RunnerConfig(61, 0, **config))
    with pytest.raises(UserError, match=r"num_cpu_blocks = 32 needs .* at most 31 blocks of 16,384 bytes fit. Lower num_cpu_blocks"):
        runner.initialize(RunnerConfig(30, 32, **config))
    check_fits("num_blocks", 10, 100, 1000, "cuda:0")
    with pytest.raises(UserError, match=r"num_blocks = 11 .* on cuda:0, .*at most 10 blocks"):
        check_fits("num_blocks", 11, 100, 1000, "cuda:0")
