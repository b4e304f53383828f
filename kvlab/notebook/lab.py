"""`policy_lab()`: write a policy, see at once whether it keeps its seam's contract, and race it against published ones.

The code runs as a notebook's cell would: its names are the notebook's afterwards, and the class is `lab.policy_class`, to be given to
`kvlab.run(config, eviction=lab.policy_class)`, a sweep or `kvlab.replay`. It runs in the kernel's own thread, so that the notebook's
interrupt button ends a policy that never comes back.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anywidget
import ipywidgets as w
import numpy as np
import plotly.graph_objects as go
import traitlets

from kvlab.analysis.template import BLACK, COLORWAY, TEMPLATE, VERMILLION
from kvlab.notebook.explorer_plot import redraw
from kvlab.notebook.lab_cell import Cell, CellError, fault, run_cell, shortened, user_namespace
from kvlab.notebook.lab_race import BOUND, Arena, Entrant, Finish, arenas, conversations, results_frame
from kvlab.notebook.lab_templates import RIVALS, TEMPLATES
from kvlab.notebook.parts import COMPARED, STATIC, Fit, Message, figure_widget, in_words, number, runs_table, table_html
from kvlab.policies.registry import list_policies
from kvlab.testing import check_policy
from kvlab.types import UserError, unknown_name

MAX_RIVALS = 8
HEIGHT = 420


class CodeArea(anywidget.AnyWidget):
    """A text area for Python. `error_line` is marked (0: none); `num_runs` counts presses of Ctrl-Enter."""

    _esm = STATIC / "code_area.js"
    _css = STATIC / "code_area.css"
    value = traitlets.Unicode("").tag(sync=True)
    error_line = traitlets.Int(0).tag(sync=True)
    num_runs = traitlets.Int(0).tag(sync=True)


def policy_lab(
    seam: str = "eviction",
    rivals: Sequence[str] | None = None,
    *,
    source: str | None = None,
    traces: Mapping[str, Any] | None = None,
    workloads: Mapping[str, Sequence[str]] | None = None,
    namespace: dict[str, Any] | None = None,
) -> PolicyLab:
    """A place to write a policy in; show it by ending a cell with it.

    Args:
        seam: whose template it starts with. rivals: names to race against; None: some well-known ones of the seam.
        source: Python to start with, in place of the template.
        traces: menu entry -> a trace as `kvlab.replay` takes it (a public trace's name, a file, lists of block ids), for races of
            eviction policies; None: conversations made here. workloads: menu entry -> overrides, for simulated runs.
        namespace: where the code's names live; None: the notebook's.

    Raises:
        UserError: an unknown seam or rival.
    """
    if seam not in TEMPLATES:
        raise unknown_name("seam with a template", seam, TEMPLATES)
    made_here = {"conversations": conversations()}
    return PolicyLab(seam, rivals, source, made_here if traces is None else traces, workloads,
                     user_namespace() if namespace is None else namespace)  # fmt: skip


class PolicyLab(w.VBox):  # type: ignore[misc] # ipywidgets has no types
    """See `policy_lab`.

    Attributes:
        code: the text area (`code.value`). policy_class: the class of the last cell that ran, and `seam` its seam; None before.
        results: one row an entrant of the last race, all figures. fig: the plotly FigureWidget.
    """

    def __init__(self, seam: str, rivals: Sequence[str] | None, source: str | None, traces: Mapping[str, Any],
                 workloads: Mapping[str, Sequence[str]] | None, namespace: dict[str, Any]) -> None:  # fmt: skip
        self._namespace, self._traces, self._workloads = namespace, traces, workloads
        self._cell: Cell | None = None
        self._checked: str | None = None  # the text that kept its contract, as long as `_cell` is what it made
        self._finishes: list[Finish] = []
        self._arenas: dict[str, Arena] = {}
        self.results = results_frame([])
        self._make_parts(seam)
        self._offer(seam, rivals)
        self.code.value = TEMPLATES[seam].strip("\n") + "\n" if source is None else source
        super().__init__([self._top(), self.code, self.message, self.printed, self.fig, self.table, self.fit], layout={"width": "100%"})
        self.template.observe(self._template_chosen, "value")
        self.code.observe(lambda _: self.check(), "num_runs")

    # ------------------------------------------------------------------ parts

    def _make_parts(self, seam: str) -> None:
        self.template = w.Dropdown(options=list(TEMPLATES), value=seam, layout={"width": "180px"})
        self.code = CodeArea()
        self.rivals = w.SelectMultiple(layout={"width": "180px", "height": "92px"})
        self.arena = w.Dropdown(layout={"width": "240px"})
        self.check_button = _button("Check contract", self.check, "run the cell and the contract of its seam (Ctrl-Enter)", "check")
        self.race_button = _button("Race", self.race, "against the chosen rivals", "flag-checkered", "primary")
        self.message = Message()
        self.printed = w.HTML(layout={"display": "none"})
        self.table = w.HTML(layout={"margin": "0 0 0 64px", "overflow": "auto"})
        self.fit = Fit()
        self.fig = figure_widget(_empty_figure())  # last: the page answers none of the others while it loads plotly
        self.fig.layout.title.text = "No race yet"

    def _top(self) -> w.Widget:
        def column(name: str, *parts: w.Widget) -> w.Widget:
            return w.VBox([w.Label(name), *parts], layout={"margin": "0 16px 8px 0"})

        buttons = w.HBox([self.check_button, self.race_button])
        return w.HBox([column("template", self.template), column("rivals (Ctrl-click for several)", self.rivals),
                       column("race on", self.arena, buttons)], layout={"flex_flow": "row wrap"})  # fmt: skip

    def _offer(self, template: str, rivals: Sequence[str] | None = None) -> None:
        """Rivals and races of a template's seam."""
        self.seam = template.partition(",")[0]
        names = [row.name for row in list_policies(self.seam) if row.name not in ("pinned", "leaf_first")]
        chosen = RIVALS[self.seam] if rivals is None else tuple(rivals)
        for name in chosen:
            if name not in names:
                raise unknown_name(f"{self.seam} policy", name, names)
        self._arenas = arenas(self.seam, self._traces, self._workloads)
        self.rivals.options, kept = [name for name in names if name != BOUND], self.arena.value
        self.arena.options = list(self._arenas)
        self.arena.value = kept if kept in self._arenas else next(iter(self._arenas))
        self.rivals.value = [name for name in chosen if name != BOUND]

    def _template_chosen(self, change: Any) -> None:
        self._offer(change["new"])
        self._cell, self.code.error_line = None, 0
        self.code.value = TEMPLATES[change["new"]].strip("\n") + "\n"
        self.message.say("")

    @property
    def policy_class(self) -> type | None:
        """The class of the last cell that ran."""
        return None if self._cell is None else self._cell.policy_class

    # ------------------------------------------------------------------ work

    def run_code(self) -> type:
        """Run the text as a cell; its policy class. CellError: what is wrong with it."""
        self._checked = None
        cell = run_cell(self.code.value, self._namespace)
        if cell.seam != self.seam:
            if cell.seam not in RIVALS:
                raise CellError(f"{cell.policy_class.__name__} is a {cell.seam} policy; the lab races {', '.join(RIVALS)}.")
            self._offer(cell.seam)
        self._cell = cell
        self.printed.value = f"<pre>{html.escape(shortened(cell.printed))}</pre>" if cell.printed else ""
        self.printed.layout.display = "" if cell.printed else "none"
        return cell.policy_class

    def check(self) -> bool:
        """Run the text and its seam's contract; whether it keeps it. What is wrong is said in words, with the line."""
        return self._guarded(self._check)

    def _check(self) -> None:
        cls = self.run_code()
        self.message.say(f"Checking {cls.__name__} ...")
        try:
            check_policy(cls, self.seam)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            assert self._cell is not None
            raise fault(error, self._cell) from error
        self._checked = self.code.value
        self.message.say(f"{cls.__name__} keeps the contract of {self.seam}: legal, deterministic, owns nothing but its metadata.", "good")

    def race(self) -> bool:
        """Check (unless this text was checked) and race; whether it came to an end. The last good picture stays if it did not."""
        return self._guarded(self._race)

    def _race(self) -> None:
        if self._cell is None or self._checked != self.code.value:
            self._check()
        assert self._cell is not None
        if len(self.rivals.value) > MAX_RIVALS:
            raise UserError(f"{len(self.rivals.value)} rivals are too many to tell apart: choose at most {MAX_RIVALS}.")
        arena = self._arenas[self.arena.value]
        bound = [BOUND] if self.arena.value.startswith("replay") else []
        mine = Entrant(self._cell.policy_class.__name__, self._cell.policy_class)
        entrants = [mine, *(Entrant(name, name) for name in [*self.rivals.value, *bound])]
        finishes = []
        competing = arena.compete(entrants)
        for place, entrant in enumerate(entrants):
            self.message.say(f"{arena.title}: {entrant.name} ({place + 1} of {len(entrants)}) ...")
            try:
                finishes.append(next(competing))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise (fault(error, self._cell) if entrant is mine else error) from error
        self._finishes, self.results = finishes, results_frame(finishes)
        self._draw(arena)
        self.message.say(_verdict(finishes, bool(bound)), "good")

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Whatever goes wrong is said in words; the kernel lives on. An interrupt or sys.exit() ends the work, not the kernel."""
        self.code.error_line = 0
        self.check_button.disabled = self.race_button.disabled = True
        try:
            work()
        except CellError as error:
            self.code.error_line = error.line or 0
            self.message.say(str(error), "error")
        except KeyboardInterrupt:
            self.message.say("Interrupted.", "error")
        except BaseException as error:
            self.message.say(in_words(error), "error")
        else:
            return True
        finally:
            self.check_button.disabled = self.race_button.disabled = False
        return False

    def figure(self) -> go.Figure:
        """The last race as a plain figure: for a page without a kernel, or for saving."""
        fig = go.Figure(self.fig)
        fig.data = [trace for trace in fig.data if trace.visible is not False]
        return fig

    def _draw(self, arena: Arena) -> None:
        mode = "lines+markers" if self._finishes[0].run is None else "lines"
        hidden = {"x": [], "y": [], "name": "", "visible": False, "mode": mode}
        edits = dict.fromkeys(range(MAX_RIVALS + 2), hidden)
        places = iter(range(1, MAX_RIVALS + 1))
        for rank, finish in enumerate(self._finishes):
            place = 0 if rank == 0 else MAX_RIVALS + 1 if finish.name == BOUND else next(places)
            edits[place] = {"x": finish.x, "y": finish.y, "name": finish.name, "visible": True, "mode": mode}
        titles = {"title.text": arena.title, "xaxis.title.text": arena.x_title, "yaxis.title.text": arena.y_title}
        redraw(self.fig, edits, titles)
        runs = [finish.run for finish in self._finishes if finish.run is not None]
        self.table.value = runs_table(runs, [run.name for run in runs], COMPARED) if runs else _replay_table(self._finishes)


def _empty_figure() -> go.Figure:
    """Mine, MAX_RIVALS rivals and the bound: made once, so that a race changes lines and nothing flickers."""
    fig = go.Figure(layout={"template": TEMPLATE, "height": HEIGHT, "hovermode": "closest", "title": {"text": ""}})
    fig.add_scatter(name="mine", visible=False, line={"color": VERMILLION, "width": 4}, marker={"size": 10})
    colors = [color for color in COLORWAY if color not in (VERMILLION, BLACK)]
    for place in range(MAX_RIVALS):
        style = {"color": colors[place % len(colors)], "width": 2, "dash": "solid" if place < len(colors) else "dot"}
        fig.add_scatter(visible=False, line=style, marker={"size": 7, "symbol": place + 1})
    fig.add_scatter(name=BOUND, visible=False, line={"color": BLACK, "width": 2, "dash": "dash"}, marker={"size": 6})
    fig.update_traces(hovertemplate="%{x:,.4g}: %{y:.1f} %<extra>%{fullData.name}</extra>")
    fig.update_yaxes(rangemode="tozero")
    return fig.update_xaxes(title_text="").update_yaxes(title_text="")


def _verdict(finishes: Sequence[Finish], has_bound: bool) -> str:
    """A sentence on how the first one did."""
    mine, others = finishes[0], [finish for finish in finishes[1:] if finish.name != BOUND]
    if mine.run is not None:
        ahead = [f.name for f in others if f.run is not None and f.run.summary["mean_ttft_ms"] > mine.run.summary["mean_ttft_ms"]]
        return f"{mine.name}: mean TTFT {number(mine.run.summary['mean_ttft_ms'])} ms, shorter than {_share(len(ahead), len(others))}."
    behind = sum(float(np.mean(f.y)) < float(np.mean(mine.y)) for f in others)
    text = f"{mine.name} finds {np.mean(mine.y):.1f} % of the blocks on average over capacities, more than {_share(behind, len(others))}"
    bound = float(np.mean(finishes[-1].y)) if has_bound else 0.0
    return text + (f"; with the future known {bound:.1f} % could be found." if has_bound else ".")


def _share(num_beaten: int, num_rivals: int) -> str:
    """So many of the rivals, in words."""
    if num_rivals < 2:
        return "its rival" if num_beaten else "nobody"
    return {0: "none of", num_rivals: "all"}.get(num_beaten, f"{num_beaten} of") + f" {num_rivals} rivals"


def _replay_table(finishes: Sequence[Finish]) -> str:
    """Blocks found in percent, any / in unbroken prefixes, best first, with the distance to the bound."""
    sizes = [f"{int(size):,} blocks" for size in finishes[0].x]
    bound = next((finish for finish in finishes if finish.name == BOUND), None)
    ordered = sorted(finishes, key=lambda finish: -float(np.mean(finish.y)))
    rows = []
    for finish in ordered:
        prefix = [100 * value for key, value in finish.row.items() if key.endswith("prefix")]
        cells = [f"{y:.1f} / {p:.1f}" for y, p in zip(finish.y, prefix, strict=True)]
        gap = "" if bound is None else f"{np.mean(bound.y) - np.mean(finish.y):.1f}"
        rows.append([finish.name, *cells, gap])
    return table_html(["blocks found (%): any / prefix", *sizes, "points to belady"], rows)


def _button(text: str, action: Callable[[], Any], tooltip: str, icon: str, style: str = "") -> w.Button:
    button = w.Button(description=text, tooltip=tooltip, icon=icon, button_style=style, layout={"width": "150px"})
    button.on_click(lambda _: action())
    return button

