"""Sweeps collected at an address: uploaded whole as runs end, resumed from there, halves told from results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from sweep_support import SIMULATED, in_child, sweep

import kvlab
from kvlab import shared, sweep_folder
from kvlab.experiment import OK, USER_ERROR, main
from kvlab.results import Run
from kvlab.shared import SharedFolder
from kvlab.types import UserError

GRID: dict[str, list[Any]] = {"num_blocks": [40, 41, 42]}


@pytest.fixture(autouse=True)
def _in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digests = sweep_folder.code_digests()
    monkeypatch.setattr(sweep_folder, "code_digests", lambda: digests)


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/study"


def journal(folder: Path, state: str) -> list[int]:
    lines = (folder / ".sweep" / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["number"] for entry in map(json.loads, lines) if entry["state"] == state]


def test_runs_are_read_from_the_address_as_from_the_folder(tmp_path: Path, url: str) -> None:
    local = sweep(tmp_path / "s", GRID, out=url)
    far = kvlab.load_runs(url)
    assert far["run"].tolist() == ["0", "1", "2"]
    assert far["folder"].tolist() == [f"{url}/{n}" for n in range(3)]
    same = [c for c in local.frame if c not in ("folder", "run")]
    assert far.frame[same].equals(local.frame[same])
    assert far.steps().equals(kvlab.load_runs(tmp_path / "s").steps())
    names = set(fsspec.filesystem("memory").find(url.removeprefix("memory:/") + "/1"))
    assert {name.rpartition("/")[2] for name in names} >= {"status.json", "steps.parquet", "requests.parquet", "config.yaml", "point.json"}
    assert not any(".reserve" in name or name.endswith(".tmp") for name in names)
    one = Run.load(f"{url}/1")
    assert (one.name, one.source, one.config["num_blocks"], one.state) == ("1", f"{url}/1", 41, "finished")
    held = one.folder
    assert held is not None
    assert held.is_dir()
    del one
    assert not held.exists()  # a copy goes with the last run that lies in it


def test_a_sweep_goes_on_from_its_address_on_a_machine_that_has_nothing(tmp_path: Path, url: str) -> None:
    sweep(tmp_path / "first", GRID, out=url)
    with pytest.raises(UserError, match=r"study holds a sweep already. Go on with it \(resume=true\)"):
        sweep(tmp_path / "second", GRID, out=url)
    assert not (tmp_path / "second").exists()
    fsspec.filesystem("memory").rm_file(url.removeprefix("memory:/") + "/1/status.json")  # as if point 1 was cut off while uploaded
    assert kvlab.load_runs(url)["status"].tolist() == ["finished", "partial", "finished"]
    runs = sweep(tmp_path / "second", {"num_blocks": [40, 41, 42, 43]}, out=url, resume=True)
    assert [run.state for run in runs] == ["finished"] * 4
    assert journal(tmp_path / "second", "finished") == [1, 3]
    assert kvlab.load_runs(url)["num_blocks"].tolist() == [40, 41, 42, 43]
    assert kvlab.load_runs(url)["status"].tolist() == ["finished"] * 4
    with pytest.raises(UserError, match="it holds another sweep, of num_blocks=40"):
        sweep(tmp_path / "third", {"block_size": [8]}, out=url, resume=True)
    sweep(tmp_path / "other", {"block_size": [8]})
    with pytest.raises(UserError, match=r"study holds another sweep than .*/other"):
        sweep(tmp_path / "other", {"block_size": [8]}, out=url, resume=True)


def test_another_configuration_at_the_address_is_not_taken_for_this_one(tmp_path: Path, url: str) -> None:
    sweep(tmp_path / "first", GRID, "watermark=0.01", out=url)
    with pytest.raises(UserError, match="was made otherwise: admission.fraction was 0.01, is 0.05"):
        sweep(tmp_path / "second", GRID, "watermark=0.05", out=url, resume=True)
    sweep(tmp_path / "second", GRID, "watermark=0.05", out=url, resume="accept")
    assert kvlab.load_runs(url)["watermark"].tolist() == [0.05] * 3
    assert journal(tmp_path / "second", "finished") == [0, 1, 2]


def test_kill_9_while_a_run_is_uploaded_leaves_a_half_that_no_one_takes_for_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the status of point 1 is there; resuming uploads the result that the folder has, and runs what is missing."""
    url = f"file://{tmp_path}/bucket/study"
    real = SharedFolder.upload

    def upload(self: SharedFolder, folder: Path, number: int, key: str) -> None:
        if number == 1:
            fs = self._fs
            monkeypatch.setattr(type(fs), "pipe_file", lambda *args, **more: os.kill(os.getpid(), signal.SIGKILL))
        real(self, folder, number, key)

    monkeypatch.setattr(SharedFolder, "upload", upload)
    child = in_child(sweep, tmp_path / "s", GRID, out=url)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    monkeypatch.setattr(SharedFolder, "upload", real)
    half = kvlab.load_runs(url)
    assert half["status"].tolist() == ["finished", "partial"]
    assert (tmp_path / "bucket" / "study" / "1" / "steps.parquet").exists()
    before = (tmp_path / "s" / "1" / "status.json").read_bytes()
    runs = sweep(tmp_path / "s", GRID, out=url, resume=True)
    assert [run.state for run in runs] == ["finished"] * 3
    assert (tmp_path / "s" / "1" / "status.json").read_bytes() == before
    assert journal(tmp_path / "s", "finished") == [0, 2]  # point 1 was killed before it was noted, and is not run again
    assert kvlab.load_runs(url)["status"].tolist() == ["finished"] * 3


