"""The registry finds every policy, and says what is wrong with a name, a parameter or a value."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import yaml

from kvlab.policies.eviction import Lru
from kvlab.policies.preemption import Lifo
from kvlab.policies.preemption.mode import CheaperOfBoth, Recompute, Swap
from kvlab.policies.registry import SEAMS, by_name, list_policies, seam_of
from kvlab.types import UserError

FIRST = {
    "scheduling": ["fcfs", "priority", "sjf"],
    "batching": ["chunked", "prefill_first", "static", "walkthrough"],
    "admission": ["full_sequence", "none", "reserve_all", "watermark"],
    "preemption": ["least_computed", "lifo", "priority"],
    "preemption/mode": ["cheaper_of_both", "recompute", "swap"],
    "eviction": ["fifo", "lfu", "lru", "random"],
    "prefix_cache": ["hash", "none"],
    "block_sizing": ["fixed"],
    "layout": ["contiguous_max", "contiguous_oracle", "contiguous_pow2", "paged", "ring"],
    "compression": ["full", "streaming", "window"],
    "kv_dtype": ["auto", "bf16", "fp16", "fp32", "fp8", "int8"],
}


def test_every_seam_has_its_first_policies() -> None:
    assert list(SEAMS) == list(FIRST)
    for seam, names in FIRST.items():
        found = [row.name for row in list_policies(seam)]
        assert set(names) <= set(found)
        assert found == sorted(found)


def test_every_policy_says_where_it_comes_from_and_where_it_deviates() -> None:
    for row in list_policies():
        assert row.idea.endswith("."), f"{row.seam}/{row.name}"
        assert len(row.source) > 10, f"{row.seam}/{row.name}"
        assert row.deviations.endswith("."), f"{row.seam}/{row.name}"
        documented = (inspect.getdoc(row.cls) or "").split("Parameters:")[1].split("Deviations:")[0]
        for parameter in row.parameters:
            assert f"{parameter}:" in documented, f"{row.seam}/{row.name}: parameter {parameter} is not described"


def test_every_package_exports_its_classes() -> None:
    for row in list_policies():
        package = importlib.import_module(row.cls.__module__.rsplit(".", 1)[0])
        assert row.cls.__name__ in package.__all__
        assert getattr(package, row.cls.__name__) is row.cls


def test_by_name_builds_a_policy() -> None:
    assert type(by_name("eviction", "lru")) is Lru
    assert by_name("eviction", "random", seed=5).seed == 5
    assert by_name("eviction", "random") is not by_name("eviction", "random")
    assert type(by_name("preemption", "lifo").mode) is Recompute
    assert type(by_name("preemption", "priority", mode="swap").mode) is Swap
    mode = CheaperOfBoth(swap_gb_per_s=1)
    assert by_name("preemption", "lifo", mode=mode, protect_oldest=False).mode is mode


@pytest.mark.parametrize(
    ("seam", "name", "parameters", "message"),
    [
        ("eviction", "lrru", {}, r"Unknown eviction policy 'lrru'\. Did you mean 'lru'\? Valid: arc, belady, clock"),
        ("evictions", "lru", {}, r"Unknown seam 'evictions'\. Did you mean 'eviction'\?"),
        ("eviction", "random", {"sed": 1}, r"Unknown parameter of eviction policy random 'sed'\. Did you mean 'seed'\?"),
        ("eviction", "lru", {"size": 1}, r"Valid: none, it takes no parameters"),
        ("preemption", "lifo", {"mode": "swpa"}, r"Unknown preemption/mode policy 'swpa'\. Did you mean 'swap'\?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(seam: str, name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        by_name(seam, name, **parameters)


@pytest.mark.parametrize(
    ("seam", "name", "parameters", "message"),
    [
        ("admission", "watermark", {"fraction": 1.0}, r"Watermark\.fraction = 1\.0 is not allowed: in \[0, 1\)"),
        ("admission", "watermark", {"fraction": -0.1}, r"Watermark\.fraction = -0\.1"),
        ("admission", "watermark", {"fraction": float("nan")}, r"Watermark\.fraction = nan"),
        ("admission", "watermark", {"fraction": "0.1"}, r"Watermark\.fraction = '0\.1'"),
        ("admission", "watermark", {"full_sequence": 1}, r"Watermark\.full_sequence = 1"),
        ("block_sizing", "fixed", {"tokens": 0}, r"Fixed\.tokens = 0 is not allowed: a positive integer"),
        ("block_sizing", "fixed", {"tokens": 16.0}, r"Fixed\.tokens = 16\.0"),
        ("block_sizing", "fixed", {"tokens": True}, r"Fixed\.tokens = True"),
        ("compression", "window", {"size": 0}, r"Window\.size = 0"),
        ("compression", "streaming", {"sinks": 0}, r"Streaming\.sinks = 0"),
        ("compression", "streaming", {"size": True}, r"Streaming\.size = True"),
        ("eviction", "random", {"seed": 0.5}, r"Random\.seed = 0\.5"),
        ("preemption", "lifo", {"mode": 3}, r"Lifo\.mode = 3 is not allowed"),
        ("preemption", "lifo", {"protect_oldest": "yes"}, r"Lifo\.protect_oldest = 'yes'"),
        ("preemption/mode", "cheaper_of_both", {"swap_gb_per_s": 0}, r"CheaperOfBoth\.swap_gb_per_s = 0"),
        ("preemption/mode", "cheaper_of_both", {"prefill_tokens_per_s": "fast"}, r"prefill_tokens_per_s = 'fast'"),
    ],
)
def test_a_wrong_value_is_refused(seam: str, name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        by_name(seam, name, **parameters)


NO_NUMBERS = (True, False, float("nan"), float("inf"), -float("inf"), "1", [1], {"a": 1}, 10**400)


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=lambda wrong: str(wrong)[:9])
def test_no_number_of_any_policy_may_be_anything_else(wrong: object) -> None:
    """A truth value is no number, and neither is one that float arithmetic can't hold; integers (a seed) may be as large as they like."""
    tried = 0
    for row in list_policies():
        for name, default in row.parameters.items():
            kinds = float if wrong == 10**400 else (int, float)
            if isinstance(default, bool) or not isinstance(default, kinds):
                continue
            tried += 1
            with pytest.raises(UserError, match=rf"{row.cls.__name__}\.{name} = "):
                by_name(row.seam, row.name, **{name: wrong})
    assert tried > 25


