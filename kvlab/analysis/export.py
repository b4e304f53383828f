"""Figures to files: SVG, PDF, PNG and stand-alone HTML, without network. The first three are drawn by a local Chromium through kaleido.

SVG and PDF are the same bytes for the same figure and the same browser: traces get fixed uids, the name that plotly.js makes up for a
figure is replaced, and the PDF's dates are set to the epoch (or SOURCE_DATE_EPOCH). Another browser version may set text elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

from kvlab.types import UserError

FORMATS = (".svg", ".pdf", ".png", ".html")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
"""Looked for on the PATH, in this order, where BROWSER_PATH is not set."""

_KEPT: list[str] = []
"""The browser of the server that runs, once one has been started: a second figure takes a tenth of the first one's time."""


def save_figure(fig: go.Figure, path: str | Path, *, width: int = 700, height: int | None = None, scale: float = 2.0) -> Path:
    """Write a figure; the format follows from the path's ending. Returns the path.

    Args:
        fig: a plotly figure (a FigureWidget as well). path: its folder is made if it isn't there.
        width, height: CSS pixels (96 an inch); height None: the figure's own. A column of 8.5 cm prints 480 pixels with text of 6.5
            points. In .html both are the figure's own and its width is the page's.
        scale: PNG only: pixels of the file per CSS pixel.

    Raises:
        UserError: another ending, a size that is no size, no browser or no kaleido, a folder that can't be written, a browser that failed.
    """
    target = Path(path)
    ending = target.suffix.lower()
    if ending not in FORMATS:
        raise UserError(f"{target.name!r}: a figure is saved as {', '.join(FORMATS)}, and the name's ending says which.")
    for name, value in (("width", width), ("height", height), ("scale", scale)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value <= 10_000):
            raise UserError(f"{name} = {value!r} is not allowed: a number in (0, 10000].")
    fixed = _fixed(fig)
    data = _html(fixed) if ending == ".html" else _drawn(fixed, ending[1:], width, height, scale)
    return written(target, data, "Give another path.")


def written(target: Path, data: bytes, advice: str) -> Path:
    """Write a file; its folder is made if it isn't there. UserError with the reason and `advice`: it can't be."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    except OSError as error:
        raise UserError(f"{target} can't be written: {error.strerror or error}. {advice}") from error
    return target


def find_browser() -> str:
    """The Chromium that draws: BROWSER_PATH, else the first of `BROWSERS` on the PATH. UserError: there is none."""
    named = os.environ.get("BROWSER_PATH")
    if named:
        if shutil.which(named) is None:
            raise UserError(f"BROWSER_PATH = {named!r} is no program that can be started. Set it to a Chromium or Chrome, or unset it.")
        return named
    for name in BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    raise UserError("Saving as SVG, PDF or PNG needs a Chromium or Chrome, and none is on the PATH. Install one (Debian, Ubuntu: apt-get "
                    "install chromium) or set BROWSER_PATH to it; .html needs none.")  # fmt: skip


def _fixed(fig: go.Figure) -> go.Figure:
    """A copy whose traces all have uids that do not change from one call to the next."""
    copy = go.Figure(fig.to_dict())
    for number, trace in enumerate(copy.data):
        trace.uid = f"trace-{number}"
    return copy


def _html(fig: go.Figure) -> bytes:
    text = pio.to_html(fig, include_plotlyjs=True, include_mathjax=False, full_html=True, div_id="figure", config={"displaylogo": False})
    return str(text).encode("utf-8")


def _drawn(fig: go.Figure, kind: str, width: int, height: int | None, scale: float) -> bytes:
    kaleido = _server()
    options = {"format": kind, "width": width, "height": height or fig.layout.height or 420, "scale": scale if kind == "png" else 1}
    try:
        data = kaleido.calc_fig_sync(fig.to_dict(), opts=options)
    except Exception as error:  # whatever went wrong in another process: the browser, its pipe, the page's script
        close_browser()
        raise UserError(f"{find_browser()} did not draw the figure: {type(error).__name__}: {error}. Try again, or another browser "
                        "(BROWSER_PATH); .html needs none.") from error  # fmt: skip
    if kind == "svg":
        return _steady_svg(data.decode("utf-8")).encode("utf-8")
    return _steady_pdf(data) if kind == "pdf" else bytes(data)


def _server() -> Any:
    """kaleido with its browser running, without MathJax, which it would fetch."""
    try:
        import kaleido
    except ImportError:
        raise UserError("Saving as SVG, PDF or PNG needs the package kaleido: pip install 'kvlab[export]'. .html does not.") from None
    browser = find_browser()
    if _KEPT and _KEPT[0] != browser:
        close_browser()
    if not _KEPT:
        kaleido.start_sync_server(n=1, mathjax=False, path=browser, silence_warnings=True)
        _KEPT.append(browser)
    return kaleido


def close_browser() -> None:
    """End the browser that `save_figure` keeps for the next figure; it ends with the process anyway."""
    if _KEPT:
        import kaleido

        _KEPT.clear()
        kaleido.stop_sync_server(silence_warnings=True)


def _steady_svg(text: str) -> str:
    """plotly.js puts a random hexadecimal name of six digits into the ids of a figure; all take the same one here."""
    found = re.search(r'id="(?:top)?defs-([0-9a-f]{6})"', text)
    return text.replace(found.group(1), "f00000") if found else text


def _steady_pdf(data: bytes) -> bytes:
    """Dates of the same length, so that the offsets in the file still hold."""
    moment = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", "0")))
    stamp = time.strftime("D:%Y%m%d%H%M%S+00'00'", moment).encode("ascii")
    return re.sub(rb"D:\d{14}\+00'00'", stamp, data)
