"""What every command does beside its work: streams that are closed, full or ASCII, paths that are empty, users without a home."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab
from kvlab import experiment
from kvlab.composition import compose
from kvlab.doors import printable
from kvlab.model.bundled import bundled_folder
from kvlab.tables import text_table
from kvlab.types import UserError
from kvlab.types.homes import cache_folder, expanded
from kvlab.types.text import half_pair, left_out

ROOT = Path(__file__).resolve().parents[1]
RUN = ["runner=simulated", "workload=synthetic", "workload.num_requests=2", "workload.output_len=2"]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def shell(command: str, cwd: Path, **env: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a shell's line in which $K is `python -m kvlab`."""
    given = {**os.environ, "PYTHONPATH": str(ROOT / ".package"), "K": f"{sys.executable} -m kvlab", **env}
    done = subprocess.run(["bash", "-c", command], cwd=cwd, env=given, capture_output=True, timeout=120)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(("command", "code", "out", "err"), [
    ("$K.policies layout > /dev/full", 2, "", "kvlab: What is printed can't be written to standard output: No space left on device.\n"),
    ("$K.policies layout >&-", 0, "", ""),
    ("$K.policies nothing 2>&-", 2, "", ""),
    ("$K.policies nothing 2> /dev/full", 2, "", ""),
    ("$K.policies nothing <&- >&- 2>&-", 2, "", ""),
    ("$K.policies > /dev/full 2>&1", 2, "", ""),
    ("$K.policies | true; echo ${PIPESTATUS[0]}", 0, "141\n", ""),  # (`true` is gone before Python has started)
    ("$K.figures nothing > /dev/full 2>&-", 2, "", ""),
])  # fmt: skip
def test_streams_that_take_nothing(tmp_path: Path, command: str, code: int, out: str, err: str) -> None:
    assert shell(command, tmp_path) == (code, out, err)


def test_a_closed_stdout_is_no_file_of_the_run(tmp_path: Path) -> None:
    """The first file that a process opens takes the place of a closed stream: what is printed would go into it."""
    assert shell(f"$K.experiment {' '.join(RUN)} hydra.run.dir=out >&-", tmp_path)[0] == 0
    (run,) = kvlab.load_runs(tmp_path / "out")
    assert (run.state, run.notes) == ("finished", [])


def test_a_table_that_finds_no_room(tmp_path: Path) -> None:
    """The run is in its folder; that its table was not printed is what went wrong."""
    code, _, err = shell(f"$K.experiment {' '.join(RUN)} hydra.run.dir=out > /dev/full", tmp_path)
    assert (code, err) == (2, "kvlab: What is printed can't be written to standard output: No space left on device.\n")
    assert kvlab.load_runs(tmp_path / "out")[0].state == "finished"


def test_a_run_in_a_folder_that_ascii_can_not_name(tmp_path: Path) -> None:
    code, out, err = shell(f"$K.experiment {' '.join(RUN)} 'hydra.run.dir=\"日本\"'", tmp_path, **ASCII)
    assert (code, err) == (0, "")
    assert "Folder: \\u" in out or "Folder: \\x" in out or "Folder: \\udc" in out
    assert kvlab.load_runs(tmp_path / "日本")[0].state == "finished"
    code, out, _ = shell("$K.compare 日本 日本", tmp_path, **ASCII)
    assert (code, out.isascii()) == (0, True)
    code, _, err = shell("$K.compare nichts_ä 日本", tmp_path, **ASCII)
    assert (code, err.isascii(), "Traceback" in err) == (2, True, False)


def test_control_characters_reach_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert printable("a\x1b[2J\r\n\t\x9b\x7f\u202e日") == "a\\x1b[2J\\x0d\\x0a\\x09\\x9b\\x7f\\u202e日"
    assert text_table(["na\nme"], [["\x1b]0;x\x07"]]) == "na\\x0ame\n------------\n\\x1b]0;x\\x07"


def test_a_command_prints_no_control_characters(tmp_path: Path) -> None:
    """Names in a run's files are as a user, or a model, has made them."""
    assert shell(f"$K.experiment {' '.join(RUN)} hydra.run.dir=out", tmp_path)[0] == 0
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    changed = {**status, "name": "\x1b[2Jmine", "notes": ["\x1b[31mred"], "state": "failed", "error": {"message": "\x07", "type": "X"}}
    (tmp_path / "out" / "status.json").write_text(json.dumps(changed), encoding="utf-8")
    code, out, err = shell("$K.compare out out; $K.export out --to latex", tmp_path)
    assert code in (0, 2)
    assert not {"\x1b", "\x07"} & {*out, *err}


# ------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("word", ["hydra.run.dir=", "hydra.run.dir=''", "hydra.run.dir=${oc.env:KVLAB_EMPTY}"])
def test_an_empty_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str) -> None:
    """It would be the working folder, and the run beside it."""
    monkeypatch.setenv("KVLAB_EMPTY", "")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    assert experiment.main([*RUN, word]) == 2
    assert "The path of a run is empty. Is it from a variable that is not set?" in capsys.readouterr().err
    assert experiment.main(["-m", *RUN, "seed=0,1", "hydra.sweep.dir="]) == 2
    assert "The path of a sweep is empty." in capsys.readouterr().err
    assert (list(work.iterdir()), list(tmp_path.iterdir())) == ([], [work])


