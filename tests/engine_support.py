"""Helpers of the engine's tests: requests, engines over fake models, undisturbed reference runs, forced preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import VirtualClock
from kvlab.engine.plan_builder import PlanBuilder
from kvlab.engine.runners.base import Runner
from kvlab.policies.batching import Chunked
from kvlab.policies.registry import by_name, list_policies
from kvlab.testing.invariants import check_drained, check_invariants
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import BlockEvent, Outcome, Plan, Request, RequestRecord, SamplingParams, StepStats

VOCAB = 97
Outputs = tuple[tuple[tuple[int, ...], str], ...]


def policy_names(seam: str) -> list[str]:
    """Every policy of a seam that an engine can use, as the registry finds them: a new file is tested without a change here."""
    return [row.name for row in list_policies(seam) if not getattr(row.cls, "sees_future", False)]


class Log:
    """A listener that keeps everything."""

    wants_block_events = True

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.outcomes: list[Outcome] = []
        self.stats: list[StepStats] = []
        self.records: dict[str, RequestRecord] = {}
        self.events: list[BlockEvent] = []

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        self.plans.append(plan)
        self.outcomes.append(outcome)
        self.stats.append(stats)

    def on_request(self, record: RequestRecord) -> None:
        assert record.request_id not in self.records, f"request {record.request_id} ended twice"
        self.records[record.request_id] = record

    def on_block(self, event: BlockEvent) -> None:
        self.events.append(event)

    def total(self, column: str) -> int:
        """Sum of a column of the steps."""
        return sum(getattr(stats, column) for stats in self.stats)

    def blocks_of(self, kind: str, tier: str = "gpu") -> list[int]:
        """Block ids of all events of a kind, in order."""
        return [e.block_id for e in self.events if e.kind == kind and e.tier == tier]

    @property
    def outputs(self) -> dict[str, Outputs]:
        """request id -> (token ids, reason) of each sequence."""
        return {name: record.outputs for name, record in self.records.items()}


ROOMY: dict[str, dict[str, Any]] = {"ring": {"n_parallel": 16}}
"""Parameters of policies that would stand in the way of tests in which many requests run at once."""


def policies(*, mode: str = "recompute", protect_oldest: bool = True, **seams: Any) -> PolicySet:
    """A PolicySet by names (or objects): `policies(eviction="lru", preemption="lifo", mode="swap")`."""
    made = {seam: by_name(seam, value, **ROOMY.get(value, {})) if isinstance(value, str) else value
            for seam, value in seams.items() if seam != "preemption"}  # fmt: skip
    victim = seams.get("preemption", "lifo")
    if isinstance(victim, str):
        how = by_name("preemption/mode", mode) if isinstance(mode, str) else mode
        victim = by_name("preemption", victim, mode=how, protect_oldest=protect_oldest)
    return PolicySet(preemption=victim, **made)


def make_engine(num_blocks: int, block_size: int, policy_set: PolicySet | None = None, *, runner: Runner | None = None,
                eos: Sequence[int] = (), log: Log | None = None, tokenizer: Any = None, vocab_size: int = VOCAB,
                block_bytes: int = 0, **limits: Any) -> tuple[Engine, Log]:  # fmt: skip
    """An engine over the paged fake model on a virtual clock, and the log of all it says."""
    log = log or Log()
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, **limits)
    engine = Engine(config, policy_set or PolicySet(), runner or PagedFakeRunner(vocab_size), VirtualClock(), tokenizer=tokenizer,
                    eos_token_ids=eos, listeners=[log], block_bytes=block_bytes)  # fmt: skip
    return engine, log


def request(name: str, prompt: Iterable[int], max_tokens: int = 4, arrival_s: float = 0.0, priority: int = 0, salt: str = "",
            **sampling: Any) -> Request:  # fmt: skip
    """A request that ignores EOS unless told otherwise. An oracle knows its output as far as it follows from that."""
    sampling.setdefault("ignore_eos", True)
    return Request(name, list(prompt), SamplingParams(max_tokens=max_tokens, **sampling), arrival_s=arrival_s, priority=priority,
                   cache_salt=salt, oracle_output_len=max_tokens)  # fmt: skip


def prompt_of(length: int, seed: int = 0, vocab_size: int = VOCAB) -> list[int]:
    """`length` tokens that depend on the seed alone."""
    draw = Random(f"prompt {seed}")
    return [draw.randrange(vocab_size) for _ in range(length)]


def step_bound(requests: Iterable[Request], num_forced: int = 0) -> int:
    """Steps that a run may take: every request may be restarted by each other one, but each time somebody gets on."""
    costs = [len(r.prompt_token_ids) + r.sampling.max_tokens * r.sampling.num_sequences for r in requests]
    return 10 + sum(costs) * (len(costs) + 1 + num_forced)


def run_to_end(engine: Engine, max_steps: int, check: bool = True) -> int:
    """Steps until nothing is left; invariants after each. Returns their number."""
    steps = 0
    while engine.has_work:
        assert steps < max_steps, f"{len(engine.groups)} requests are unfinished after {steps} steps"
        engine.step()
        steps += 1
        if check:
            check_invariants(engine)
    if check:
        check_drained(engine)
    return steps


def serve(engine: Engine, requests: Iterable[Request], check: bool = True) -> int:
    """All requests at once, to the end."""
    requests = list(requests)
    for each in requests:
        engine.add_request(copy_of(each))
    return run_to_end(engine, step_bound(requests), check)


def copy_of(original: Request) -> Request:
    """A request of its own, so that two engines can be given the same."""
    return Request(original.request_id, list(original.prompt_token_ids), original.sampling, original.prompt, original.arrival_s,
                   original.priority, original.tenant, original.cache_salt, original.oracle_output_len,
                   cache=original.cache, cache_until=original.cache_until)  # fmt: skip


def reference_outputs(requests: Iterable[Request], *, window: Any = None, eos: Sequence[int] = (), vocab_size: int = VOCAB,
                      seed: int = 0, max_model_len: int = 8192) -> dict[str, Outputs]:  # fmt: skip
    """Outputs of an engine with blocks for everyone, no cache and no preemption, under the same fake model."""
    requests = list(requests)
    blocks = sum((len(r.prompt_token_ids) + r.sampling.max_tokens + 16) // 16 * r.sampling.num_sequences + 1 for r in requests)
    seams = {"prefix_cache": "none", "batching": Chunked(), **({"compression": window} if window is not None else {})}
    engine, log = make_engine(blocks + 1, 16, policies(**seams), eos=eos, vocab_size=vocab_size, seed=seed, max_model_len=max_model_len,
                              max_num_batched_tokens=1 << 20, max_num_seqs=1 << 16)  # fmt: skip
    serve(engine, requests, check=False)
    assert log.total("num_preemptions") == log.total("prefix_cache_hits") == 0
    return log.outputs


class Forcer:
    """Makes an engine preempt the requests it is told, before or after the running ones have been scheduled in a step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.before: list[str] = []
        self.after: list[str] = []
        self.num_forced = 0
        self._run: Callable[[PlanBuilder], None] = engine.scheduler._enterers["running"]
        engine.scheduler._enterers["running"] = self._running

    def _running(self, build: PlanBuilder) -> None:
        self._force(self.before, build)
        self._run(build)
        self._force(self.after, build)

    def _force(self, names: list[str], build: PlanBuilder) -> None:
        for name in names:
            group = self.engine.groups.get(name)
            if group is not None and any(group is g for g in self.engine.scheduler.running):
                self.engine.scheduler.giving_way.preempt(group, build)
                self.num_forced += 1
        names.clear()
