"""Trace files: finding them, reading their lines, and what loaders of all formats have in common."""

from __future__ import annotations

import difflib
import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from kvlab.types import UserError, refuse_lfs_pointer
from kvlab.types.homes import expanded
from kvlab.workload.fetching import cache_folder, fetch
from kvlab.workload.public_traces import PUBLIC_TRACES

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SUFFIXES = ("", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".json", ".json.gz", ".txt", ".txt.gz")
ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".json", ".json.gz", ".txt", ".txt.gz")
MAX_TOKENS = 2**40
"""More is no length but a fault of the file."""


def default_folders() -> list[Path]:
    """Where traces are looked for: $KVLAB_TRACES, then ./traces, then shared/data/traces beside the repository."""
    from_env = [Path(part) for part in os.environ.get("KVLAB_TRACES", "").split(os.pathsep) if part]
    repository = Path(__file__).resolve().parents[2]
    return [*from_env, Path("traces"), repository.parent / "shared" / "data" / "traces"]


def trace_folders(first: str | Path | None = None) -> list[Path]:
    """`default_folders`, after a folder that a configuration names."""
    return ([] if first is None else [expanded(first)]) + default_folders()


def find_trace(name_or_path: str | Path, folders: Sequence[Path] | None = None) -> Path:
    """The file of a trace: a path; a name (suffix optional) in one of the folders; else, for a public trace, fetched from its home.

    Raises:
        UserError: not found; says where it was looked for, what is there, and how to name another folder. Or a download failed.
    """
    folders = default_folders() if folders is None else list(folders)
    for base in (Path(), *folders):
        for suffix in SUFFIXES:
            path = base / f"{name_or_path}{suffix}"
            if path.is_file():
                return path
    there = sorted({p.name for folder in folders if folder.is_dir() for p in folder.iterdir() if p.name.endswith(ENDINGS)})
    looked = ", ".join(str(folder) for folder in folders) or "no folder"
    public = PUBLIC_TRACES.get(_without_suffix(str(name_or_path)))
    if public is not None:
        try:
            return fetch(public, cache_folder())
        except UserError as error:
            raise UserError(
                f"The trace {public.name!r} is in none of the folders ({looked}), and can't be fetched: {error}"
                " Set KVLAB_TRACES to the folder that holds it."
            ) from None
    near = difflib.get_close_matches(str(name_or_path), [*there, *PUBLIC_TRACES], n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    found = f" Traces there: {', '.join(there)}." if there else " There are no traces there."
    raise UserError(
        f"There is no trace {str(name_or_path)!r}: looked for a file of that path, and in {looked}.{hint}{found}"
        f" Give the path of the file, set KVLAB_TRACES to the folder that holds it, or take a public one: {', '.join(PUBLIC_TRACES)}."
    )


def _without_suffix(name: str) -> str:
    return next((name.removesuffix(end) for end in sorted(ENDINGS, key=len, reverse=True) if name.endswith(end)), name)


def open_text(path: Path) -> TextIO:
    """A text file or a gzipped one, as UTF-8. UserError: a Git LFS pointer."""
    refuse_lfs_pointer(path)
    return gzip.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".gz" else open(path, encoding="utf-8-sig")


def beginning(path: Path, num_characters: int = 1 << 16) -> str:
    """The first characters of a file, without blank space before them. UserError: it can't be read, or is a Git LFS pointer."""
    with reading(path), open_text(path) as file:
        text = file.read(num_characters).lstrip()
    return text


@contextmanager
def reading(path: Path, number: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Faults of a file as UserErrors; `number`: the last line read."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip data after line {number()} ({error}). Fetch the file again.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text after line {number()} ({error.reason}).") from error
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}.") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a text file or a gzipped one; blank lines are left out.

    Raises:
        UserError: the file is missing, may not be read, is not UTF-8, or its gzip data is damaged.
    """
    number = 0
    with reading(path, lambda: number), open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.rstrip("\r\n")


@dataclass
class TraceRows:
    """Requests of a trace. `rows`: line number of each in its file, for messages. `notes`: what reading had to mend, counted.

    `has_lengths`: False where the file has no lengths (those here are then 0).
    """

    path: Path
    rows: Ints
    arrivals_s: Floats
    input_lens: Ints
    output_lens: Ints
    notes: list[str] = field(default_factory=list, kw_only=True)
    has_lengths: bool = field(default=True, kw_only=True)

    def __len__(self) -> int:
        return len(self.rows)


def check_and_repair(trace: TraceRows, notes: list[str], mend_outputs: bool = True) -> Ints:
    """Which rows to use, in which order, as indices; output lengths are mended in place.

    Repairs, each counted in a note: rows without input tokens are left out, outputs of 0 become 1 (unless `mend_outputs` is false),
    unsorted arrivals are sorted (rows of one time keep their order).

    Raises:
        UserError: no request is left; a length is negative (with its row).
    """
    notes += trace.notes
    for name, lengths in (("input", trace.input_lens), ("output", trace.output_lens)):
        negative = np.flatnonzero(lengths < 0)
        if negative.size:
            raise UserError(f"{trace.path}, line {trace.rows[negative[0]]}: {name} length {lengths[negative[0]]} is negative.")
    keep = np.flatnonzero(trace.input_lens > 0) if trace.has_lengths else np.arange(len(trace))
    if len(keep) < len(trace):
        notes.append(f"{trace.path.name}: {len(trace) - len(keep)} of {len(trace)} rows have no input tokens and were left out.")
    no_output = keep[trace.output_lens[keep] == 0]
    if no_output.size and mend_outputs:
        notes.append(f"{trace.path.name}: {no_output.size} rows have no output tokens; each was given 1.")
        trace.output_lens[no_output] = 1
    if not keep.size:
        raise UserError(f"{trace.path} holds no requests.")
    times = trace.arrivals_s[keep]
    num_early = int((np.diff(times) < 0).sum())
    if num_early:
        notes.append(f"{trace.path.name}: {num_early} rows arrive before the row above them; the trace was sorted by arrival.")
    return keep[np.argsort(times, kind="stable")]