def test_other_empty_paths() -> None:
    for call in (lambda: kvlab.load_runs(""), lambda: kvlab.compare("", ""), lambda: kvlab.calibrate(" "),
                 lambda: kvlab.run(compose(*RUN), folder=""), lambda: kvlab.sweep({"seed": [0]}, *RUN, folder="")):  # fmt: skip
        with pytest.raises(UserError, match="is empty"):
            call()


@pytest.mark.parametrize(("given", "written"), [
    ("hydra.run.dir=runs/日本", """'hydra.run.dir="runs/日本"'"""), ("hydra.run.dir=runs/(1)", """'hydra.run.dir="runs/(1)"'"""),
    ("hydra.run.dir=~/x", """'hydra.run.dir="~/x"'"""), ("hydra.run.dir=a=b&c", """'hydra.run.dir="a=b&c"'"""),
    ('hydra.run.dir=a"b\\', '\'hydra.run.dir="a\\"b\\\\"\''), ("model.path=ä,ö", """'model.path="ä,ö"'"""),
])  # fmt: skip
def test_a_value_that_hydra_does_not_take_is_shown_in_quotes(given: str, written: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(given)
    assert str(caught.value).endswith(f"Write {written}")


# -------------------------------------------------------------------------------------- homes


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(path: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("KVLAB_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("KVLAB_CACHE")
    for call in (cache_folder, bundled_folder):
        with pytest.raises(UserError, match="no home folder to keep models and traces in.*KVLAB_CACHE=FOLDER"):
            call()
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/kvlab")


def test_a_home_that_is_not_known() -> None:
    with pytest.raises(UserError, match="'~nobody-of-that-name/x' begins in a home folder that is not known here"):
        expanded("~nobody-of-that-name/x")
    with pytest.raises(UserError, match="home folder"):
        kvlab.replay([[1]], capacity="1GiB", model="~nobody-of-that-name/x")


# ------------------------------------------------------------------------ halves of surrogate pairs


def test_half_of_a_surrogate_pair_is_found() -> None:
    assert half_pair("日本 \U0001f600") is None
    assert half_pair({"a": ["x", ("y", "\udc00")]}) == "\udc00"
    assert half_pair({"\ud800": 1}) == "\ud800"
    assert half_pair([1, None, b"\xff", 2.5]) is None
    assert left_out([]) == []
    assert left_out([f"line {n}" for n in range(12)])[0].endswith("line 8; line 9 and 2 more.")


LINES = [
    {"prompt": "one"}, {"prompt": "two \ud800"}, {"messages": [{"role": "user", "content": "three \udfff"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, {"prompt": "four", "request_id": "\ud83d"},
    {"prompt": "five", "tenant": "t\ud800"}, {"prompt": "six", "session_id": "\ud800"}, {"prompt": "seven", "cache_salt": "\ud800"},
    {"prompt": "eight", "stop": ["\ud800"]}, {"prompt": "nine \U0001f600", "tenant": "ä"},
]  # fmt: skip


@pytest.mark.parametrize("runner", ["simulated", "torch"])
def test_lines_that_are_no_text_are_named_and_the_others_served(tmp_path: Path, runner: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    config = compose("model=tiny", f"runner={runner}", "workload=prompts", f"workload.path={path}", "workload.sampling.max_tokens=2")
    run = kvlab.run(config, folder=tmp_path / "out", progress=False)
    assert run.requests()["request_id"].tolist() == ["prompt-0", "prompt-1"]
    assert run.requests()["tenant"].tolist() == ["", "ä"]
    (note,) = [note for note in run.notes if "surrogate" in note]
    assert [f"line {n}" in note for n in range(1, 11)] == [False, *[True] * 8, False]


def test_conversations_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    ask, answer = {"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Yes"}
    talks = [[ask, answer], [{**ask, "value": "\ud800"}, answer], [ask, {**answer, "value": "\udc00"}], [ask, answer]]
    path.write_text(json.dumps([{"id": str(i), "conversations": talk} for i, talk in enumerate(talks)]), encoding="utf-8")
    config = compose("model=tiny", "runner=simulated", "workload=sharegpt", f"workload.path={path}")
    run = kvlab.run(config, folder=tmp_path / "out", progress=False)
    assert run.requests()["request_id"].tolist() == ["sharegpt-1-turn-0", "sharegpt-4-turn-0"]
    assert any("talk.json, conversation 2; talk.json, conversation 3." in note for note in run.notes)


def test_a_prompt_that_is_no_text_is_refused() -> None:
    llm = kvlab.LLM("tiny")
    for call in (lambda: llm.generate("a \ud800"), lambda: llm.chat([{"role": "user", "content": "\ud800"}])):
        with pytest.raises(UserError, match=r"holds '\\ud800', half of a surrogate pair"):
            call()


def test_texts_of_a_table_are_written_as_they_can_be() -> None:
    from kvlab.trace.store import _text

    assert _text("ä\udcff\udce6\udc97\udca5") == "ä\\xff日"
    assert _text("\ud800") == "\\ud800"
    assert io.BytesIO(_text("日").encode()).getvalue() == b"\xe6\x97\xa5"
