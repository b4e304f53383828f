"""What `kvlab.explain` returns: sentences, advice and a table, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvlab.advising import Advice


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. Prints as text, shows as HTML in a notebook.

    Attributes:
        name: the run's. limit: what limited most of its time, a key of `kvlab.explaining.LIMITS`; None where no step that took time was
            recorded. shares: limit -> share of the run's time, adds up to 1. sentences: the paragraph. advice: knobs, the largest possible
            gain first. table: `subject`, `value`, `unit`, `from` (the columns that the value was taken from).
    """

    name: str
    limit: str | None
    shares: Mapping[str, float]
    sentences: tuple[str, ...]
    advice: tuple[Advice, ...]
    table: pd.DataFrame

    @property
    def text(self) -> str:
        """The paragraph, then the advice, a line each."""
        lines = [" ".join(self.sentences), *(f"- {advice}" for advice in self.advice)]
        return "\n".join(lines)

    def __str__(self) -> str:
        table = self.table.to_string(index=False, na_rep="unknown") if len(self.table) else ""
        return f"{self.text}\n\n{table}".rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{html.escape(str(advice))}</li>" for advice in self.advice)
        table = _table_html(self.table) if len(self.table) else ""
        words = f"<p><b>{html.escape(self.name)}</b>. {html.escape(' '.join(self.sentences))}</p>"
        return words + (f"<ul>{items}</ul>" if items else "") + table


def _table_html(table: pd.DataFrame) -> str:
    """Words to the left, numbers to the right with four digits."""
    sides = {str(name): f"text-align: {'right' if name == 'value' else 'left'}" for name in table}
    head = "".join(f'<th style="{side}">{name}</th>' for name, side in sides.items())
    shown = table.assign(value=["unknown" if np.isnan(value) else f"{value:,.4g}" for value in table["value"]])
    cells = [[f'<td style="{sides[name]}">{html.escape(str(cell))}</td>' for cell in shown[name]] for name in sides]
    rows = ["".join(row) for row in zip(*cells, strict=True)]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
