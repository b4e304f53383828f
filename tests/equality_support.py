"""What the equality and replay tests share: the tiny model, engines over real tensors, what a run did, a recorded run from a log."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from engine_support import Log

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import Clock, WallClock
from kvlab.engine.runners.base import Runner
from kvlab.engine.runners.recorded import RecordedRunner
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.model.loading import LoadedModel
from kvlab.model.random_weights import tiny_model
from kvlab.trace.outcomes import outcome_row, recorded_step

torch.set_num_threads(1)  # the tensors are small: two threads would mostly wait for each other


@lru_cache(maxsize=2)
def tiny(dtype: torch.dtype = torch.float64) -> LoadedModel:
    """The tiny model, on the CPU."""
    loaded = tiny_model(0, dtype, torch.device("cpu"))
    loaded.model.prepare_for_inference()
    return loaded


def tiny_engine(num_blocks: int, block_size: int, policy_set: PolicySet | None = None, *, loaded: LoadedModel | None = None,
                runner: Runner | None = None, clock: Clock | None = None, log: Log | None = None,
                **limits: Any) -> tuple[Engine, Log]:  # fmt: skip
    """An engine over a real model and real paged tensors, and the log of all it says."""
    loaded, log = loaded or tiny(), log or Log()
    shape = loaded.config
    policy_set = policy_set or PolicySet()
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    itemsize = getattr(torch, policy_set.kv_dtype.storage(dtype)).itemsize
    config = EngineConfig(num_blocks, block_size, **{"max_model_len": 640, **limits})
    block_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize * block_size
    engine = Engine(config, policy_set, runner or TorchRunner(loaded), clock or WallClock(), loaded.tokenizer, loaded.eos_token_ids, [log],
                    dtype, block_bytes, shape.vocab_size)  # fmt: skip
    return engine, log


def modes(log: Log) -> list[str]:
    """How each preempted group gave way, in order."""
    return [entry.mode for plan in log.plans for entry in plan.preempted]


def recording(log: Log) -> RecordedRunner:
    """A runner that replays what the log heard, through the rows that a run folder holds."""
    rows = zip(log.plans, log.outcomes, log.stats, strict=True)
    return RecordedRunner([recorded_step(outcome_row(*row)) for row in rows])
