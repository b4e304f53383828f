"""Figures and seeds worked out by hand where an engine's own sums would agree with each other and still be wrong."""

from __future__ import annotations

import pytest
from engine_support import VOCAB, Forcer, Log, make_engine, policies, prompt_of, request, run_to_end, serve

from kvlab import assembly
from kvlab.building import build
from kvlab.composition import compose
from kvlab.config import to_plain
from kvlab.engine.driver import drive
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.base import PreemptionMode, VictimView
from kvlab.types import Now, RequestRecord
from kvlab.workload.base import WorkloadContext
from kvlab.workload.multi_turn import MultiTurnWorkload


def test_a_recomputed_chunk_over_the_prompts_end_counts_on_both_sides() -> None:
    """6 prompt tokens and 3 outputs of 4 when it gives way: 6 tokens are computed of the prompt again, 3 beyond it."""
    engine, log = make_engine(12, 4, policies(prefix_cache="none"))
    force = Forcer(engine)
    for name in ("old", "young"):
        engine.add_request(request(name, prompt_of(6), max_tokens=12))
    for _ in range(4):
        engine.step()  # outputs 1 to 4
    force.before.append("young")
    run_to_end(engine, 60)
    back = next(s for s in log.stats if s.preempted_queries)
    assert (back.preempted_queries, back.recomputed_tokens) == (10, 9)  # its last token had not been computed
    assert back.num_prompt_tokens_computed == 6
    assert back.num_generation_tokens == 4 + 1  # 3 again, 1 new, and one of the old request
    assert all(s.num_prompt_tokens_computed + s.num_generation_tokens == p.num_new_tokens
               for s, p in zip(log.stats, log.plans, strict=True))  # fmt: skip


def test_every_beam_counts_as_output_in_its_last_step_too() -> None:
    """Width 2, 3 tokens, both returned: 2 tokens in each of 3 steps, 6 in the record."""
    engine, log = make_engine(20, 4)
    serve(engine, [request("a", prompt_of(5), max_tokens=3, beam_width=2, n=2)])
    assert [s.num_output_tokens for s in log.stats] == [2, 2, 2]
    assert log.records["a"].num_output_tokens == 6


@pytest.mark.parametrize(("seams", "words"), [
    ({"batching": "chunked"}, ["tokens", "", ""]),  # 8 tokens a step: the first prompt takes all
    ({"batching": "static"}, ["max_num_seqs", "batching", "batching"]),  # the batch is under way
    ({"batching": "prefill_first"}, ["tokens", "", ""]),
])  # fmt: skip
def test_whoever_waits_waits_for_a_reason(seams: dict[str, str], words: list[str]) -> None:
    limit = {"max_num_seqs": 1} if seams["batching"] == "static" else {"max_num_batched_tokens": 8}
    engine, log = make_engine(40, 4, policies(**seams), **limit)
    for name in ("a", "b"):
        engine.add_request(request(name, prompt_of(8, seed=ord(name)), max_tokens=5))
    for _ in words:
        engine.step()
    assert [s.admission_blocked_by for s in log.stats] == words
    assert [s.num_waiting_reqs for s in log.stats] == [int(bool(word)) for word in words]


def test_a_step_that_preempts_says_that_it_admits_nobody() -> None:
    engine, log = make_engine(40, 4)
    force = Forcer(engine)
    for name in ("a", "b"):
        engine.add_request(request(name, prompt_of(8, seed=ord(name)), max_tokens=5))
    engine.step()
    force.before.append("b")
    engine.step()
    assert [s.admission_blocked_by for s in log.stats] == ["", "preemption"]
    assert log.plans[1].blocked[0].request_id == "b"


