"""Frames to figures. Needs plotly; nothing in kvlab imports it before a figure is asked for."""

from kvlab.analysis import plots as plots
from kvlab.analysis.plots import compare, memory_bands, throughput, timeline

__all__ = ["compare", "memory_bands", "plots", "throughput", "timeline"]
