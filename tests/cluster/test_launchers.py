"""Joblib, submitit's local executor and a Ray of two nodes give the same frame as one process (`make test-cluster`)."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sweep_support import SIMULATED, interrupted, states, sweep

import kvlab
from kvlab import sweep_folder
from kvlab.experiment import INTERRUPTED, OK, USER_ERROR, main
from kvlab.policies.eviction.lru import Lru
from kvlab.results import Runs
from kvlab.types import UserError

pytestmark = pytest.mark.cluster
HOSTS_OWN = ["folder", "mean_schedule_ms", "peak_process_rss_bytes"]
WORDS = ["num_blocks=12", "workload.num_requests=30"]


class Newest(Lru):
    """A policy of a test's module, which no worker can import: it must travel by value."""


@pytest.fixture(autouse=True)
def _in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digests = sweep_folder.code_digests()
    monkeypatch.setattr(sweep_folder, "code_digests", lambda: digests)


def grid() -> dict[str, list[Any]]:
    class Local(Newest):
        """Neither can this one."""

    return {"eviction": ["lru", Local], "watermark": [0, 0.1]}


def meet(folder: Path, **more: Any) -> None:
    """Two points run at the same time, in two processes: each waits until the other one has begun."""
    here, parent = folder / "meeting", os.getpid()
    here.mkdir()

    class Meets(Lru):
        """Waits, before its run, for a second process."""

        def __init__(self, place: int) -> None:
            self.place = place
            super().__init__()

        def reset(self) -> None:
            super().reset()
            if os.getpid() == parent:
                return  # where points are checked before any is run
            (here / str(os.getpid())).touch()
            end = time.monotonic() + 100
            while len(list(here.iterdir())) < 2:
                if time.monotonic() > end:
                    raise TimeoutError("nobody came")
                time.sleep(0.05)

    runs = sweep(folder / "meet", {"eviction": [Meets(0), Meets(1)]}, *WORDS, **more)
    assert [run.state for run in runs] == ["finished"] * 2, [run.error for run in runs]
    assert {str(run.status["pid"]) for run in runs} <= {p.name for p in here.iterdir()}


def frame(runs: Runs) -> pd.DataFrame:
    return runs.frame.drop(columns=HOSTS_OWN)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return frame(sweep(tmp_path_factory.mktemp("one") / "s", grid(), *WORDS))


@pytest.mark.parametrize(
    "more",
    [{"jobs": 2}, {"launcher": "joblib", "launcher_options": {"n_jobs": 2}},
     {"launcher": "slurm", "launcher_options": {"cluster": "local"}}],
)  # fmt: skip
def test_processes_of_this_machine_give_the_frame_of_one(tmp_path: Path, expected: pd.DataFrame, more: dict[str, Any]) -> None:
    runs = sweep(tmp_path / "s", grid(), *WORDS, **more)
    pd.testing.assert_frame_equal(frame(runs), expected)
    assert os.getpid() not in {run.status["pid"] for run in runs}
    meet(tmp_path, **more)
    again = sweep(tmp_path / "s", grid(), *WORDS, **more, resume=True)  # nothing is left to do
    assert [run.status["pid"] for run in again] == [run.status["pid"] for run in runs]


def test_the_command_lines_launchers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", *SIMULATED, *WORDS, "eviction=lru,fifo"]
    tables = []
    for launcher in ("basic", "joblib", "submitit_local"):
        assert main([*words, f"hydra/launcher={launcher}", f"hydra.sweep.dir={launcher}"]) == OK
        assert "2 of 2 runs finished." in capsys.readouterr().out
        tables.append(frame(kvlab.load_runs(launcher)))
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0])
    assert main([*words, "hydra/launcher=submitit_slurm", "hydra.sweep.dir=slurm"]) == USER_ERROR
    assert "Slurm needs a machine that has sbatch" in capsys.readouterr().err


