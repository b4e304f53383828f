"""The list of mutants keeps up with the source, and the runner tells killed, survived, hung and equivalent ones apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mutants import Mutant, all_mutants
from mutants.__main__ import ROOT, selected
from mutants.mutant import StaleMutant
from mutants.running import Result, run_mutants


def test_every_mutant_applies_once_to_the_source_and_is_a_python_program() -> None:
    mutants = all_mutants()
    assert [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1] == []
    for mutant in mutants:
        text = mutant.applied_to(ROOT)
        assert text != (ROOT / mutant.file).read_text(encoding="utf-8"), mutant.name
        compile(text, mutant.name, "exec")


def test_the_tests_of_every_mutant_exist() -> None:
    named = {test for mutant in all_mutants() for test in mutant.tests}
    assert [mutant.name for mutant in all_mutants() if not isinstance(mutant.tests, tuple) or not mutant.tests] == []
    for test in sorted(named):
        file, *parts = test.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        for part in parts:
            assert part.split("[")[0] in text, test


def test_a_text_that_occurs_twice_or_never_is_stale(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n", encoding="utf-8")
    with pytest.raises(StaleMutant, match="occurs 2 times in a.py"):
        Mutant("twice", "a.py", "1", "2", ("t.py",)).applied_to(tmp_path)
    with pytest.raises(StaleMutant, match="occurs 0 times in a.py"):
        Mutant("never", "a.py", "z", "2", ("t.py",)).applied_to(tmp_path)
    with pytest.raises(StaleMutant, match=r"b\.py does not exist"):
        Mutant("missing", "b.py", "z", "2", ("t.py",)).applied_to(tmp_path)


def test_selection_by_piece_and_by_pattern() -> None:
    a, b = Mutant("a-hit", "kvlab/cache/pool.py", "1", "2", ("t",)), Mutant("b", "kvlab/engine/beam.py", "1", "2", ("t",))
    assert selected([a, b], "") == [a, b]
    assert selected([a, b], "hit") == [a]
    assert selected([a, b], "kvlab/*/beam.py, zzz") == [b]


def test_the_runner_tells_verdicts_apart_and_leaves_the_tree_alone(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    source = "def smaller(a, b):\n    return a < b\n\n\ndef up_to(n):\n    i = 0\n    while i < n:\n        i += 1\n    return i\n"
    (root / "m.py").write_text(source, encoding="utf-8")
    (root / "test_m.py").write_text(
        "import m\n\ndef test_m():\n    assert m.smaller(1, 2) and not m.smaller(2, 1)\n    assert m.up_to(3) == 3\n", encoding="utf-8")
    (root / "test_broken.py").write_text("def test_b():\n    assert False\n", encoding="utf-8")

    def mutant(name: str, old: str, new: str, test: str = "test_m.py", equivalent: str = "") -> Mutant:
        return Mutant(name, "m.py", old, new, (test,), equivalent)

    mutants = [
        mutant("killed", "a < b", "a > b"),
        mutant("survives", "a < b", "a <= b"),
        mutant("hangs", "i += 1", "i += 0"),
        mutant("stale", "a == b", "a != b"),
        mutant("equivalent", "i = 0", "i = 00", equivalent="the same number"),
        mutant("not equivalent", "i = 0", "i = 9", equivalent="a wrong reason"),
        mutant("broken", "a < b", "a > b", test="test_broken.py"),
    ]
    heard: list[Result] = []
    results = run_mutants(root, mutants, jobs=2, report=heard.append, least_limit_s=2.5)
    assert {result.mutant.name: result.verdict for result in results} == {
        "killed": "killed", "survives": "SURVIVED", "hangs": "timed out", "stale": "STALE", "equivalent": "equivalent",
        "not equivalent": "NOT EQUIVALENT", "broken": "BROKEN TESTS"}
    assert results[0].note == "test_m.py::test_m"
    assert len(heard) == len(mutants)
    assert (root / "m.py").read_text(encoding="utf-8") == source
    assert sorted(path.name for path in root.iterdir()) == ["m.py", "test_broken.py", "test_m.py"]
