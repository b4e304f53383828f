"""Mutants: small changes of meaning in the source, each with the tests that should notice it. ``make mutants`` runs them.

One module an area holds a list, ``MUTANTS``, of :class:`~mutants.mutant.Mutant`. To add one: its name (unique), its file, a piece of the
source that occurs exactly once in that file, what stands there instead, and the tests to run. ``tests/test_mutants.py`` holds that every
mutant still applies, so a change of the source that moves one shows in the ordinary tests.
"""

from __future__ import annotations

from importlib import import_module

from mutants.mutant import Mutant

__all__ = ["AREAS", "Mutant", "all_mutants"]

AREAS = ("cache", "engine", "kernels", "model", "policies", "replay", "trace")


def all_mutants() -> list[Mutant]:
    """The mutants of all areas, in the order of the lists."""
    return [mutant for area in AREAS for mutant in import_module(f"mutants.{area}").MUTANTS]
