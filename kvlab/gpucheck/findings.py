"""What a check found: a row a figure, with what was predicted on paper and what is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure.

    Attributes:
        section, name: where it belongs and what it is. setting: what was varied (block_size, dtype ...), for plots.
        value, unit: as measured; value None: not measured, `note` says why.
        predicted: of the same unit, from bytes and FLOPs over the card's measured rates; None where there is no such model.
        goal: what is asked for, in words; "" for none. ok: whether it holds; None where nothing is asked, or nothing was measured.
    """

    section: str
    name: str
    value: float | None
    unit: str
    setting: dict[str, Any] = field(default_factory=dict)
    predicted: float | None = None
    goal: str = ""
    ok: bool | None = None
    note: str = ""

    def row(self) -> dict[str, Any]:
        """Flat, for a frame: settings as columns of their own."""
        plain = {name: getattr(self, name) for name in ("section", "name", "value", "unit", "predicted", "goal", "ok", "note")}
        return {**plain, **{f"setting.{key}": value for key, value in self.setting.items()}}

    @property
    def label(self) -> str:
        """Name with its settings."""
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.setting.items())])


def at_least(value: float, goal: float, unit: str) -> tuple[str, bool]:
    """(goal in words, whether it holds)."""
    return f">= {goal:g} {unit}", value >= goal


def at_most(value: float, goal: float, unit: str) -> tuple[str, bool]:
    """(goal in words, whether it holds)."""
    return f"<= {goal:g} {unit}", value <= goal
