"""A run's configuration as plain data: which keys and values it may have, checked before anything is loaded or written.

Nothing here needs Hydra: `kvlab.composition` makes configurations from the groups under conf/, `kvlab.building` makes objects of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvlab.types import UserError, unknown_name
from kvlab.types.chat import CHAT_DATE, chat_date

SEAMS = (
    "scheduling", "batching", "admission", "preemption", "eviction", "prefix_cache", "block_sizing", "layout", "compression",
    "kv_dtype",
)  # fmt: skip
"""The groups that choose a policy, in the order of `PolicySet`."""

PARTS = ("model", "runner", "cost_model", "workload")
"""The groups that choose anything else."""

DTYPES = ("auto", "float64", "float32", "float16", "bfloat16")

BACKENDS = ("auto", "torch", "triton")

RECORDS = ("steps", "requests", "blocks", "outcomes", "plans")

GOALS = ("ttft_ms", "tpot_ms", "e2el_ms")
"""Goals of a request for goodput (milliseconds); a configuration may leave them out."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_date(value: object) -> bool:
    try:
        chat_date(value)
    except UserError:
        return False
    return True


def _is_device(name: str) -> bool:
    """Whether torch knows a device of that name; whether there is one is the runner's to say."""
    if name == "auto":
        return True
    import torch  # here, as reading configurations and drawing need none of it

    try:
        return bool(torch.device(name))
    except RuntimeError:
        return False


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
    "device": (lambda v: isinstance(v, str) and _is_device(v), "auto, cpu, cuda, or cuda:0 and so on"),
    "backend": (lambda v: v in BACKENDS, f"one of {', '.join(BACKENDS)}"),
    "threads": _POSITIVE_OR_NULL,
    "depth": (lambda v: _is_int(v) and v in (0, 1), "0 (a plan waits for the last outcome) or 1 (it is made while the last one runs)"),
    "seed": (lambda v: _is_int(v) and v >= 0, "0 or a positive integer"),
    "chat_date": (_is_date, "a date as YYYY-MM-DD (today, for chat templates that write it)"),
    "run": (lambda v: v is None or (isinstance(v, str) and v != ""), "the folder of a recorded run, or null"),
}
"""Top-level values: what is allowed, as a test and in words."""

NAMES: dict[str, Iterable[str]] = {"dtype": DTYPES, "backend": BACKENDS, "device": ("auto", "cpu", "cuda")}
"""Values that are one of a few names."""

SINCE: dict[str, Any] = {"depth": 0, "backend": "auto", "kv_cache_bytes": None, "gpu_memory_utilization": 0.9, "tensor_parallel_size": 1,
                         "chat_date": CHAT_DATE}  # fmt: skip
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
