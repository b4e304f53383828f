"""Tokens per block."""

from kvlab.policies.block_sizing.auto import Auto
from kvlab.policies.block_sizing.fixed import Fixed

__all__ = ["Auto", "Fixed"]
