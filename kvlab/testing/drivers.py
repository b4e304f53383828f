"""One driver a seam: it feeds random, legal events to a policy, checks each decision, and returns the decisions."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from kvlab.testing.cache_drivers import drive_block_sizing, drive_compression, drive_kv_dtype, drive_layout, drive_prefix_cache
from kvlab.testing.eviction import drive_eviction
from kvlab.testing.rules import Rules
from kvlab.testing.scheduler_drivers import drive_admission, drive_batching, drive_mode, drive_preemption
from kvlab.testing.scheduling import drive_scheduling

DRIVERS: dict[str, Callable[[Any, Random, Rules], list[object]]] = {
    "scheduling": drive_scheduling,
    "batching": drive_batching,
    "admission": drive_admission,
    "preemption": drive_preemption,
    "preemption/mode": drive_mode,
    "eviction": drive_eviction,
    "prefix_cache": drive_prefix_cache,
    "block_sizing": drive_block_sizing,
    "layout": drive_layout,
    "compression": drive_compression,
    "kv_dtype": drive_kv_dtype,
}
