"""Configurations from the groups under conf/: `compose(*overrides)`, and one clear message for a wrong key, group or name.

Works in scripts, in notebooks, repeatedly, and inside a running `@hydra.main`: Hydra's global state is put back afterwards.
"""

from __future__ import annotations

import difflib
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvlab.config import SEAMS, VALUES, check_value
from kvlab.types import UserError, unknown_name

CONFIG_MODULE, CONFIG_NAME = "kvlab.conf", "config"


@contextmanager
def _hydra(config_dir: str | Path | None = None) -> Iterator[ConfigLoader]:
    """Hydra initialised on kvlab's configuration; whatever was initialised before is put back. One thread at a time: Hydra's state is the
    process's, and widgets compose in a thread of their own while a cell may compose too."""
    with _ONE_AT_A_TIME:
        backup = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            if config_dir is None:
                with initialize_config_module(CONFIG_MODULE, job_name="run", version_base=None):
                    _own_launchers()
                    yield GlobalHydra.instance().config_loader()
            else:
                with initialize_config_dir(str(Path(config_dir).resolve()), job_name="run", version_base=None):
                    yield GlobalHydra.instance().config_loader()
        finally:
            GlobalHydra.instance().clear()
            GlobalHydra.instance().hydra = backup


_ONE_AT_A_TIME = threading.RLock()


def _own_launchers() -> None:
    """Where Hydra's launcher plugins are installed too, `hydra/launcher=joblib` still means conf/hydra/launcher/joblib.yaml."""
    plugins = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for name in ("joblib", "ray", "submitit_slurm", "submitit_local"):
        plugins.pop(f"{name}.yaml", None)


def _refuse_sweeps(parsed: Sequence[Override]) -> None:
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line!r} names several values: run them all with -m (or kvlab.sweep in Python); a list is [a,b]."
            )


def compose(*overrides: str) -> DictConfig:
    """The configuration that `python -m kvlab.experiment OVERRIDES` would run, e.g. `compose("+policy=lru", "block_size=8")`.

    Raises:
        UserError: wrong syntax, an unknown key, group or name (with the nearest match and the valid ones), or a wrong value.
    """
    with _hydra() as loader:
        return _compose(loader, overrides)


def check_overrides(overrides: Sequence[str], multirun: bool = False) -> None:
    """Check command-line overrides before anything runs; sweeps (`block_size=8,16`) are allowed with `multirun`.

    Raises:
        UserError: as `compose`.
    """
    with _hydra() as loader:
        parsed = _check(loader, overrides)
    if not multirun:
        _refuse_sweeps(parsed)


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them. UserError: one that can't be read."""
    with _hydra() as loader:
        return _parse(loader, overrides)


def compose_hydra(overrides: Sequence[str]) -> DictConfig:
    """Hydra's own settings (`hydra.sweep.dir` ...) under some overrides of `hydra`. UserError: Hydra refuses them."""
    with _hydra():
        try:
            config: DictConfig = hydra_compose(CONFIG_NAME, overrides=list(overrides), return_hydra_config=True).hydra
            return config
        except (HydraException, OmegaConfBaseException) as error:
            raise as_user_error(error) from error


def groups() -> dict[str, list[str]]:
    """Every group of the configuration and its options: `groups()["eviction"]`."""
    with _hydra() as loader:
        return _groups(loader, [])


