"""What policies there are, read from the folders: a class dropped into a seam's package is found by itself."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from typing import Any, NamedTuple

from kvlab.policies import base
from kvlab.types import UserError, unknown_name

SEAMS: dict[str, type] = {
    "scheduling": base.SchedulingPolicy,
    "batching": base.BatchingPolicy,
    "admission": base.AdmissionPolicy,
    "preemption": base.PreemptionPolicy,
    "preemption/mode": base.PreemptionMode,
    "eviction": base.EvictionPolicy,
    "prefix_cache": base.PrefixCachePolicy,
    "block_sizing": base.BlockSizingPolicy,
    "layout": base.LayoutPolicy,
    "compression": base.CompressionPolicy,
    "kv_dtype": base.KVDtypePolicy,
}
"""Seam (also its Hydra group) -> contract. The seam `a/b` lies in the package kvlab.policies.a.b."""


class PolicyRow(NamedTuple):
    """One policy. `name`: its file and yaml; `parameters`: name -> default (`inspect.Parameter.empty`: must be given)."""

    seam: str
    name: str
    cls: type
    parameters: dict[str, Any]
    idea: str
    source: str
    deviations: str


def list_policies(seam: str | None = None) -> list[PolicyRow]:
    """All policies of one seam, or of all (None), in the order of SEAMS and then by name. UserError: no such seam."""
    if seam is not None and seam not in SEAMS:
        raise unknown_name("seam", seam, SEAMS)
    rows = [_row(s, module) for s in SEAMS if seam in (None, s) for module in _module_names(s)]
    return [row for row in rows if row is not None]


def by_name(seam: str, name: str, **parameters: Any) -> Any:
    """A new policy. UserError: an unknown seam, name or parameter, a missing one, or a value the policy refuses.

    For preemption, `mode` may be the name of a mode or be left out (recompute); for eviction, `inner` may be the name of a policy.
    """
    rows = {row.name: row for row in list_policies(seam)}
    if name not in rows:
        raise unknown_name(f"{seam} policy", name, rows)
    row = rows[name]
    for parameter in parameters:
        if parameter not in row.parameters:
            valid = row.parameters or ["none, it takes no parameters"]
            raise unknown_name(f"parameter of {seam} policy {name}", parameter, valid)
    if seam == "preemption" and "mode" in row.parameters:
        mode = parameters.get("mode", "recompute")
        parameters["mode"] = by_name("preemption/mode", mode) if isinstance(mode, str) else mode
    if seam == "eviction" and isinstance(parameters.get("inner"), str):
        parameters["inner"] = by_name("eviction", parameters["inner"])
    missing = [p for p, default in row.parameters.items() if default is inspect.Parameter.empty and p not in parameters]
    if missing:
        raise UserError(f"The {seam} policy {name} needs {', '.join(missing)}. Its parameters: {', '.join(row.parameters)}.")
    return row.cls(**parameters)


def made(cls: type) -> Any:
    """A policy of a class that was given in place of an object.

    Raises:
        UserError: the class is abstract, or its constructor wants arguments.
    """
    if inspect.isabstract(cls):
        lacking = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise UserError(f"{cls.__name__} lacks {lacking}: define it (kvlab.policies.base says what for).")
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise UserError(f"{cls.__name__} can't be made without arguments: {error}. Give an object, {cls.__name__}(...).") from None
    return cls()


def seam_of(cls: type) -> str:
    """The seam whose contract a class fulfils. UserError: it fulfils none."""
    for seam, contract in SEAMS.items():
        if issubclass(cls, contract):
            return seam
    contracts = ", ".join(sorted(contract.__name__ for contract in SEAMS.values()))
    raise UserError(f"{cls.__name__} is no policy. Derive it from one of the contracts in kvlab.policies.base: {contracts}.")


def _module_names(seam: str) -> list[str]:
    package = importlib.import_module("kvlab.policies." + seam.replace("/", "."))
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg]
    return sorted(name for name in names if not name.startswith("_"))


def _row(seam: str, name: str) -> PolicyRow | None:
    """The policy defined in a seam's module `name`; None for a helper module that defines none."""
    module = importlib.import_module(f"kvlab.policies.{seam.replace('/', '.')}.{name}")
    own = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__]
    found = [cls for cls in own if issubclass(cls, SEAMS[seam]) and not inspect.isabstract(cls)]
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(cls.__name__ for cls in found)
        raise UserError(f"{module.__name__} holds {len(found)} policies ({names}). One a file is allowed: move the others.")
    cls = found[0]
    signature = inspect.signature(cls)
    doc = inspect.getdoc(cls) or ""
    parameters = {p.name: p.default for p in signature.parameters.values()}
    return PolicyRow(seam, name, cls, parameters, _first_paragraph(doc), _section(doc, "Source"), _section(doc, "Deviations"))


def _first_paragraph(doc: str) -> str:
    return " ".join(doc.split("\n\n")[0].split())


def _section(doc: str, title: str) -> str:
    """The text after `title:` in a docstring, with the deeper-indented lines that follow it, on one line ("" without one)."""
    match = re.search(rf"^{title}:(.*(?:\n[ \t]+\S.*)*)", doc, re.MULTILINE)
    return " ".join(match.group(1).split()) if match else ""
