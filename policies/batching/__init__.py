"""What a step is made of: which queues are served, in which order, and how much of a prompt at once."""

from kvlab.policies.batching.chunked import Chunked
from kvlab.policies.batching.decode_first import DecodeFirst
from kvlab.policies.batching.prefill_first import PrefillFirst
from kvlab.policies.batching.sarathi import Sarathi
from kvlab.policies.batching.split_prefill_first import SplitPrefillFirst
from kvlab.policies.batching.static import Static
from kvlab.policies.batching.waiting_served import WaitingServed
from kvlab.policies.batching.walkthrough import Walkthrough

__all__ = ["Chunked", "DecodeFirst", "PrefillFirst", "Sarathi", "SplitPrefillFirst", "Static", "WaitingServed", "Walkthrough"]
