"""What the files under conf/ say, as they are written: `${watermark}` is not yet a number there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from kvlab.building import find_class
from kvlab.types import UserError

_NUMBER = re.compile(r"^\$\{(\w+)\}$")


@cache
def nodes(group: str) -> tuple[dict[str, Any], ...]:
    """The nodes of a group's files, sorted by name; none of a group that has no folder."""
    folder = files("kvlab.conf").joinpath(*group.split("."))
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml")) if folder.is_dir() else []
    return tuple(_read(*group.split("."), name) for name in found)


@cache
def main() -> dict[str, Any]:
    """conf/config.yaml."""
    return _read("config.yaml")


def default_node(group: str) -> dict[str, Any]:
    """The node of a group that is chosen where none is."""
    choice = next(choice[group] for choice in main()["defaults"] if isinstance(choice, Mapping) and group in choice)
    return _read(group, f"{choice}.yaml")


def number_of(value: object) -> str:
    """"watermark" of `${watermark}`; else nothing."""
    found = _NUMBER.match(value) if isinstance(value, str) else None
    return found[1] if found else ""


def without_leftovers(group: str, node: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A group's node with a class of one's own, less what is left in it of the house's policy in whose place it stands.

    `admission._target_=mine.Mine` leaves `fraction` there, as the yaml has it, for which `Mine` may have no parameter. A value that is
    nobody's in the house was set for `Mine`: it stays, and is refused where it has no such parameter.

    Args:
        config: the whole configuration, in which interpolated numbers are looked up.
    """
    target = str(node.get("_target_", ""))
    if not target or target.startswith("kvlab."):
        return node
    try:
        takes = inspect.signature(find_class(target)).parameters
    except UserError:  # no such class: said when it is made
        return node
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values()):
        return node
    return {
        key: value for key, value in node.items()
        if key == "_target_" or key in takes or not any(key in of and _written(of[key], config) == value for of in nodes(group))
    }  # fmt: skip


def _written(value: object, config: Mapping[str, Any]) -> object:
    """A file's value in a configuration."""
    number = number_of(value)
    return config.get(number) if number else value


def _read(*parts: str) -> dict[str, Any]:
    import yaml

    found = yaml.safe_load(files("kvlab.conf").joinpath(*parts).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}
