"""Objects from nodes of a configuration that name a class (`_target_`), and nodes from objects."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kvlab.types import UserError, unknown_name


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
