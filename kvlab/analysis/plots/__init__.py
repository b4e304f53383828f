"""Frames to figures: each function takes a frame (of steps, of requests, of runs, of replays) and gives a plotly figure.

All have one look (kvlab.analysis.template), units on every axis, and the same traces for the same frame. A frame that lacks a column is
a UserError that names it; a frame without rows gives a figure that says so.
"""

from kvlab.analysis.plots.capacity import miss_ratio_curve, policy_by_capacity
from kvlab.analysis.plots.differences import difference, step_difference
from kvlab.analysis.plots.fronts import pareto, pareto_front
from kvlab.analysis.plots.latencies import latency, latency_percentiles
from kvlab.analysis.plots.life import timeline
from kvlab.analysis.plots.memory import fragmentation, memory_bands, pool_shares
from kvlab.analysis.plots.over_time import events, queues, throughput
from kvlab.analysis.plots.steps import MAX_POINTS
from kvlab.analysis.plots.sweeps import block_size_curve, compare, watermark_curve
from kvlab.analysis.plots.tenants import service

__all__ = [
    "MAX_POINTS", "block_size_curve", "compare", "difference", "events", "fragmentation", "latency", "latency_percentiles", "memory_bands",
    "miss_ratio_curve", "pareto", "pareto_front", "policy_by_capacity", "pool_shares", "queues", "service", "step_difference", "throughput",
    "timeline", "watermark_curve",
]  # fmt: skip
