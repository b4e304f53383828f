"""Random sequences of submit, step, abort, fork, preemption and reset, on pools so small that everything happens, under random
combinations of policies. Invariants hold after each operation, and what comes out is what an undisturbed engine says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random
from typing import Any

import pytest
from engine_support import (
    Forcer,
    Log,
    Outputs,
    copy_of,
    make_engine,
    policies,
    policy_names,
    prompt_of,
    reference_outputs,
    request,
    step_bound,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvlab.engine import Engine
from kvlab.policies.admission import Watermark
from kvlab.policies.base import SchedulingPolicy
from kvlab.policies.batching import Chunked
from kvlab.policies.compression import Streaming, Window
from kvlab.policies.prefix_cache import Radix
from kvlab.testing.invariants import check_drained, check_invariants
from kvlab.types import GroupView, Now, QueuesView, Request, UserError

EOS = (3,)


class AnyOrder(Chunked):
    """Mixed steps that serve the queues in a given order: the contract allows all, ours happen to use few."""

    def __init__(self, order: tuple[str, ...]) -> None:
        self.order = order

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        return (self.order,)


class Fickle(SchedulingPolicy):
    """Turns the waiting queue round every third step: keys that change while a group waits."""

    is_static = False

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return (group.group_id * (1 if now.step // 3 % 2 else -1),)


SEAMS_DRAWN = ("scheduling", "batching", "admission", "preemption", "eviction")
ORDERS = [AnyOrder(order) for order in permutations(("running", "waiting", "swapped"))]
SMALL_VOCAB = 23
RADIX = [Radix(), Radix(partial_block_copy=True), Radix(min_match_tokens=3, cache_generated=False, partial_block_copy=True)]
REGIONS = [name for name in policy_names("layout") if name != "paged"]

FIRED: Counter[str] = Counter()
"""How often each mechanism acted over all scenes."""
MECHANISMS = {"preempted": "num_preemptions", "swapped out": "swapped_out_blocks", "swapped in": "swapped_in_blocks",
              "copied": "cow_copies", "evicted": "num_evicted_blocks", "hit": "prefix_cache_hits", "found again": "preempted_hits",
              "recomputed": "recomputed_tokens", "shared": "shared_blocks_saved"}  # fmt: skip


@dataclass
class Scene:
    """An engine's sizes and policies, and what is done to it."""

    limits: dict[str, Any]
    seams: dict[str, Any]
    window: int | None
    operations: list[tuple[Any, ...]]


