"""What a figure is made of: its folder, and the `FigureSpec` that its figure.py defines."""

from __future__ import annotations

import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.figures.reach import reached
from kvlab.types import KvlabError, UserError, unknown_name

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas as pd

    from kvlab.results import Run

RESULTS, MANIFEST, README, SPEC, PDF, SVG, PNG = (
    "results.parquet", "manifest.json", "README.md", "figure.py", "figure.pdf", "figure.svg", "figure.png",
)  # fmt: skip


@dataclass(frozen=True)
class FigureSpec:
    """How a figure comes from results, and what of each run is a result.

    Attributes:
        number: "F2". title: one line, what is shown over what.
        draw: results -> figure; called in `kvlab.figures.style.style()`.
        keep: summary figures of each run that become columns. measure: further columns of a run (a mapping), or rows of their own
            (a frame; `keep` is not looked at then).
        collect: takes all runs of the sweep at once and returns the results, where a row needs more than one run.
        compute: for figures without runs: the values of a point -> columns.
        measured: columns that a clock or a noisy machine made: `run --verify` compares all others exactly.
        table: results -> the table that README.md shows between its markers.
        png: also write figure.png (for pages that show it); it is not compared.
    """

    number: str
    title: str
    draw: Callable[[pd.DataFrame], matplotlib.figure.Figure]
    keep: tuple[str, ...] = ()
    measure: Callable[[Run], Mapping[str, Any] | pd.DataFrame] | None = None
    collect: Callable[[list[Run]], pd.DataFrame] | None = None
    compute: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    measured: tuple[str, ...] = ()
    table: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    png: bool = False

    def sources(self) -> list[str]:
        """Source of what makes results of runs, with the constants and helpers it uses: a change of it makes committed results stale."""
        makers = [maker for maker in (self.measure, self.collect, self.compute) if maker is not None]
        used = dict.fromkeys(part for maker in makers for part in reached(maker))
        return [",".join(self.keep), *map(inspect.getsource, makers), *used]


@dataclass(frozen=True)
class Folder:
    """A figure's folder."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's name, which is the figure's."""
        return self.path.name

    def sweeps(self) -> list[Path]:
        """sweep.yaml, then sweep_*.yaml: further grids of the same figure."""
        found = sorted(self.path.glob("sweep*.yaml"), key=lambda p: (p.stem != "sweep", p.stem))
        if not found or found[0].stem != "sweep":
            raise UserError(f"{self.path} has no sweep.yaml: it says which runs the figure needs.")
        return found

    def spec(self) -> FigureSpec:
        """The `FIGURE` of figure.py. UserError where there is none, or the file can't be imported."""
        path = self.path / SPEC
        module_spec = importlib.util.spec_from_file_location(f"kvlab_figure_{self.name}", path)
        if not path.is_file() or module_spec is None or module_spec.loader is None:
            raise UserError(f"{self.path} has no {SPEC}: it defines FIGURE = FigureSpec(...).")
        module = importlib.util.module_from_spec(module_spec)
        try:
            module_spec.loader.exec_module(module)
        except ModuleNotFoundError as error:
            raise missing_package(error) from error
        except Exception as error:
            raise UserError(f"{path} can't be imported: {type(error).__name__}: {error}") from error
        found = getattr(module, "FIGURE", None)
        if not isinstance(found, FigureSpec):
            raise UserError(f"{path} defines no FIGURE = FigureSpec(...).")
        return found


@contextmanager
def own_code(what: str) -> Iterator[None]:
    """Around a call of a figure's own code. What it raises becomes a UserError with the last line of figure.py that was reached, so that
    one figure's slip doesn't keep the others; kvlab's errors and missing packages go through. `what`: "draw", "measure" ..."""
    try:
        yield
    except (KvlabError, ModuleNotFoundError):
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == SPEC]
        place = f"{SPEC}, line {lines[-1]}" if lines else SPEC
        told = f"the results lack {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        again = " If they were made for another figure.py, run the figure again." if isinstance(error, KeyError) else ""
        raise UserError(f"{place} ({what}): {told}.{again}") from error


def read_text(path: Path) -> str:
    """A text file. UserError where it can't be read, or is garbled."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is garbled: byte {error.start} is no UTF-8 text. Restore it (git checkout {path}).") from error
    except OSError as error:
        raise UserError(f"{path} can't be read: {error}") from error


def missing_package(error: ModuleNotFoundError) -> UserError:
    """What to install for a figure."""
    return UserError(f"Drawing needs the package {error.name!r}, which is not installed: pip install 'kvlab[figures]' (or make setup).")


def default_root() -> Path:
    """experiments/ of the checkout that kvlab was imported from, else of the current folder."""
    checkout = Path(__file__).resolve().parents[2] / "experiments"
    return checkout if checkout.is_dir() else Path.cwd() / "experiments"


def names(root: Path | None = None) -> list[str]:
    """The figures under a folder (default: experiments/), by number."""
    folder = root or default_root()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Figures live in a checkout's experiments/ (not in an installed package): "
                        "run this in a clone, or give --root FOLDER.")  # fmt: skip
    found = [p.parent for p in folder.glob(f"*/{SPEC}")]
    return sorted((p.name for p in found), key=lambda name: (_number(folder / name / SPEC), name))


def _number(path: Path) -> int:
    """The number that FIGURE has, read without importing the file; those without one come first."""
    found = re.search(r'number="F(\d+)"', path.read_text(encoding="utf-8", errors="replace"))
    return int(found.group(1)) if found else 0


def load(name: str, root: Path | None = None) -> Folder:
    """A figure by name. UserError with the nearest and the valid names."""
    known = names(root)
    if name not in known:
        raise unknown_name("figure", name, known)
    return Folder((root or default_root()) / name)
