"""Runs on a shared path: `s3://bucket/sweep`, `file:///mnt/x`, whatever fsspec opens. Written locally first, then uploaded whole.

    URL/sweep.json          the sweep's points, as in its local folder
    URL/N/...               a run folder each; URL/N/point.json has the point's key, URL/N/status.json comes last

A run without its status was cut off while it was uploaded: readers call it "partial", and resuming uploads it again.
Claims are local: processes on one disk may share a sweep, machines without one give its points out through a launcher.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlab.trace.run_folder import RESERVE
from kvlab.trace.store import disk_error
from kvlab.types import UserError

STATUS, POINT, MANIFEST = "status.json", "point.json", "sweep.json"
NOT_SHARED = (RESERVE, STATUS, POINT)
HIDDEN = (".sweep", ".attempts")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}},
}
"""How a protocol's file system is opened: a store that does not answer is said within a minute."""


def is_url(path: object) -> bool:
    """Whether a path is an address (`s3://...`) and no folder of this machine."""
    return isinstance(path, str) and "://" in path


def named(path: object, what: str) -> None:
    """UserError: the path of `what` is empty, which would be the working folder."""
    if not str(path).strip():
        raise UserError(f"The path of {what} is empty. Is it from a variable that is not set? Name one, or leave it out.")


def local_only(path: object, what: str) -> None:
    """UserError: `path` is an address, and `what` is written locally; or it is empty."""
    named(path, what)
    text = str(path)
    if "://" in text or (text.partition("/")[0].endswith(":") and len(text.partition("/")[0]) > 2):  # Path("s3://x") is "s3:/x"
        raise UserError(f"{text} is an address, and {what} is written to a folder of this machine. Sweeps are uploaded as their runs end: "
                        "kvlab.sweep(..., out=URL), or -m hydra.sweep.dir=URL.")  # fmt: skip


def mirror_of(url: str) -> Path:
    """The local folder of a sweep whose folder is an address: the same each time, so that resuming finds what was not uploaded."""
    return Path("runs") / "shared" / "".join(c if c.isalnum() or c in "-_." else "-" for c in url.replace("://", "-").strip("/"))


