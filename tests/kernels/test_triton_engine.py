"""The engine on Triton kernels, in the interpreter: the tokens of the torch backend, whatever the policies do to the blocks.

model=tiny in float32. A greedy token may differ only where two logits are closer than the kernels' rounding; these inputs' are not (the
gap is asserted).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import Log, policies, serve
from equality_support import Watch, modes, tiny, tiny_engine

import kvlab
from kvlab.engine.runners.backends import make_backend
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.kernels.interface import Backend
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.kernels.triton_backend import TritonBackend
from kvlab.policies.registry import by_name
from kvlab.types import Request, SamplingParams, UserError

CPU = torch.device("cpu")
PREFIX = [(7 * i * i + 3 * i + 11) % 256 for i in range(18)]
MIN_GAP = 1e-4


def requests() -> list[Request]:
    """Three prompts of 20 to 24 tokens with a common beginning, 5 tokens each; one splits into two samples."""
    out = []
    for number in range(3):
        tail = [(number * 37 + 5 * i) % 256 for i in range(2 + 2 * number)]
        sampling = SamplingParams(max_tokens=5, ignore_eos=True, seed=number, **({"n": 2, "temperature": 0.8} if number == 1 else {}))
        out.append(Request(f"r{number}", PREFIX + tail, sampling))
    return out


def run(backend: Backend, num_blocks: int, block_size: int, budget: int, num_cpu_blocks: int = 0, **seams: object) -> Log:
    loaded = tiny(torch.float32)
    engine, log = tiny_engine(num_blocks, block_size, policies(**seams), loaded=loaded, runner=TorchRunner(loaded, backend),
                              max_model_len=40, max_num_batched_tokens=budget, num_cpu_blocks=num_cpu_blocks)  # fmt: skip
    serve(engine, requests(), check=False)
    return log


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "num_blocks", "mode"), [(1, 48, "swap"), (3, 17, "recompute"), (16, 4, "swap")])
def test_the_tokens_of_torch(block_size: int, num_blocks: int, mode: str) -> None:
    """Chunked prefill, preemption, prefix hits and a fork, all of which must have happened."""
    with Watch(tiny(torch.float32)) as watch:
        expected = run(TorchBackend(), 200, block_size, 200, prefix_cache="none")
    assert watch.smallest_gap() > MIN_GAP
    backend = TritonBackend(CPU)
    log = run(backend, num_blocks, block_size, 16, num_blocks if mode == "swap" else 0, mode=mode)
    assert log.outputs == expected.outputs
    assert log.total("num_preemptions") > 0
    assert mode in modes(log)
    assert log.total("prefix_cache_hits") > 0
    assert any(entry.num_samples == 0 for plan in log.plans for entry in plan.scheduled), "no prompt was cut"
    assert {path.split()[0] for path in backend.paths} == {"write_kv", "decode_attention", "prefill_attention"}


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "fp16"])
def test_the_tokens_of_torch_from_small_numbers(kv_dtype: str) -> None:
    """What storage loses, it loses alike on both: the same bits are written, and read the same."""
    stored = by_name("kv_dtype", "fp8", k_scale=0.01, v_scale=0.01) if kv_dtype == "fp8" else kv_dtype
    expected = run(TorchBackend(), 200, 16, 200, prefix_cache="none", kv_dtype=stored)
    log = run(TritonBackend(CPU), 17, 3, 16, 17, mode="swap", kv_dtype=stored)
    assert log.outputs == expected.outputs
    assert log.total("num_preemptions") > 0


@pytest.mark.slow
@pytest.mark.parametrize("window", [by_name("compression", "window", size=9), by_name("compression", "streaming", sinks=2, size=9)])
def test_a_window(window: Any) -> None:
    expected = run(TorchBackend(), 200, 16, 200, prefix_cache="none", compression=window)
    log = run(TritonBackend(CPU), 200, 3, 16, prefix_cache="none", compression=window)
    assert log.outputs == expected.outputs
    assert any(entry.num_dropped_tokens for plan in log.plans for entry in plan.scheduled)


def test_what_it_refuses() -> None:
    backend = TritonBackend(CPU)
    for arguments, message in [
        ((64, 8, 4, 16, torch.float64, torch.float32, None, CPU), "a model in float64: use dtype=float32, float16, bfloat16"),
        ((64, 8, 4, 16, torch.float32, torch.float64, None, CPU), "K and V in float64: store them as"),
        ((320, 8, 4, 16, torch.float32, torch.float32, None, CPU), "heads of 320 numbers: even head sizes up to 256 work"),
        ((64, 8, 3, 16, torch.float32, torch.float32, None, CPU), "8 query heads over 3 KV heads"),
    ]:
        with pytest.raises(ValueError, match=message):
            backend.check(*arguments)
    backend.check(80, 9, 3, 17, torch.bfloat16, torch.int8, 5, CPU)
    with pytest.raises(UserError, match="backend=triton has no kernels for a model in float64"):
        tiny_engine(10, 4, runner=TorchRunner(tiny(torch.float64), backend))
    with pytest.raises(UserError, match="Unknown backend 'tritton'. Did you mean 'triton'"):
        make_backend("tritton", CPU)
    with pytest.raises(UserError, match="needs a CUDA device, and this run is on meta: use backend=torch"):
        make_backend("triton", torch.device("meta"))
    assert make_backend("auto", CPU).name == "torch"


@pytest.mark.slow
def test_a_run_says_which_kernels_it_used(tmp_path: Path) -> None:
    config = ["model=tiny", "dtype=float32", "device=cpu", "threads=1", "workload=synthetic", "workload.num_requests=2",
              "workload.arrivals.kind=all_at_once", "workload.prompt_len=9", "workload.output_len=2", "block_size=5"]  # fmt: skip
    plain = kvlab.run(kvlab.compose(*config), folder=tmp_path / "plain", progress=False)
    assert plain.env["backend"] == "torch"
    assert "kernel_paths" not in plain.summary
    done = kvlab.run(kvlab.compose(*config, "backend=triton"), folder=tmp_path / "triton", progress=False)
    assert done.env["backend"] == "triton"
    # Two layers, two steps: both prompts, then both decodes.
    assert {path.split()[0]: count for path, count in done.summary["kernel_paths"].items()} == {
        "decode_attention": 2, "prefill_attention": 2, "write_kv": 4,
    }  # fmt: skip
    with pytest.raises(UserError, match="backend = 'cuda' is not allowed: one of auto, torch, triton"):
        kvlab.run(kvlab.compose(*config, "backend=cuda"), folder=tmp_path / "no")
