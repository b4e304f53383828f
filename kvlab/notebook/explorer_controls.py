"""What `sweep_explorer` can turn: the workloads it offers, and its sliders and menus, as overrides of the command line.

Everything a control says is an override, so that a run in the explorer, its command line and its Python call are the same run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ipywidgets as w
from omegaconf import DictConfig, OmegaConf
from traitlets import TraitError

from kvlab.composition import compose, groups
from kvlab.config import VALUES, check_value, to_plain
from kvlab.types import UserError, unknown_name

SIMULATED = ("runner=simulated", "model=dummy_llama3_8b", "cost_model=h100", "max_model_len=8192")
"""A Llama-3-8B on one H100 as a roofline: nothing is loaded, and steps take what they would take there, roughly."""

REAL = ("runner=torch", "model=smollm2")

_TREE = "workload.prefix={depth: 1, branching: 4, tokens_per_node: 192}"
SIMULATED_WORKLOADS: dict[str, tuple[str, ...]] = {
    "conversations": ("workload=multi_turn", "workload.num_sessions=20", "workload.turns=3", "workload.think_s=0.5",
                      "workload.arrivals.rate=24", "workload.prompt_len.mean=160", "workload.turn_len=48", "workload.output_len=64",
                      _TREE),
    "shared prompts": ("workload=shared_prefix", "workload.num_requests=96", "workload.arrivals.rate=60", "workload.output_len.mean=96",
                       "workload.output_len.max=384"),
    "independent": ("workload=synthetic", "workload.num_requests=96", "workload.arrivals.rate=60", "workload.prompt_len.mean=192",
                    "workload.output_len.mean=96", "workload.output_len.max=384"),
    "bursts": ("workload=synthetic", "workload.num_requests=96", "workload.arrivals.kind=gamma", "workload.arrivals.cv=5",
               "workload.arrivals.rate=60", "workload.prompt_len.mean=192", "workload.output_len.mean=96",
               "workload.output_len.max=384"),
    "long prompts": ("workload=synthetic", "workload.num_requests=48", "workload.arrivals.rate=12", "workload.prompt_len.mean=900",
                     "workload.prompt_len.max=4000", "workload.output_len.mean=64"),
}  # fmt: skip
REAL_WORKLOADS: dict[str, tuple[str, ...]] = {
    "chat prompts": ("workload=chat", "workload.limit=16", "workload.sampling.max_tokens=24"),
    "conversations": ("workload=multi_turn", "workload.num_sessions=6", "workload.turns=2", "workload.think_s=0.2",
                      "workload.arrivals.rate=8", "workload.prompt_len.mean=48", "workload.turn_len=16", "workload.output_len=16"),
}  # fmt: skip

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WATERMARKS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)

# Policies that need to know the future are for replay.
NOT_OFFERED = {"eviction": ("belady",), "scheduling": (), "preemption": ()}


class Setting(NamedTuple):
    """A point in the explorer: a label for a legend, and its overrides."""

    label: str
    overrides: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command line that does the same run."""
        return "python -m kvlab.experiment " + " ".join(shlex.quote(word) for word in self.overrides)

    @property
    def python(self) -> str:
        """The Python that does the same run."""
        lines = "".join(f"    {word!r},\n" for word in self.overrides)
        return f"import kvlab\n\nrun = kvlab.run(kvlab.compose(\n{lines}))\nrun"

    def config(self) -> dict[str, Any]:
        """The plain configuration. UserError: a wrong override."""
        return fast_config(self.overrides)


_BASES: dict[tuple[str, ...], DictConfig] = {}


def fast_config(overrides: Sequence[str]) -> dict[str, Any]:
    """`to_plain(compose(*overrides))` with the files read once: plain numbers at the top are set on a kept copy.

    A slider changes numbers only, and reading the groups' files takes longer than the run.
    """
    options = groups_once()
    numbers = [word for word in overrides if word.partition("=")[0] in ("block_size", "num_blocks", "watermark")]
    rest = tuple(word for word in overrides if word not in numbers)
    if rest not in _BASES:
        if len(_BASES) > 64:
            _BASES.clear()
        _BASES[rest] = compose(*rest)
    assert not any(word.partition("=")[0] in options for word in numbers)
    config = _BASES[rest].copy()
    for word in numbers:
        key, _, text = word.partition("=")
        OmegaConf.update(config, key, float(text) if key == "watermark" else int(text))
    return to_plain(config)