class SharedFolder:
    """A folder at an address. UserError: an unknown protocol, a package that it needs is missing."""

    def __init__(self, url: str) -> None:
        if not is_url(url):
            raise UserError(f"{url!r} is no address: e.g. s3://bucket/sweep, or file:///mnt/disk/sweep for a folder.")
        self.url = url.rstrip("/")
        protocol = "s3" if url.startswith("s3a://") else url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs

            self._fs, path = url_to_fs(self.url, **OPTIONS.get(protocol, {}))
        except ImportError as error:
            extra = "pip install 'kvlab[s3]'" if protocol == "s3" else "pip install fsspec, and the package that it asks for"
            raise UserError(f"{self.url} can't be opened: {error}. {extra}") from error
        except ValueError as error:
            raise UserError(f"{self.url} can't be opened: {error}. Known are those of fsspec: s3, file, gs, az, memory ...") from error
        self._path = str(path).rstrip("/")

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Whatever the store's package raises, as an error that says where and what to do."""
        try:
            self._fs.invalidate_cache()
            yield
        except UserError:
            raise
        except Exception as error:  # each store's package has its own
            name = type(error).__name__
            first = (str(error).strip().splitlines() or [name])[0]
            if isinstance(error, PermissionError) or "Credential" in name or "Token" in name:
                hint = "Give credentials that may read and write there (S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)."
            elif isinstance(error, FileNotFoundError):
                hint = "Is the address right, and is there such a bucket or folder? Buckets are not made by kvlab."
            else:
                hint = "Is the address right (S3 of one's own: AWS_ENDPOINT_URL), does the network reach it, is there room?"
            raise UserError(f"{self.url} can't be {doing}: {name}: {first}. {hint}") from error

    def _at(self, *names: object) -> str:
        return "/".join([self._path, *map(str, names)])

    def _cat(self, paths: Sequence[str]) -> dict[str, Any]:
        """JSON values of the files that are there, and are no halves. What can't be reached or read is raised: it may be there."""
        found: dict[str, Any] = {}
        for path, text in (self._fs.cat(list(paths), on_error="return") if paths else {}).items():
            if isinstance(text, FileNotFoundError):
                continue
            if isinstance(text, Exception):
                raise text
            try:
                found[path] = json.loads(text)
            except ValueError:
                continue
        return found

    # ---------------------------------------------------------------------------- a run

    def states(self, points: Mapping[int, str]) -> dict[int, str]:
        """Number -> state of runs that are here whole, of points (number -> key) that are the same as when they ran."""
        with self._named("read"):
            found = self._cat([self._at(n, name) for n in points for name in (POINT, STATUS)])
        here = {}
        for number, key in points.items():
            point, status = found.get(self._at(number, POINT)), found.get(self._at(number, STATUS))
            if isinstance(point, dict) and isinstance(status, dict) and point.get("key") == key:
                here[number] = str(status.get("state"))
        return here

    def upload(self, folder: Path, number: int, key: str) -> None:
        """Put a run's folder here as point `number`, in place of what was there; its status last."""
        files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in NOT_SHARED and p.suffix != ".tmp"]
        targets = [self._at(number, p.relative_to(folder).as_posix()) for p in files]
        with self._named("written"):
            there = self._fs.find(self._at(number)) if self._fs.exists(self._at(number)) else []
            for path in (self._at(number, STATUS), *(p for p in there if p not in targets)):  # the status first
                if path in there and self._fs.exists(path):
                    self._fs.rm_file(path)
            if files:
                self._fs.put([str(p) for p in files], targets)
            self._fs.pipe_file(self._at(number, POINT), json.dumps({"key": key}).encode())
            self._fs.put_file(str(folder / STATUS), self._at(number, STATUS))

    def download(self, number: int, folder: Path) -> None:
        """Bring a run to `folder`, which must not be there yet: it appears whole or not at all."""
        self._get(self._at(number), folder)
        (folder / POINT).unlink(missing_ok=True)

    def _get(self, path: str, folder: Path) -> None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".fetching-", dir=folder.parent))
        except OSError as error:
            raise disk_error(folder, error) from error
        try:
            with self._named("read"):
                files = [p for p in self._fs.find(path) if not set(HIDDEN) & set(p[len(path) :].split("/"))]
                if not files and not self._fs.exists(path):
                    raise FileNotFoundError("nothing is there")
                local = [scratch / p[len(path) :].lstrip("/") for p in files]
                for parent in {p.parent for p in local}:
                    parent.mkdir(parents=True, exist_ok=True)
                if files:
                    self._fs.get(files, [str(p) for p in local])
            os.rename(scratch, folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    # -------------------------------------------------------------------------- a sweep

    def manifest(self) -> dict[str, Any] | None:
        """The sweep that is here, if one is."""
        with self._named("read"):
            found = self._cat([self._at(MANIFEST)])
        value = found.get(self._at(MANIFEST))
        return value if isinstance(value, dict) else None

    def write_manifest(self, path: Path) -> None:
        """Put a sweep's manifest here; the first thing that is written, which shows that it can be."""
        with self._named("written"):
            self._fs.pipe_file(self._at(MANIFEST), path.read_bytes())

    def copy(self) -> Copy:
        """All runs here, on this machine, for as long as the copy is held."""
        copy = Copy(self)
        self._get(self._path, copy.root)
        return copy


class Copy:
    """What was at an address, in a temporary folder that goes with the last reference to it."""

    def __init__(self, shared: SharedFolder) -> None:
        self.url = shared.url
        self._scratch = Path(tempfile.mkdtemp(prefix="kvlab-"))
        self.root = self._scratch / (shared.url.rpartition("/")[2] or "runs")
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
