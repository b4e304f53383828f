"""What each tenant got: service received over time, the quantity that fair scheduling policies balance."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.plots.steps import OF_REQUESTS, TIME
from kvlab.analysis.template import line_style, need, nothing, panels, plot
from kvlab.types import UserError


@plot
def service(
    requests: pd.DataFrame, prompt_weight: float = 1.0, output_weight: float = 2.0, num_bins: int = 40, title: str = "Service received"
) -> go.Figure:
    """Service received by each tenant: in all so far, and per second in `num_bins` equal stretches of time.

    Service is prompt_weight * prompt tokens + output_weight * output tokens (Sheng et al., "Fairness in serving large language models",
    OSDI 2024, with their weights 1 and 2). A prompt counts when its first token came, cached or not; a request's output tokens of all
    its sequences are spread evenly over the times of the first one's. Requests without a tenant are the tenant "(none)"; requests
    without a token received nothing.

    Raises:
        UserError: a missing column, weights below 0, num_bins below 1.
    """
    if prompt_weight < 0 or output_weight < 0 or num_bins < 1:
        raise UserError(f"prompt_weight = {prompt_weight}, output_weight = {output_weight}, num_bins = {num_bins} is not allowed: weights "
                        "of at least 0, at least 1 stretch.")  # fmt: skip
    need(requests, ["tenant", "arrival_s", "num_prompt_tokens", "num_output_tokens", "token_times_s"], OF_REQUESTS)
    fig = panels(title, 2, 480)
    served = requests[[len(times) > 0 for times in requests["token_times_s"]]] if len(requests) else requests
    if served.empty:
        return nothing(fig, "no request received a token")
    tenants = served["tenant"].fillna("").replace("", "(none)")
    begin = float(served["arrival_s"].min())
    end = max(float(times[-1]) for times in served["token_times_s"])
    edges = np.linspace(begin, max(end, begin + 1e-9), num_bins + 1)
    for number, tenant in enumerate(sorted(tenants.unique())):
        times, amounts = _received(served[tenants == tenant], prompt_weight, output_weight)
        total = np.concatenate([[0.0], np.cumsum(amounts)])
        at_edge = total[np.searchsorted(times, edges, side="right")]
        line = line_style(number)["line"]
        for row, (y, shape) in enumerate(((at_edge, "linear"), ([*np.diff(at_edge) / np.diff(edges), 0.0], "hv")), start=1):
            fig.add_scatter(x=edges, y=y, name=tenant, legendgroup=tenant, mode="lines", line={**line, "shape": shape}, row=row, col=1,  # type: ignore[dict-item]
                            showlegend=row == 1, hovertemplate="%{y:,.4~g}")  # fmt: skip
    what = f"{prompt_weight:g} x prompt + {output_weight:g} x output tokens"
    fig.update_yaxes(title_text="service so far", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(title_text="service per second", rangemode="tozero", row=2, col=1)
    return fig.update_xaxes(title_text=f"{TIME}<br>service = {what}", row=2, col=1)


def _received(requests: pd.DataFrame, prompt_weight: float, output_weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Times and amounts of service, in order of time."""
    times, amounts = [], []
    for prompt, output, when in zip(requests["num_prompt_tokens"], requests["num_output_tokens"], requests["token_times_s"], strict=True):
        share = np.full(len(when), output_weight * output / len(when))
        share[0] += prompt_weight * prompt
        times.append(np.asarray(when, dtype=np.float64))
        amounts.append(share)
    time, amount = np.concatenate(times), np.concatenate(amounts)
    order = np.argsort(time, kind="stable")
    return time[order], amount[order]
