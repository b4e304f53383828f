"""What a step computes of each sequence, and columns for steps in which most sequences decode.

A batch of a hundred sequences that each compute their latest token differs from step to step in nothing but positions and ids. A plan of
such a step keeps a row of numbers for all of them; tuples are made when somebody looks. Whoever only looks sees no difference:
`Decodes` and `OneEach` are sequences, equal to the tuples that they stand for, printed and pickled as them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Ints = npt.NDArray[np.int64]


class ScheduledSeq(NamedTuple):
    """Tokens [first_position, first_position + num_new_tokens) of one sequence are computed in this step.

    Attributes:
        seq_id: the sequence.
        first_position: position of the first token computed (0-based; equals the tokens computed so far).
        num_new_tokens: tokens computed in this step (>= 1). A prefill chunk and a decode differ in nothing else.
        num_samples: tokens to sample from the last logits: 0 for a chunk that does not reach the sequence's end, 1 as a rule,
            n when the prompt of a group of n parallel samples is complete (the runner returns n - 1 forks).
        num_dropped_tokens: tokens before the first one computed whose slots were given up by a compression policy (a multiple of the
            block size); slot index = position - num_dropped_tokens, but for sinks, whose blocks at the head have stayed.
        num_lookahead_slots: slots reserved past the new tokens (0 today; for speculation).
    """

    seq_id: int
    first_position: int
    num_new_tokens: int
    num_samples: int = 1
    num_dropped_tokens: int = 0
    num_lookahead_slots: int = 0


class _AsTuple(Sequence[T]):
    """A sequence that makes its tuple when it is first looked at."""

    __slots__ = ("_made", "rest")

    rest: tuple[T, ...]
    _made: tuple[T, ...] | None

    @abstractmethod
    def _head(self) -> Iterator[T]:
        """Everything before `rest`."""

    def as_tuple(self) -> tuple[T, ...]:
        """The tuple it stands for."""
        if self._made is None:
            self._made = (*self._head(), *self.rest)
        return self._made

    @abstractmethod
    def entry(self, index: int) -> T:
        """One of them; no tuple of all is made for it."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.as_tuple()[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self.as_tuple())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _AsTuple):
            return self.as_tuple() == other.as_tuple()
        return self.as_tuple() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.as_tuple())

    def __repr__(self) -> str:
        return repr(self.as_tuple())

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self.as_tuple()),)


class Decodes(_AsTuple[ScheduledSeq]):
    """`Plan.scheduled`: sequences that compute one token and sample one, then the `rest`.

    Attributes:
        seq_ids: of the decoding ones; the same object in consecutive plans as long as they are the same. `first` + `offset`: their
            first positions; `first` is never written. num_keys: sum of their contexts, new tokens included.
    """

    __slots__ = ("first", "num_keys", "offset", "seq_ids")

    def __init__(self, seq_ids: tuple[int, ...], first: Ints, offset: int, num_keys: int, rest: tuple[ScheduledSeq, ...]) -> None:
        self.rest = rest
        self._made = None
        self.seq_ids = seq_ids
        self.first = first
        self.offset = offset
        self.num_keys = num_keys

    def _head(self) -> Iterator[ScheduledSeq]:
        return map(ScheduledSeq, self.seq_ids, (self.first + self.offset).tolist(), (1,) * len(self.seq_ids))

    def __len__(self) -> int:
        return len(self.seq_ids) + len(self.rest)

    def entry(self, index: int) -> ScheduledSeq:
        """See `_AsTuple`."""
        num = len(self.seq_ids)
        return ScheduledSeq(self.seq_ids[index], int(self.first[index]) + self.offset, 1) if index < num else self.rest[index - num]


class OneEach(_AsTuple[tuple[int, ...]]):
    """Token ids, `Plan.token_ids` or `Outcome.tokens`: one for each of the first sequences (`ids`, never written), then the `rest`."""

    __slots__ = ("ids",)

    def __init__(self, ids: Ints, rest: tuple[tuple[int, ...], ...]) -> None:
        self.rest = rest
        self._made = None
        self.ids = ids

    def _head(self) -> Iterator[tuple[int, ...]]:
        return zip(self.ids.tolist())

    def __len__(self) -> int:
        return len(self.ids) + len(self.rest)

    def entry(self, index: int) -> tuple[int, ...]:
        """See `_AsTuple`."""
        num = len(self.ids)
        return (int(self.ids[index]),) if index < num else self.rest[index - num]


def seq_ids_of(scheduled: Sequence[ScheduledSeq]) -> tuple[int, ...]:
    """Of everything that is scheduled, in order; the same object in consecutive plans of the same lanes and nothing else."""
    if not isinstance(scheduled, Decodes):
        return tuple([entry.seq_id for entry in scheduled])
    return (*scheduled.seq_ids, *[entry.seq_id for entry in scheduled.rest]) if scheduled.rest else scheduled.seq_ids


def entry_of(items: Sequence[T], index: int) -> T:
    """One of `items`, which may be columns."""
    return items.entry(index) if isinstance(items, _AsTuple) else items[index]