def test_sampled_tokens_do_not_depend_on_who_finished_first() -> None:
    """Conversations without a seed of their own: follow-ups are submitted in another order under another policy."""

    def outputs(scheduling: str, num_blocks: int) -> tuple[list[str], dict[str, object]]:
        engine, log = make_engine(num_blocks, 4, policies(scheduling=scheduling), runner=SimulatedRunner(VOCAB),
                                  max_num_seqs=num_blocks // 8, max_model_len=200)  # fmt: skip
        workload = MultiTurnWorkload(6, 3, {"kind": "uniform", "min": 4, "max": 40}, 5, {"kind": "uniform", "min": 2, "max": 20},
                                     sampling={"temperature": 1.0}, arrivals={"kind": "all_at_once"})  # fmt: skip
        workload.start(WorkloadContext(None, VOCAB, 200, 0, ()))
        drive(engine, workload)
        return list(log.records), dict(log.outputs)

    (order, wide), (other_order, narrow) = outputs("fcfs", 200), outputs("sjf", 24)
    assert order != other_order
    assert len(wide) == 18
    assert wide == narrow


@pytest.mark.parametrize(("dtype", "bytes_per_token"), [("auto", 4 * 2 * 2 * 32), ("fp16", 2 * 2 * 2 * 32), ("fp8", 2 * 2 * 32),
                                                        ("int8", 2 * 2 * (32 + 4 * 2))])
def test_a_simulated_run_costs_what_its_kv_dtype_stores(dtype: str, bytes_per_token: int) -> None:
    """model=tiny: 2 layers; K and V of 4 heads of 8 numbers each."""
    config = to_plain(compose("model=tiny", "runner=simulated", "dtype=float32", f"kv_dtype={dtype}", "block_size=8"))
    chosen = assembly.policy_set(config, {})
    parts = assembly.simulated_parts(config, build(config["model"]))
    assembly.make_engine(assembly.engine_config(config, chosen, parts), chosen, parts)
    assert isinstance(parts.runner, SimulatedRunner)
    shape = parts.runner.cost._shape  # type: ignore[attr-defined]
    heads = parts.shape.num_kv_heads * parts.shape.head_dim
    assert (parts.shape.num_layers, heads) == (2, 32)
    assert (shape.kv_bytes_per_token, shape.block_bytes) == (bytes_per_token, 8 * bytes_per_token)


class Asked(PreemptionMode):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.views: list[VictimView] = []

    def mode(self, victim: VictimView, now: Now) -> str:
        self.views.append(victim)
        return "recompute"


def test_a_victims_shared_tokens_are_recomputed_once() -> None:
    """n = 4 over 8 prompt tokens (two blocks of 4) with one output token computed each: 8 + 4 tokens, 2 + 4 blocks."""
    asked = Asked()
    engine, _ = make_engine(40, 4, policies(mode=asked))
    force = Forcer(engine)
    engine.add_request(request("old", prompt_of(5, seed=1), max_tokens=9))
    engine.add_request(request("many", prompt_of(8), max_tokens=9, n=4, temperature=1.0))
    engine.step()
    engine.step()
    force.before.append("many")
    run_to_end(engine, 100)
    assert [(view.num_computed_tokens, view.num_swap_blocks) for view in asked.views] == [(8 + 4, 2 + 4)]


class Grumbler(Log):
    """Fails at the first request that ends."""

    def on_request(self, record: RequestRecord) -> None:
        super().on_request(record)
        if len(self.records) == 1:
            raise RuntimeError("no space left on this listener")


def test_an_error_of_a_listener_leaves_a_whole_step() -> None:
    """Two requests end in one step; the listener fails at the first. The engine has committed both and goes on."""
    engine, log = make_engine(40, 4, log=Grumbler())
    for name in ("a", "b", "c"):
        engine.add_request(request(name, prompt_of(4, seed=ord(name)), max_tokens=3 if name == "c" else 2))
    engine.step()
    with pytest.raises(RuntimeError, match="no space left"):
        engine.step()
    assert list(engine.groups) == ["c"]
    assert [record.request_id for record in engine.take_ended()] == ["a", "b"]
    run_to_end(engine, 5)
    assert list(log.records) == ["a", "b", "c"]
