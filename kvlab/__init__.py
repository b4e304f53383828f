"""kvlab: a workbench for KV-cache policies of LLM serving.

    import kvlab
    run = kvlab.run(kvlab.compose("+policy=lru", "block_size=8"))
    runs = kvlab.sweep({"policy": ["lru", "fifo"], "block_size": [8, 16, 32]})
    kvlab.LLM().generate("The capital of France is")

Names below are imported when they are first used, so that `import kvlab` needs neither torch nor Hydra, plotly or Jupyter.
"""

import os
import sys

if sys.argv and ((sys.argv[0] == "-m" and any(word.removeprefix("-m").split(".")[0] == "kvlab" for word in sys.orig_argv))
                 or os.path.basename(sys.argv[0]) in ("kvlab", "kvlab.exe")):  # fmt: skip
    # A command, and no program that uses kvlab: Ctrl-C is heard from here on, before anything that takes time is imported.
    try:
        from kvlab.doors import enter

        enter()
    except KeyboardInterrupt:
        os.write(2, b"kvlab: interrupted.\n")
        os._exit(130)

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# OpenMP reads these when torch is first imported. Threads that spin at barriers until they are needed again make decoding several times
# slower as soon as anything else wants a core (another run of a sweep, a browser); threads that sleep at once lose a quarter of an idle
# machine to waking up. So they spin for some 40 microseconds (the numbers that most barriers of a decode step need) and sleep then.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Packages that may be used without importing them first: kvlab.replay(...), a module that can be called, kvlab.replay.sweep(...).
_SUBPACKAGES = ("compare", "analysis", "policies", "replay", "search", "testing", "trace")

# name -> module that defines it. Modules are not called like the functions they hold: importing one would hide the function.
_LAZY = {
    "LLM": "kvlab.llm",
    "calibrate": "kvlab.calibration",
    "GenerationOutput": "kvlab.generation",
    "Run": "kvlab.results",
    "Runs": "kvlab.results",
    "load_runs": "kvlab.results",
    "run": "kvlab.running",
    "sweep": "kvlab.sweeping",
    "compose": "kvlab.composition",
    "explain": "kvlab.explaining",
    "Request": "kvlab.types",
    "SamplingParams": "kvlab.types",
    "UserError": "kvlab.types",
}

if TYPE_CHECKING:
    from kvlab.calibration import calibrate as calibrate
    from kvlab.composition import compose as compose
    from kvlab.explaining import explain as explain
    from kvlab.generation import GenerationOutput as GenerationOutput
    from kvlab.llm import LLM as LLM
    from kvlab.results import Run as Run
    from kvlab.results import Runs as Runs
    from kvlab.results import load_runs as load_runs
    from kvlab.running import run as run
    from kvlab.sweeping import sweep as sweep
    from kvlab.types import Request as Request
    from kvlab.types import SamplingParams as SamplingParams
    from kvlab.types import UserError as UserError

__all__ = [
    "LLM", "GenerationOutput", "Request", "Run", "Runs", "SamplingParams", "UserError", "__version__", "calibrate", "compose", "explain",
    "load_runs", "run", "sweep",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _SUBPACKAGES:
        return import_module(f"kvlab.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}; it has {', '.join(sorted(_LAZY))}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBPACKAGES})