@pytest.mark.parametrize("whole_group", [True, False])
def test_ctrl_c_in_joblibs_processes_loses_nothing_that_was_finished(tmp_path: Path, whole_group: bool) -> None:
    folder, numbers = tmp_path / "s", range(40, 48)
    words = ["-m", *SIMULATED, "workload.num_requests=600", "num_blocks=" + ",".join(map(str, numbers)), f"hydra.sweep.dir={folder}",
             "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]  # fmt: skip
    code, err = interrupted(folder, words, whole_group)
    assert code == INTERRUPTED, err
    assert "kvlab: interrupted." in err
    assert 1 <= states(folder).count("finished") < 8
    before = {run.name: run for run in kvlab.load_runs(folder)}
    for run in before.values():  # joblib ends its processes by force
        assert run.state in ("finished", "interrupted", "killed", "partial")
        assert len(run.steps()) >= (run.state == "finished")
    kept = {name: (folder / name / "status.json").read_bytes() for name, run in before.items() if run.state == "finished"}
    assert main([*words, "resume=true"]) == OK
    loaded = kvlab.load_runs(folder)
    assert loaded["num_blocks"].tolist() == list(numbers)
    assert set(loaded["status"]) == {"finished"}
    assert {name: (folder / name / "status.json").read_bytes() for name in kept} == kept


def test_a_policy_of_a_scripts_main_reaches_the_workers(tmp_path: Path) -> None:
    """As in a notebook's cell: the class is __main__'s, as an object and as a _target_."""
    script = tmp_path / "study.py"
    script.write_text(textwrap.dedent(f"""
        import kvlab
        from kvlab.policies.base import KeyEviction

        class Deepest(KeyEviction):
            '''The block furthest from its prompt's start.'''

            def key(self, block):
                return (-block.depth, block.used_tick)

        if __name__ == "__main__":
            words = {[*SIMULATED, *WORDS]!r}
            for name, more in (("jobs", dict(jobs=2)), ("joblib", dict(launcher="joblib"))):
                runs = kvlab.sweep({{"eviction": [Deepest, Deepest(), "lru"]}}, *words, folder=name, progress=False, **more)
                assert [run.state for run in runs] == ["finished"] * 3, runs.frame["notes"].tolist()
                assert runs["eviction"].tolist() == ["Deepest", "Deepest", "lru"]
                runs = kvlab.sweep({{"seed": [0, 1]}}, *words, "eviction._target_=__main__.Deepest", folder=name + "-target",
                                   progress=False, **more)
                assert [run.state for run in runs] == ["finished"] * 2, runs.frame["notes"].tolist()
    """), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------- Ray


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray of two nodes with a CPU each, on this machine; its token is this test's own."""
    folder = tmp_path_factory.mktemp("ray")
    token = folder / "token"
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    scratch = Path("/tmp") / f"kvlab-ray-{os.getpid()}"  # Ray's sockets need a short path
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0",
           "RAY_TMPDIR": str(scratch)}  # fmt: skip
    scratch.mkdir()
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    import ray  # which reads them once

    port = free_port()
    own_address = ray.util.get_node_ip_address()  # Ray takes it whatever it is told; the token keeps others out
    address = f"{own_address}:{port}"
    common = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", "--object-store-memory=100000000",
              "--disable-usage-stats"]  # fmt: skip
    nodes = []
    try:
        head = [*common, "--head", f"--port={port}", "--include-dashboard=false"]
        with open(folder / "head.log", "w", encoding="utf-8") as log:
            nodes.append(subprocess.Popen(head, stdout=log, stderr=log, start_new_session=True))
        for _ in range(240):
            try:
                socket.create_connection((own_address, port), 1).close()
                break
            except OSError:
                time.sleep(0.5)
        with open(folder / "worker.log", "w", encoding="utf-8") as log:
            worker = [*common, f"--address={address}", "--node-name=second"]
            nodes.append(subprocess.Popen(worker, stdout=log, stderr=log, start_new_session=True))
        ray.init(address=address, log_to_driver=False)
        for _ in range(240):
            if sum(node["Alive"] for node in ray.nodes()) == 2:
                break
            time.sleep(0.5)
        assert sum(node["Alive"] for node in ray.nodes()) == 2, (folder / "worker.log").read_text(encoding="utf-8")
        yield address
    finally:
        ray.shutdown()
        for node in reversed(nodes):
            node.terminate()
            try:
                node.wait(30)
            except subprocess.TimeoutExpired:
                node.kill()
        shutil.rmtree(scratch, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def test_two_ray_nodes_give_the_frame_of_one_process(tmp_path: Path, two_nodes: str, expected: pd.DataFrame) -> None:
    options = {"address": two_nodes, "remote": {"num_cpus": 1}}
    runs = sweep(tmp_path / "s", grid(), *WORDS, launcher="ray", launcher_options=options)
    pd.testing.assert_frame_equal(frame(runs), expected)
    meet(tmp_path, launcher="ray", launcher_options=options)  # a CPU each: two points at once are on two nodes


def test_an_unreachable_ray_is_said(tmp_path: Path) -> None:
    import ray

    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(UserError, match=r"No Ray cluster answers at 127.0.0.1:\d+ .*ray start --head"):
        sweep(tmp_path / "s", {"num_blocks": [40]}, launcher="ray", launcher_options={"address": f"127.0.0.1:{free_port()}"})


# ----------------------------------------------------------------------------- MLflow


def test_a_run_in_mlflows_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = kvlab.run(kvlab.compose(*SIMULATED, "num_blocks=40"), folder=tmp_path / "run", progress=False)
    uri = (tmp_path / "mlruns").as_uri()
    run_id = run.to_mlflow(uri)
    logged = mlflow.MlflowClient(tracking_uri=uri).get_run(run_id)
    assert logged.data.params["num_blocks"] == "40"
    assert logged.data.params["eviction"] == "lru"
    assert logged.data.metrics["mean_ttft_ms"] == run.summary["mean_ttft_ms"]
    assert logged.info.status == "FINISHED"
    names = {item.path for item in mlflow.MlflowClient(tracking_uri=uri).list_artifacts(run_id)}
    assert {"config.yaml", "steps.parquet", "requests.parquet", "summary.json"} <= names
