"""A run's configuration as plain data: checked values, objects built from `_target_`, and the run's identity.

Nothing here needs Hydra: `kvlab.composition` makes configurations from the groups under conf/, this module uses them.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import inspect
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from kvlab import __version__
from kvlab.types import UserError, unknown_name

SEAMS = (
    "scheduling", "batching", "admission", "preemption", "eviction", "prefix_cache", "block_sizing", "layout", "compression",
    "kv_dtype",
)  # fmt: skip
"""The groups that choose a policy, in the order of `PolicySet`."""

PARTS = ("model", "runner", "cost_model", "workload")
"""The groups that choose anything else."""

NOT_IDENTITY = ("hydra", "name", "threads", "record")
"""Keys that change where or how fast a run goes and what is written of it, not what it is."""

DTYPES = ("auto", "float64", "float32", "float16", "bfloat16")

BACKENDS = ("auto", "torch", "triton")

RECORDS = ("steps", "requests", "blocks", "outcomes", "plans")

GOALS = ("ttft_ms", "tpot_ms", "e2el_ms")
"""Goals of a request for goodput (milliseconds); a configuration may leave them out."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Check = tuple[Callable[[Any], bool], str]
_POSITIVE: Check = (lambda v: _is_int(v) and v >= 1, "a positive integer")
_POSITIVE_OR_NULL: Check = (lambda v: v is None or (_is_int(v) and v >= 1), "a positive integer, or null")

VALUES: dict[str, Check] = {
    "block_size": (_POSITIVE[0], "a positive integer (tokens per block)"),
    "num_blocks": (_POSITIVE_OR_NULL[0], "a positive integer, or null (taken from kv_cache_tokens or from the free memory)"),
    "kv_cache_tokens": (_POSITIVE_OR_NULL[0], "a positive integer, or null (taken from the free memory)"),
    "kv_cache_bytes": (_POSITIVE_OR_NULL[0], "a positive integer (bytes of each device's pool), or null"),
    "gpu_memory_utilization": (lambda v: _is_number(v) and 0 < v <= 1, "a number in (0, 1] (share of a CUDA device's memory)"),
    "tensor_parallel_size": (_POSITIVE[0], "a positive integer (devices that share a model)"),
    "memory_fraction": (lambda v: _is_number(v) and 0 < v <= 1, "a number in (0, 1] (share of the free memory)"),
    "num_cpu_blocks": (lambda v: _is_int(v) and v >= 0, "0 (no swap) or a positive integer"),
    "watermark": (lambda v: _is_number(v) and 0 <= v < 1, "a number in [0, 1) (share of the pool kept free at admission)"),
    "max_num_seqs": _POSITIVE,
    "max_num_batched_tokens": _POSITIVE,
    "max_model_len": (_POSITIVE_OR_NULL[0], "a positive integer (tokens), or null (the model's own limit)"),
    "dtype": (lambda v: v in DTYPES, f"one of {', '.join(DTYPES)}"),
    "device": (lambda v: isinstance(v, str) and v != "", "auto, cpu, cuda, cuda:0, ..."),
    "backend": (lambda v: v in BACKENDS, f"one of {', '.join(BACKENDS)}"),
    "threads": _POSITIVE_OR_NULL,
    "depth": (lambda v: _is_int(v) and v in (0, 1), "0 (a plan waits for the last outcome) or 1 (it is made while the last one runs)"),
    "seed": (lambda v: _is_int(v) and v >= 0, "0 or a positive integer"),
    "run": (lambda v: v is None or (isinstance(v, str) and v != ""), "the folder of a recorded run, or null"),
}
"""Top-level values: what is allowed, as a test and in words."""

NAMES: dict[str, Iterable[str]] = {"dtype": DTYPES, "backend": BACKENDS}
"""Values that are one of a few names."""

SINCE: dict[str, Any] = {"depth": 0, "backend": "auto", "kv_cache_bytes": None, "gpu_memory_utilization": 0.9, "tensor_parallel_size": 1}
"""Values that configurations of earlier versions lack, and what they stood for."""


def check_value(key: str, value: object) -> None:
    """UserError if a top-level value is not allowed; keys without a rule pass."""
    if key in VALUES and not VALUES[key][0](value):
        names = NAMES.get(key, ())
        near = difflib.get_close_matches(value, names, n=1, cutoff=0.5) if isinstance(value, str) else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{key} = {value!r} is not allowed: {VALUES[key][1]}.{hint}")


def check_config(config: Mapping[str, Any]) -> None:
    """Check a whole plain configuration before anything is loaded or written.

    Raises:
        UserError: an unknown or missing key, or a value outside its range.
    """
    known = [*VALUES, *SEAMS, *PARTS, "record", "goals", "hydra", "name"]
    for key in config:
        if key not in known:
            raise unknown_name("key", str(key), known)
    for key in (*VALUES, *SEAMS, "model", "runner", "workload", "record"):
        if key not in config and key not in SINCE:
            raise UserError(f"The configuration has no {key!r}. Take one from kvlab.compose(...) or a run folder's config.yaml.")
    for key, value in config.items():
        check_value(key, value)
    record = config["record"]
    if not isinstance(record, Mapping):
        raise UserError(f"record = {record!r} is not allowed: a mapping of {', '.join(RECORDS)} to true or false.")
    for name, value in record.items():
        if name not in RECORDS:
            raise unknown_name("key of record", str(name), RECORDS)
        if not isinstance(value, bool):
            raise UserError(f"record.{name} = {value!r} is not allowed: true or false.")
    _check_goals(config.get("goals", {}))


