"""Each scheduling policy has an order of service that no other policy shows: one scene, one place to run in, worked out by hand.

Before the scene two prompts are served, so that 64 tokens P and 48 tokens Q are cached (blocks of 16). Then `a` comes and runs; step k
of the scene is at 2 + k/10 s. After three steps (a has 3 of 9 outputs) the others come, in alphabetical order:

        arrival  priority  tenant  prompt                      outputs
    a   0.0      5         A       20                          9
    b   0.2      3         A       36: R (32 tokens) and 4     5
    c   0.6      0         A       50: R and 18                6
    d   2.2      4         B       57: Q and 9                 2
    e   2.21     2         B       69: P and 5                 7
    f   2.22     1         A       45                          4
    g   2.23     5         B       51: Q and 3                 3

One request runs at a time, so each policy's decisions are the order in which requests enter; only policies that send running requests
away let one enter twice. Preempted requests are computed again.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import make_engine, policies, policy_names, prompt_of, reference_outputs, request

from kvlab.policies.registry import by_name
from kvlab.policies.scheduling._predictor import LengthPredictor
from kvlab.types import Request

P, Q, R = prompt_of(64, 1), prompt_of(48, 2), prompt_of(32, 3)

PARAMETERS: dict[str, dict[str, Any]] = {
    "edf": {"ttft_ms_per_prompt_token": 4.0},
    "mlfq": {"prompt_tokens_per_iteration": 40},
    "random": {"seed": 1},
    "sjf_predicted": {"mean": 5.0, "cv": 0.5, "seed": 1},
    "srpt_predicted": {"mean": 5.0, "cv": 0.5, "seed": 1},
}

ORDER = {
    # By arrival.
    "fcfs": "abcdefg",
    # Numbers 0, 1, 2, 3, 4, 5.
    "priority": "acfebdg",
    # Prompts of 36, 45, 50, 51, 57, 69.
    "sjf": "abfcgde",
    # Outputs of 2, 3, 4, 5, 6, 7.
    "sjf_oracle": "adgfbce",
    # a has 6 left when the others come and gives way to d (2 left); it goes on after b (5 left), before c (6, but later).
    "srpt_oracle": "adgfbace",
    # Predictions (see PREDICTED).
    "sjf_predicted": "adgfcbe",
    # a is thought to have 5.41 left when the others come; it goes on after c (4.77), before b (5.88).
    "srpt_predicted": "adgfcabe",
    # Iterations of 40 prompt tokens: a and b join level 0 (one iteration), the others level 1 (two). a has sunk to level 2 after three
    # iterations, and gives way to b; b sinks to 1, where it is not sent away, and after two more to 2: then c sends it away, and so on:
    # two iterations each of c, d (which ends), e, f, g (which ends after a third, as nobody is above it). Level 2 in order of joining:
    # a has four iterations and sinks, b and c end, e sinks after four, f ends; then those on level 3: a, e.
    "mlfq": "abcdefgabcefae",
    # Cached: P 64, Q 48 (d before g). Then b by arrival; it leaves R, so that c has 32 cached tokens and f none.
    "lpm": "aedgbcf",
    # Two wait for the branch Q, one for P: d. Now one waits for each, e before g; then as lpm.
    "dfs_weight": "adegbcf",
    # Service: b 0.1045 s, c 0.1263, d 0.0471, e 0.1486, f 0.0856, g 0.0664. Wait / service, the highest first:
    # at 2.9 b 25.8 (c 18.2, d 14.9); at 3.4 d 25.5 (c 22.2, g 17.6); at 3.6 c 23.8 (g 20.6); at 4.2 g 29.7 (f 23.1); f; e.
    "hrrn": "abdcgfe",
    # Service when a has run (above what the tenants began with): A 20 + 2 * 9 = 38; B was lifted to A's 20 + 2 * 3 = 26 when d came.
    # d: B 26 + 57 + 4 = 87; b: A 38 + 36 + 10 = 84; c: A 84 + 50 + 12 = 146; e: B 87 + 69 + 14 = 170; f: A 199; g.
    "vtc": "adbcefg",
    # The first eight bytes of blake2b("1/<id>") as a little-endian number, over 2^64: d 0.05, f 0.24, c 0.27, g 0.32, e 0.73, b 0.75.
    "random": "adfcgeb",
    # Due 1 s + 4 ms a prompt token after arrival: b 0.344, c 0.8, f 2.4, d 2.428, g 2.434, e 2.486 (+ 1).
    "edf": "abcfdge",
}

PREDICTED = {"a": 8.41, "b": 5.88, "c": 4.77, "d": 1.46, "e": 7.59, "f": 3.36, "g": 2.84}
"""tau 0.6, mean 5, cv 0.5, seed 1: computed apart from the formula and torch's inverse of the normal distribution function."""


def scene() -> list[Request]:
    """a to g."""
    rows = [
        ("a", prompt_of(20, 10), 9, 0.0, 5, "A"),
        ("b", R + prompt_of(4, 11), 5, 0.2, 3, "A"),
        ("c", R + prompt_of(18, 12), 6, 0.6, 0, "A"),
        ("d", Q + prompt_of(9, 13), 2, 2.2, 4, "B"),
        ("e", P + prompt_of(5, 14), 7, 2.21, 2, "B"),
        ("f", prompt_of(45, 15), 4, 2.22, 1, "A"),
        ("g", Q + prompt_of(3, 16), 3, 2.23, 5, "B"),
    ]
    requests = [request(name, prompt, output, arrival, priority) for name, prompt, output, arrival, priority, _ in rows]
    for each, row in zip(requests, rows, strict=True):
        each.tenant = row[-1]
    return requests


def entries(scheduling: str) -> str:
    """The order in which requests of the scene enter under a policy."""
    policy = by_name("scheduling", scheduling, **PARAMETERS.get(scheduling, {}))
    engine, log = make_engine(100, 16, policies(scheduling=policy), max_num_seqs=1)
    for warm in (request("P", [*P, 0], 1), request("Q", [*Q, 0], 1)):
        engine.add_request(warm)
        while engine.has_work:
            engine.step(1.0)
    num_warm = len(log.plans)
    first, *others = scene()
    engine.add_request(first)
    step = 0
    while engine.has_work:
        if step == 3:
            for each in others:
                engine.add_request(each)
        engine.step(2.0 + step / 10)
        step += 1
    assert {name: log.outputs[name] for name in "abcdefg"} == reference_outputs(scene())
    return "".join(entry.request_id for plan in log.plans[num_warm:] for entry in plan.admitted)


@pytest.mark.parametrize("scheduling", policy_names("scheduling"))
def test_each_policy_serves_in_its_own_order_and_in_no_other_policys(scheduling: str) -> None:
    got = entries(scheduling)
    assert got == ORDER[scheduling], "a new policy needs its row in ORDER"
    assert [name for name, order in ORDER.items() if order == got] == [scheduling]


def test_predictions() -> None:
    """Each length's normal score, blurred by rho = sin(0.3 pi), taken back to tokens."""
    predictor = LengthPredictor(tau=0.6, mean=5.0, cv=0.5, seed=1)
    predicted = {each.request_id: predictor.predict(each.request_id, each.sampling.max_tokens) for each in scene()}
    assert predicted == pytest.approx(PREDICTED, abs=0.005)


def test_the_table_is_whole() -> None:
    """No two policies share an order."""
    assert sorted(ORDER) == policy_names("scheduling")
    assert len(set(ORDER.values())) == len(ORDER)
