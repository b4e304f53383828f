"""What the equality and replay tests share: the tiny model, engines over real tensors, what a run did, a recorded run from a log."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import torch
from engine_support import Log

from kvlab.cache.tensors import KVTensors, storage_dtype
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
    stored = storage_dtype(policy_set.kv_dtype.storage(dtype))
    config = EngineConfig(num_blocks, block_size, **{"max_model_len": 640, **limits})
    block_bytes = KVTensors.bytes_per_block(shape.num_layers, block_size, shape.num_kv_heads, shape.head_dim, stored)
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


# ------------------------------------------------------------------ covering arrays

Case = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]


def complete(factors: Factors, part: Case, is_valid: Callable[[Case], bool], draw: Random) -> Case | None:
    """A random valid case that holds `part`; None when there is none (every completion has been tried). `is_valid` takes parts too."""
    if not is_valid(part):
        return None
    missing = [name for name in factors if name not in part]
    if not missing:
        return part
    name = draw.choice(missing)
    for value in draw.sample(list(factors[name]), len(factors[name])):
        found = complete(factors, {**part, name: value}, is_valid, draw)
        if found is not None:
            return found
    return None


def tuples_of(case: Case, strength: int) -> set[tuple[tuple[str, Any], ...]]:
    """All combinations of `strength` (factor, value) pairs in a case, in the order of its factors."""
    return set(itertools.combinations(sorted(case.items()), strength))


def covering_array(factors: Factors, is_valid: Callable[[Case], bool], seed: int, strength: int = 2, tries: int = 30) -> list[Case]:
    """Cases in which every combination of `strength` values of different factors that can occur, does (greedy, seeded).

    A combination is left out only when all its completions are invalid.
    """
    draw = Random(seed)
    names = sorted(factors)
    wanted = [tuple(zip(group, values, strict=True)) for group in itertools.combinations(names, strength)
              for values in itertools.product(*(factors[name] for name in group))]  # fmt: skip
    draw.shuffle(wanted)
    covered: set[tuple[tuple[str, Any], ...]] = set()
    cases: list[Case] = []
    for target in wanted:
        if target in covered:
            continue
        found = [complete(factors, dict(target), is_valid, draw) for _ in range(tries)]
        possible = [case for case in found if case is not None]
        if not possible:
            continue
        best = max(possible, key=lambda case: len(tuples_of(case, strength) - covered))
        covered |= tuples_of(best, strength)
        cases.append({name: best[name] for name in factors})
    return cases


def name_of(case: Case) -> str:
    """A case as a test's name."""
    return "-".join(str(value) for value in case.values())


# ------------------------------------------------------------ logits and KV of a run


class Watch:
    """Keeps the logits that a model gives while it is watched (`with Watch(loaded) as watch`)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self.logits: list[torch.Tensor] = []

    def __enter__(self) -> Watch:
        inner = self._model.logits

        def logits(hidden_SE: torch.Tensor) -> torch.Tensor:
            self.logits.append(inner(hidden_SE))
            return self.logits[-1]

        self._model.logits = logits  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        del self._model.logits

    def smallest_gap(self) -> float:
        """Smallest distance between the best two logits of any row."""
        best = torch.cat(self.logits).topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


def kv_by_position(engine: Engine, seqs: Iterable[Any]) -> dict[int, torch.Tensor]:
    """K and V of each sequence's computed tokens, in order of position: seq_id -> [L, 2, T, K, D] (a copy). Nothing may be dropped."""
    found = {}
    kv = engine.runner._kv  # type: ignore[attr-defined]
    origin = {destination: source for _, source, destination in engine.kv.pending_copies}  # copied with the next step
    for seq in seqs:
        assert seq.table.num_dropped_blocks == 0
        slots = kv.gpu[:, :, [origin.get(block_id, block_id) for block_id in seq.table.block_ids]].flatten(2, 3)
        found[seq.seq_id] = slots[:, :, : seq.num_computed].clone()
    return found
