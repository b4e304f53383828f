"""Mutants of kvlab/engine."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