@st.composite
def sizes(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], int | None]:
    """(limits, policies, window): combinations that `PolicySet.check` allows."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    num_blocks = draw(st.integers(2, 12))
    seams: dict[str, Any] = {seam: draw(st.sampled_from(policy_names(seam))) for seam in SEAMS_DRAWN}
    if draw(st.integers(0, 2)) == 0:
        seams |= {"batching": draw(st.sampled_from(ORDERS)), "scheduling": draw(st.sampled_from([Fickle(), "fcfs"]))}
    if seams["admission"] == "watermark":
        seams["admission"] = Watermark(draw(st.sampled_from([0.0, 0.1, 0.5, 0.99])))
    seams["mode"] = draw(st.sampled_from(policy_names("preemption/mode")))
    seams["protect_oldest"] = draw(st.booleans())
    seams["layout"] = draw(st.sampled_from(["paged"] * 6 + REGIONS))
    window = None
    max_model_len = 8192
    if seams["layout"] == "paged":
        seams["prefix_cache"] = draw(st.sampled_from(["hash", "hash", "none", *RADIX]))
        window = draw(st.sampled_from([None, None, None, 1, 2, 3, 5, 9]))
    else:
        seams["prefix_cache"] = "none"
        regions = draw(st.integers(1, min(4, num_blocks)))
        max_model_len = max(2, num_blocks // regions * block_size - draw(st.integers(0, 1)))
        if -(-max_model_len // block_size) > num_blocks:
            max_model_len = num_blocks * block_size
    limits = {
        "num_blocks": num_blocks, "block_size": block_size, "num_cpu_blocks": draw(st.sampled_from([0, 1, 3, 8, 40])),
        "max_num_batched_tokens": draw(st.sampled_from([4, 5, 8, 16, 64])), "max_num_seqs": draw(st.sampled_from([4, 5, 9, 64])),
        "max_model_len": max_model_len, "seed": 5,
    }  # fmt: skip
    if window is not None:
        sinks = draw(st.sampled_from([0, 0, 1, 2, 5]))
        seams["compression"] = Streaming(sinks, window) if sinks else Window(window)
    return limits, seams, window


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    limits, seams, window = draw(sizes())
    size = limits["block_size"]
    submit = st.tuples(
        st.just("submit"), st.integers(1, 4 * size), st.integers(0, 2), st.integers(0, 4 * size), st.integers(1, 2 * size + 4),
        st.sampled_from([(1, 0), (1, 0), (1, 0), (2, 0), (4, 0), (1, 2), (2, 2), (3, 3)]), st.sampled_from([0.0, 1.0]), st.booleans(),
        st.integers(0, 2), st.sampled_from(["", "", "", "salt"]),
    )  # fmt: skip
    target = st.integers(0, 9)
    operation = st.one_of(
        submit, submit, st.tuples(st.just("step"), st.integers(1, 6)), st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), target), st.tuples(st.sampled_from(["preempt_before", "preempt_after"]), target),
        st.tuples(st.just("reset")),
    )  # fmt: skip
    return Scene(limits, seams, window, draw(st.lists(operation, min_size=12, max_size=40)))


def _make(operation: tuple[Any, ...], number: int, window: int | None) -> Request:
    _, length, stem, num_shared, max_tokens, (n, width), temperature, ignore_eos, priority, salt = operation
    shared = prompt_of(64, stem, SMALL_VOCAB)[: min(num_shared, length)]
    prompt = shared + prompt_of(length - len(shared), 1000 + number, SMALL_VOCAB)
    made = request(f"r{number}", prompt, max_tokens, float(number), priority, salt, n=n, beam_width=width,
                   temperature=0.0 if width else temperature, ignore_eos=ignore_eos)  # fmt: skip
    made.oracle_output_len, made.tenant = max_tokens, "ab"[number % 2]  # an oracle that errs where EOS comes first
    return made


class Play:
    """One scene on one engine."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.engine: Engine
        self.log: Log
        self.engine, self.log = make_engine(policy_set=policies(**scene.seams), eos=EOS, vocab_size=SMALL_VOCAB, block_bytes=300_000,
                                            **scene.limits)  # fmt: skip
        self.forcer = Forcer(self.engine)
        self.requests: list[Request] = []
        self.num_steps = 0

    def run(self) -> None:
        for operation in self.scene.operations:
            self.operate(*operation)
            check_invariants(self.engine)
        while self.engine.has_work:
            bound = step_bound(self.requests, self.forcer.num_forced)
            assert self.num_steps <= bound, f"{len(self.engine.groups)} requests unfinished after {bound} steps"
            self.operate("step", 1)
            check_invariants(self.engine)
        check_drained(self.engine)
        assert self.engine.reset_prefix_cache()
        assert self.engine.kv.pool.num_free == self.scene.limits["num_blocks"]
        assert self.engine.kv.cpu_pool.num_free == self.scene.limits["num_cpu_blocks"]

    def operate(self, kind: str, *arguments: Any) -> None:
        if kind == "submit":
            new = _make((kind, *arguments), len(self.requests), self.scene.window)
            try:
                self.engine.add_request(copy_of(new))
            except UserError:  # too long, or more sequences than a step can hold
                FIRED["refused"] += 1
            else:
                self.requests.append(new)
        elif kind == "step":
            for _ in range(arguments[0]):
                if self.engine.has_work:
                    self.engine.step()
                    self.num_steps += 1
                    check_invariants(self.engine)
        elif kind == "reset":
            held = self.engine.kv.pool.num_held
            assert self.engine.reset_prefix_cache() is (held == 0)
        elif self.requests:
            name = self.requests[arguments[0] % len(self.requests)].request_id
            if kind == "abort":
                self.engine.abort(name)
                assert self.engine.abort(name) is None
            else:
                (self.forcer.before if kind == "preempt_before" else self.forcer.after).append(name)


def _check_outputs(play: Play) -> None:
    wanted = reference_outputs(play.requests, window=play.scene.seams.get("compression"), eos=EOS, vocab_size=SMALL_VOCAB, seed=5,
                               max_model_len=play.scene.limits["max_model_len"])  # fmt: skip
    assert play.log.records.keys() == wanted.keys()
    for each in play.requests:
        record = play.log.records[each.request_id]
        _check_output(each, record.outputs, record.finish_reason, wanted[each.request_id])


def _check_output(of: Request, got: Outputs, finish_reason: str, wanted: Outputs) -> None:
    """The same; what was cut short (abort, kv_capacity) is a beginning of it."""
    if finish_reason not in ("abort", "kv_capacity"):
        assert got == wanted, f"{of.request_id} ({finish_reason}): {got}, undisturbed {wanted}"
        return
    if of.sampling.beam_width:
        return  # a search that was cut short has other hypotheses
    cut = [reason in ("abort", "kv_capacity") for _, reason in got]
    assert any(cut), f"{of.request_id} ({finish_reason}): {got}"
    for (tokens, reason), is_cut, (whole, whole_reason) in zip(got, cut, wanted, strict=False):
        assert tokens == whole[: len(tokens)] if is_cut else (tokens, reason) == (whole, whole_reason), f"{of.request_id}: {got}, {wanted}"


def _check_statistics(log: Log) -> None:
    """Facts about the counts that hold in any run."""
    for record in log.records.values():
        assert 0 <= record.num_cached_tokens < record.num_prompt_tokens
        assert record.num_output_tokens == sum(len(tokens) for tokens, _ in record.outputs)
        assert 0 <= record.num_wasted_tokens <= record.num_computed_tokens
    admitted = [a.request_id for plan in log.plans for a in plan.admitted if a.kind == "new"]
    assert len(admitted) == len(set(admitted))
    assert log.total("prefix_cache_queries") == sum(log.records[name].num_prompt_tokens for name in admitted)
    assert log.total("prefix_cache_hits") == sum(log.records[name].num_cached_tokens for name in admitted)
    assert log.total("num_evicted_blocks") <= len(log.blocks_of("evict"))
    for name, column in MECHANISMS.items():
        FIRED[name] += log.total(column)
    FIRED["ended for capacity"] += sum(len(plan.ended) for plan in log.plans)


