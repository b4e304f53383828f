"""A sweep whose results are collected at an address: opened there, uploaded point by point, settled at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlab.shared import MANIFEST, SharedFolder
from kvlab.sweep_folder import SweepFolder, open_sweep
from kvlab.sweep_points import Point
from kvlab.trace.run_folder import read_json
from kvlab.trace.store import write_json
from kvlab.types import UserError

ENDED = ("finished", "failed")
"""States in which a run is uploaded; one that was cut off is run again."""

_log = logging.getLogger(__name__)


def open_shared(root: Path, out: str, points: Sequence[Point], resume: bool | str = False, stop_on_error: bool = False) -> list[Point]:
    """`open_sweep` for a sweep that is uploaded to `out`; goes on with what is there, even where the local folder is new.

    Raises:
        UserError: as `open_sweep`; `out` can't be read or written, or holds another sweep than `root`.
    """
    shared = SharedFolder(out)
    there = shared.manifest()
    if there is not None and resume is False:
        raise UserError(f"{shared.url} holds a sweep already. Go on with it (resume=true), or choose another address.")
    if there is not None:
        here = SweepFolder(root).manifest()
        if here is not None and _conflict(here, there):
            raise UserError(f"{shared.url} holds another sweep than {root}: choose another address, or another folder.")
        if here is None or len(_numbers(there)) > len(_numbers(here)):
            with SweepFolder(root).alone():
                write_json(root / MANIFEST, there)
    numbered = open_sweep(root, points, resume, stop_on_error)
    shared.write_manifest(root / MANIFEST)
    return [replace(point, out=shared.url) for point in numbered]


def _numbers(manifest: dict[str, Any]) -> dict[int, str]:
    try:
        return {int(entry["number"]): str(entry["label"]) for entry in manifest["points"]}
    except (KeyError, TypeError, ValueError):
        return {}


def _conflict(here: dict[str, Any], there: dict[str, Any]) -> bool:
    """Whether a number means two points, or a point has two numbers."""
    ours, theirs = _numbers(here), _numbers(there)
    turned = {label: number for number, label in ours.items()}
    return any(ours.get(n, label) != label or turned.get(label, n) != n for n, label in theirs.items())


def state_here(sweep: SweepFolder, number: int) -> str | None:
    """What a point's local folder says; None where it has no status."""
    try:
        return str(read_json(sweep.folder(number) / "status.json")["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def bring_back(sweep: SweepFolder, point: Point) -> bool:
    """Fetch the result of a point that another machine has finished, if there is one. UserError: the store can't be read."""
    if not point.out:
        return False
    shared = SharedFolder(point.out)
    if shared.states({point.number: point.key}).get(point.number) != "finished":
        return False
    sweep.set_aside(point.number)
    folder = sweep.folder(point.number)
    if folder.is_dir():  # an empty one, which stands in the way
        folder.rmdir()
    shared.download(point.number, folder)
    return True


def share(sweep: SweepFolder, point: Point) -> None:
    """Upload a point that has ended, unless it is there. Never raises for the store: `settle` tries again, and says what is missing."""
    if not point.out or (state := state_here(sweep, point.number)) not in ENDED:
        return
    shared = SharedFolder(point.out)
    try:
        if shared.states({point.number: point.key}).get(point.number) != state:
            shared.upload(sweep.folder(point.number), point.number, point.key)
    except UserError as error:
        _log.warning("point %d (%s) is not uploaded yet: %s", point.number, point.label, error)
        sweep.note({"label": point.label, "number": point.number, "state": "not uploaded", "error": str(error)})


def settle(root: Path, points: Sequence[Point]) -> None:
    """At a sweep's end: what ended here is there, and what ended elsewhere (a cluster without a shared disk) is here.

    Raises:
        UserError: the store can't be read or written now; says what to do.
    """
    points = [point for point in points if point.out]
    if not points:
        return
    sweep, shared = SweepFolder(root), SharedFolder(points[0].out)
    done = 0
    try:
        there = shared.states({point.number: point.key for point in points})
        for point in points:
            state, other = state_here(sweep, point.number), there.get(point.number)
            if state in ENDED and other != state:
                shared.upload(sweep.folder(point.number), point.number, point.key)
            elif state is None and other is not None and not sweep.folder(point.number).exists():
                shared.download(point.number, sweep.folder(point.number))
            done += 1
    except UserError as error:
        raise UserError(f"{error} {len(points) - done} of {len(points)} runs may be missing there; what was run here is in {root}, and "
                        "resume=true uploads it.") from error  # fmt: skip
