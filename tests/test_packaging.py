"""A wheel holds everything under one import name, and `import kvlab` needs none of the heavy packages."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, away from this one's environment."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, encoding="utf-8", timeout=240)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked layout, without network and without leaving build products in the repository."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", ".package", "kvlab", "kernels", "policies", "conf"):
        if (ROOT / name).exists():
            subprocess.run(["cp", "-r", "-P", str(ROOT / name), str(source / name)], check=True)
    if not (source / "README.md").exists():
        (source / "README.md").write_text("kvlab\n", encoding="utf-8")
    out = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", *build], capture_output=True, encoding="utf-8", timeout=240)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_all_folders_as_subpackages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"kvlab"}
    for folder in ("kernels", "policies", "conf"):
        here = {f"kvlab/{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".yaml", ".jsonl")}
        assert here <= set(names), sorted(here - set(names))
    assert "kvlab/py.typed" in names
    assert "kvlab/conf/hydra/job_logging/kvlab.yaml" in names


@pytest.mark.slow
def test_installed_wheel_imports_and_composes(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ["install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=240)
    code = """
import sys, kvlab, kvlab.kernels, kvlab.policies
config = kvlab.compose("+policy=fifo", "block_size=7")
print(kvlab.__file__, kvlab.policies.__file__, config.eviction._target_, config.block_sizing.tokens)
for name in ("kernels", "policies", "conf"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    sys.exit(f"top-level {name} was importable")
"""
    done = python(code, tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    file, policies_file, target, tokens = done.stdout.split()
    assert file == str(site / "kvlab/__init__.py")
    assert policies_file == str(site / "kvlab/policies/__init__.py")
    assert (target, tokens) == ("kvlab.policies.eviction.fifo.Fifo", "7")


def test_an_editable_install_is_found_beside_a_clone_of_the_same_name(tmp_path: Path) -> None:
    """In the folder that holds the clone, kvlab/ is no package: what an editable install puts on the path must win over it."""
    (tmp_path / "kvlab").mkdir()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    code = "import kvlab, kvlab.policies, kvlab.conf; print(kvlab.__version__, kvlab.run.__name__)"
    done = python(code, tmp_path, PYTHONPATH=str(ROOT / build[""]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [version(), "run"]


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_import_needs_nothing_heavy() -> None:
    blocked = ("torch", "hydra", "omegaconf", "plotly", "ipywidgets", "IPython", "jupyterlab", "pandas", "transformers", "triton")
    code = "import kvlab; print(kvlab.__version__, kvlab.SamplingParams(max_tokens=3).max_tokens)"
    done = python(BLOCKER.format(blocked=blocked) + code, ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [version(), "3"]


def test_engine_side_imports_without_doors() -> None:
    blocked = ("hydra", "omegaconf", "plotly", "ipywidgets", "anywidget", "IPython", "jupyterlab", "pyarrow")
    code = "import kvlab, kvlab.llm, kvlab.running, kvlab.results; print(kvlab.LLM.__name__, kvlab.run.__name__)"
    done = python(BLOCKER.format(blocked=blocked) + code, ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["LLM", "run"]


def test_unknown_attribute_lists_names() -> None:
    import kvlab

    with pytest.raises(AttributeError, match="load_runs"):
        _ = kvlab.load_run


def version() -> str:
    found = re.search(r'__version__ = "(.+)"', (ROOT / "kvlab/__init__.py").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.split(r"[<>=; ]", d)[0].lower() for d in wanted}
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pinned = {line.split("==")[0].lower(): line for line in lines}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert names - set(pinned) == set()
    assert "omegaconf" not in names, "hydra-core knows the omegaconf it works with"


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_a_skipped_test_fails_in_ci(tmp_path: Path, ci: str, code: int) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    no_engines = "class Drains:\n    def watch(self): pass\n    def finish(self): pass\n"
    (tmp_path / "drain_support.py").write_text(no_engines, encoding="utf-8")
    (tmp_path / "test_it.py").write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no reason')\n", encoding="utf-8")
    for workers in ("0", "2"):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers]
        env = {"PATH": "/usr/bin:/bin", "CI": ci}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        assert "1 passed, 1 skipped" in done.stdout
