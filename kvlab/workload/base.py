"""The contract of workloads: where requests come from, and when.

A driver asks `due(now)` before each step, gives what it gets to the engine, and reports each ended request with `on_finish`.
To write one, implement `build` (arrival times) and `make` (the i-th request); open loop, closed loop and aborts come from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvlab.types import Request, RequestRecord, UserError
from kvlab.workload.aborts import Aborts
from kvlab.workload.loop import Loop


class Tokenizer(Protocol):
    """What a workload needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    def encode(self, text: str, /) -> list[int]:
        """Token ids of a text, with the ids that a plain prompt begins with (BOS) where the model wants them."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Text of token ids."""

    def apply_chat(self, messages: Sequence[Any], /) -> list[int]:
        """Token ids of a conversation (mappings with role and content), ready for the assistant's answer."""


@dataclass(frozen=True)
class WorkloadContext:
    """What a run tells its workload.

    Attributes:
        tokenizer: None in simulated runs (text then becomes its UTF-8 bytes, and `Workload.notes` says so).
        vocab_size: token ids are in [0, vocab_size). max_model_len: longest prompt + output, in tokens.
        seed: everything random in a workload follows from it.
        special_ids: ids that random prompts must not hold (chat markers ...), besides the tokenizer's BOS and EOS.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    seed: int
    special_ids: tuple[int, ...] = ()

    @property
    def reserved_ids(self) -> tuple[int, ...]:
        """`special_ids` with those of the tokenizer (its BOS, EOS and, where it names them, `special_ids`), ascending."""
        bos: int | None = getattr(self.tokenizer, "bos_token_id", None)
        eos: Sequence[int] = getattr(self.tokenizer, "eos_token_ids", ())
        special: Sequence[int] = getattr(self.tokenizer, "special_ids", ())
        ids = {*self.special_ids, *special, *eos} | ({bos} if bos is not None else set())
        return tuple(sorted(i for i in ids if 0 <= i < self.vocab_size))


class Workload(ABC):
    """A source of requests, deterministic from `WorkloadContext.seed`.

    Open loop (default): a request is due at its arrival time. Closed loop (`concurrency=n`): arrival times are ignored, n
    conversations are alive at a time, and the next begins at the moment one ends (a lone request is a conversation of one turn).

    Attributes:
        notes: what a reader of the results should know (rows repaired, prompts clipped ...), a sentence each; filled by `start`.
    """

    concurrency: int | None = None
    aborts: Aborts | None = None
    notes: list[str]
    _loop: Loop | None = None

    def __init__(self, *, concurrency: int | None = None, abort: Mapping[str, Any] | None = None) -> None:
        """concurrency: None for an open loop, else conversations alive at once. abort: `{fraction, after_s}`, see `Aborts`."""
        if concurrency is not None and (isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1):
            raise UserError(f"workload.concurrency = {concurrency!r} is not allowed: null (open loop) or a whole number >= 1.")
        self.concurrency = concurrency
        self.aborts = None if abort is None else Aborts.from_config(abort)
        self.notes = []

    # ------------------------------------------------------- what a workload implements

    def check(self) -> None:  # noqa: B027
        """UserError for parameters that no run could use, without reading or drawing anything. Default: the constructor has seen to it."""

    @abstractmethod
    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Read, draw and check everything; return the arrival time (s) of each conversation. UserError for bad input."""

    @abstractmethod
    def make(self, index: int) -> Request:
        """The first request of conversation `index`. Called once, when it becomes due: token ids are made here, not before.

        The caller sets `arrival_s`.
        """

    def has_next(self, request: Request) -> bool:
        """Whether the end of `request` may bring another turn. Default: never."""
        return False

    def follow_up(self, request: Request, record: RequestRecord) -> Request | None:
        """The turn after `request`, with its `arrival_s` (finish + think time), or None. Asked only where `has_next` is true."""
        return None

    # ------------------------------------------------------------- what a driver calls

    def start(self, ctx: WorkloadContext) -> None:
        """Build and check everything. Starting again gives a fresh, identical run. UserError before any work."""
        self.notes = []
        arrivals_s = self.build(ctx)
        self._loop = Loop(arrivals_s, self.concurrency)
        if self.concurrency is not None and any(arrivals_s):
            self.notes.append(f"Closed loop (concurrency={self.concurrency}): the arrival times given were not used.")
        if self.aborts is not None:
            self.aborts.start(ctx.seed)

    def due(self, now_s: float) -> list[Request]:
        """Requests with arrival_s <= now_s not handed out before, by arrival (ties: order of the workload)."""
        out = []
        while (item := self.loop.pop(now_s)) is not None:
            arrival_s, index, request = item
            if request is None:
                request = self.make(index)
                request.arrival_s = arrival_s
            if self.aborts is not None:
                self.aborts.apply(request, index)
            self.loop.opened(index, request, self.has_next(request))
            out.append(request)
        return out

    def next_arrival_s(self) -> float | None:
        """When the next known request is due; None: nothing known until something finishes, or the end."""
        return self.loop.next_arrival_s()

    def on_finish(self, record: RequestRecord) -> None:
        """Report a request that ended, for whatever reason. May make a new one due. Requests of others are ignored."""
        closed = self.loop.closed(record.request_id)
        if closed is None:
            return
        index, request = closed
        following = self.follow_up(request, record) if request is not None else None
        if following is not None:
            self.loop.push(following.arrival_s, index, following)
        else:
            self.loop.free_slot(record.finish_s)

    @property
    def exhausted(self) -> bool:
        """No request will ever come again, whatever happens to those in flight."""
        return self.loop.exhausted

    @property
    def num_requests(self) -> int | None:
        """Requests of the whole run, where known (for progress)."""
        return self.loop.num_conversations

    @property
    def loop(self) -> Loop:
        """The queue of what is to come; there is one after `start`."""
        if self._loop is None:
            raise RuntimeError(f"{type(self).__name__}.start(ctx) must be called first")
        return self._loop
