"""When two runs are the same experiment, and when two configurations decide alike."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvlab import __version__
from kvlab.building import find_class
from kvlab.config import SEAMS

NOT_IDENTITY = ("hydra", "name", "threads", "record")
"""Keys that change where or how fast a run goes and what is written of it, not what it is."""

DECIDING = (*SEAMS, "model", "workload", "seed", "block_size", "num_blocks", "kv_cache_tokens", "num_cpu_blocks", "watermark",
            "max_num_seqs", "max_num_batched_tokens", "max_model_len", "depth")  # fmt: skip
"""Keys that plans depend on, given the tokens and times of a recorded run."""


def identity(config: Mapping[str, Any], model_checksum: str, policies: Mapping[str, Any] | None = None) -> str | None:
    """What makes two runs the same experiment, in 16 hex digits: configuration, version, model, source of foreign classes.

    `policies`: objects given in place of configured ones; all their attributes count, as they are after `reset()`. None where a class
    has no source or an attribute no value that could be compared: such a run is taken for no other.
    """
    facts = experiment_facts(config, policies)
    if facts is None:
        return None
    kept, sources = facts
    text = json.dumps([kept, __version__, model_checksum, sources], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def experiment_facts(config: Mapping[str, Any], policies: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, str]] | None:
    """(configuration that counts, source or attributes of each foreign class and each policy given as an object): what a run is, apart
    from kvlab's version and the model's weights. None where something can't be compared, as in `identity`."""
    sources: dict[str, str] = {}
    for target in _targets({k: v for k, v in config.items() if k not in (policies or {})}):
        digest = _digest_or_none(find_class(target))
        if digest is None:
            return None
        sources[target] = digest
    try:
        sources |= {seam: json.dumps(_facts(_as_new(policy)), sort_keys=True) for seam, policy in (policies or {}).items()}
    except (_NoFactsError, RecursionError):
        return None
    return {k: v for k, v in config.items() if k not in NOT_IDENTITY and k not in (policies or {})}, sources


def deciding_differences(config: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """What two configurations that both say something of a deciding key say differently, as "key = ours (recorded: theirs)".

    Sizes left open (null) agree with any; a file's path may have changed; keys that only one of the two has are left out.
    """
    found: list[str] = []

    def compare(name: str, ours: Any, theirs: Any) -> None:
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            for key in [key for key in ours if key in theirs and key != "path"]:
                compare(f"{name}.{key}", ours[key], theirs[key])
        elif ours != theirs and not (ours is None and "." not in name):
            found.append(f"{name} = {ours!r} (recorded: {theirs!r})")

    for key in DECIDING:
        if key == "kv_cache_tokens" and config.get("num_blocks") is not None:
            continue  # without effect
        if key in config and key in recorded:
            compare(key, config[key], recorded[key])
    return found


class _NoFactsError(Exception):
    """Something whose value can't be compared between two runs."""


def _as_new(policy: Any) -> Any:
    """A copy without the state of an earlier run."""
    try:
        policy = copy.deepcopy(policy)
    except Exception as error:  # whatever a foreign class raises: it can't be looked at
        raise _NoFactsError from error
    if hasattr(policy, "reset"):
        policy.reset()
    return policy


def _facts(value: Any) -> Any:
    """A value as JSON: plain values as they are, objects by class, source and attributes, functions by source."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, (array, range, np.ndarray)):
        return [type(value).__name__, getattr(value, "shape", None), [_facts(part) for part in value]]
    if isinstance(value, np.generic):
        return _facts(value.item())
    if isinstance(value, (list, tuple, deque)):
        return [_facts(part) for part in value]
    if isinstance(value, Mapping):
        return {"mapping": [[_facts(key), _facts(part)] for key, part in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(json.dumps(_facts(part), sort_keys=True) for part in value)}
    made_by = value if inspect.isclass(value) or inspect.isfunction(value) else type(value)
    digest = _digest_or_none(made_by)
    attributes = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
    if digest is None or (made_by is not value and not hasattr(value, "__dict__") and not attributes):
        raise _NoFactsError
    named = f"{made_by.__module__}.{made_by.__qualname__} {digest}"
    if inspect.isfunction(value):
        return [named, _facts(value.__defaults__), [_facts(cell.cell_contents) for cell in value.__closure__ or ()]]
    if made_by is value:
        return named
    kept = {**{name: getattr(value, name) for name in attributes}, **getattr(value, "__dict__", {})}
    return {named: {name: _facts(part) for name, part in sorted(kept.items())}}


def _targets(node: Any) -> list[str]:
    if isinstance(node, Mapping):
        own = [str(node["_target_"])] if "_target_" in node else []
        return own + [t for v in node.values() for t in _targets(v)]
    if isinstance(node, list):
        return [t for v in node for t in _targets(v)]
    return []


def _digest_or_none(factory: Any) -> str | None:
    source = _foreign_source(factory)
    return None if source is None else (hashlib.sha256(source.encode()).hexdigest()[:16] if source else "kvlab")


def _foreign_source(factory: Any) -> str | None:
    """Source text of a class or function that is not kvlab's; "" for kvlab's own, None where the source can't be had."""
    if getattr(factory, "__module__", "").split(".")[0] == "kvlab":
        return ""
    try:
        return inspect.getsource(factory)
    except (OSError, TypeError):
        return None
