"""Requests, sequence groups, the scheduler, the sampler, runners and the clock: the engine and its step."""

from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.engine import Engine, StepResult

__all__ = ["Engine", "EngineConfig", "PolicySet", "StepResult"]
