"""Fresh random inputs for the kernels' tests: their seed is logged, and KVLAB_TEST_SEED repeats it.

KVLAB_TEST_DEVICE=cuda runs attention's tests compiled, on a GPU. The others are of the interpreter, and of tensors on a CPU: there
`python -m kvlab.gpucheck` checks what the small kernels do.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("KVLAB_TEST_DEVICE", "cpu") != "cpu":
    collect_ignore = ["test_cache_kernels.py", "test_interpreter.py", "test_small_kernels.py", "test_triton_engine.py"]

SEED = int(os.environ.get("KVLAB_TEST_SEED", random.SystemRandom().randrange(2**31)))


def pytest_report_header() -> str:
    return f"KVLAB_TEST_SEED={SEED}"


@pytest.fixture
def seed() -> int:
    """The run's seed; printed, so that a failed test shows it."""
    print(f"KVLAB_TEST_SEED={SEED}")
    return SEED


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The interpreter works on small tiles: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
