"""Objects from `_target_`, plain configurations, and the identity of a run."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import kvlab
from kvlab.assembly import policy_set, simulated_parts, torch_parts
from kvlab.building import build, find_class
from kvlab.composition import groups
from kvlab.config import check_config, check_value, to_plain
from kvlab.effects import without_effect
from kvlab.identifying import identity
from kvlab.policies.block_sizing.fixed import Fixed
from kvlab.policies.eviction.lru import Lru
from kvlab.policies.eviction.random import Random
from kvlab.policies.registry import PolicyRow, by_name, list_policies
from kvlab.types import UserError

LRU = {"_target_": "kvlab.policies.eviction.lru.Lru"}


def test_build_nests_and_passes_parameters() -> None:
    policy = build({
        "_target_": "kvlab.policies.preemption.lifo.Lifo", "protect_oldest": False,
        "mode": {
            "_target_": "kvlab.policies.preemption.mode.cheaper_of_both.CheaperOfBoth",
            "swap_gb_per_s": 5.0, "prefill_tokens_per_s": 7.0,
        },
    })  # fmt: skip
    assert policy.protect_oldest is False
    assert (policy.mode.swap_gb_per_s, policy.mode.prefill_tokens_per_s) == (5.0, 7.0)


def test_context_goes_to_parameters_of_that_name_only() -> None:
    policy = build({"_target_": "kvlab.policies.eviction.random.Random"}, seed=9, model="unused")
    assert policy.seed == 9
    assert build({"_target_": "kvlab.policies.eviction.random.Random", "seed": 4}, seed=9).seed == 4


@pytest.mark.parametrize(
    ("node", "say"),
    [
        ({"_target_": "kvlab.policies.eviction.random.Random", "sed": 1}, "Did you mean 'seed'"),
        ({"_target_": "kvlab.policies.eviction.lru.Lru", "seed": 1}, "takes no parameters"),
        ({"_target_": "kvlab.policies.eviction.lru.Lrru"}, "Did you mean 'Lru'"),
        ({"_target_": "kvlab.policies.eviction.lrru.Lru"}, "no module 'kvlab.policies.eviction.lrru'"),
        ({"_target_": "Mine"}, "__main__.Name"),
        ({"_target_": "kvlab.policies.preemption.lifo.Lifo"}, "needs a value for mode"),
        ({"seed": 1}, "without _target_"),
        ({"_target_": "kvlab.policies.block_sizing.fixed.Fixed", "tokens": 0}, "tokens"),
    ],
)
def test_build_errors_say_what_is_allowed(node: dict[str, object], say: str) -> None:
    with pytest.raises(UserError) as caught:
        build(node)
    assert say in str(caught.value)


def test_a_class_of_a_notebook_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    main.Mine = type("Mine", (Lru,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert find_class("__main__.Mine") is main.Mine
    assert isinstance(build({"_target_": "__main__.Mine"}), Lru)


def test_a_module_that_fails_to_import_names_what_is_missing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "my_policies.py").write_text("import no_such_package_at_all\nclass Mine: ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="needs the module 'no_such_package_at_all'"):
        find_class("my_policies.Mine")


def test_to_plain_refuses_what_is_no_configuration() -> None:
    with pytest.raises(UserError, match="DictConfig"):
        to_plain(["eviction=lru"])
    assert to_plain({"a": (1, 2), "hydra": {"job": 1}, "b": {"c": None}}) == {"a": [1, 2], "b": {"c": None}}


def test_unresolvable_interpolation_is_a_user_error() -> None:
    from omegaconf import OmegaConf

    with pytest.raises(UserError, match="nowhere"):
        to_plain(OmegaConf.create({"a": "${nowhere}"}))


def test_check_config_names_missing_and_unknown_keys() -> None:
    with pytest.raises(UserError, match="no 'block_size'"):
        check_config({})
    with pytest.raises(UserError, match="Did you mean 'block_size'"):
        check_config({"blocksize": 3})


def config(**more: object) -> dict[str, object]:
    return {"eviction": LRU, "block_size": 16, "seed": 0, **more}


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"backend = 'trition' is not allowed: one of auto, torch, triton\. Did you mean 'triton'\?"):
        check_value("backend", "trition")
    with pytest.raises(UserError, match=r"bfloat16\. Did you mean 'bfloat16'\?"):
        check_value("dtype", "bfloat")
    with pytest.raises(UserError, match=r"one of auto, torch, triton\.$"):
        check_value("backend", 7)


def test_what_a_simulated_run_does_not_heed_is_said() -> None:
    """The cost model's device knows nothing of ranks and kernels."""
    config = to_plain(kvlab.compose("runner=simulated", "tensor_parallel_size=2", "backend=torch"))
    assert simulated_parts(config, build(config["model"])).notes == (
        "tensor_parallel_size = 2 has no effect with runner=simulated: its times come from the cost model.",
        "backend = torch has no effect with runner=simulated: its times come from the cost model.",
    )
    assert simulated_parts(to_plain(kvlab.compose("runner=simulated")), build(config["model"])).notes == ()


