"""Every group, option and preset composes and builds; a wrong key, group, name or value is one message with the way out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import kvlab
from kvlab.assembly import policy_objects, policy_set
from kvlab.building import build
from kvlab.composition import check_overrides, compose, groups
from kvlab.config import SEAMS, check_config, to_plain
from kvlab.effects import without_effect
from kvlab.types import UserError

CONF = Path(__file__).resolve().parents[1] / "conf"
SEAM_OPTIONS = sorted(
    (path.parent.relative_to(CONF).as_posix(), path.stem)
    for seam in (*SEAMS, "preemption/mode")
    for path in (CONF / seam).glob("*.yaml")
)
PRESETS = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))

GOLDEN_KEYS = [
    "admission", "backend", "batching", "block_size", "block_sizing", "chat_date", "compression", "cost_model", "depth", "device", "dtype",
    "eviction", "goals", "gpu_memory_utilization", "kv_cache_bytes", "kv_cache_tokens", "kv_dtype", "layout", "max_model_len",
    "max_num_batched_tokens", "max_num_seqs", "memory_fraction", "model", "num_blocks", "num_cpu_blocks", "preemption", "prefix_cache",
    "record", "run", "runner", "scheduling", "seed", "tensor_parallel_size", "threads", "watermark", "workload",
]  # fmt: skip


def test_top_level_keys_are_these() -> None:
    """A renamed key breaks people's scripts: it has to be renamed here too, on purpose."""
    assert sorted(to_plain(compose())) == GOLDEN_KEYS


def test_the_groups_the_project_promises() -> None:
    found = groups()
    promised = {
        "scheduling": ["fcfs", "priority", "sjf"],
        "batching": ["chunked", "prefill_first", "static"],
        "admission": ["full_sequence", "none", "reserve_all", "watermark"],
        "preemption": ["least_computed", "lifo", "priority"],
        "preemption/mode": ["cheaper_of_both", "recompute", "swap"],
        "eviction": ["fifo", "lfu", "lru", "random"],
        "prefix_cache": ["hash", "none", "radix"],
        "block_sizing": ["fixed"],
        "layout": ["contiguous_max", "contiguous_oracle", "contiguous_pow2", "paged", "ring"],
        "compression": ["full", "streaming", "window"],
        "kv_dtype": ["auto", "bf16", "fp16", "fp32", "fp8", "int8"],
        "policy": ["fifo", "lfu", "lru", "transformers", "vllm", "vllm_v0", "walkthrough"],
        "model": ["hf", "smollm2", "tiny"],
        "runner": ["recorded", "simulated", "torch"],
    }
    assert {group: sorted(set(names) - set(found[group])) for group, names in promised.items()} == {g: [] for g in promised}


@pytest.mark.parametrize(("group", "name"), SEAM_OPTIONS)
def test_every_policy_builds_from_its_yaml(group: str, name: str) -> None:
    config = to_plain(compose(f"{group}={name}"))
    check_config(config)
    node = config["preemption"]["mode"] if group == "preemption/mode" else config[group]
    policy = build(node)
    assert type(policy).__module__ == f"kvlab.policies.{group.replace('/', '.')}.{name}"


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda p: p.relative_to(CONF).as_posix())
def test_every_yaml_shows_the_command_that_runs_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert isinstance(yaml.safe_load(text), dict)
    if path.relative_to(CONF).parts[0] == "hydra":
        return
    commands = re.findall(r"^# (?:\w+=\S+ )?python -m kvlab\.(?:experiment|replay \S+) (.+)$", text, re.MULTILINE)
    assert commands, "the header shows the command"
    group, name = path.relative_to(CONF).parent.as_posix(), path.stem
    if group != ".":
        assert re.search(rf"\+?{group}={name}\b", commands[0]), commands[0]
    words = [w for w in shlex.split(commands[0]) if not w.startswith("-")]
    check_overrides(words)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_compose_and_say_what_they_follow(preset: str) -> None:
    config = to_plain(compose(f"+policy={preset}"))
    check_config(config)
    for seam in SEAMS:
        build(config[seam])
    assert "# Follows:" in (CONF / "policy" / f"{preset}.yaml").read_text(encoding="utf-8")


