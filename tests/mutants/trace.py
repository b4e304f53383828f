"""Mutants of kvlab/trace."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