def _compose(loader: ConfigLoader, overrides: Sequence[str]) -> DictConfig:
    _refuse_sweeps(_check(loader, overrides))
    try:
        return hydra_compose(CONFIG_NAME, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise as_user_error(error) from error


def as_user_error(error: Exception) -> UserError:
    """An error of Hydra's as one message, without its hints on debugging."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    noise = ("Set the environment variable", "See https", "full_key:", "object_type=", "reference_type=")
    kept = [line for line in lines if not line.startswith(noise)]
    return UserError(" ".join(kept))


# ------------------------------------------------------------- checking overrides


def _check(loader: ConfigLoader, overrides: Sequence[str]) -> list[Override]:
    parsed = _parse(loader, overrides)
    options = _options(loader, parsed)
    for override in parsed:
        if override.key_or_group in options:
            _check_choice(override, options)
    keys = [o for o in parsed if o.key_or_group not in options and not o.key_or_group.startswith("hydra")]
    if not keys:
        return parsed
    fixed = [o for o in parsed if not o.is_sweep_override()]
    chosen = [o.input_line or "" for o in fixed if o.key_or_group in options or o.key_or_group.startswith("hydra")]
    config = _base(tuple(chosen))
    for override in keys:
        _check_key(override, config, options)
    return parsed


def _base(chosen: tuple[str, ...]) -> DictConfig:
    """The configuration of these groups, to look keys up in; the points of a sweep share one."""
    if chosen not in _BASES:
        if len(_BASES) >= 64:
            _BASES.clear()
        try:
            _BASES[chosen] = hydra_compose(CONFIG_NAME, overrides=list(chosen))
        except (HydraException, OmegaConfBaseException) as error:
            raise as_user_error(error) from error
    return _BASES[chosen]


_BASES: dict[tuple[str, ...], DictConfig] = {}


def _parse(loader: ConfigLoader, overrides: Sequence[str]) -> list[Override]:
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"{text!r} is not an override: write KEY=VALUE, e.g. block_size=8, eviction=lru or +policy=lru.")
    parser = OverridesParser.create(config_loader=loader)
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException as error:
            raise UserError(_advice(parser, text, str(error).splitlines()[0])) from error
    return parsed


def _advice(parser: OverridesParser, text: str, reason: str) -> str:
    """What is wrong with an override that Hydra can't read, and the same in quotes where it can be read so."""
    key, _, value = text.partition("=")
    inside = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    for quoted in (_quoted(inside), ",".join(map(_quoted, value.split(",")))):
        try:
            read = parser.parse_overrides([f"{key}={quoted}"])[0]
            OmegaConf.create({"value": _choices(read)})  # a ${ that is never closed is no text either
        except (HydraException, OmegaConfBaseException):
            continue
        return f"{text!r} can't be read: its value has characters that Hydra takes in quotes only. Write {shlex.quote(f'{key}={quoted}')}"
    advice = "Quote a value with commas, brackets or spaces: \"key='a, b'\"."
    return f"{text!r} can't be read ({reason}). {advice}"


def _quoted(value: str) -> str:
    """A value as Hydra reads it between quotes: quotes inside, and backslashes before any quote, are escaped."""
    return '"' + re.sub(r'(\\*)("|$)', lambda end: end[1] * 2 + ('\\"' if end[2] else ""), value) + '"'


def _options(loader: ConfigLoader, overrides: Sequence[Override]) -> dict[str, list[str]]:
    """Groups and options; listed once a process, since reading kvlab's folders takes longer than anything else here."""
    if any(o.key_or_group == "hydra.searchpath" for o in overrides):
        return _groups(loader, overrides)
    if not _KNOWN:
        _KNOWN.update(_groups(loader, []))
    return _KNOWN


_KNOWN: dict[str, list[str]] = {}


def _groups(loader: ConfigLoader, overrides: Sequence[Override], parent: str = "") -> dict[str, list[str]]:
    """Group -> options, Hydra's own left out; further folders (`hydra.searchpath=[...]` among the overrides) included."""
    found: dict[str, list[str]] = {}
    paths = [o.input_line or "" for o in overrides if o.key_or_group == "hydra.searchpath"]
    for name in loader.list_groups(parent):
        group = f"{parent}/{name}" if parent else name
        if group.startswith("__") or group == "hydra":
            continue
        options = loader.get_group_options(group, config_name=CONFIG_NAME if paths else None, overrides=paths)
        if options:
            found[group] = list(options)
        found |= _groups(loader, overrides, group)
    return found


def _choices(override: Override) -> list[Any]:
    """The values an override asks for: one, or those of `a,b,c`; other sweeps (glob, range) choose from what there is."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [getattr(v, "text", v) for v in value.list]
    return [] if override.is_sweep_override() else [getattr(value, "text", value)]


def _check_choice(override: Override, options: Mapping[str, list[str]]) -> None:
    """A group's override: the names must be among its options."""
    group = override.key_or_group
    if override.is_delete():
        return
    for choice in _choices(override):
        for name in choice if isinstance(choice, list) else [choice]:
            if str(name) not in options[group]:
                seam = group if group.split("/")[0] in SEAMS else ""
                raise unknown_name(group, "null" if name is None else str(name), options[group], seam)
    if group in ADDITIVE and not override.is_add() and not override.is_force_add():
        raise UserError(f"Presets are added: write +{group}=NAME (valid: {', '.join(options[group])}).")
    if group not in ADDITIVE and override.is_add():
        raise UserError(f"{group!r} already has a choice: write {group}=NAME without '+'.")


ADDITIVE = ("policy", "experiment")
"""Groups of presets: not in the defaults list, so Hydra takes them with `+` only."""


def _check_key(override: Override, config: DictConfig, options: Mapping[str, list[str]]) -> None:
    """A value's override: the key must exist, unless `+` adds a constructor's parameter to a group's node."""
    key = override.key_or_group
    first, *rest = key.split(".")
    top = [str(k) for k in config]
    if first not in top:
        raise unknown_name("key or group", key, {*top, *options})
    if "/" not in key and not override.is_delete():
        for choice in _choices(override):
            if key in VALUES:
                check_value(key, choice)
            elif not rest and OmegaConf.is_config(config[first]) and not isinstance(choice, dict):
                raise unknown_name(key, str(choice), options.get(key, list(map(str, config[first]))))
    node: Any = config[first]
    in_class = False
    for i, part in enumerate(rest):
        group = "/".join([first, *rest])
        if i + 1 == len(rest) and group in options:
            raise UserError(f"{key!r} is a group's choice: write {group}=NAME (valid: {', '.join(options[group])}).")
        path = ".".join([first, *rest[:i]])
        if isinstance(node, (bool, int, float, str)):
            raise UserError(f"Unknown key {key!r}: {path} is a value, not a group. Write {path}=VALUE.")
        if override.is_add() or override.is_force_add() or not isinstance(node, DictConfig):
            return
        in_class = in_class or "_target_" in node
        names = [str(k) for k in node]
        if part not in names:
            near = difflib.get_close_matches(part, names, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            add = f" To give the class another parameter: +{override.input_line}." if in_class else ""
            raise UserError(f"Unknown key {key!r}.{hint} Valid under {path}: {', '.join(names)}.{add}")
        node = node._get_node(part) if OmegaConf.is_missing(node, part) else node[part]