def test_presets_set_what_their_systems_do() -> None:
    def short(preset: str, *keys: str) -> list[object]:
        config = compose(f"+policy={preset}")
        values = [OmegaConf.select(config, key) for key in keys]
        return [v._target_.split(".")[-2] if OmegaConf.is_dict(v) else v for v in values]

    keys = ("batching", "admission", "preemption", "preemption.mode", "eviction", "prefix_cache", "layout", "watermark")
    assert short("lru", *keys) == ["chunked", "watermark", "lifo", "recompute", "lru", "hash", "paged", 0.01]
    assert short("fifo", "eviction") == ["fifo"]
    assert short("lfu", "eviction") == ["lfu"]
    assert short("vllm", *keys) == ["chunked", "full_sequence", "lifo", "recompute", "lru", "hash", "paged", 0.0]
    assert short("vllm_v0", *keys) == ["prefill_first", "watermark", "lifo", "recompute", "lru", "none", "paged", 0.01]
    assert short("walkthrough", *keys) == ["walkthrough", "watermark", "lifo", "swap", "lru", "none", "paged", 0.01]
    assert short("transformers", *keys)[:2] == ["static", "reserve_all"]
    assert short("transformers", "prefix_cache", "layout") == ["none", "contiguous_max"]
    assert compose("+policy=vllm_v0").admission.full_sequence is True
    assert compose("+policy=walkthrough").num_cpu_blocks > 0


def test_command_line_wins_over_a_preset() -> None:
    config = compose("+policy=vllm", "eviction=fifo", "watermark=0.25")
    assert config.eviction._target_ == "kvlab.policies.eviction.fifo.Fifo"
    assert config.watermark == 0.25
    assert compose("+policy=lru", "watermark=0.25").admission.fraction == 0.25


@pytest.mark.parametrize(
    ("overrides", "near", "listed"),
    [
        (["evction=lru"], "eviction", "prefix_cache"),
        (["eviction=lrru"], "lru", "fifo, filo, gdsf"),
        (["blok_size=3"], "block_size", "num_blocks"),
        (["+blok_size=3"], "block_size", "num_blocks"),
        (["preemption/mode=swp"], "swap", "cheaper_of_both, recompute, swap"),
        (["preemption/mod=swap"], "preemption/mode", "eviction"),
        (["+policy=vlm"], "vllm", "walkthrough"),
        (["model=smolm2"], "smollm2", "tiny"),
        (["eviction=random", "eviction.sed=3"], "seed", "_target_, seed"),
        (["record.blokcs=true"], "blocks", "outcomes"),
    ],
)
def test_wrong_names_give_the_nearest_and_the_list(overrides: list[str], near: str, listed: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(*overrides)
    message = str(caught.value)
    assert f"Did you mean {near!r}?" in message
    assert listed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("block_size=0", "a positive integer"),
        ("block_size=-16", "a positive integer"),
        ("block_size=1.5", "a positive integer"),
        ("block_size=true", "a positive integer"),
        ("block_size=big", "a positive integer"),
        ("block_size=null", "a positive integer"),
        ("watermark=1", "[0, 1)"),
        ("watermark=-0.1", "[0, 1)"),
        ("watermark=nan", "[0, 1)"),
        ("watermark=a", "[0, 1)"),
        ("num_blocks=0", "a positive integer"),
        ("num_blocks=-1", "a positive integer"),
        ("num_cpu_blocks=-1", "0 (no swap)"),
        ("max_num_seqs=0", "a positive integer"),
        ("max_num_batched_tokens=0", "a positive integer"),
        ("max_model_len=0", "a positive integer"),
        ("memory_fraction=0", "(0, 1]"),
        ("dtype=float31", "float32"),
        ("seed=-1", "0 or a positive integer"),
        ("threads=0", "a positive integer"),
        ("record.blocks=3", "true or false"),
        ("record=all", "record"),
    ],
)
def test_values_are_checked_before_anything_loads(override: str, allowed: str) -> None:
    with pytest.raises(UserError) as caught:
        check_config(to_plain(compose(override)))
    assert override.split("=")[0].split(".")[0] in str(caught.value)
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "say"),
    [
        ("policy=lru", "+policy=NAME"),
        ("+eviction=lru", "without '+'"),
        ("preemption.mode=swap", "preemption/mode=NAME"),
        ("block_size", "KEY=VALUE"),
        ("block_size=8,16", "-m"),
        ("run=[1", "can't be read"),
        ("eviction=null", "Valid: arc, belady, clock"),
        ("~eviction", "eviction"),
    ],
)
def test_wrong_forms_say_the_right_one(override: str, say: str) -> None:
    with pytest.raises(UserError, match=re.escape(say)):
        check_config(to_plain(compose(override)))


