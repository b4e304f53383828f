"""Launches as a GPU would see them, in a process of their own (`launching.py`): what is compiled ahead of time is what is launched, and all
of it before a run's first step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = ["cache_write_kernel", "decode_kernel", "move_blocks_kernel", "prefill_kernel", "reduce_kernel", "rms_norm_kernel",
           "rotary_kernel", "silu_and_mul_kernel"]  # fmt: skip


@pytest.mark.slow
def test_a_run_compiles_nothing_after_its_first_step() -> None:
    """Five settings of head sizes, types and block sizes, 5 and 3 among them, whose blocks are no multiple of 16 words; in each, blocks
    went out and in, some were copied, decodes went by graph and not. Every argument was bound as `Launch.variant` says."""
    folder = Path(__file__).parent
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join((str(folder.parent), str(folder.parents[1]), env.get("PYTHONPATH", "")))
    done = subprocess.run([sys.executable, str(folder / "launching.py")], capture_output=True, encoding="utf-8", env=env)
    settings = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(settings) == 5, done.stderr
    for setting in settings:
        assert setting["before"] == KERNELS
        assert setting["after"] == []
        assert setting["unlike"] == []
        assert setting["swapped"] > 0
        assert {"eager", "graph[4]"} <= set(setting["paths"])
    assert sum(setting["copied"] > 0 for setting in settings) >= 4  # blocks of one token are never shared in part
