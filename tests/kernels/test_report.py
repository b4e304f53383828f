"""Kernels compiled ahead of time for GPUs that aren't here: in processes of their own, which must not interpret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.kernels import report

ROOT = Path(__file__).parents[2]


def run(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, "-m", "kvlab.kernels.report", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_shipped_kernels_compile_without_spills(target: str) -> None:
    """Both attention kernels among them, with matrix instructions and 128-bit loads (the report's own rules, asserted here again)."""
    done = run("--target", target)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(target)]
    assert all(int(line.split()[2]) <= 16 for line in rows)
    for kernel in ("decode_kernel", "prefill_kernel"):
        own = [line.split() for line in rows if kernel in line]
        assert own
        assert all(line[4] == "yes" and line[5] in ("mma", "wgmma", "mma wgmma") for line in own)
    for kernel in ("rms_norm", "rotary", "silu_and_mul", "cache_write", "rerotate", "move_blocks", "reduce"):
        assert any(f"{kernel}_kernel" in line for line in rows), kernel
    assert f"{len(rows)} compilations, 0 fall short" in done.stdout


@pytest.mark.full
def test_every_shipped_variant() -> None:
    done = run("--all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ compilations, 0 fall short", done.stdout)


@pytest.mark.slow
def test_what_the_command_refuses() -> None:
    done = run(interpret=True)
    assert (done.returncode, "TRITON_INTERPRET is set" in done.stderr) == (2, True)
    done = run("--kernel", "no_such")
    assert (done.returncode, "No kernel's name holds 'no_such'" in done.stderr) == (2, True)


def test_what_falls_short_is_shown() -> None:
    good = report.Row("sm_80", "good_kernel", 40, 8, 1024, True, "mma", ())
    bad = report.Row("sm_80", "bad_kernel", 255, 480, 1024, False, "", ("480 bytes of stack, more than 16: registers spill",))
    lines = report.table([good, bad]).splitlines()
    assert lines[1].split() == ["sm_80", "40", "8", "1024", "yes", "mma", "good_kernel"]
    assert lines[3] == "       FAULT: 480 bytes of stack, more than 16: registers spill"
    assert lines[4] == "2 compilations, 1 fall short"


@pytest.mark.parametrize(("ptx", "is_wide"), [
    ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", True), ("ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 ];", True),
    ("ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd3 ];", True), ("cp.async.ca.shared.global [ %r1 ], [ %rd1 ], 0x4, %r2;", False),
    ("ld.global.v2.b32 { %r1, %r2 }, [ %rd1 ];", False), ("st.global.v4.b32 [ %rd1 ], { %r1, %r2, %r3, %r4 };", False),
])  # fmt: skip
def test_what_counts_as_a_128_bit_load(ptx: str, is_wide: bool) -> None:
    assert (report.WIDE_LOAD.search(ptx) is not None) == is_wide


def test_without_triton_and_without_a_gpu() -> None:
    """An engine on torch needs no Triton; one on Triton says what it needs."""
    code = """
import sys, torch
from kvlab.engine.runners.backends import make_backend
from kvlab.types import UserError
cpu = torch.device("cpu")
try:
    make_backend("triton", cpu)
except UserError as error:
    print(error)
kernels = [name for name in sys.modules if name.split(".")[0] == "triton" or "triton" in name and name.startswith("kvlab")]
for name in kernels:
    del sys.modules[name]
sys.meta_path.insert(0, type("Nothing", (), {"find_spec": staticmethod(lambda name, *_: (_ for _ in ()).throw(ModuleNotFoundError(name))
                                                                       if name.split(".")[0] == "triton" else None)}))
import kvlab, kvlab.assembly
print(make_backend("auto", cpu).name, make_backend("torch", cpu).name)
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=ROOT, env=env)
    refused, names = done.stdout.splitlines()
    assert refused.startswith("backend=triton needs a CUDA device, and this run is on cpu: use backend=torch. (For tests,")
    assert "set TRITON_INTERPRET=1" in refused
    assert names == "torch torch"


STEPS = """
import torch
from kvlab.kernels.decode_attention import decode_launches
from kvlab.kernels.prefill_attention import prefill_launch

OPTIONS = dict.fromkeys(("window", "sink_logits_H", "soft_cap", "k_scale", "v_scale", "config"))
OPTIONS |= dict(num_sink_tokens=0, capability=(9, 0))
cache = torch.empty(4, 16, 2, 64, dtype=torch.bfloat16)

def ints(*shape, at):  # beginning at an odd place of a buffer
    return torch.zeros(1000, dtype=torch.int64)[at:][: torch.Size(shape).numel()].view(shape)

found = set()
for num_seqs, width, splits, at in [(1, 1, 2, 0), (16, 16, 16, 1), (3, 17, 5, 2), (32, 5, 128, 3)]:
    q = torch.empty(num_seqs, 6, 64, dtype=torch.bfloat16)
    tables, lengths = ints(num_seqs, width, at=at), ints(num_seqs, at=at)
    launches = decode_launches(q, cache, cache, tables, lengths, 1.0, mass_out=None, num_splits=splits, out=q, sms=132, **OPTIONS)
    starts = ints(num_seqs + 1, at=at)
    launches.append(prefill_launch(q, cache, cache, tables, starts, lengths, 64, 1.0, out=q, **OPTIONS))
    found |= {str(launch.variant()) for launch in launches}
print(len(found))
"""


@pytest.mark.slow
def test_steps_of_all_sizes_run_what_was_compiled_once() -> None:
    """Decode, reduction and prefill: one compilation each, whatever the numbers of sequences and splits, the tables' width, and where in a
    buffer tables and lengths begin. (Each more would stop a run for a second or two.)"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, encoding="utf-8", cwd=ROOT, env=env)
    assert done.stdout.split() == ["3"], done.stderr