def test_a_name_like_a_class_is_taken_for_ones_own_and_what_is_said_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for override, key in (("eviction=Mine", "eviction"), ("preemption/mode=Mine", "preemption.mode"), ("scheduling=MyOwn", "scheduling")):
        name = override.partition("=")[2]
        with pytest.raises(UserError, match=rf"'{name}'\. A class of your own is given by {key}\._target_=MODULE\.{name} on the command"):
            kvlab.compose(override)
    with pytest.raises(UserError, match=r"eviction policy 'Mine'\. A class of your own is given by eviction\._target_=MODULE\.Mine.*"
                                        r"as an object in Python\. Valid: arc,"):  # fmt: skip
        policy_objects({"eviction": "Mine"})
    for override, near in (("eviction=Lru", "lru"), ("eviction=S3Fifo", "s3fifo")):
        with pytest.raises(UserError, match=f"Did you mean '{near}'[?] A class of your own"):
            kvlab.compose(override)
    for override in ("eviction=lrru", "model=Mine", "workload=Mine"):  # an ordinary slip; groups that are no seams
        with pytest.raises(UserError) as caught:
            kvlab.compose(override)
        assert "class of your own" not in str(caught.value)
    (tmp_path / "my_module.py").write_text("from kvlab.policies.eviction.lru import Lru\n\nclass Mine(Lru):\n    pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = to_plain(kvlab.compose("eviction._target_=my_module.Mine"))
    assert type(policy_set(config, {}).eviction).__name__ == "Mine"


OWN = """
from kvlab.policies.base import AdmissionPolicy

class Headcount(AdmissionPolicy):
    def __init__(self, most=4):
        self.most = most

    def admits(self, entry, pool, now):
        return "" if len(entry.running) < self.most else "headcount"

class Share(Headcount):
    def __init__(self, fraction=0.5):
        super().__init__()
        self.fraction = fraction

class Anything(Headcount):
    def __init__(self, **rest):
        super().__init__()
        self.rest = rest
"""


def test_a_class_of_ones_own_takes_a_place_without_what_the_house_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, watermark, leaves fraction and full_sequence in the node; what was set for the class stays."""
    (tmp_path / "own_admission.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(*words: str) -> Any:
        return policy_set(to_plain(kvlab.compose(*words)), {}).admission

    assert vars(made("admission._target_=own_admission.Headcount")) == {"most": 4}
    assert vars(made("admission._target_=own_admission.Headcount", "+admission.most=2", "watermark=0.3")) == {"most": 2}
    assert vars(made("admission=none", "admission._target_=own_admission.Headcount")) == {"most": 4}
    assert vars(made("admission._target_=own_admission.Share", "watermark=0.3")) == {"most": 4, "fraction": 0.3}
    assert made("admission._target_=own_admission.Anything").rest == {"fraction": 0.01, "full_sequence": False}
    with pytest.raises(UserError, match=r"Unknown parameter of own_admission\.Headcount 'fraction'"):
        made("admission._target_=own_admission.Headcount", "admission.fraction=0.3")
    with pytest.raises(UserError, match="there is no module 'own_nothing'"):
        made("admission._target_=own_nothing.Headcount")
    plain = to_plain(kvlab.compose("admission._target_=own_admission.Headcount", "watermark=0.3"))
    assert without_effect(plain, policy_set(plain, {}), {}) == (
        "watermark = 0.3 has no effect: admission Headcount does not take it (adaptive, watermark would).",)  # fmt: skip


def test_sweeps_are_checked_value_by_value() -> None:
    check_overrides(["+policy=lru,fifo", "block_size=8,16,32", "watermark=0,0.01,0.1"], multirun=True)
    with pytest.raises(UserError, match="lrru"):
        check_overrides(["eviction=lru,lrru"], multirun=True)
    with pytest.raises(UserError, match="block_size = 0"):
        check_overrides(["block_size=8,0"], multirun=True)


def test_compose_leaves_hydra_as_it_found_it() -> None:
    from hydra import initialize_config_module

    assert compose("seed=1").seed == 1
    assert not GlobalHydra.instance().is_initialized()
    with initialize_config_module("kvlab.conf", version_base=None):
        before = GlobalHydra.instance().hydra
        assert kvlab.compose("seed=2").seed == 2
        with pytest.raises(UserError):
            compose("sed=2")
        assert GlobalHydra.instance().hydra is before
    assert not GlobalHydra.instance().is_initialized()


def test_every_group_folder_is_a_package() -> None:
    folders = [CONF, *(p for p in CONF.rglob("*") if p.is_dir() and p.name != "__pycache__")]
    assert [str(p) for p in folders if not (p / "__init__.py").exists()] == []