def _check_goals(goals: object) -> None:
    if not isinstance(goals, Mapping):
        raise UserError(f"goals = {goals!r} is not allowed: a mapping of {', '.join(GOALS)} to milliseconds or null.")
    for name, value in goals.items():
        if name not in GOALS:
            raise unknown_name("key of goals", str(name), GOALS)
        if value is not None and not (_is_number(value) and value > 0):
            raise UserError(f"goals.{name} = {value!r} is not allowed: milliseconds above 0, or null (no goal).")


def find_class(target: str) -> Callable[..., Any]:
    """The class or function that `package.module.Name` names; `__main__.Name` finds one from a notebook cell.

    Raises:
        UserError: there is no such module or name; the message lists the module's classes.
    """
    module_name, _, name = target.rpartition(".")
    if not module_name:
        raise UserError(f"_target_ = {target!r} is not allowed: package.module.Name, or __main__.Name for a class of a notebook.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not (module_name + ".").startswith(error.name + "."):
            raise UserError(f"_target_ = {target!r} needs the module {error.name!r}, which is not installed.") from error
        raise UserError(f"_target_ = {target!r}: there is no module {error.name!r}. Is its folder on PYTHONPATH?") from error
    found = getattr(module, name, None)
    if callable(found):
        return found
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
    raise unknown_name(f"name in _target_ ({module_name})", name, [n for n in own if not n.startswith("_")])


def build(node: Mapping[str, Any], **context: Any) -> Any:
    """The object a node with `_target_` describes; nested nodes with `_target_` are built first.

    `context`: further arguments, each given only if the constructor has a parameter of that name.

    Raises:
        UserError: unknown class, unknown or missing parameter, or whatever the constructor refuses.
    """
    if "_target_" not in node:
        raise UserError(f"A configuration node without _target_ can't be built: {dict(node)!r}.")
    target = str(node["_target_"])
    factory = find_class(target)
    args = {k: _build_nested(v) for k, v in node.items() if k != "_target_"}
    signature = inspect.signature(factory)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = [n for n, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in args:
        if not names and not takes_any:
            raise UserError(f"{target} takes no parameters, but {name!r} was given.")
        if name not in names and not takes_any:
            raise unknown_name(f"parameter of {target}", name, names)
    args |= {k: v for k, v in context.items() if k in names and k not in args}
    missing = [n for n in names if n not in args and signature.parameters[n].default is inspect.Parameter.empty]
    if missing:
        raise UserError(f"{target} needs a value for {', '.join(missing)}.")
    return factory(**args)


def _build_nested(value: Any) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return build(value)
    return value


def to_plain(config: Any) -> dict[str, Any]:
    """A DictConfig (resolved) or a mapping as plain dicts, lists and scalars; `hydra`'s own settings are left out.

    Raises:
        UserError: a value is missing (`???`) or an interpolation names a key that isn't there.
    """
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf
        from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

        try:
            config = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except MissingMandatoryValue as error:
            raise UserError(f"{error.full_key} has no default: give {error.full_key}=VALUE.") from error
        except OmegaConfBaseException as error:
            raise UserError(f"The configuration can't be resolved: {str(error).splitlines()[0]}.") from error
    if not isinstance(config, Mapping):
        raise UserError(f"A configuration is a DictConfig from kvlab.compose(...) or a dict, not {type(config).__name__}.")
    return {str(k): _plain(v) for k, v in config.items() if k != "hydra"}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def foreign_source(factory: Any) -> str | None:
    """Source text of a class or function that is not kvlab's; "" for kvlab's own, None where the source can't be had."""
    if getattr(factory, "__module__", "").split(".")[0] == "kvlab":
        return ""
    try:
        return inspect.getsource(factory)
    except (OSError, TypeError):
        return None


def describe(policy: Any) -> dict[str, Any]:
    """The configuration node of an object: its class as `_target_`, and those constructor parameters that it keeps under their names.

    Parameters that are neither plain values nor objects with parameters of their own are left out.
    """
    made_by = type(policy)
    node: dict[str, Any] = {"_target_": f"{made_by.__module__}.{made_by.__qualname__}"}
    kept = getattr(policy, "__dict__", {})
    for name in inspect.signature(made_by).parameters:
        if name not in kept:
            continue
        value = kept[name]
        if value is None or isinstance(value, (bool, int, float, str)):
            node[name] = value
        elif hasattr(value, "__dict__") and not callable(value):
            node[name] = describe(value)
    return node


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


DECIDING = (*SEAMS, "model", "workload", "seed", "block_size", "num_blocks", "kv_cache_tokens", "num_cpu_blocks", "watermark",
            "max_num_seqs", "max_num_batched_tokens", "max_model_len", "depth")  # fmt: skip
"""Keys that plans depend on, given the tokens and times of a recorded run."""


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
    source = foreign_source(factory)
    return None if source is None else (hashlib.sha256(source.encode()).hexdigest()[:16] if source else "kvlab")
