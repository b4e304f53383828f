"""The engine run by hand, without configuration files: a batch of prompts under a set of policies to a fixed number of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.runners.torch_runner import TorchRunner
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


def make_runner(loaded: LoadedModel, device: torch.device) -> TorchRunner:
    """A runner on Triton kernels."""
    return TorchRunner(loaded, TritonBackend(device))


def serve(runner: TorchRunner, dtype: torch.dtype, config: EngineConfig, policies: PolicySet, work: Sequence[Sequence[int]],
          num_output: int) -> Served:  # fmt: skip
    """Run all prompts (token ids) to `num_output` greedy tokens each; all arrive at once."""
    engine = Engine(config, policies, runner, model_dtype=str(dtype).removeprefix("torch."))
    for index, ids in enumerate(work):
        engine.add_request(Request(f"r{index}", list(ids), SamplingParams(max_tokens=num_output, ignore_eos=True)))
    outputs: dict[str, list[int]] = {}
    steps = []
    start = time.perf_counter()
    while engine.has_work:
        result = engine.step()
        steps.append(result.stats)
        outputs |= {record.request_id: list(record.outputs[0][0]) for record in result.finished}
    return Served([outputs[f"r{index}"] for index in range(len(work))], time.perf_counter() - start, steps)