def unheeded(*words: str, **given: object) -> tuple[str, ...]:
    config = to_plain(kvlab.compose(*words))
    return without_effect(config, policy_set(config, given), given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["watermark=0.1", "admission=none"],
         "watermark = 0.1 has no effect: admission none does not take it (adaptive, watermark would)."),
        (["watermark=0.1", "admission.fraction=0.2"], "watermark = 0.1 has no effect: admission.fraction = 0.2 is given."),
        (["prefix_cache=none", "eviction=sieve"],
         "eviction Sieve has no effect with prefix_cache NoCache: no block stays cached, so none is evicted."),
        (["num_cpu_blocks=8"], "num_cpu_blocks = 8 has no effect with preemption.mode=recompute: nothing is swapped out."),
        (["batching=static", "max_num_batched_tokens=7"],
         "max_num_batched_tokens = 7 does not limit a step with batching Static: prompts are computed whole, however many enter at once "
         "(max_num_seqs limits how many)."),
        (["+policy=walkthrough", "max_num_batched_tokens=7"],
         "max_num_batched_tokens = 7 does not limit a step with batching Walkthrough: prompts are computed whole, however many enter at "
         "once (max_num_seqs limits how many)."),
        (["num_blocks=64", "kv_cache_tokens=2048"], "kv_cache_tokens = 2048 has no effect: num_blocks = 64 says how large the pool is."),
        (["memory_fraction=0.9"], "memory_fraction = 0.9 has no effect: kv_cache_tokens = 4096 says how large the pool is."),
        (["cost_model=h100"], "cost_model has no effect with runner=torch: only runner=simulated takes its times from it."),
        (["run=runs/a"], "run = runs/a has no effect with runner=torch: runner=recorded follows a run."),
        (["runner=simulated", "device=cpu"], "device = cpu has no effect with runner=simulated: its times come from the cost model."),
        (["runner=recorded", "threads=2"], "threads = 2 has no effect with runner=recorded: it replays what was recorded."),
    ],
)  # fmt: skip
def test_a_setting_that_has_no_effect_is_told_of(words: list[str], said: str) -> None:
    assert unheeded(*words) == (said,)


def test_a_setting_that_has_an_effect_or_was_not_set_is_not_told_of() -> None:
    for words in ([], ["watermark=0.1"], ["watermark=0.1", "admission=adaptive"], ["admission=none"], ["watermark=0", "admission=none"],
                  ["prefix_cache=none"], ["num_cpu_blocks=8", "preemption/mode=swap"], ["block_size=8", "block_sizing=auto"],
                  ["kv_cache_tokens=null", "memory_fraction=0.9"], ["runner=simulated", "cost_model=h100"],
                  ["max_num_batched_tokens=64", "seed=3"]):  # fmt: skip
        assert unheeded(*words) == (), words
    presets = [f"+{group}={name}" for group in ("policy", "experiment") for name in groups()[group]]
    assert len(presets) > 20
    assert {word: said for word in presets if (said := unheeded(word))} == {}
    assert unheeded("block_size=8", block_sizing=Fixed(16)) == ("block_size = 8 has no effect: block_sizing Fixed does not take it "
                                                                "(auto, fixed would).",)  # fmt: skip
    taken = to_plain(kvlab.compose("watermark=0.1")) | {"admission": {"_target_": "mine.Mine", "share": 0.1}}
    assert without_effect(taken, policy_set(to_plain(kvlab.compose()), {}), {}) == ()  # a class of one's own takes it as it likes


