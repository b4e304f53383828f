"""Nested configurations and figures as flat rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; lists as JSON text. A node with `_target_` is also its class's short name."""
    out: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            if "_target_" in item:
                out[name] = _short(str(item["_target_"]))
            out.update(flatten({k: v for k, v in item.items() if k != "_target_"}, f"{name}."))
        else:
            out[name] = json.dumps(item, default=str) if isinstance(item, (list, tuple)) else item
    return out


def _short(target: str) -> str:
    """A class's name; a policy of kvlab's goes by its file's name, which is also its yaml's."""
    parts = target.split(".")
    return parts[-2] if target.startswith("kvlab.policies.") else parts[-1]
