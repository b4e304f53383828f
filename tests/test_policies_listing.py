"""python -m kvlab.policies: every policy with its parameters, source and deviations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlab.policies.__main__ import main
from kvlab.policies.registry import SEAMS, list_policies

ROOT = Path(__file__).resolve().parents[1]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_every_policy_is_listed_under_its_seam(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys)
    for seam in SEAMS:
        rows = list_policies(seam)
        section = out.split(f"\n{seam} ({len(rows)})\n" if seam != "scheduling" else f"{seam} ({len(rows)})\n")[1]
        names = [line.split()[0] for line in section.splitlines() if line.startswith("  ") and line[2] != " "][: len(rows)]
        assert names == [row.name for row in rows]
    assert out.splitlines()[-1].startswith(f"{len(list_policies())} policies.")


def test_parameters_and_defaults_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "eviction", "block_sizing")
    assert "  random               Any candidate goes" in out
    assert "(seed=0)" in out
    assert "(tokens=16)" in out
    assert "admission" not in out.split("eviction (")[0]


def test_long_and_markdown_have_source_and_deviations_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list_policies("eviction")
    long = printed(capsys, "eviction", "--long")
    assert long.count("  source: ") == long.count("  deviations: ") == len(rows)
    assert "eviction=lru\n" in long
    table = printed(capsys, "eviction", "--markdown").splitlines()
    assert len(table) == 2 + len(rows)
    assert all(line.count(" | ") >= 5 for line in (table[0], *table[2:]))


def test_every_policy_says_where_it_comes_from_and_where_it_deviates() -> None:
    silent = [f"{row.seam}={row.name}" for row in list_policies() if not row.idea or not row.source or not row.deviations]
    assert silent == []


def test_the_readme_names_every_policy_and_preset() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for seam in SEAMS:
        row = next(line for line in readme.splitlines() if line.startswith(f"| {seam.split('/')[0]} |"))
        assert [r.name for r in list_policies(seam) if not re.search(rf"\b{r.name}\b", row)] == [], seam
    presets = [path.stem for path in (ROOT / "conf/policy").glob("*.yaml")]
    assert [name for name in presets if f"`{name}`" not in readme] == []


@pytest.mark.parametrize(("word", "nearest"), [("evicton", "eviction"), ("--log", "--long")])
def test_a_wrong_word_names_the_nearest(capsys: pytest.CaptureFixture[str], word: str, nearest: str) -> None:
    assert main([word]) == 2
    assert nearest in capsys.readouterr().err
