"""vtc: counters worked out by hand, and the service of two tenants within the paper's bound while one floods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_support import Log, make_engine, policies, prompt_of, request, run_to_end

from kvlab.policies.registry import by_name
from kvlab.policies.scheduling import Vtc
from kvlab.types import Now, Request, UserError

NOW = Now(0, 0.0)
NONE: Any = None


def group(group_id: int, tenant: str, num_prompt: int = 10) -> Any:
    return SimpleNamespace(group_id=group_id, tenant=tenant, num_prompt_tokens=num_prompt, arrival_s=0.0, request_id=f"r{group_id}")


# --------------------------------------------------------------------------------------------------- counters


def test_a_prompt_is_charged_once_and_output_as_it_comes() -> None:
    policy = Vtc(input_weight=1.0, output_weight=2.0)
    first = group(0, "a", 10)
    policy.arrived(first, NONE, NOW)
    assert policy.counters == {"a": 0.0}
    policy.entered(first, "new", NOW)
    assert policy.counters == {"a": 10.0}
    policy.computed(first, 10, 1, NOW)
    policy.computed(first, 4, 4, NOW)  # four samples
    assert policy.counters == {"a": 20.0}
    policy.preempted(first, "recompute", NOW)
    policy.entered(first, "resumed", NOW)
    policy.computed(first, 15, 0, NOW)
    assert policy.counters == {"a": 20.0}


def test_a_tenant_that_was_away_is_lifted_to_the_least_of_those_that_wait() -> None:
    """Counters a 40, b 70; both wait; c comes with 0: lifted to 40. a comes again while it waits: not lifted."""
    policy = Vtc()
    policy.counters |= {"a": 40.0, "b": 70.0}
    policy.arrived(group(0, "b"), NONE, NOW)
    assert policy.counters == {"a": 40.0, "b": 70.0}  # nobody waits, nobody has left the queue yet
    policy.arrived(group(1, "a"), NONE, NOW)
    assert policy.counters["a"] == 70.0  # it had nothing waiting: up to b's
    policy.counters["a"] = 40.0
    policy.arrived(group(2, "c"), NONE, NOW)
    assert policy.counters == {"a": 40.0, "b": 70.0, "c": 40.0}
    policy.counters["a"] = 10.0
    policy.arrived(group(3, "a"), NONE, NOW)
    assert policy.counters["a"] == 10.0


@pytest.mark.parametrize("leaves", ["enters", "aborted"])
def test_with_nobody_waiting_a_tenant_is_lifted_to_the_last_that_left_the_queue(leaves: str) -> None:
    """b left last, with 30 (and 10 for its prompt, if it entered)."""
    policy = Vtc()
    one, two = group(0, "a"), group(1, "b")
    policy.arrived(one, NONE, NOW)
    policy.arrived(two, NONE, NOW)
    policy.counters |= {"a": 90.0, "b": 30.0}
    policy.entered(one, "new", NOW)
    if leaves == "enters":
        policy.entered(two, "new", NOW)
    policy.ended(two, NOW)
    policy.arrived(group(2, "c"), NONE, NOW)
    assert policy.counters["c"] == (40.0 if leaves == "enters" else 30.0)
    policy.ended(one, NOW)  # it ran: its end is no leaving of the queue
    policy.arrived(group(3, "d"), NONE, NOW)
    assert policy.counters["d"] == policy.counters["c"]


def test_an_order_charges_each_as_it_would_enter() -> None:
    """a 0, b 15. a's 10: a 10; a's 20: a 30; b's 10: b 25; b's 10: b 35; a's 1. With a's weight 4: 2.5, 7.5: all of a first."""
    waiting = [group(0, "a", 10), group(1, "b", 10), group(2, "a", 20), group(3, "b", 10), group(4, "a", 1)]
    for weights, order in ((None, [0, 2, 1, 3, 4]), ({"a": 4.0}, [0, 2, 4, 1, 3])):
        policy = Vtc(tenant_weights=weights)
        policy.counters |= {"a": 0.0, "b": 15.0}
        assert [g.group_id for g in policy.order(waiting, NONE, NOW)] == order
        assert policy.counters == {"a": 0.0, "b": 15.0}


def test_equal_counters_go_by_submission() -> None:
    waiting = [group(0, "z"), group(1, "a"), group(2, "z"), group(3, "a")]
    assert [g.group_id for g in Vtc().order(waiting, NONE, NOW)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "parameters", [{"input_weight": -1}, {"output_weight": float("inf")}, {"tenant_weights": {"a": 0}}, {"tenant_weights": 3}]
)
def test_a_parameter_out_of_range(parameters: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"Vtc.{next(iter(parameters))} = "):
        by_name("scheduling", "vtc", **parameters)


# ------------------------------------------------------------------------------------------------- in the engine

POOL_TOKENS = 64
PROMPT, OUTPUT = 12, 10
BOUND = 2 * max(1 * PROMPT, 2 * POOL_TOKENS)
"""2 * max(w_p * L_input, w_q * M): M, tokens that a running batch may hold, is the pool's."""


def of_tenant(tenant: str, number: int, prompt: int, output: int) -> Request:
    made = request(f"{tenant}{number}", prompt_of(prompt, number), output)
    made.tenant = tenant
    return made


