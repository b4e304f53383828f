"""The engine run by hand, without configuration files: a batch of prompts under a set of policies to a fixed number of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.runners.cuda_runner import CudaRunner
from kvlab.engine.runners.cuda_streams import Streams
from kvlab.kernels.triton_backend import TritonBackend
from kvlab.model.loading import LoadedModel
from kvlab.types import Request, SamplingParams, StepStats


@dataclass(slots=True)
class Served:
    """A finished run: output tokens of each request in order, seconds, the counts of each step."""

    tokens: list[list[int]]
    seconds: float
    steps: list[StepStats]

    def total(self, field: str) -> int:
        """Sum of a count over all steps."""
        return sum(getattr(stats, field) for stats in self.steps)


def make_runner(loaded: LoadedModel, device: torch.device, graph_sizes: Sequence[int] | None = None,
                streams: Streams | None = None) -> CudaRunner:  # fmt: skip
    """A runner on Triton kernels; decodes as CUDA graphs of these batch sizes (None: its default ones, (): none)."""
    return CudaRunner(loaded, TritonBackend(device), streams, graph_sizes)


def serve(runner: CudaRunner, dtype: torch.dtype, config: EngineConfig, policies: PolicySet, work: Sequence[Sequence[int]],
          num_output: int | Sequence[int]) -> Served:  # fmt: skip
    """Run all prompts (token ids) to `num_output` greedy tokens each (one number, or one a prompt); all arrive at once."""
    lengths = [num_output] * len(work) if isinstance(num_output, int) else list(num_output)
    engine = Engine(config, policies, runner, model_dtype=str(dtype).removeprefix("torch."))
    for index, (ids, length) in enumerate(zip(work, lengths, strict=True)):
        engine.add_request(Request(f"r{index}", list(ids), SamplingParams(max_tokens=length, ignore_eos=True)))
    outputs: dict[str, list[int]] = {}
    steps = []
    start = time.perf_counter()
    while engine.has_work:
        result = engine.step()
        steps.append(result.stats)
        outputs |= {record.request_id: list(record.outputs[0][0]) for record in result.finished}
    return Served([outputs[f"r{index}"] for index in range(len(work))], time.perf_counter() - start, steps)
