"""Pareto fronts over runs: which runs another dominates, and which none does."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.plots.steps import OF_RUNS
from kvlab.analysis.plots.sweeps import KNOWN
from kvlab.analysis.template import BLUE, VERMILLION, figure, need, need_numbers, nothing, plot
from kvlab.objectives import Objective, kept_off, undominated
from kvlab.types import UserError

GREY = "#8C8C8C"


def pareto_front(frame: pd.DataFrame, objectives: Mapping[str, str], refusing: bool = False) -> pd.Series:
    """True for each row that no other row dominates: at least as good in every objective and better in one.

    The rule is that of `Runs.pareto`: runs that did not finish neither stand on the front nor beat others, nor do those that refused
    requests (their figures are those of an easier workload).

    Args:
        frame: one row a run. objectives: column -> "min" or "max". Rows without a value in one of them are never on the front.
        refusing: whether runs that refused requests may be on it.

    Raises:
        UserError: no objective, a direction other than min and max, a missing column, or one that holds no numbers.
    """
    if not objectives or any(direction not in ("min", "max") for direction in objectives.values()):
        raise UserError(f'objectives = {dict(objectives)!r} is not allowed: columns with "min" or "max", '
                        'e.g. {"mean_ttft_ms": "min", "output_token_throughput_per_s": "max"}.')  # fmt: skip
    need(frame, list(objectives), OF_RUNS)
    need_numbers(frame, list(objectives), KNOWN)
    goals = [Objective(column, direction == "max") for column, direction in objectives.items()]
    stands = (kept_off(frame, refusing) == "").to_numpy(dtype=bool, copy=True)
    rows = frame.loc[stands, list(objectives)].astype(float)
    losses = [[goal.loss(value) for goal, value in zip(goals, row, strict=True)] for row in rows.itertuples(index=False)]
    stands[stands] = undominated(losses)
    return pd.Series(stands, index=frame.index, dtype=bool)


@plot
def pareto(
    frame: pd.DataFrame, objectives: Mapping[str, str], name: str = "run", title: str | None = None, refusing: bool = False
) -> go.Figure:
    """Runs as points over two objectives; those that none dominates are named and joined by a staircase: what lies behind it is beaten.

    Runs that refused requests are open crosses, runs that did not finish are not drawn; a line below says how many of either.

    Args:
        frame: `runs.frame`. objectives: two columns with their directions, the first on the x axis; see `pareto_front`.
        name: column that names a point (of points at one place the first is named, hovering names all).
        refusing: whether runs that refused requests may be on the front.

    Raises:
        UserError: not two objectives, or as `pareto_front`.
    """
    if len(objectives) != 2:
        raise UserError(f"pareto draws two objectives, not {len(objectives)}: {', '.join(objectives)}.")
    need(frame, [*objectives, name], OF_RUNS)
    need_numbers(frame, list(objectives), KNOWN)
    (x, x_goes), (y, y_goes) = objectives.items()
    fig = figure(title or "Pareto front", 460)
    runs = frame.dropna(subset=[x, y])
    unfinished = (kept_off(runs, refusing=True) != "").to_numpy(dtype=bool)
    num_unfinished, runs = int(unfinished.sum()), runs[~unfinished]
    if runs.empty:
        return nothing(fig, f"no {'finished ' if num_unfinished else ''}run has both {x} and {y}")
    on_front, why = pareto_front(runs, objectives, refusing), kept_off(runs, refusing)
    rest, refused = runs[~on_front & (why == "")], runs[why != ""]
    hover = f"%{{customdata}}<br>{x} %{{x:,.5~g}}<br>{y} %{{y:,.5~g}}<extra></extra>"
    if len(rest):
        fig.add_scatter(x=rest[x], y=rest[y], mode="markers", name="dominated", customdata=rest[name].astype(str), hovertemplate=hover,
                        marker={"color": "white", "size": 8, "line": {"color": GREY, "width": 1.5}})  # fmt: skip
    if len(refused):
        fig.add_scatter(x=refused[x], y=refused[y], mode="markers", name="refused requests",
                        customdata=refused[name].astype(str) + ": " + why[why != ""], hovertemplate=hover,
                        marker={"color": VERMILLION, "size": 9, "symbol": "x-open", "line": {"width": 1.5}})  # fmt: skip
    best = runs[on_front].sort_values([x, y], ascending=[x_goes == "min", y_goes == "min"], kind="stable")
    first = ~best.duplicated(subset=[x, y])
    # Walking from the best x to the worst, y gets better: the corner between two points is the next one's x at the last one's y.
    fig.add_scatter(
        x=best[x], y=best[y], mode="lines+markers+text", name="Pareto front", text=best[name].astype(str).where(first, ""),
        textposition=f"{'bottom' if y_goes == 'min' else 'top'} {'left' if x_goes == 'min' else 'right'}",
        customdata=best[name].astype(str), hovertemplate=hover, line={"color": BLUE, "width": 2, "shape": "hv"},
        marker={"color": BLUE, "size": 10, "symbol": "diamond"}, textfont={"size": 11}, cliponaxis=False,
    )  # fmt: skip
    fig.update_layout(hovermode="closest")
    _note(fig, len(refused), num_unfinished)
    arrow = {"min": "lower is better", "max": "higher is better"}
    fig.update_xaxes(title_text=f"{KNOWN.get(x, x)}; {arrow[x_goes]}", range=_room(runs[x], x_goes), nticks=6)
    return fig.update_yaxes(title_text=f"{KNOWN.get(y, y)};<br>{arrow[y_goes]}", range=_room(runs[y], y_goes))


def _note(fig: go.Figure, num_refusing: int, num_unfinished: int) -> None:
    """Says below the figure which runs can't be on its front."""
    said = [f"{what}: {number} {'run' if number == 1 else 'runs'}" for number, what in (
        (num_refusing, "Left out of the front, as they refused requests"), (num_unfinished, "Not drawn, as they did not finish")) if number]
    if said:
        fig.add_annotation(text="<br>".join(said), x=0, xref="paper", xanchor="left", y=0, yref="paper", yanchor="top", yshift=-50,
                           align="left", showarrow=False, font={"size": 11, "color": "#666666"})  # fmt: skip
        fig.update_layout(margin_b=66 + 16 * len(said))


def _room(values: pd.Series, direction: str) -> list[float]:
    """The range of the values with room for names on the better side."""
    low, high = float(values.min()), float(values.max())
    span = (high - low) or abs(high) or 1.0
    wide, narrow = 0.3 * span, 0.08 * span
    return [low - (wide if direction == "min" else narrow), high + (wide if direction == "max" else narrow)]
