"""What the engine asks of a runner: take a plan, give back what came of it. The torch, simulated and recorded runners
all fit here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvlab.types import Outcome, Plan


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Sizes a runner needs before the first step.

    Attributes:
        num_blocks, num_cpu_blocks: blocks of the gpu tier and of the swap tier (0: no swap).
        block_size: tokens per block.
        max_num_seqs: sequences that may be scheduled in one step; max_model_len: tokens a sequence may reach.
        window: each query sees at most this many latest positions, itself included; None: all. num_sink_tokens: first ones that it
            sees besides.
        kv_dtype: storage dtype of K and V: a name of `kvlab.cache.tensors.STORAGE_DTYPES`.
        kv_scales: of K and V under fp8, a number or one a layer each.
        depth: plans that may be submitted before an earlier one's outcome is asked for.
        eos_token_ids: ids that end a sequence (masked while a request is below its min_tokens); may be empty.
    """

    num_blocks: int
    num_cpu_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    window: int | None = None
    kv_dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    depth: int = 0
    kv_scales: tuple[float | tuple[float, ...], float | tuple[float, ...]] = (1.0, 1.0)
    num_sink_tokens: int = 0


class DeviceMemory(NamedTuple):
    """Bytes of device memory as measured: held by live tensors, and reserved by the allocator."""

    allocated: int
    reserved: int


class Handle(Protocol):
    """A step in flight."""

    def result(self) -> Outcome:
        """Wait for the step and return its outcome; an exception of the step is raised here. May be called again."""


class Ready:
    """The handle of a synchronous runner: the outcome is already there."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def result(self) -> Outcome:
        """The outcome."""
        return self._outcome


class Runner(Protocol):
    """Carries out plans in the order of submission. Owns tensors and a row per sequence, decides nothing."""

    @property
    def kv_bytes_allocated(self) -> int:
        """Bytes of the gpu tier's KV tensors, taken from the tensors themselves; 0 where there are none."""

    def initialize(self, config: RunnerConfig) -> None:
        """Allocate for these sizes and forget every sequence. Called before the first step, and again to start anew."""

    def submit(self, plan: Plan) -> Handle:
        """Start a step, in the order that `Plan` states."""

    def device_memory(self) -> DeviceMemory | None:
        """Measured device memory; None where there is no device to measure."""

    def close(self) -> None:
        """Give back memory and threads. The runner may be initialised again."""
