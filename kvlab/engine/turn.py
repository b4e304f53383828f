"""Whose turn it is with an engine: one thread at a time, and nobody in the middle of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from kvlab.types import UserError

DECIDING, TELLING = "deciding", "telling"
"""Parts of a step: what is decided and taken in; listeners hear of it, and the engine's state is complete."""


class Turn:
    """A lock, and what its holder is in the middle of.

    Attributes:
        lock: held by whoever acts on the engine. within: the part of a step that is under way ("" for none); read it under `lock`.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.within = ""

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        """A copy of an engine is nobody's turn yet."""
        return Turn, ()

    @contextmanager
    def take(self, what: str, within: str = "") -> Iterator[None]:
        """Wait until no other thread acts on the engine; in here, `within` is under way.

        Raises:
            UserError: a listener or policy asked for `what` in the middle of a step of this thread: for another step, or for anything
                before the step is complete.
        """
        with self.lock:
            before = self.within
            if before and (within or before == DECIDING):
                raise UserError(f"{what} was called within a step, by a listener or a policy. Call it when the step has returned; a "
                                "listener may add and abort requests of an engine in on_step and on_request.")  # fmt: skip
            self.within = within or before
            try:
                yield
            finally:
                self.within = before
