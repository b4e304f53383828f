"""Cost models from measurements: fitted on a recorded run, or a roofline of this machine.

    python -m kvlab.calibration run=runs/real      what a fit on that run gives, and its error on held-out steps
    python -m kvlab.calibration                    this machine's matrix rate, memory bandwidth and overheads (a few seconds)

    python -m kvlab.experiment runner=simulated cost_model=fitted cost_model.run=runs/real
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab.building import build
from kvlab.doors import exit_code
from kvlab.engine.cost import CostModel, Fit, Fitted, fit_steps
from kvlab.engine.cost.linear import SCALES
from kvlab.model.config import LlamaConfig
from kvlab.results import Run
from kvlab.shared import named
from kvlab.types import KvlabError, UserError, unknown_name

HOST_MS = ("schedule_ms", "commit_ms", "record_ms")
VIRTUAL = ("simulated", "recorded")
"""Devices of runs whose clock is not this machine's: their host time is no part of their steps."""

WORK_COLUMNS = ("num_prompt_tokens_computed", "num_generation_tokens", "num_scheduled_seqs", "num_decode_seqs", "num_kv_tokens_read",
                "num_attention_pairs", "swapped_in_blocks", "swapped_out_blocks", "cow_copies")  # fmt: skip
"""What `work_of` looks at."""


def work_of(steps: pd.DataFrame) -> np.ndarray:
    """A steps table as (steps, features): the columns of `kvlab.engine.cost.linear.features`, from what was recorded."""
    tokens = steps["num_prompt_tokens_computed"] + steps["num_generation_tokens"]
    decodes = steps["num_decode_seqs"]
    moved = steps["swapped_in_blocks"] + steps["swapped_out_blocks"] + steps["cow_copies"]
    columns = (np.ones(len(steps)), steps["num_scheduled_seqs"] - decodes, tokens - decodes, decodes, steps["num_kv_tokens_read"],
               steps["num_attention_pairs"], moved)  # fmt: skip
    return np.column_stack([np.asarray(column, dtype=np.float64) for column in columns])


def calibrate(run: str | Path | Run, host: bool | None = None, skip: int = 1) -> Fit:
    """Fit step times of a recorded run.

    Args:
        run: its folder, or a `Run`. host: whether a step's host time (schedule, commit, record) is part of it, as it is part of what a
            request waits for; None: yes for real runs, no for simulated ones. skip: steps left out at the start (they pay for
            memory and warm-up once).
    Raises:
        UserError: no such folder, nothing recorded, a time that is not a number, too few steps, or steps of one kind only.
    """
    if isinstance(skip, bool) or not isinstance(skip, int) or skip < 0:
        raise UserError(f"skip = {skip!r} is not allowed: 0 or more steps to leave out at the start.")
    loaded = run if isinstance(run, Run) else _load(run)
    steps = loaded.steps()
    source = str(loaded.folder or loaded.name)
    if not len(steps):
        raise UserError(f"{source} has no recorded steps (record.steps=false, or not a run's folder). Record the run again.")
    steps = steps[(steps["num_prompt_tokens_computed"] + steps["num_generation_tokens"]) > 0].iloc[skip:]
    if len(steps) and not steps["num_scheduled_seqs"].any():
        raise UserError(f"{source} was recorded by an older kvlab: its steps lack 'num_scheduled_seqs' and others. Record it again.")
    is_host = loaded.env.get("device") not in VIRTUAL if host is None else host
    milliseconds = steps[["execute_ms", *(HOST_MS if is_host else ())]].sum(axis=1, skipna=False)
    return fit_steps(work_of(steps), milliseconds.to_numpy(dtype=np.float64) / 1e3, source)


def _load(run: str | Path) -> Run:
    named(run, "the recorded run")
    if not Path(run).is_dir():
        raise UserError(f"There is no run folder {str(run)!r}. Give the folder of a recorded run (the one with steps.parquet).")
    return Run.load(run)


def fitted(run: str | None = None, host: bool | None = None, skip: int = 1, config: Mapping[str, Any] | None = None) -> CostModel:
    """cost_model=fitted: a linear cost model with the coefficients of a recorded run.

    Args:
        run, host, skip: see `calibrate`. config: of the run that is to be simulated; its model must have the shape of the fit's.
    Raises:
        UserError: as `calibrate`, or another model.
    """
    if not run:
        raise UserError("cost_model=fitted needs cost_model.run=FOLDER, the folder of a recorded run of the same model.")
    loaded = _load(run)
    fit = calibrate(loaded, host, skip)
    if config is not None and "model" in loaded.config:
        _same_shape(loaded.config["model"], config["model"], run)
    return Fitted(fit)


