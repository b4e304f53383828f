"""A sweep collected in S3 (moto's server on this machine), written by worker processes; a store that refuses or is not there."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sweep_support import sweep

import kvlab
from kvlab import sweep_folder
from kvlab.types import UserError

pytestmark = pytest.mark.cluster
GRID: dict[str, list[Any]] = {"num_blocks": [40, 41, 42, 43]}


@pytest.fixture(autouse=True)
def _in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digests = sweep_folder.code_digests()
    monkeypatch.setattr(sweep_folder, "code_digests", lambda: digests)
    for name, value in (("ACCESS_KEY_ID", "testing"), ("SECRET_ACCESS_KEY", "testing"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    boto3.client("s3").create_bucket(Bucket="results")
    s3fs.S3FileSystem.clear_instance_cache()  # which knows another server
    yield "s3://results"
    server.stop()


def test_worker_processes_upload_and_any_machine_reads(tmp_path: Path, bucket: str) -> None:
    """Two worker processes write; a machine with nothing but the address reads, and goes on."""
    local = sweep(tmp_path / "s", GRID, jobs=2, out=f"{bucket}/study")
    far = kvlab.load_runs(f"{bucket}/study")
    same = [c for c in local.frame if c not in ("folder", "run")]
    assert far.frame[same].equals(local.frame[same])
    assert far["folder"].tolist() == [f"s3://results/study/{n}" for n in range(4)]
    again = sweep(tmp_path / "elsewhere", GRID, out=f"{bucket}/study", resume=True)
    assert [run.status["started"] for run in again] == [run.status["started"] for run in local]


def test_stores_that_cant_be_used_are_named(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"s3://nobucket/x can't be written: FileNotFoundError: .*Buckets are not made by kvlab"):
        sweep(tmp_path / "s", GRID, out="s3://nobucket/x")
    with pytest.raises(UserError, match=r"s3://results/none can't be read: FileNotFoundError: nothing is there"):
        kvlab.load_runs("s3://results/none")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # as in a new process
    with pytest.raises(UserError, match=r"s3://results/x can't be read: .*AWS_ENDPOINT_URL"):
        sweep(tmp_path / "t", GRID, out="s3://results/x")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match=r"s3://results/x can't be read: .*AWS_ACCESS_KEY_ID"):
        kvlab.load_runs("s3://results/x")
    assert not any((tmp_path / name / "0").exists() for name in ("s", "t"))