@pytest.mark.parametrize("wrong", [0, 65_537, 10**12])
def test_a_ring_has_a_number_of_slots_that_can_be_made(wrong: int) -> None:
    with pytest.raises(UserError, match=rf"Ring\.n_parallel = {wrong} is not allowed: an integer from 1 to 65536"):
        by_name("layout", "ring", n_parallel=wrong)


@pytest.mark.parametrize("cv", [1e-200, 1e200])
def test_a_predictor_refuses_a_spread_it_cannot_reckon_with(cv: float) -> None:
    for name in ("sjf_predicted", "srpt_predicted"):
        with pytest.raises(UserError, match=r"cv = 1e.200 is not allowed"):
            by_name("scheduling", name, cv=cv)


def test_a_class_knows_its_seam() -> None:
    assert seam_of(Lifo) == "preemption"
    assert seam_of(Recompute) == "preemption/mode"
    with pytest.raises(UserError, match="int is no policy"):
        seam_of(int)


def test_every_policy_has_a_yaml_of_its_name_that_sets_its_parameters() -> None:
    """conf/<seam>/<name>.yaml names the class, knows no other keys, and leaves out only a parameter that is a group of its own. An inner
    policy is set by its defaults list."""
    root = Path(__file__).resolve().parents[1] / "conf"
    for row in list_policies():
        keys = yaml.safe_load((root / row.seam / f"{row.name}.yaml").read_text(encoding="utf-8"))
        assert keys.pop("_target_") == f"{row.cls.__module__}.{row.cls.__name__}"
        chosen = [entry.popitem()[0] for entry in keys.pop("defaults", ()) if entry != "_self_"]
        keys |= {group.partition("@")[2]: None for group in chosen}
        assert set(keys) == set(row.parameters) - ({"mode"} if row.seam == "preemption" else set()), f"{row.seam}/{row.name}"
