"""The sections in order; one that fails is reported with its traceback, and the others go on."""

from __future__ import annotations

import datetime
import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kvlab.gpucheck.block_sizes import block_size_curve
from kvlab.gpucheck.card import Rates, environment, find_device, measure_rates
from kvlab.gpucheck.correctness import correctness
from kvlab.gpucheck.findings import Finding
from kvlab.gpucheck.policies import across_policies, graphs, swap_round_trip
from kvlab.gpucheck.report import write_report
from kvlab.gpucheck.sizes import DRY, FULL, Sizes
from kvlab.gpucheck.speed import decode_speed, prefill_speed
from kvlab.gpucheck.throughput import end_to_end
from kvlab.gpucheck.tokens import RANDOM, teacher_forced
from kvlab.types import UserError, unknown_name

Section = Callable[[torch.device, Rates, Sizes, str], list[Finding]]

SECTIONS: dict[str, Section] = {
    "correctness": lambda device, rates, sizes, model: correctness(device, sizes),
    "swap": lambda device, rates, sizes, model: swap_round_trip(device, sizes),
    "decode": lambda device, rates, sizes, model: decode_speed(device, rates, sizes),
    "prefill": lambda device, rates, sizes, model: prefill_speed(device, rates, sizes),
    "tokens": lambda device, rates, sizes, model: teacher_forced(device, sizes, model),
    "policies": lambda device, rates, sizes, model: across_policies(device, sizes, model),
    "graphs": lambda device, rates, sizes, model: graphs(device, sizes, model),
    "block_size": lambda device, rates, sizes, model: block_size_curve(device, rates, sizes),
    "end_to_end": lambda device, rates, sizes, model: end_to_end(device, rates, sizes),
}

MEANING = {
    "correctness": "kernels against float64 over head sizes, groups, block sizes, types",
    "swap": "blocks out and in again, bit for bit",
    "decode": "decode attention: bandwidth and latency over block sizes, beside torch's on contiguous K and V",
    "prefill": "prefill attention: share of the matrix rate",
    "tokens": "logits and best tokens against the CPU's float32, beside transformers'",
    "policies": "tokens across policies, block sizes, swap, depth",
    "graphs": "tokens of decodes as CUDA graphs against eager ones",
    "block_size": "end-to-end latency of a Llama-3-8B shape over block sizes",
    "end_to_end": "a Llama-3-8B shape: step time over its floor, throughput over transformers'",
}


TIMED = ("decode", "prefill", "block_size", "end_to_end")
"""Sections whose goals are times: a dry run states them and judges none."""


def run_sections(names: list[str], dry: bool, folder: Path, model: str) -> int:
    """Run the named sections (all if none is named), write the report as it grows, print it. Returns 0 if all goals hold, else 1.

    Raises:
        UserError: an unknown section, a model that isn't there, a device that can't serve, a folder that isn't empty or writable.
    """
    for name in names:
        if name not in SECTIONS:
            raise unknown_name("section", name, list(SECTIONS))
    if model not in ("", RANDOM) and not (Path(model) / "config.json").is_file():
        raise UserError(f"--model {model} is no folder of a model (it holds no config.json): give one, {RANDOM}, or nothing.")
    device = find_device(dry)
    _make_ready(folder)
    sizes = DRY if dry else FULL
    about = environment(device, dry) | {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}
    print(f"{about['card']}: measuring its own rates", flush=True)
    rates, findings = measure_rates(device, sizes.copy_bytes, sizes.matrix_size, sizes.num_repeats)
    failures: dict[str, str] = {}
    for name in names or SECTIONS:
        start = time.perf_counter()
        try:
            found = SECTIONS[name](device, rates, sizes, model)
            findings += [replace(one, ok=None) for one in found] if dry and name in TIMED else found
        except UserError as error:
            failures[name] = str(error)
        except Exception:  # the card's time is short: what the other sections find is kept
            failures[name] = traceback.format_exc()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        write_report(folder, about, findings, failures)
        print(f"{name}: {time.perf_counter() - start:.1f} s{', FAILED' if name in failures else ''}", flush=True)
    print((folder / "README.md").read_text(encoding="utf-8"))
    return 1 if failures or any(finding.ok is False for finding in findings) else 0


def _make_ready(folder: Path) -> None:
    """An empty folder in which the report can be written; an earlier report is never written over."""
    try:
        if folder.exists() and any(folder.iterdir()):
            what = "a report already" if (folder / "findings.json").exists() else "files that are not a report of this check"
            raise UserError(f"{folder} holds {what}: choose another folder with --out.")
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / "probe"
        probe.write_bytes(bytes(1))
        probe.unlink()
    except OSError as error:
        raise UserError(f"No report can be written to {folder}: {error.strerror or error}. Choose another folder with --out.") from error