def test_a_store_that_goes_away_costs_no_result(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SharedFolder.upload

    def upload(self: SharedFolder, folder: Path, number: int, key: str) -> None:
        if number:
            with self._named("written"):
                raise ConnectionError("no route to host\nand more")
        real(self, folder, number, key)

    monkeypatch.setattr(SharedFolder, "upload", upload)
    with pytest.raises(UserError) as caught:
        sweep(tmp_path / "s", GRID, out=url)
    message = str(caught.value)
    assert message.startswith(f"{url} can't be written: ConnectionError: no route to host. Is the address right")
    assert message.endswith(f"2 of 3 runs may be missing there; what was run here is in {tmp_path}/s, and resume=true uploads it.")
    assert kvlab.load_runs(tmp_path / "s")["status"].tolist() == ["finished"] * 3
    monkeypatch.setattr(SharedFolder, "upload", real)
    sweep(tmp_path / "s", GRID, out=url, resume=True)
    assert journal(tmp_path / "s", "finished") == [0, 1, 2]
    assert kvlab.load_runs(url)["status"].tolist() == ["finished"] * 3


def test_a_result_that_cant_be_read_is_not_taken_for_missing(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(tmp_path / "s", GRID, out=url)
    memory = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(memory, "cat_file", lambda *args, **more: (_ for _ in ()).throw(PermissionError("Access Denied")))
    with pytest.raises(UserError, match=r"can't be read: PermissionError: Access Denied. Give credentials that may read and write there"):
        sweep(tmp_path / "t", GRID, out=url, resume=True)
    assert not (tmp_path / "t" / "0").exists()


def test_what_ended_on_a_machine_without_the_folder_is_fetched(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster without a shared disk: the folder of a point vanishes after its upload."""
    real = SharedFolder.upload

    def upload(self: SharedFolder, folder: Path, number: int, key: str) -> None:
        real(self, folder, number, key)
        shutil.rmtree(folder)

    monkeypatch.setattr(SharedFolder, "upload", upload)
    runs = sweep(tmp_path / "s", GRID, out=url)
    assert [run.state for run in runs] == ["finished"] * 3
    assert len(runs[2].steps()) == runs[2].summary["num_steps"] > 0


def test_failed_runs_are_at_the_address_too_and_are_run_again(tmp_path: Path, url: str) -> None:
    runs = sweep(tmp_path / "s", {"num_blocks": [40, 1]}, out=url)
    assert [run.state for run in runs] == ["finished", "failed"]
    far = kvlab.load_runs(url)
    assert far["status"].tolist() == ["finished", "failed"]
    assert "Every request of the workload was refused" in str(far[1].error)
    sweep(tmp_path / "s", {"num_blocks": [40, 1]}, out=url, resume=True)
    assert journal(tmp_path / "s", "failed") == [1, 1]


def test_the_command_line(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", *SIMULATED, "num_blocks=40,41", f"hydra.sweep.dir={url}"]
    assert main(words) == OK
    assert "2 of 2 runs finished." in capsys.readouterr().out
    assert kvlab.load_runs(url)["status"].tolist() == ["finished"] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs"]
    assert main(words) == USER_ERROR
    assert "holds a sweep already. Go on with it (resume=true)" in capsys.readouterr().err
    assert main([*words, "resume=true"]) == OK


def test_addresses_that_cant_be_used_are_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for out, say in (
        ("s4://bucket/x", r"s4://bucket/x can't be opened: Protocol not known: s4. Known are those of fsspec: s3, file"),
        ("bucket/x", r"out = 'bucket/x' is not allowed: an address"),
        (f"file:///proc/{uuid.uuid4().hex}", r"can't be written: "),
    ):
        with pytest.raises(UserError, match=say):
            sweep(tmp_path / "s", GRID, out=out)
        assert not (tmp_path / "s" / "0").exists()
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
    with pytest.raises(UserError, match="two addresses: leave one out"):
        kvlab.sweep(GRID, *SIMULATED, folder="memory://a", out="memory://b", progress=False)
    with pytest.raises(UserError, match=r"memory://nowhere can't be read: FileNotFoundError: nothing is there. Is the address right"):
        kvlab.load_runs("memory://nowhere")
    with pytest.raises(UserError, match=r"is an address, and a run is written to a folder of this machine.*out=URL"):
        kvlab.run(kvlab.compose(*SIMULATED, "num_blocks=40"), folder="s3://bucket/run", progress=False)
    assert main([*SIMULATED, "num_blocks=40", "hydra.run.dir=s3://bucket/run"]) == USER_ERROR
    assert "is an address" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

    def no_s3fs(*args: Any, **more: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", no_s3fs)
    with pytest.raises(UserError, match=r"Install s3fs to access S3. pip install 'kvlab\[s3\]'"):
        kvlab.load_runs("s3://bucket/x")


def test_an_address_gives_one_local_folder() -> None:
    assert shared.mirror_of("s3://bucket/a/sweep 1/") == Path("runs/shared/s3-bucket-a-sweep-1")
