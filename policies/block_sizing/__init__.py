"""Tokens per block."""

from kvlab.policies.block_sizing.fixed import Fixed

__all__ = ["Fixed"]
