"""Fetching public traces into the user's cache folder: to a temporary file, checked, then renamed. No half file is ever found.

Beside each file lies FILE.sha256.json with its digest. A file whose size or time has changed since is checked again before it is used.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvlab.progress import Progress
from kvlab.types import UserError, homes
from kvlab.workload.public_traces import PublicTrace

_log = logging.getLogger("kvlab.traces")

TIMEOUT_S = 30.0
"""Longest silence of a server."""

_CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """Where fetched traces are kept: traces/ in $KVLAB_CACHE, else in $XDG_CACHE_HOME/kvlab, else in ~/.cache/kvlab."""
    return homes.cache_folder() / "traces"


def fetch(trace: PublicTrace, folder: Path) -> Path:
    """The trace's file in `folder`, downloaded if it is not there. With KVLAB_OFFLINE=1 nothing is downloaded.

    Raises:
        UserError: no network, an answer other than the file, a cut-off download, a checksum that differs, a folder that can't be
            written. The folder then holds no part of the file.
    """
    path = folder / trace.file_name
    record = path.with_name(path.name + ".sha256.json")
    if path.is_file():
        _check_kept(trace, path, record)
        return path
    if os.environ.get("KVLAB_OFFLINE", "") not in ("", "0"):
        raise UserError(f"KVLAB_OFFLINE is set, and {path} is not there.")
    known = trace.sha256 or _read(record).get("sha256")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{trace.file_name}.", suffix=".part", dir=folder)
    except OSError as error:
        raise UserError(f"{folder} can't be written ({error.strerror or error}); KVLAB_CACHE names another folder.") from None
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            digest = _download(trace, file)
        if known is not None and digest != known:
            raise UserError(f"{trace.url} has SHA-256 {digest} where {known} is expected: another file than published. Nothing was kept.")
        part.chmod(0o644)
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror or error}.") from None
    finally:
        part.unlink(missing_ok=True)
    _write(record, path, trace, digest)
    if known is None:
        told = "%s: no published checksum; trusted as fetched, SHA-256 %s (kept in %s and checked from now on)."
        _log.warning(told, trace.name, digest, record)
    _log.info("%s: fetched from %s (%s; cite %s)", trace.name, trace.url, trace.licence, trace.citation)
    return path


def _download(trace: PublicTrace, file: Any) -> str:
    """Write the body of the trace's URL and return its SHA-256. UserError: the network, the server, or an end before the end."""
    request = urllib.request.Request(trace.url, headers={"User-Agent": "kvlab"})
    digest, done = hashlib.sha256(), 0
    total: int | None = None
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            length = answer.headers.get("Content-Length")
            total = int(length) if length and length.isdecimal() else None
            with Progress(total, trace.name, "B") as bar:
                while chunk := answer.read(_CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    bar.update(done)
    except urllib.error.HTTPError as error:
        raise UserError(f"{trace.url} answers {error.code} {error.reason}.") from None
    except http.client.IncompleteRead as error:
        done += len(error.partial)
        of = "" if total is None else f" of {total}"
        raise UserError(f"{trace.url} broke off after {done}{of} bytes. Try again.") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise UserError(f"{trace.url} can't be reached ({getattr(error, 'reason', None) or error}).") from None
    if total is not None and done < total:
        raise UserError(f"{trace.url} broke off after {done} of {total} bytes. Try again.")
    return digest.hexdigest()


def _check_kept(trace: PublicTrace, path: Path, record: Path) -> None:
    """UserError if a kept file is not what was fetched, or not what was published."""
    kept, stat = _read(record), path.stat()
    known = trace.sha256 or kept.get("sha256")
    if known == kept.get("sha256") and [kept.get("num_bytes"), kept.get("mtime_ns")] == [stat.st_size, stat.st_mtime_ns]:
        return
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror or error}). Give the right to, or set KVLAB_CACHE.") from None
    if known is not None and digest.hexdigest() != known:
        raise UserError(f"{path} has SHA-256 {digest.hexdigest()} where {known} is expected: it was changed. Delete it to fetch it again.")
    _write(record, path, trace, digest.hexdigest())


def _read(record: Path) -> dict[str, Any]:
    """The record of a fetched file; empty where there is none."""
    with suppress(OSError, ValueError):
        kept = json.loads(record.read_text(encoding="utf-8"))
        if isinstance(kept, dict):
            return kept
    return {}


def _write(record: Path, path: Path, trace: PublicTrace, digest: str) -> None:
    stat = path.stat()
    kept = {"sha256": digest, "num_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "url": trace.url}
    with suppress(OSError):  # a read-only folder: the file is checked anew each time
        record.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
