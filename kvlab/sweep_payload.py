"""A point as bytes that any process can run: classes of notebooks and scripts travel by value, with cloudpickle."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlab.building import find_class
from kvlab.sweep_attempt import Attempt, attempt
from kvlab.sweep_points import Point
from kvlab.types import UserError


def pack(root: Path, point: Point) -> bytes:
    """A point for `run_packed`. UserError: an object that can't be sent (an open file, a lock, a tensor on a device ...)."""
    try:
        import cloudpickle
    except ImportError as error:
        raise UserError("Running points in other processes needs cloudpickle: pip install cloudpickle.") from error
    classes = {name: find_class(f"__main__.{name}") for name in _of_main(point.config)}
    try:
        inner = bytes(cloudpickle.dumps((str(root.absolute()), replace(point, facts={}), classes)))
        return pickle.dumps(([path or os.getcwd() for path in sys.path], inner))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(f"The policies of point {point.number} ({point.label}) can't be sent to another process: {error}. "
                        "Give a class instead of an object, or run without jobs and launcher.") from error  # fmt: skip


def run_packed(payload: bytes) -> Attempt:
    """Run a packed point here. Modules are looked for where the sender would, too; what only its `__main__` has is put into this one's."""
    paths, inner = pickle.loads(payload)
    sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
    root, point, classes = pickle.loads(inner)
    main = sys.modules["__main__"]
    for name, found in classes.items():
        if not hasattr(main, name):
            setattr(main, name, found)
    return attempt(Path(root), point)


def _of_main(node: Any) -> set[str]:
    """Names that the configuration looks up in `__main__`."""
    if isinstance(node, Mapping):
        own = str(node.get("_target_", ""))
        names = {own.removeprefix("__main__.")} if own.startswith("__main__.") else set()
        return names.union(*(_of_main(value) for value in node.values())) if node else names
    if isinstance(node, list):
        return set().union(*(_of_main(value) for value in node)) if node else set()
    return set()
