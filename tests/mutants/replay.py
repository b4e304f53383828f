"""Mutants of kvlab/replay."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
