"""`python -m kvlab.lab` and progress: where notebooks go, what is said, and lines of text where no bar can be drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlab import lab, progress
from kvlab.progress import Progress, clock, in_notebook, progress_line
from kvlab.types import UserError

ROOT = Path(__file__).parents[1]


def test_a_clone_opens_its_notebooks_in_place(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(lab, "serve", lambda command, cwd: calls.append((command, cwd)) or 0)
    assert lab.main(["02", "--no-browser"]) == 0
    (command, cwd), = calls
    assert command[1:] == ["-m", "jupyterlab", str(ROOT / "notebooks" / "02_block_size_and_watermark.ipynb"), "--no-browser"]
    assert cwd == ROOT / "notebooks"
    assert capsys.readouterr().out == f"Notebooks: {ROOT / 'notebooks'}\n"


@pytest.mark.parametrize(("words", "number", "others"), [
    ([], "01", []),
    (["--port", "9000"], "01", ["--port", "9000"]),
    (["--no-browser", "--port", "9000", "--ip", "0"], "01", ["--no-browser", "--port", "9000", "--ip", "0"]),
    (["--no-browser", "03", "--port", "9000"], "03", ["--no-browser", "--port", "9000"]),
    (["--port", "9000", "03"], "03", ["--port", "9000"]),
    (["02.ipynb", "--port", "9000"], "02", ["--port", "9000"]),
    (["02", "--port=9000"], "02", ["--port=9000"]),
    (["02_block_size_and_watermark", "--port", "03"], "02", ["--port", "03"]),
    (["02_block_size_and_watermark.ipynb"], "02", []),
])  # fmt: skip
def test_a_notebook_is_told_from_what_jupyterlab_is_to_have(monkeypatch, words, number, others):
    calls = []
    monkeypatch.setattr(lab, "serve", lambda command, cwd: calls.append(command) or 0)
    assert lab.main(words) == 0
    (_, _, _, path, *given), = calls
    assert Path(path).name[:2] == number
    assert given == others


@pytest.mark.parametrize(("word", "said"), [("", "Unknown notebook ''"), (".ipynb", "Unknown notebook '.ipynb'"),
                                            ("2", "Unknown notebook '2'"), ("0", "Several notebooks begin with '0': 01_quickstart.ipynb"),
                                            ("0.ipynb", "Several notebooks begin with '0.ipynb'")])  # fmt: skip
def test_a_name_that_means_no_notebook_or_several(monkeypatch, capsys, word, said):
    monkeypatch.setattr(lab, "serve", lambda command, cwd: pytest.fail("started"))
    assert lab.main([word, "--no-browser"]) == 2
    assert said in capsys.readouterr().err


def test_copies_say_where_they_are_and_overwrite_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab, "serve", lambda command, cwd: 0)
    target = tmp_path / "mine"
    target.mkdir()
    (target / "01_quickstart.ipynb").write_text("my own", encoding="utf-8")
    assert lab.main(["01", "--copy-to", str(target)]) == 0
    number = len(list((ROOT / "notebooks").glob("*.ipynb")))
    assert f"{target} ({number - 1} copied, 1 were there and stay as they are)" in capsys.readouterr().out
    assert (target / "01_quickstart.ipynb").read_text(encoding="utf-8") == "my own"
    assert len(list(target.glob("*.ipynb"))) == number


def test_an_installed_package_copies(tmp_path, monkeypatch, capsys):
    package = tmp_path / "site-packages" / "kvlab" / "notebooks"
    package.mkdir(parents=True)
    (package / "01_quickstart.ipynb").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(lab, "notebooks_folder", lambda: package)
    monkeypatch.chdir(tmp_path)
    assert lab.prepare("01", None) == tmp_path / "kvlab-notebooks" / "01_quickstart.ipynb"
    assert (tmp_path / "kvlab-notebooks" / "01_quickstart.ipynb").exists()


def test_a_whole_name_is_no_beginning():
    assert lab.find_notebook("01_a", ["01_a.ipynb", "01_a_more.ipynb"]) == "01_a.ipynb"


def test_wrong_notebook_and_wrong_folder(tmp_path, capsys):
    assert lab.main(["99_none"]) == 2
    assert "Unknown notebook '99_none'" in capsys.readouterr().err
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="--copy-to FOLDER"):
        lab.prepare("01", str(tmp_path / "file"))


def test_lines_say_how_far_and_how_long():
    assert progress_line("sweep", 3, 12, "run", 60.0) == "sweep: 3 of 12 run, 1:00 taken, about 3:00 left"
    assert progress_line("run", 5, None, "req", 3.0, "40 tokens") == "run: 5 req, 0:03 taken, 40 tokens"
    assert (clock(59.6), clock(3723)) == ("1:00", "1:02:03")


def test_without_a_terminal_lines_are_written_now_and_then(monkeypatch, capsys):
    assert not in_notebook()
    with Progress(4, "sweep", "run") as quiet:
        quiet.update(1)
    assert capsys.readouterr().err == ""  # short ones stay silent
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with Progress(None, "sweep", "run") as bar:
        bar.update(1, "lru", total=4)
    assert re.fullmatch(r"sweep: 1 of 4 run, 0:00 taken, about 0:00 left, lru\n", capsys.readouterr().err)
    with Progress(4, "sweep", "run", enabled=False) as off:
        off.update(1)
    assert capsys.readouterr().err == ""
