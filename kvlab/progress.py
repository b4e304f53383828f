"""A progress bar on terminals and in notebooks; silent where nobody looks, and where tqdm is not installed."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """A bar over `total` things (None: unknown). Use as a context manager; `update` takes the number done so far."""

    def __init__(self, total: int | None, label: str, unit: str, enabled: bool = True) -> None:
        self._bar: Any = None
        if enabled and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=label, unit=unit, dynamic_ncols=True, leave=False)

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """`done` of `total` (when it has become known); `note` stands behind the bar."""
        if self._bar is None:
            return
        if total is not None:
            self._bar.total = total
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
