"""The Jupyter workbench: `block_map`, `timeline`, `prefix_tree` and `live` show a run, `export_html` takes a notebook along;
`sweep_explorer` turns a run's settings by hand, `policy_lab` is for writing a policy and racing it.

Needs ipywidgets, anywidget and plotly. Names are imported when they are first used.
"""

from importlib import import_module
from typing import Any

# name -> module that defines it. Modules are not called like the functions they hold: importing one would hide the function.
_LAZY = {
    "block_map": "kvlab.notebook.block_grid",
    "timeline": "kvlab.notebook.request_bars",
    "prefix_tree": "kvlab.notebook.content_tree",
    "live": "kvlab.notebook.live_view",
    "export_html": "kvlab.notebook.export",
    "policy_lab": "kvlab.notebook.lab",
    "sweep_explorer": "kvlab.notebook.explorer",
}

__all__ = ["block_map", "export_html", "live", "policy_lab", "prefix_tree", "sweep_explorer", "timeline"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'kvlab.notebook' has no attribute {name!r}; it has {', '.join(sorted(_LAZY))}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
