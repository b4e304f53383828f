"""Capacities in blocks, tokens, bytes of a model and shares: one parser, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlab.model.random_weights import SHAPES
from kvlab.replay import AccessTrace, EngineOptions, kv_bytes_per_token, parse_capacity, replay
from kvlab.types import UserError


@pytest.mark.parametrize(
    ("value", "unit", "amount", "kind"),
    [
        (5000, None, 5000, "blocks"), ("5000", None, 5000, "blocks"), ("5_000blocks", None, 5000, "blocks"),
        ("1e4", None, 10_000, "blocks"),
        ("40000tok", None, 40_000, "tokens"), ("40 ktok", None, 40_000, "tokens"), (40_000, "tokens", 40_000, "tokens"),
        ("8GiB", None, 8 * 2**30, "bytes"), ("1.5GB", None, 1_500_000_000, "bytes"), ("7", "bytes", 7, "bytes"),
        ("3KiB", "bytes", 3072, "bytes"),
    ],
)  # fmt: skip
def test_units(value: Any, unit: str | None, amount: int, kind: str) -> None:
    capacity = parse_capacity(value, unit)
    assert (capacity.amount, capacity.unit) == (amount, kind)


@pytest.mark.parametrize(("value", "blocks"), [(0.1, 1), (0.3, 3), ("0.3", 3), ("30%", 3), ("99.9%", 9), (0.001, 1)])
def test_a_share_of_ten_blocks(value: Any, blocks: int) -> None:
    assert parse_capacity(value).num_blocks(16, 10, None) == blocks


def test_bytes_of_a_model() -> None:
    """Llama 3 8B: 2 x 32 layers x 8 KV heads x 128 x 2 bytes = 131,072 a token. 8 GiB are 65,536 tokens, 128 blocks of 512."""
    assert kv_bytes_per_token("llama3_8b") == 131_072
    assert kv_bytes_per_token("dummy_llama3_8b", "float32") == 262_144
    assert kv_bytes_per_token(SHAPES["llama2_7b"], "fp8") == 262_144
    assert kv_bytes_per_token("llama3_8b", "int8") == 2 * 32 * 8 * (128 + 2)
    assert kv_bytes_per_token(70_000) == 70_000
    trace = AccessTrace("t", [[1, 2], [1, 3]], [0.0, 0.0], [1024, 1000])
    assert replay(trace, "lru", "8GiB", model="llama3_8b").capacity == 128
    assert replay(trace, "lru", 8 * 2**30, capacity_unit="bytes", model="llama3_8b").capacity == 128
    assert replay(trace, "lru", "1100tok").capacity == 2
    assert replay(trace, "lru", 0.5, capacity_unit="share").capacity == 1


def test_a_models_folder_says_its_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    ), encoding="utf-8")  # fmt: skip
    assert kv_bytes_per_token(tmp_path) == 2 * 28 * 4 * 128 * 2
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 28}', encoding="utf-8")
    with pytest.raises(UserError, match="doesn't say num_hidden_layers, num_attention_heads and hidden_size"):
        kv_bytes_per_token(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="can't be read as JSON"):
        kv_bytes_per_token(str(tmp_path))


def test_an_engines_block_stands_for_what_the_traced_service_held(tmp_path: Path) -> None:
    """block_tokens=16 shrinks blocks of 512 tokens 32 times: 128 blocks of 16 stand for 65,536 tokens of the service, 8 GiB."""
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 32, "hash_ids": [1]}\n', encoding="utf-8")
    assert replay(path, "lru", "8GiB", "engine", model="llama3_8b").capacity == 128
    assert replay(path, "lru", "65536tok", "engine", options=EngineOptions(block_size=8)).capacity == 256
    assert replay(path, "lru", "65536tok", "engine", options=EngineOptions(block_tokens=512)).capacity == 4096


@pytest.mark.parametrize(
    ("value", "arguments", "message"),
    [
        ("8GiB", {}, "bytes need a model, for example model=llama3_8b"),
        ("1kB", {"model": "llama3_8b"}, r"capacity = 1kB holds no block of 512 tokens: at least 67108864 bytes"),
        ("511tok", {}, r"holds no block of 512 tokens: at least 512 tokens"),
        ("8GiX", {}, "Unknown unit of a capacity 'GiX'"),
        ("8GiB", {"capacity_unit": "tokens", "model": 1}, "is bytes, and capacity_unit=tokens says otherwise"),
        (5, {"capacity_unit": "block"}, "Unknown capacity_unit 'block'. Did you mean 'blocks'"),
        (1.5, {"capacity_unit": "share"}, "is not allowed: blocks"),
        (5, {"capacity_unit": "share"}, "is not allowed: blocks"),
        ("0tok", {}, "is not allowed: blocks"),
        ("-5", {}, "is not allowed: blocks"),
        ("100%", {}, "is not allowed: blocks"),
        ("8GiB", {"model": "llama3_9b"}, "Unknown model 'llama3_9b'. Did you mean 'llama3_8b'"),
        ("8GiB", {"model": "llama3_8b", "kv_dtype": "fp4"}, "Unknown kv_dtype 'fp4'"),
        ("8GiB", {"model": 0}, "model = 0 is not allowed as bytes per token"),
        ("8GiB", {"model": 1.5}, "model = 1.5 is not allowed: a name such as llama3_8b"),
    ],
)
def test_what_is_no_capacity(value: Any, arguments: dict[str, Any], message: str) -> None:
    trace = AccessTrace("t", [[1, 2], [1, 3]], [0.0, 0.0], [1024, 1000])
    with pytest.raises(UserError, match=message):
        replay(trace, "lru", value, **arguments)


def test_tokens_need_lengths() -> None:
    with pytest.raises(UserError, match="this trace has no lengths, so that a block is no number of tokens. Give blocks or a share"):
        replay([[1], [2]], "lru", "100tok")
