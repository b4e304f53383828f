"""Plain data that every part of kvlab speaks: plans and outcomes, requests, read-only views, events, errors."""

from kvlab.types.columns import ScheduledSeq
from kvlab.types.errors import (
    ChangedView,
    IllegalDecision,
    KvlabError,
    MissingOracle,
    RequestTooLong,
    UserError,
    refuse_lfs_pointer,
    unknown_name,
)
from kvlab.types.events import BlockEvent, Listener, RequestRecord, StepStats
from kvlab.types.plan import (
    LATE,
    Admitted,
    BlockCopy,
    Blocked,
    BlockTransfer,
    Candidate,
    Outcome,
    Plan,
    Preempted,
    RecordedStep,
    SeqStart,
    TokenLogprobs,
)
from kvlab.types.request import Request, RequestShape, wrong_caching
from kvlab.types.sampling import SamplingParams
from kvlab.types.views import BlockView, GroupView, Now, PoolView, QueuesView

__all__ = [
    "LATE", "Admitted", "BlockCopy", "BlockEvent", "BlockTransfer", "BlockView", "Blocked", "Candidate", "ChangedView", "GroupView",
    "IllegalDecision", "KvlabError", "Listener", "MissingOracle", "Now", "Outcome", "Plan", "PoolView", "Preempted", "QueuesView",
    "RecordedStep", "Request", "RequestRecord", "RequestShape", "RequestTooLong", "SamplingParams", "ScheduledSeq", "SeqStart",
    "StepStats", "TokenLogprobs", "UserError", "refuse_lfs_pointer", "unknown_name", "wrong_caching",
]  # fmt: skip
