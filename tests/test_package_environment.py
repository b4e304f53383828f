"""What `import kvlab` puts into the environment for libraries that read it when they are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PRINT = "import json, os, kvlab; print(json.dumps([os.environ.get(name) for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')]))"


@pytest.mark.parametrize(("given", "expected"), [
    ({}, ["PASSIVE", "3000"]),
    ({"GOMP_SPINCOUNT": "7"}, ["PASSIVE", "7"]),
    ({"OMP_WAIT_POLICY": "ACTIVE"}, ["ACTIVE", None]),
    ({"OMP_WAIT_POLICY": "PASSIVE"}, ["PASSIVE", None]),
])  # fmt: skip
def test_how_threads_wait_is_set_unless_somebody_chose(given: dict[str, str], expected: list[str | None]) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | given
    run = subprocess.run([sys.executable, "-c", PRINT], env=env, capture_output=True, encoding="utf-8", check=True)
    assert json.loads(run.stdout) == expected