def _same_shape(recorded: Mapping[str, Any], simulated: Mapping[str, Any], run: str) -> None:
    """Coefficients are those of one model: another one's steps would be figures of nothing."""
    try:
        of_run = build(recorded).shape()
    except KvlabError:
        return  # the recorded model is gone (a folder that was moved): nothing to compare
    of_simulated = build(simulated).shape()
    if _sizes(of_run) != _sizes(of_simulated):
        ran, other = (f"{s.num_layers} layers and {s.num_parameters:,} weights" for s in (of_run, of_simulated))
        raise UserError(f"cost_model.run = {run}: a run of a model of {ran}; the model to simulate has {other}. "
                        "Give the same model=..., or record a run of this one.")  # fmt: skip


def _sizes(shape: LlamaConfig) -> tuple[int, ...]:
    return (shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.num_heads, shape.num_kv_heads)


def describe_cost(cost: CostModel, steps: pd.DataFrame) -> dict[str, Any]:
    """What the summary of a simulated run says of its cost model. For a fit: also how many of its steps it had to extrapolate."""
    about = cost.describe()
    if isinstance(cost, Fitted) and len(steps):
        limits = np.array([cost.fit.ranges[name] for name in SCALES])
        about["extrapolated_steps"] = float((work_of(steps) > limits).any(axis=1).mean())
    return about


# ------------------------------------------------------------------------ this machine


def measure_machine(seconds: float = 1.0) -> dict[str, float]:
    """A roofline of the processor kvlab runs on: float32 matrix rate, bandwidth of reading weights, cost of a small operation.

    Returns the parameters of `Roofline`: tflops, gb_per_s, layer_overhead_us (15 small torch operations), transfer_gb_per_s. Medians
    of about `seconds` each; threads are torch's.
    """
    import torch

    a, b = torch.randn(512, 2048), torch.randn(2048, 2048)
    flops = 2 * 512 * 2048 * 2048
    weights, vector = torch.randn(64 << 20), torch.empty(64 << 20)  # 256 MiB: beyond any cache
    matrix, column = weights.view(8192, -1), torch.randn(weights.numel() // 8192)
    small = torch.randn(8, 576)
    with torch.inference_mode():
        matmul_s = _median_s(lambda: a @ b, seconds)
        read_s = _median_s(lambda: matrix @ column, seconds)
        copy_s = _median_s(lambda: vector.copy_(weights), seconds)
        launch_s = _median_s(lambda: small * small, seconds / 4)
    num_bytes = weights.numel() * 4
    return {"tflops": flops / matmul_s / 1e12, "gb_per_s": num_bytes / read_s / 1e9, "transfer_gb_per_s": num_bytes / copy_s / 1e9,
            "layer_overhead_us": 15 * launch_s * 1e6}  # fmt: skip


def _median_s(work: Callable[[], object], seconds: float) -> float:
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


# --------------------------------------------------------------------------- the door


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after a user's error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
        for key in given:
            if key not in ("run", "skip"):
                raise unknown_name("option", key, ("run", "skip"))
        if "run" in given:
            print(format_fit(calibrate(given["run"], skip=_whole(given.get("skip", "1")))))
        else:
            figures = measure_machine()
            print("\n".join(f"{name:<20}{value:>12.4g}" for name, value in figures.items()))
            print("\ncost_model=cpu dtype=float32 " + " ".join(f"cost_model.{name}={value:.4g}" for name, value in figures.items()))
    except KvlabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _whole(text: str) -> int:
    if not text.isdigit():
        raise UserError(f"skip={text} is not allowed: a whole number of steps.")
    return int(text)


def format_fit(fit: Fit) -> str:
    """Coefficients and errors as text."""
    lines = [f"{name:<16}{value:>14.6g}" + ("   (never occurred)" if name in fit.not_seen else "")
             for name, value in fit.coefficients.items()]  # fmt: skip
    lines += ["", f"{'errors':<16}{'steps':>8}{'mean':>10}{'median':>10}{'p90':>10}{'total':>10}"]
    for name, e in (("seen", fit.seen), ("held out", fit.held_out)):
        lines.append(f"{name:<16}{e.num_steps:>8}{e.mape:>10.2%}{e.median:>10.2%}{e.p90:>10.2%}{e.total:>+10.2%}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