def service(log: Log, requests: list[Request]) -> list[dict[str, float]]:
    """Service of each tenant after each step, counted from plans and outcomes: prompts at admission, twice the outputs."""
    by_id = {each.request_id: each for each in requests}
    so_far = {each.tenant: 0.0 for each in requests}
    owner: dict[int, str] = {}
    rows = []
    for plan, outcome in zip(log.plans, log.outcomes, strict=True):
        for entry in plan.admitted:
            if entry.kind == "new":
                so_far[by_id[entry.request_id].tenant] += len(by_id[entry.request_id].prompt_token_ids)
        owner |= {start.seq_id: by_id_of(log, plan, start.group_id, by_id) for start in plan.starts}
        for scheduled, tokens in zip(plan.scheduled, outcome.tokens, strict=True):
            so_far[owner[scheduled.seq_id]] += 2 * len(tokens)
        rows.append(dict(so_far))
    return rows


def by_id_of(log: Log, plan: Any, group_id: int, by_id: dict[str, Request]) -> str:
    """The tenant of a group that enters in this plan."""
    return next(by_id[entry.request_id].tenant for entry in plan.admitted if entry.group_id == group_id)


def widest_gap(rows: list[dict[str, float]], first: int, last: int) -> float:
    """The largest difference of the service that a and b got within any interval of steps first..last."""
    ahead = [row["a"] - row["b"] for row in rows[first : last + 1]]
    return max(ahead) - min(ahead)


def backlogged(log: Log, requests: list[Request]) -> tuple[int, int]:
    """The first and last step at which both tenants have requests that were submitted and have not entered."""
    entered = {entry.request_id: plan.step for plan in log.plans for entry in plan.admitted if entry.kind == "new"}
    last = min(max(entered[r.request_id] for r in requests if r.tenant == tenant) for tenant in "ab")
    return min(entered[r.request_id] for r in requests if r.tenant == "b"), last - 1


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "sarathi"])
def test_a_flood_does_not_push_the_other_tenant_aside(batching: str, mode: str) -> None:
    """a sends 60 requests at once, b 20 behind them; b's are shorter. While both wait, what one got more than the other within any
    interval is within the bound; under fcfs it is several times that."""
    requests = [of_tenant("a", i, PROMPT, OUTPUT) for i in range(60)] + [of_tenant("b", i, PROMPT // 2, OUTPUT // 2) for i in range(20)]
    gaps = {}
    for scheduling in ("vtc", "fcfs"):
        engine, log = make_engine(POOL_TOKENS // 4, 4, policies(scheduling=scheduling, batching=batching, mode=mode), num_cpu_blocks=40)
        for each in requests:
            engine.add_request(each)
        run_to_end(engine, 3000, check=False)
        rows = service(log, requests)
        assert rows[-1] == {"a": 60 * (PROMPT + 2 * OUTPUT), "b": 20 * (PROMPT // 2 + 2 * (OUTPUT // 2))}
        first, last = backlogged(log, requests) if scheduling == "vtc" else (0, len(rows) - 1)
        assert last - first > 20
        gaps[scheduling] = widest_gap(rows, first, last)
    assert gaps["vtc"] <= BOUND
    assert gaps["fcfs"] > 3 * BOUND


def test_a_tenant_that_comes_late_gets_its_share_and_no_more() -> None:
    """a has been served alone for long when b comes: from then on neither is ahead by more than the bound (without the lift b would be
    served alone until it had caught up)."""
    requests = [of_tenant("a", i, PROMPT, OUTPUT) for i in range(60)] + [of_tenant("b", i, PROMPT, OUTPUT) for i in range(40)]
    engine, log = make_engine(POOL_TOKENS // 4, 4, policies(scheduling="vtc"))
    for each in requests[:60]:
        engine.add_request(each)
    while sum(record.tenant == "a" for record in log.records.values()) < 30:
        engine.step()
    comes = len(log.plans)
    for each in requests[60:]:
        engine.add_request(each)
    run_to_end(engine, 3000, check=False)
    rows = service(log, requests)
    assert rows[comes]["a"] - rows[comes]["b"] > 3 * BOUND
    _, last = backlogged(log, requests)
    assert last - comes > 40
    assert widest_gap(rows, comes, last) <= BOUND


def test_weights_are_shares() -> None:
    """b has twice a's weight: while both wait it gets twice the service, within the bound of its weighted service."""
    requests = [of_tenant(tenant, i, PROMPT, OUTPUT) for i in range(40) for tenant in "ab"]
    engine, log = make_engine(POOL_TOKENS // 4, 4, policies(scheduling=Vtc(tenant_weights={"b": 2.0})))
    for each in requests:
        engine.add_request(each)
    run_to_end(engine, 3000, check=False)
    rows = service(log, requests)
    first, last = backlogged(log, requests)
    weighted = [{"a": row["a"], "b": row["b"] / 2} for row in rows]
    assert widest_gap(weighted, first, last) <= BOUND
    got = {tenant: rows[last][tenant] - rows[first][tenant] for tenant in "ab"}
    assert 1.7 < got["b"] / got["a"] < 2.3