def _play(scene: Scene) -> None:
    play = Play(scene)
    play.run()
    _check_outputs(play)
    _check_statistics(play.log)


def _random_scene(draw: Random) -> Scene:
    """A scene from a plain generator: less simple than hypothesis' own, and with requests that mostly fit."""
    size, num_blocks = draw.choice([1, 2, 3, 4, 16]), draw.randint(2, 12)
    seams: dict[str, Any] = {seam: draw.choice(policy_names(seam)) for seam in SEAMS_DRAWN}
    if draw.random() < 0.4:
        seams |= {"batching": draw.choice(ORDERS), "scheduling": draw.choice([Fickle(), "sjf"])}
    if seams["admission"] == "watermark":
        seams["admission"] = Watermark(draw.choice([0.0, 0.1, 0.5, 0.99]))
    seams |= {"mode": draw.choice(["swap", *policy_names("preemption/mode")]), "protect_oldest": draw.random() < 0.5,
              "layout": draw.choice(["paged"] * 8 + REGIONS), "prefix_cache": draw.choice(["hash", "hash", "none", *RADIX])}  # fmt: skip
    window, max_model_len = draw.choice([None, None, None, 1, 2, 3, 5, 9]), 8192
    if seams["layout"] != "paged":
        seams["prefix_cache"], window = "none", None
        max_model_len = max(2, num_blocks // draw.randint(1, min(4, num_blocks)) * size - draw.randint(0, 1))
        max_model_len = min(max_model_len, num_blocks * size)
    if window is not None:
        sinks = draw.choice([0, 0, 1, 2, 5])
        seams["compression"] = Streaming(sinks, window) if sinks else Window(window)
    limits = {
        "num_blocks": num_blocks, "block_size": size, "num_cpu_blocks": draw.choice([0, 3, 8, 40, 40]), "max_model_len": max_model_len,
        "max_num_batched_tokens": draw.choice([4, 5, 8, 16, 64]), "max_num_seqs": draw.choice([4, 5, 9, 64]), "seed": 5,
    }  # fmt: skip
    return Scene(limits, seams, window, [_random_operation(draw, size, num_blocks * size) for _ in range(draw.randint(10, 60))])


def _random_operation(draw: Random, size: int, num_slots: int) -> tuple[Any, ...]:
    kind = draw.choices(["submit", "step", "abort", "reset", "preempt_before", "preempt_after"], [35, 50, 3, 2, 5, 5])[0]
    if kind != "submit":
        return {"step": (kind, draw.randint(1, 4)), "reset": (kind,)}.get(kind, (kind, draw.randint(0, 9)))
    length = draw.randint(1, max(1, min(4 * size, num_slots - 1)))
    max_tokens = draw.randint(1, max(1, min(num_slots - length + 1, 3 * size + 3)))
    shape = draw.choice([(1, 0)] * 4 + [(2, 0), (4, 0), (1, 2), (2, 2), (3, 3)])
    return (kind, length, draw.randint(0, 2), draw.randint(0, length), max_tokens, shape, draw.choice([0.0, 1.0]), draw.random() < 0.7,
            draw.randint(0, 2), draw.choice(["", "", "", "salt"]))  # fmt: skip


def _play_seed(seed: int) -> None:
    try:
        _play(_random_scene(Random(seed)))
    except Exception as error:
        raise AssertionError(f"scene of seed {seed}: {error!r}") from error


_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("KVLAB_PROPERTY_EXAMPLES", "400")), derandomize=True, database=None, **_COMMON)
@given(scenes())
def test_whatever_happens_tokens_and_accounts_are_right(scene: Scene) -> None:
    """The property that covers most of what can go wrong in an engine's bookkeeping (the same examples in every run)."""
    _play(scene)


@pytest.mark.slow
def test_random_scenes_by_seed() -> None:
    """Seeds 0 to 299; a failure names its seed. Every mechanism acted in them: a test that never preempts proves nothing."""
    FIRED.clear()
    for seed in range(300):
        _play_seed(seed)
    print(f"\n{dict(FIRED)}")
    quiet = [name for name in (*MECHANISMS, "ended for capacity", "refused") if not FIRED[name]]
    assert not quiet, f"never seen: {quiet}"


@pytest.mark.full
def test_many_random_scenes_by_seed() -> None:
    """Seeds 300 to 1,299."""
    for seed in range(300, 1_300):
        _play_seed(seed)


@pytest.mark.full
@settings(max_examples=1_500, phases=[Phase.generate, Phase.shrink], **_COMMON)
@given(scenes())
def test_whatever_happens_at_length(scene: Scene) -> None:
    """New examples in every run; a failure prints how to repeat it."""
    _play(scene)