def test_a_run_notes_what_has_no_effect(tmp_path: Path) -> None:
    words = ["runner=simulated", "model=dummy_llama3_8b", "workload=synthetic", "workload.num_requests=2", "num_blocks=99"]
    done = kvlab.run(kvlab.compose(*words, "watermark=0.1", "admission=none"), folder=tmp_path / "run", progress=False)
    said = "watermark = 0.1 has no effect: admission none does not take it (adaptive, watermark would)."
    assert said in done.notes
    assert said in json.loads((tmp_path / "run" / "status.json").read_text(encoding="utf-8"))["notes"]
    assert said in (tmp_path / "run" / "run.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("runner", ["torch", "simulated", "recorded"])
def test_an_unknown_device_is_refused_whatever_the_runner(runner: str) -> None:
    with pytest.raises(UserError, match=r"device = 'tpu' is not allowed: auto, cpu, cuda, or cuda:0 and so on\."):
        kvlab.compose(f"runner={runner}", "device=tpu")
    with pytest.raises(UserError, match=r"device = 'cudo' is not allowed: .* Did you mean 'cuda'\?"):
        check_config(to_plain(kvlab.compose(f"runner={runner}")) | {"device": "cudo"})
    check_config(to_plain(kvlab.compose(f"runner={runner}", "device='cuda:1'")))


def test_sizes_of_graphs_are_checked_where_there_are_none() -> None:
    config = to_plain(kvlab.compose("model=tiny", "device=cpu"))
    with pytest.raises(UserError, match=r"\[4, 2\] are not allowed: ascending"):
        torch_parts(config, build(config["model"]), [4, 2])
    assert torch_parts(config, build(config["model"]), [2, 4]).notes == ("runner.graph_sizes has no effect on cpu.",)
    assert torch_parts(config, build(config["model"])).notes == ()


def test_identity_depends_on_what_matters_and_on_nothing_else() -> None:
    base = identity(config(), "weights")
    assert base is not None
    assert len(base) == 16
    assert identity(config(), "weights") == base
    assert identity(config(threads=2, name="other"), "weights") == base
    assert identity(config(block_size=8), "weights") != base
    assert identity(config(), "other weights") != base
    assert identity({k: config()[k] for k in ("seed", "block_size", "eviction")}, "weights") == base


def test_identity_follows_the_source_of_foreign_classes(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for number, body in enumerate(("pass", "x = 1")):
        (tmp_path / f"policy_{number}.py").write_text(f"class Mine:\n    {body}\n", encoding="utf-8")
        found.append(identity(config(eviction={"_target_": f"policy_{number}.Mine"}), "weights"))
    assert found[0] is not None
    assert found[0] != found[1]
    objects = [identity(config(), "weights", {"eviction": Random(seed)}) for seed in (1, 1, 2)]
    assert objects[0] == objects[1] != objects[2]


class Scored(Random):
    """A policy with parts: an object, a function, and state that a run changes."""

    def __init__(self, weight: float, score: Callable[[int], float]) -> None:
        super().__init__(0)
        self.inner = Random(1)
        self.weights = {"depth": weight}
        self.score = score


def scored(weight: float, factor: float, **more: object) -> str | None:
    policy = Scored(weight, lambda depth: factor * depth)
    for name, value in more.items():
        setattr(policy, name, value)
    return identity(config(record={"blocks": weight == 1.5}), "weights", {"eviction": policy})


def test_equal_policy_objects_are_one_experiment_whatever_they_are_made_of() -> None:
    """Nested objects, mappings, functions with what they close over; neither addresses nor the state of an earlier run count."""
    base = scored(1.5, 2.0)
    assert base is not None
    assert scored(1.5, 2.0) == base
    assert scored(1.5, 2.0, _candidates=[3, 4]) == base  # reset() takes it back
    assert len({base, scored(2.5, 2.0), scored(1.5, 3.0), scored(1.5, 2.0, extra=1)}) == 4
    assert scored(1.5, 2.0, lock=threading.Lock()) is None


@pytest.mark.parametrize("row", list_policies(), ids=lambda row: f"{row.seam}={row.name}")
def test_every_policy_in_the_house_has_an_identity_as_an_object(row: PolicyRow) -> None:
    made = [by_name(row.seam, row.name) for _ in range(2)]
    found = {identity(config(), "weights", {row.seam: policy}) for policy in made}
    assert len(found) == 1
    assert None not in found


def test_what_is_recorded_of_a_run_is_no_part_of_its_identity() -> None:
    assert identity(config(record={"blocks": True}), "weights") == identity(config(record={"blocks": False}), "weights")


def test_a_class_without_source_has_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, type] = {"__name__": "__main__"}  # type: ignore[dict-item]
    exec("class Mine: ...", namespace)
    main = types.ModuleType("__main__")
    main.Mine = namespace["Mine"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert identity(config(eviction={"_target_": "__main__.Mine"}), "weights") is None
    assert identity(config(), "weights", {"eviction": namespace["Mine"]()}) is None


def test_goals_are_checked_and_reach_the_summary(tmp_path: Path) -> None:
    """Steps of 10 ms: a first token takes its own step and at most the one under way: 5 ms nobody meets, 21 everybody."""
    small = ("runner=simulated", "model=tiny", "cost_model=constant", "workload=synthetic", "workload.num_requests=4")
    for goal, fraction in ((5, 0.0), (21, 1.0)):
        config = kvlab.compose(*small, f"goals.ttft_ms={goal}", "workload.arrivals={kind:fixed,rate:1}")
        run = kvlab.run(config, folder=tmp_path / str(goal), progress=False)
        assert run.summary["goodput_fraction"] == fraction
    with pytest.raises(UserError, match=r"goals\.ttft_ms = -1 is not allowed"):
        kvlab.run(kvlab.compose(*small, "goals.ttft_ms=-1"), folder=tmp_path / "bad", progress=False)
