"""Makes the first figure of a notebook seconds earlier.

plotly imports nbformat, that imports jsonschema, and where `rfc3987_syntax` is installed (it comes with JupyterLab) jsonschema imports it
at once, which builds 38 grammars: several seconds, for checks of IRIs that no notebook contains.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SLOW = "rfc3987_syntax"


def is_valid_syntax(*arguments: Any, **named: Any) -> Any:
    """`rfc3987_syntax.is_valid_syntax`, imported when it is first called."""
    return import_module(SLOW).is_valid_syntax(*arguments, **named)


def import_nbformat() -> None:
    """Import nbformat with `rfc3987_syntax` put off until an IRI is checked; nothing else changes, and it may fail as it would anyway."""
    if "jsonschema" in sys.modules or SLOW in sys.modules or find_spec("nbformat") is None:
        return
    later = ModuleType(SLOW)
    later.is_valid_syntax = is_valid_syntax  # type: ignore[attr-defined]
    sys.modules[SLOW] = later
    try:
        import_module("nbformat")
    finally:
        if sys.modules.get(SLOW) is later:
            del sys.modules[SLOW]
