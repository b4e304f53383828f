"""A sweep's folder: which points it holds, of which code and configuration, who works on which, and what has become of them.

    sweep.json             the points (number, label, key, facts) and the code they were made with
    0/ 1/ 2/ ...           a run folder each, named by the point's number
    .sweep/claims/N        locked by the process that works on point N (flock: the lock of a process that died is gone with it)
    .sweep/journal.jsonl   a line for each attempt that ended
    .sweep/stop_on_error   is there with on_error=stop; .sweep/stopped: why no further point is started
    .attempts/N-K/         what earlier attempts at point N left: never overwritten, never counted
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab import __version__
from kvlab.reading import MARKS, foreign, visible_names
from kvlab.sweep_points import Point
from kvlab.trace.run_folder import RESERVE, process_start, read_json
from kvlab.trace.store import disk_error, write_json
from kvlab.types import UserError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

MANIFEST, HIDDEN, ATTEMPTS = "sweep.json", ".sweep", ".attempts"
RESULTS_DEPEND_ON = ("cache", "engine", "kernels", "model", "policies", "trace", "types", "workload", "assembly.py", "running.py")
"""Parts of kvlab whose source decides what a run's result is; an edit of another part is no drift."""
FORMAT = 1
NAMED = 4
"""Differences that a message names; the rest are counted."""


