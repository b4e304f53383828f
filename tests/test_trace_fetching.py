"""Public traces fetched by name: a local server in place of their homes; checks, cut-off downloads, and what is said without a network."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from workload_helpers import all_due

from kvlab.replay import replay
from kvlab.types import UserError
from kvlab.workload import BurstGPTWorkload, MooncakeWorkload, find_trace, traces
from kvlab.workload.fetching import cache_folder, fetch
from kvlab.workload.public_traces import PUBLIC_TRACES, PublicTrace, table

CONTENT = b'{"timestamp": 0, "input_length": 700, "output_length": 4, "hash_ids": [1, 2]}\n' * 3
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Home(BaseHTTPRequestHandler):
    """/whole, /half (cut off after half of the bytes promised), /chunked (cut off in its second chunk, its length never said); all else
    is not there."""

    def do_GET(self) -> None:
        if self.path == "/chunked":
            self.protocol_version = "HTTP/1.1"
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n%x\r\n%s" % (60, CONTENT[:60], 60, CONTENT[60:70]))
            self.close_connection = True
            return
        if self.path not in ("/whole", "/half"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT if self.path == "/whole" else CONTENT[: len(CONTENT) // 2])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The server's address. The cache folder is a fresh one, and there are no folders with traces."""
    for name in ("http_proxy", "HTTP_PROXY", "KVLAB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVLAB_TRACES", str(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Home)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def public(url: str, sha256: str | None = DIGEST, name: str = "toy") -> PublicTrace:
    return PublicTrace(name, f"{name}.jsonl", url, sha256, 1, "CC0", "nobody")


def test_a_trace_is_fetched_once_and_found_by_name(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLIC_TRACES, "toy", public(f"{home}/whole"))
    path = find_trace("toy")
    assert path == cache_folder() / "toy.jsonl"
    assert path.read_bytes() == CONTENT
    monkeypatch.setitem(PUBLIC_TRACES, "toy", public(f"{home}/gone"))
    assert find_trace("toy.jsonl") == path
    assert replay("toy", "lru", 5).prefix_hits_per_request.tolist() == [0, 2, 2]
    assert len(all_due(MooncakeWorkload("toy"))) == 3
    assert sorted(one.name for one in path.parent.iterdir()) == ["toy.jsonl", "toy.jsonl.sha256.json"]


def test_ones_own_folder_comes_first(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLIC_TRACES, "toy", public(f"{home}/gone"))
    for folder in ("mine", "named"):
        (tmp_path / folder).mkdir()
        header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        (tmp_path / folder / "toy.csv").write_text(header + "5,GPT-4,7,1,8,API log\n", encoding="utf-8")
    assert find_trace("toy") == tmp_path / "mine" / "toy.csv"
    workload = BurstGPTWorkload("toy", folder=tmp_path / "named")
    assert len(all_due(workload)) == 1
    assert workload._trace.path == tmp_path / "named" / "toy.csv"


def test_an_answer_of_unknown_length_that_breaks_off_is_not_kept(home: str) -> None:
    """Without a published hash nothing else would tell the half from the whole."""
    with pytest.raises(UserError, match="/chunked broke off after 60 bytes. Try again"):
        fetch(public(f"{home}/chunked", None), cache_folder())
    assert list(cache_folder().iterdir()) == []


@pytest.mark.parametrize(
    ("place", "sha256", "message"),
    [
        ("whole", "0" * 64, rf"has SHA-256 {DIGEST} where 0{{64}} is expected: another file than published. Nothing was kept"),
        ("gone", DIGEST, r"/gone answers 404 Not Found"),
        ("half", DIGEST, rf"/half broke off after {len(CONTENT) // 2} of {len(CONTENT)} bytes. Try again"),
    ],
)
def test_what_is_not_the_file_is_not_kept(home: str, place: str, sha256: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fetch(public(f"{home}/{place}", sha256), cache_folder())
    assert list(cache_folder().iterdir()) == []


def test_a_file_without_a_checksum_is_trusted_once(home: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvlab.traces"):
        path = fetch(public(f"{home}/whole", None), cache_folder())
    assert f"toy: no published checksum; trusted as fetched, SHA-256 {DIGEST}" in caplog.text
    caplog.clear()
    assert fetch(public(f"{home}/whole", None), cache_folder()) == path
    assert caplog.text == ""
    path.write_bytes(CONTENT + b"{}\n")
    with pytest.raises(UserError, match=rf"where {DIGEST} is expected: it was changed. Delete it to fetch it again"):
        fetch(public(f"{home}/whole", None), cache_folder())
    path.unlink()  # the record stays: what is fetched anew must be what it was
    assert fetch(public(f"{home}/whole", None), cache_folder()).read_bytes() == CONTENT
    path.unlink()
    record = path.with_name("toy.jsonl.sha256.json")
    record.write_text(record.read_text(encoding="utf-8").replace(DIGEST, "1" * 64), encoding="utf-8")
    with pytest.raises(UserError, match="another file than published"):
        fetch(public(f"{home}/whole", None), cache_folder())


def test_a_kept_file_that_was_changed_is_refused(home: str) -> None:
    path = fetch(public(f"{home}/whole"), cache_folder())
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match="it was changed. Delete it"):
        fetch(public(f"{home}/whole"), cache_folder())
    path.write_bytes(CONTENT)  # the same bytes at another time are fine
    assert fetch(public(f"{home}/whole"), cache_folder()) == path


def test_one_message_when_neither_a_folder_nor_the_network_has_it(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = "http://127.0.0.1:9/x"  # the discard port: nobody listens
    monkeypatch.setitem(PUBLIC_TRACES, "toy", public(dead))
    with pytest.raises(UserError) as caught:
        find_trace("toy")
    message = str(caught.value)
    assert "\n" not in message
    assert re.match(rf"The trace 'toy' is in none of the folders \({re.escape(str(tmp_path / 'mine'))}, traces, ", message)
    assert f"and can't be fetched: {dead} can't be reached (" in message
    assert message.endswith("Set KVLAB_TRACES to the folder that holds it.")
    monkeypatch.setenv("KVLAB_OFFLINE", "1")
    with pytest.raises(UserError, match="KVLAB_OFFLINE is set"):
        find_trace("toy")
    with pytest.raises(UserError, match=r"There is no trace 'toi'.* Did you mean 'toy'\?"):
        find_trace("toi")


def test_a_folder_that_can_not_be_made(home: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="can't be written .* KVLAB_CACHE names another folder"):
        fetch(public(f"{home}/whole"), tmp_path / "file" / "traces")


def test_the_table_of_public_traces() -> None:
    assert {"mooncake_conversation", "qwen_bailian_a", "azure_2024_conv", "burstgpt_1", "sharegpt_v3"} <= set(PUBLIC_TRACES)
    for name, trace in PUBLIC_TRACES.items():
        assert trace.name == name
        assert trace.file_name.startswith(name + ".")
        assert trace.url.startswith("https://")
        assert re.search(r"/[0-9a-f]{40}/|/releases/download/", trace.url), "pinned to a commit or a release"
        assert trace.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", trace.sha256)
        assert name in table()


@pytest.mark.traces
@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic", "azure_2023_code", "azure_2023_conv"])
def test_checksums_are_those_of_the_files(name: str) -> None:
    import gzip

    path = find_trace(name)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == PUBLIC_TRACES[name].sha256
    assert traces._without_suffix(path.name) == name