_GROUPS: dict[str, list[str]] = {}


def groups_once() -> dict[str, list[str]]:
    """`kvlab.composition.groups()`, read once a process."""
    if not _GROUPS:
        _GROUPS.update(groups())
    return _GROUPS


class Controls:
    """The sliders and menus, and what they say.

    Args:
        overrides: what all runs share, as on the command line; they stand before what the controls say.
        workloads, real_workloads: menu entry -> overrides.

    Raises:
        UserError: an override that a control sets, or an unknown key or name in any of them.
    """

    def __init__(self, overrides: Sequence[str], workloads: Mapping[str, Sequence[str]], real_workloads: Mapping[str, Sequence[str]],
                 start: Mapping[str, Any]) -> None:  # fmt: skip
        self._shared = tuple(overrides)
        self._workloads = {"simulated": dict(workloads), "real": dict(real_workloads)}
        options = groups_once()
        self.runner = _menu(["simulated", "real"])
        self.workload = _menu(list(workloads))
        self.block_size = w.SelectionSlider(options=BLOCK_SIZES, value=16, continuous_update=True)
        self.num_blocks = w.IntSlider(value=192, min=8, max=1024, step=8, continuous_update=True)
        self.equal_memory = w.Checkbox(value=True, indent=False, description="keep tokens equal", tooltip="a change of block_size "
                                       "changes num_blocks too, so that the pool holds as many tokens as before")  # fmt: skip
        self.watermark = w.SelectionSlider(options=[(f"{100 * x:g} %", x) for x in WATERMARKS], value=0.01, continuous_update=True)
        self.eviction = _menu(_offered("eviction", options), "lru")
        self.scheduling = _menu(_offered("scheduling", options), "fcfs")
        self.preemption = _menu(_offered("preemption", options), "lifo")
        self.mode = _menu(options["preemption/mode"], "recompute")
        self._check_shared()
        for name, value in {**self._of_shared(), **start}.items():
            self._start(name, value)
        self._tokens = self.num_blocks.value * self.block_size.value
        self.block_size.observe(self._rescale, "value")
        self.num_blocks.observe(self._remember, "value")
        self.runner.observe(self._swap_workloads, "value")
        self._rescaling = False

    @property
    def all(self) -> dict[str, w.ValueWidget]:
        """Every control whose value is part of the setting, by name."""
        names = ("runner", "workload", "block_size", "num_blocks", "watermark", "eviction", "scheduling", "preemption", "mode")
        return {name: getattr(self, name) for name in names}

    @property
    def is_real(self) -> bool:
        """A real model is to decode."""
        return bool(self.runner.value == "real")

    def setting(self) -> Setting:
        """What the controls say now."""
        runner = str(self.runner.value)
        chosen = {"block_size": self.block_size.value, "num_blocks": self.num_blocks.value, "watermark": self.watermark.value,
                  "eviction": self.eviction.value, "scheduling": self.scheduling.value, "preemption": self.preemption.value,
                  "preemption/mode": self.mode.value}  # fmt: skip
        if self.mode.value != "recompute":
            chosen["num_cpu_blocks"] = self.num_blocks.value
        fixed = self._without_shared(REAL if self.is_real else SIMULATED)
        words = tuple(f"{key}={value}" for key, value in chosen.items())
        label = f"B={chosen['block_size']} N={chosen['num_blocks']} wm={100 * self.watermark.value:g}%"
        names = [self.eviction.value, self.scheduling.value, self.preemption.value]
        told = " ".join(name for name, usual in zip(names, ("lru", "fcfs", "lifo"), strict=True) if name != usual)
        label += f" {told}" if told else ""
        label += "" if self.mode.value == "recompute" else f" {self.mode.value}"
        workload = tuple(self._workloads[runner][self.workload.value])
        return Setting(label + (" (real)" if self.is_real else ""), (*fixed, *workload, *self._shared, *words))

    def _start(self, name: str, value: Any) -> None:
        """Set a control before anything is shown; values beyond its usual range widen it. UserError: not allowed."""
        controls = self.all
        if name not in controls:
            raise unknown_name("control of sweep_explorer", name, controls)
        if name in VALUES:
            check_value(name, value)
        control = controls[name]
        if name == "block_size" and value not in BLOCK_SIZES:
            control.options = sorted({*BLOCK_SIZES, value})
        elif name == "watermark" and value not in WATERMARKS:
            control.options = [(f"{100 * x:g} %", x) for x in sorted({*WATERMARKS, float(value)})]
        elif name == "num_blocks":
            if value is None:
                raise UserError("sweep_explorer(num_blocks=None) is not allowed: a positive integer.")
            control.min, control.max, control.step = min(control.min, value), max(control.max, value), 1
        elif name in NOT_OFFERED and value in groups_once()[name] and value not in control.options:
            control.options = [*control.options, value]
        try:
            control.value = value
        except TraitError as error:
            raise unknown_name(name, str(value), [str(option) for option in control.options]) from error

    def _check_shared(self) -> None:
        """Overrides of the caller, found wrong before anything is shown."""
        for word in self._shared:
            key = word.partition("=")[0].lstrip("+")
            if key in {*self.all, "preemption/mode"} and key != "workload":
                name = key.rpartition("/")[2]
                raise UserError(f"{word!r} is what a control of sweep_explorer sets: sweep_explorer({name}=...) starts it there.")
        for kind, base, known in (("simulated", SIMULATED, SIMULATED_WORKLOADS), ("real", REAL, REAL_WORKLOADS)):
            for name, words in self._workloads[kind].items():
                if not self._shared and known.get(name) == tuple(words):
                    continue  # ours: the tests know that they compose, and composing all of them takes a second
                compose(*self._without_shared(base), *words, *self._shared)

    def _of_shared(self) -> dict[str, Any]:
        """What a preset among the shared overrides says of the controls: they start there."""
        if not self._shared:
            return {}
        config = to_plain(compose(*self._without_shared(SIMULATED), *self._shared))
        found = {name: _file_name(config[name]) for name in ("eviction", "scheduling", "preemption")}
        found["mode"] = _file_name(config["preemption"]["mode"])
        numbers = {name: config[name] for name in ("watermark", "block_size")}
        return {**{name: value for name, value in found.items() if value}, **numbers}

    def _without_shared(self, base: Sequence[str]) -> tuple[str, ...]:
        """`base` less the keys that the caller gives: the command line takes a group's choice once."""
        keys = {word.partition("=")[0] for word in self._shared}
        return tuple(word for word in base if word.partition("=")[0] not in keys)

    def _rescale(self, change: Mapping[str, Any]) -> None:
        """The pool keeps its tokens: num_blocks follows block_size."""
        if not self.equal_memory.value:
            self._tokens = self.num_blocks.value * self.block_size.value
            return
        wanted = max(1, self._tokens // int(change["new"]))
        self._rescaling = True
        try:
            self.num_blocks.step = 1 if wanted < 256 else 8
            self.num_blocks.min, self.num_blocks.max = 1, max(64, 3 * wanted)
            self.num_blocks.value = wanted
        finally:
            self._rescaling = False

    def _remember(self, change: Mapping[str, Any]) -> None:
        if not self._rescaling:
            self._tokens = int(change["new"]) * self.block_size.value

    def _swap_workloads(self, change: Mapping[str, Any]) -> None:
        names = list(self._workloads[change["new"]])
        kept = self.workload.value if self.workload.value in names else names[0]
        self.workload.options = names
        self.workload.value = kept


def _menu(options: Sequence[str], value: str | None = None) -> w.Dropdown:
    return w.Dropdown(options=options, value=value if value is not None else options[0])


def _file_name(node: Mapping[str, Any]) -> str:
    """The name under which a policy of kvlab's is chosen; "" for another's."""
    parts = str(node.get("_target_", "")).split(".")
    return parts[-2] if parts[:2] == ["kvlab", "policies"] else ""


def _offered(group: str, options: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for name in options[group] if name not in NOT_OFFERED[group]]