class SweepFolder:
    """The folder of a sweep that was opened (`open_sweep`), or of a worker that is told its points."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hidden = root / HIDDEN

    def folder(self, number: int) -> Path:
        """A point's run folder."""
        return self.root / str(number)

    def manifest(self) -> dict[str, Any] | None:
        """What sweep.json says; None where there is none. UserError: it is damaged."""
        path = self.root / MANIFEST
        if not path.exists():
            return None
        try:
            value = read_json(path)
            if value["format"] == FORMAT and all({"number", "label", "key", "facts"} <= set(point) for point in value["points"]):
                return dict(value)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise UserError(f"{path} is damaged, or of another version of kvlab. Choose another folder; the runs in this one stay readable.")

    # ------------------------------------------------------------- who works on what

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """True while this process alone has `name` (a point's number); False if another has it. The dead hold nothing."""
        with self._locked(self.hidden / "claims" / name, wait=False) as ours:
            yield ours

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other process is opening this sweep."""
        with self._locked(self.hidden / "lock", wait=True):
            yield

    @contextmanager
    def _locked(self, path: Path, wait: bool) -> Iterator[bool]:
        if fcntl is None:
            raise UserError("Sweeps need a system with file locks (Linux, macOS).")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise disk_error(path, error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                raise UserError(f"{path} can't be locked ({error.strerror}): this file system has no locks. Put the sweep's folder on "
                                "another one, e.g. a local disk.") from error  # fmt: skip
            with suppress(OSError):  # for people who look; a full disk must not matter here
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_process()).encode(), 0)
            yield True
        finally:
            os.close(descriptor)

    def holder(self, name: str) -> str:
        """Who has a claim, in words."""
        try:
            value = read_json(self.hidden / "claims" / name)
            return f"process {value['pid']} on {value['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    # ------------------------------------------------------------------ what there is

    def is_finished(self, number: int) -> bool:
        """Whether a point's run ended well."""
        try:
            return bool(read_json(self.folder(number) / "status.json").get("state") == "finished")
        except (OSError, ValueError, AttributeError):
            return False

    def set_aside(self, number: int) -> None:
        """Make room for a new attempt: what an earlier one left goes to .attempts/, whole.

        Raises UserError if the folder holds something that is no run's, or can't be moved.
        """
        folder = self.folder(number)
        visible = visible_names(folder)
        ours = any((folder / mark).exists() for mark in MARKS)
        if not ours and not visible:
            return
        if not ours:
            raise UserError(foreign(folder, visible[0]))
        try:
            (self.root / ATTEMPTS).mkdir(exist_ok=True)
            taken = [int(p.name.split("-")[1]) for p in (self.root / ATTEMPTS).glob(f"{number}-*")]
            os.rename(folder, self.root / ATTEMPTS / f"{number}-{max(taken, default=0) + 1}")
        except OSError as error:
            raise disk_error(folder, error) from error
        with suppress(OSError):
            (self.root / ATTEMPTS / f"{number}-{max(taken, default=0) + 1}" / RESERVE).unlink(missing_ok=True)

    def note(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the journal; a full disk doesn't matter here."""
        line = json.dumps({"time": _now(), **_process(), **entry}) + "\n"
        with suppress(OSError):
            self.hidden.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.hidden / "journal.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)

    def go(self, stop_on_error: bool) -> None:
        """Points may be started, from now on."""
        for mark, wanted in (("stopped", False), ("stop_on_error", stop_on_error)):
            if wanted:
                (self.hidden / mark).touch()
            else:
                (self.hidden / mark).unlink(missing_ok=True)

    @property
    def stops_on_error(self) -> bool:
        """Whether the first failure ends the sweep."""
        return (self.hidden / "stop_on_error").exists()

    def stop(self, reason: str) -> None:
        """No process starts another point of this sweep, until it is resumed."""
        with suppress(OSError):
            (self.hidden / "stopped").write_text(reason + "\n", encoding="utf-8")

    def stopped(self) -> str | None:
        """Why no further point is started; None: they are."""
        try:
            return (self.hidden / "stopped").read_text(encoding="utf-8").strip() or "stopped"
        except OSError:
            return None


def open_sweep(root: Path, points: Sequence[Point], resume: bool | str = False, stop_on_error: bool = False) -> list[Point]:
    """Write or compare a sweep's manifest; returns the points with the numbers they have in this folder.

    Args:
        resume: False: the folder must hold no sweep yet. True: go on with the one it holds, or begin. "accept": go on though code or
            configuration has changed; points whose own configuration or sources changed are run anew, other results are kept.
        stop_on_error: the first failure ends the sweep, in whatever process it happens.

    Raises:
        UserError: the folder holds a sweep (resume=False), or another one (no point in common), or one of other code or
            configuration (the message names what drifted).
    """
    sweep = SweepFolder(root)
    with sweep.alone():
        known = sweep.manifest()
        if known is None:
            numbered = [replace(point, number=number) for number, point in enumerate(points)]
            write_json(root / MANIFEST, _manifest(numbered, [], code_digests()))
            sweep.go(stop_on_error)
            return numbered
        if resume is False:
            raise UserError(f"{root} holds a sweep of {len(known['points'])} points already. Go on with it (resume=true), or choose "
                            "another folder.")  # fmt: skip
        differences = drift(known, points)
        if differences and resume != "accept":
            shown = "; ".join(differences[:NAMED]) + (f"; and {len(differences) - NAMED} more" if len(differences) > NAMED else "")
            raise UserError(f"{root} was made otherwise: {shown}. Go on all the same with resume=accept (points whose own "
                            "configuration changed are run anew), or choose another folder.")  # fmt: skip
        numbered = _merge(sweep, known, points)
        sweep.go(stop_on_error)
        return numbered


def _merge(sweep: SweepFolder, known: Mapping[str, Any], points: Sequence[Point]) -> list[Point]:
    """Give points their old numbers, new ones the next; results of points that have become other points are set aside."""
    old: dict[str, list[dict[str, Any]]] = {}
    for entry in known["points"]:
        old.setdefault(_match(entry["label"]), []).append(entry)
    following = 1 + max((int(entry["number"]) for entry in known["points"]), default=-1)
    numbered: list[Point] = []
    for point in points:
        entry = old[_match(point.label)].pop(0) if old.get(_match(point.label)) else None
        if entry is None:
            numbered.append(replace(point, number=following))
            following += 1
            continue
        number = int(entry["number"])
        if entry["key"] != point.key:
            sweep.set_aside(number)
        numbered.append(replace(point, number=number))
    left = [entry for entries in old.values() for entry in entries]  # points that this grid leaves out: kept as they are
    write_json(sweep.root / MANIFEST, _manifest(numbered, left, code_digests()))
    return numbered


def _manifest(points: Sequence[Point], others: Sequence[Mapping[str, Any]], code: Mapping[str, str]) -> dict[str, Any]:
    entries = [*others, *({"number": p.number, "label": p.label, "key": p.key, "facts": dict(p.facts)} for p in points)]
    return {"format": FORMAT, "kvlab": __version__, "code": dict(code), "points": sorted(entries, key=lambda entry: int(entry["number"]))}


def drift(known: Mapping[str, Any], points: Sequence[Point]) -> list[str]:
    """What is not as it was when the sweep was made: kvlab's version and source files, configuration, foreign sources, inputs.

    Points are compared with those of the same label; new labels (a grid that grew) are no drift.
    """
    found = [f"kvlab's version was {known['kvlab']}, is {__version__}"] if known["kvlab"] != __version__ else []
    code, then = code_digests(), known["code"]
    found += [f"kvlab/{name} has changed" for name in sorted({*code, *then}) if code.get(name) != then.get(name)]
    old = {_match(entry["label"]): entry["facts"] for entry in known["points"]}
    common = [point for point in points if _match(point.label) in old]
    if not common and points:
        return [f"it holds another sweep, of {known['points'][0]['label'] or 'one point'} and so on"]
    for point in common:
        facts = json.loads(json.dumps(dict(point.facts), default=str))
        before = old[_match(point.label)]
        for name in sorted({*facts, *before}):
            if facts.get(name) != before.get(name):
                found.append(_changed(name, before.get(name), facts.get(name)))
    return list(dict.fromkeys(found))


def _changed(name: str, before: Any, now: Any) -> str:
    digests = name.startswith(("source of ", "contents of "))
    return f"the {name} has changed" if digests else f"{name} was {before!r}, is {now!r}"


def _match(label: str) -> str:
    """A label in which the order of axes doesn't count."""
    return ", ".join(sorted(label.split(", ")))


def code_digests() -> dict[str, str]:
    """Source file -> 12 hex digits of its contents, for the parts that results depend on."""
    package = Path(__file__).resolve().parent
    found: dict[str, str] = {}
    for part in RESULTS_DEPEND_ON:
        path = package / part
        for file in [path] if path.is_file() else sorted(path.glob("**/*.py")):
            found[file.relative_to(package).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return found


def _process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "process_start": process_start(os.getpid())}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
