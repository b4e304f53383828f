"""Settings that a run does not heed, in words: a watermark that no policy takes, an eviction policy without a prefix cache.

Only what was set is told of (a value other than its default's); what says "none" (0, null) is no claim. Which policy takes which number
is read from the groups under conf/ (`fraction: ${watermark}`), so that a new policy needs no entry here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from kvlab.config import PARTS, SEAMS
from kvlab.engine.config import PolicySet
from kvlab.house import default_node, main, nodes, number_of, without_leftovers
from kvlab.policies.preemption.mode import Recompute

READ_BY_THE_ENGINE = ("max_num_batched_tokens", "seed")
"""Numbers that policies take and the engine too."""

_TIMES = "its times come from the cost model"
_REPLAYS = "it replays what was recorded"
UNHEEDED = {
    "simulated": (("device", "threads"), _TIMES),
    "recorded": (("device", "threads", "backend", "tensor_parallel_size"), _REPLAYS),
}
"""Runner -> (settings of real models, why they change nothing). `simulated_parts` tells of its other two."""

POOL = ("num_blocks", "kv_cache_bytes", "kv_cache_tokens", "gpu_memory_utilization", "memory_fraction")
"""What the size of the pool is taken from: the first that is given. The last two are shares of what memory is found."""


def without_effect(config: Mapping[str, Any], policies: PolicySet, given: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence for each setting that changes nothing.

    Args:
        config: of a run, plain. policies: that it is made with. given: those of them, by seam, that came as objects.
    """
    return (*_numbers(config, given), *_policies(config, policies), *_sizes(config), *_machine(config))


def no_token_limit(max_num_batched_tokens: int, policies: PolicySet) -> Iterator[str]:
    """That this limit is none, where the batching policy says so."""
    if not policies.batching.has_token_limit:
        name = type(policies.batching).__name__
        yield (f"max_num_batched_tokens = {max_num_batched_tokens} does not limit a step with batching {name}: prompts are computed whole, "
               "however many enter at once (max_num_seqs limits how many).")  # fmt: skip


def _set(config: Mapping[str, Any], key: str) -> bool:
    """Whether a value was set: there, not "none", and not the default."""
    return bool(config.get(key)) and config[key] != main().get(key, config[key])


def _numbers(config: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Numbers at the top that only policies take, and none of these does."""
    for key, takers in takers_of_numbers().items():
        if key in READ_BY_THE_ENGINE or not _set(config, key):
            continue
        seam = next(iter(takers.values()))[0]
        node = {} if seam in given else config.get(seam)
        if isinstance(node, Mapping):
            node = without_leftovers(seam, node, config)
        target = str(node.get("_target_")) if isinstance(node, Mapping) else ""
        parameter = takers[target][1] if target in takers else None
        if parameter is None and not (isinstance(node, Mapping) and config[key] in node.values()):
            names = ", ".join(sorted({_name(taker) for taker, (of, _) in takers.items() if of == seam}))
            who = type(given[seam]).__name__ if seam in given else _name(target)
            yield f"{key} = {config[key]} has no effect: {seam} {who} does not take it ({names} would)."
        elif parameter is not None and key != "block_size" and isinstance(node, Mapping) and node.get(parameter) != config[key]:
            yield f"{key} = {config[key]} has no effect: {seam}.{parameter} = {node.get(parameter)} is given."


def _policies(config: Mapping[str, Any], policies: PolicySet) -> Iterator[str]:
    """Policies that are never asked, and limits that they don't ask for."""
    if _set(config, "max_num_batched_tokens"):
        yield from no_token_limit(config["max_num_batched_tokens"], policies)
    eviction = type(policies.eviction)
    if not policies.prefix_cache.enabled and eviction is not type(PolicySet().eviction):
        name = type(policies.prefix_cache).__name__
        yield f"eviction {eviction.__name__} has no effect with prefix_cache {name}: no block stays cached, so none is evicted."
    if config.get("num_cpu_blocks") and type(policies.preemption.mode) is Recompute:
        yield f"num_cpu_blocks = {config['num_cpu_blocks']} has no effect with preemption.mode=recompute: nothing is swapped out."


def _sizes(config: Mapping[str, Any]) -> Iterator[str]:
    """Sizes of the pool besides the one that it is made with."""
    first = next((key for key in POOL[:3] if config.get(key)), None)
    if first is None:
        return
    for key in POOL[POOL.index(first) + 1 :]:
        if _set(config, key) and not (key == "kv_cache_tokens" and _agrees(config)):
            yield f"{key} = {config[key]} has no effect: {first} = {config[first]} says how large the pool is."


def _agrees(config: Mapping[str, Any]) -> bool:
    """A run's own config.yaml has the number of blocks that its kv_cache_tokens came to."""
    size = config.get("block_size") or 1
    return bool(config.get("num_blocks") == config["kv_cache_tokens"] // size)


def _machine(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings that another runner would heed."""
    node = config.get("runner")
    target = str(node.get("_target_")) if isinstance(node, Mapping) else ""
    runner = target.removeprefix("kvlab.runners.")
    keys, why = UNHEEDED.get(runner, ((), ""))
    for key in keys:
        if _set(config, key) or (key == "threads" and config.get(key)):
            yield f"{key} = {config[key]} has no effect with runner={runner}: {why}."
    cost = config.get("cost_model")
    if runner in ("torch", "recorded") and isinstance(cost, Mapping) and dict(cost) != default_node("cost_model"):
        yield f"cost_model has no effect with runner={runner}: only runner=simulated takes its times from it."
    if runner in ("torch", "simulated") and config.get("run"):
        yield f"run = {config['run']} has no effect with runner={runner}: runner=recorded follows a run."


# ------------------------------------------------------------------- read from conf/


@cache
def takers_of_numbers() -> dict[str, dict[str, tuple[str, str]]]:
    """Number at the top -> class that takes it -> (its group, the parameter)."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for group in (*SEAMS, *PARTS):
        for node in nodes(group):
            for parameter, value in node.items():
                if (number := number_of(value)) and "_target_" in node:
                    found.setdefault(number, {})[node["_target_"]] = (group, parameter)
    return found


def _name(target: str) -> str:
    """The name a policy is chosen by: its file's; of another class its own."""
    *_, module, name = target.rsplit(".", 2)
    return module if target.startswith("kvlab.policies.") else name
