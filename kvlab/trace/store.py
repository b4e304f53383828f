"""Tables on disk: parquet where pyarrow is installed, JSON lines where it is not. Every file appears whole or not at all.

While a run goes its rows are written as numbered part files in `.parts/`; at the end they become one file. Readers take either.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pandas as pd

from kvlab.trace.frames import DERIVED_FROM, derived, empty_frame, raw_frame, series, with_derived
from kvlab.trace.schema import DERIVED, TABLES, Column, recorded
from kvlab.types import UserError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:  # a GPU machine may have torch and pandas alone
    pa = pq = None

PARTS = ".parts"


def disk_error(path: Path, error: OSError) -> UserError:
    """An OSError while writing as one message that names the path and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(f"No space left to write {path} ({error.strerror}). Free some, or choose another run folder.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(f"No permission to write {path} ({error.strerror}). Allow it, or choose another run folder.")
    return UserError(f"Can't write {path}: {error.strerror or error}. Choose another run folder.")


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` when the block ends well, and leaves nothing behind when it doesn't.

    Raises UserError naming the path if the disk refuses.
    """
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(tmp, "wb") as file:
            yield file
        os.replace(tmp, path)
    except BaseException as error:
        with suppress(OSError):
            tmp.unlink()
        if isinstance(error, OSError):
            raise disk_error(path, error) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically (UTF-8)."""
    with atomic(path) as file:
        file.write(_text(text).encode())


def _text(text: str) -> str:
    """What of a string is no text (a file name that is not UTF-8, half of a surrogate pair) as it was in bytes, or as an escape."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file atomically; numbers that are not finite become null."""
    write_text(path, json.dumps(_finite(value), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and value - value != 0 else value


def suffix() -> str:
    """What tables are written as on this machine."""
    return ".parquet" if pq is not None else ".jsonl"


def write_part(folder: Path, table: str, number: int, rows: Sequence[Sequence[Any]]) -> None:
    """Write rows (in the order of `schema.recorded`) as part `number` (from 1) of a table."""
    columns = recorded(table)
    with atomic(folder / PARTS / f"{table}-{number:05d}{suffix()}") as file:
        if pq is None:
            file.writelines(_json_line(columns, row) for row in rows)
            return
        _write_arrow(file, [_arrow_rows(columns, rows)], compression="lz4", use_dictionary=False, write_statistics=False)  # twice as fast


def _arrow_rows(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> Any:
    cells = list(zip(*rows, strict=True))
    try:
        arrays = [pa.array(cell, type=_arrow_type(c.dtype)) for c, cell in zip(columns, cells, strict=True)]
    except UnicodeEncodeError:
        cells = [tuple(_text(v) if isinstance(v, str) else v for v in cell) for cell in cells]
        arrays = [pa.array(cell, type=_arrow_type(c.dtype)) for c, cell in zip(columns, cells, strict=True)]
    return pa.table(arrays, names=[c.name for c in columns])


def merge_parts(folder: Path, table: str, last_rows: Sequence[Sequence[Any]] = ()) -> None:
    """Turn a table's parts, and rows that are in none yet, into one file with derived columns, one part in memory at a time; then remove
    the parts. (Without pyarrow all rows must be in parts.)"""
    parts = part_paths(folder, table)
    with atomic(folder / f"{table}{suffix()}") as file:
        if pq is not None:
            texts = [c.name for c in TABLES[table] if c.dtype == "str"]  # dictionaries of numbers take longer and more space
            _write_arrow(file, _with_derived_arrow(table, parts, last_rows), compression="zstd", use_dictionary=texts or False)
        else:
            frame = read_table(folder, table)
            file.writelines(_json_line(TABLES[table], row) for row in frame.itertuples(index=False))
    for part in parts:
        part.unlink(missing_ok=True)


def _with_derived_arrow(table: str, parts: Sequence[Path], last_rows: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Each part as an arrow table with derived columns; an empty one where there is no row, so that the file has its columns.

    Only what derived columns need becomes pandas: texts and token ids stay as they are.
    """
    needed = [c for c in recorded(table) if c.name in DERIVED_FROM.get(table, ())]
    added = [c for c in TABLES[table] if c.source == DERIVED]
    previous_end_s = None
    rest = (_arrow_rows(recorded(table), rows) for rows in (last_rows,) if rows)
    for raw in chain(map(_read_arrow, parts), rest):
        frame = pd.DataFrame({c.name: _from_arrow(c, raw[c.name], raw.num_rows) for c in needed})
        values = derived(table, frame, previous_end_s)
        for column in added:
            raw = raw.append_column(column.name, pa.array(values[column.name], type=pa.float64(), from_pandas=True))
        if table == "steps" and len(frame):
            previous_end_s = float(frame["end_s"].iloc[-1])
        yield raw
    if not parts and not last_rows:
        yield _arrow_table(TABLES[table], empty_frame(table))


def part_paths(folder: Path, table: str) -> list[Path]:
    """The part files of a table, in order."""
    found = [p for s in (".parquet", ".jsonl") for p in (folder / PARTS).glob(f"{table}-*{s}")]
    return sorted(found, key=lambda p: p.stem)


def table_paths(folder: Path, table: str) -> list[Path]:
    """The files that hold a table: the merged one, else its parts; none where it was not recorded."""
    whole = [p for p in (folder / f"{table}.parquet", folder / f"{table}.jsonl") if p.exists()]
    return whole or part_paths(folder, table)


def read_table(folder: Path, table: str, note: Callable[[str], None] | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """A table of a run folder as a frame: the merged file, else its parts, else an empty frame.

    Damaged files are left out; `note` hears of each ("steps-00003.parquet is damaged: ..."). Without `note` they raise UserError.
    `columns`: only these, in the schema's order; of a long run's merged file no others are read.
    """
    wanted = [c for c in TABLES[table] if columns is None or c.name in columns]
    for path in (folder / f"{table}.parquet", folder / f"{table}.jsonl"):
        if path.exists() and (whole := _try_read(path, wanted, note)) is not None:
            return whole
    frames = [f for p in part_paths(folder, table) if (f := _try_read(p, recorded(table), note)) is not None]
    rows = pd.concat(frames, ignore_index=True) if frames else raw_frame(table, [])
    return with_derived(table, rows)[[c.name for c in wanted]]


def iter_rows(folder: Path, table: str) -> Iterator[tuple[Any, ...]]:
    """The recorded rows of a table in order, a thousand in memory at a time: plain Python values, lists for lists.

    Raises UserError for a damaged file; nothing is yielded where the table was not recorded.
    """
    names = [c.name for c in recorded(table)]
    for path in table_paths(folder, table):
        try:
            if path.suffix == ".jsonl":
                with open(path, encoding="utf-8") as file:
                    yield from (tuple(json.loads(line)[name] for name in names) for line in file)
            else:
                for batch in pq.ParquetFile(_opened(path)).iter_batches(1024, columns=names):
                    yield from zip(*(batch[name].to_pylist() for name in names), strict=True)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{path} can't be read: {error}") from error


def _try_read(path: Path, columns: Sequence[Column], note: Callable[[str], None] | None) -> pd.DataFrame | None:
    try:
        return read_file(path, columns)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, ImportError) as error:  # pyarrow's errors are ValueErrors and OSErrors
        message = f"{path.name} is damaged: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        if note is None:
            raise UserError(f"{path} can't be read: {error}") from error
        note(message)
        return None


def read_file(path: Path, columns: Sequence[Column]) -> pd.DataFrame:
    """One file as a frame with exactly `columns`; those the file lacks are null (0 or "" where the dtype has none)."""
    if path.suffix == ".jsonl":
        with open(path, encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        cells = {c.name: [r.get(c.name) for r in records] for c in columns}
        return pd.DataFrame({c.name: series(c, _filled(c, cells[c.name])) for c in columns})
    if pq is None:
        raise ImportError("reading parquet needs pyarrow (pip install pyarrow)")
    in_file = set(pq.read_schema(_opened(path)).names)
    table = _read_arrow(path, [c.name for c in columns if c.name in in_file])
    names = set(table.column_names)
    return pd.DataFrame({c.name: _from_arrow(c, table[c.name] if c.name in names else None, table.num_rows) for c in columns})


def _read_arrow(path: Path, columns: Sequence[str] | None = None) -> Any:
    """A parquet file (or some of its columns) as an arrow table; threads cost more than they gain on the small files of most runs."""
    return pq.read_table(_opened(path), columns=columns, use_threads=path.stat().st_size > 8 << 20)


def _opened(path: Path) -> Any:
    """A file as pyarrow reads it; of a path that is no UTF-8 (bytes of a name in an ASCII locale) it would not know what to make."""
    return pa.OSFile(os.fsencode(path))


def _filled(column: Column, values: Sequence[Any]) -> Sequence[Any]:
    missing: Any = 0 if column.dtype == "int64" else () if column.dtype.startswith("list") else None
    return values if missing is None else [missing if v is None else v for v in values]


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _from_arrow(column: Column, chunks: Any, num_rows: int) -> pd.Series:
    if chunks is None:
        return series(column, _filled(column, [None] * num_rows))
    if column.dtype.startswith("list") and not (_is_list(chunks.type) or chunks.null_count == num_rows):
        raise ValueError(f"{column.name} holds {chunks.type}, not lists")
    if chunks.null_count and column.dtype == "list<float64>":
        return series(column, _filled(column, chunks.to_pylist()))
    if column.dtype in ("int64", "float64", "list<float64>"):  # the wide columns, without a Python object a value
        return pd.Series(chunks.to_pandas().to_numpy(), dtype=None if column.dtype.startswith("list") else column.dtype)
    if column.dtype.startswith("list"):
        return pd.Series([[] if cell is None else cell for cell in chunks.to_pylist()], dtype=object)
    return series(column, chunks.to_pylist())


def _json_line(columns: Sequence[Column], row: Sequence[Any]) -> bytes:
    values = (None if v is pd.NA else v.tolist() if hasattr(v, "tolist") else v for v in row)
    return (json.dumps(_finite(dict(zip((c.name for c in columns), values, strict=True)))) + "\n").encode()


def _arrow_type(dtype: str) -> Any:
    if dtype.startswith("list<"):
        return pa.list_(_arrow_type(dtype[5:-1]))
    return {"int64": pa.int64(), "int64?": pa.int64(), "float64": pa.float64(), "str": pa.string()}[dtype]


def _arrow_table(columns: Sequence[Column], frame: pd.DataFrame) -> Any:
    arrays = [pa.array(frame[c.name], type=_arrow_type(c.dtype), from_pandas=True) for c in columns]
    return pa.table(arrays, names=[c.name for c in columns])


def _write_arrow(file: IO[bytes], tables: Any, **options: Any) -> None:
    """Write arrow tables of one schema as one parquet file, a row group each."""
    writer = None
    try:
        for table in tables:
            writer = writer or pq.ParquetWriter(file, table.schema, **options)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
