"""Models with random weights: `tiny` for tests and `dummy` shapes for runs where only sizes matter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch

from kvlab.model.config import LlamaConfig, RopeScaling
from kvlab.model.llama import Llama, tensor_shapes
from kvlab.model.loading import LoadedModel
from kvlab.model.parallel import Shard, sharded
from kvlab.model.tokenizer import ByteTokenizer, Tokenizer
from kvlab.types import UserError, unknown_name

TINY = LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8,
                   max_position_embeddings=4096, bos_token_id=256, eos_token_ids=(257,))  # fmt: skip

SHAPES: dict[str, LlamaConfig] = {
    "smollm2": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True,
    ),
    "tinyllama": LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=22, num_heads=32, num_kv_heads=4, head_dim=64,
        max_position_embeddings=2048,
    ),
    "llama2_7b": LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128,
        max_position_embeddings=4096,
    ),
    "llama3_1b": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
        max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 32.0), tie_word_embeddings=True,
    ),
    "llama3_8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 8.0),
    ),
}  # fmt: skip
"""Shapes of published models, by name."""


def shape_named(shape: str, num_layers: int | None = None) -> LlamaConfig:
    """The config of a named shape, cut to `num_layers`; UserError for an unknown name or fewer than one layer."""
    if shape not in SHAPES:
        raise unknown_name("model shape", shape, SHAPES)
    if num_layers is not None and num_layers < 1:
        raise UserError(f"num_layers = {num_layers} is not allowed: at least 1, or null for all layers of the shape.")
    config = SHAPES[shape]
    return config if num_layers is None else replace(config, num_layers=num_layers)


def dummy_model(shape: str, num_layers: int | None, seed: int, dtype: torch.dtype, device: torch.device,
                shard: Shard | None = None) -> LoadedModel:  # fmt: skip
    """Random weights of a named shape. They are drawn on the device itself, so values differ between devices (sizes don't)."""
    config = shape_named(shape, num_layers)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)

    name = f"dummy_{shape}" + ("" if num_layers is None else f"_{num_layers}layers")
    return _random_model(config, draw, name, f"seed={seed} device={device.type}", None, shard)


def tiny_weights(seed: int) -> dict[str, torch.Tensor]:
    """Float64 weights of the tiny model under their Hugging Face names, drawn on the CPU.

    Projections have unit gain (std 1 / sqrt(fan in)), embeddings std 1: attention and MLP really change the hidden state, so that
    greedy tokens vary with the whole context instead of settling on one, and the gap between the best two logits is rarely small.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in tensor_shapes(TINY).items():
        if len(size) == 1:
            weights[name] = torch.ones(size, dtype=torch.float64)
        else:
            std = 1.0 if "embed_tokens" in name else size[1] ** -0.5
            weights[name] = torch.empty(size, dtype=torch.float64).normal_(0.0, std, generator=generator)
    return weights


def tiny_model(seed: int, dtype: torch.dtype, device: torch.device, shard: Shard | None = None) -> LoadedModel:
    """The tiny model: the same numbers, rounded, for every dtype and device."""
    weights = tiny_weights(seed)
    tokenizer = ByteTokenizer(TINY.vocab_size)
    return _random_model(TINY, lambda name, _: weights[name].to(dtype=dtype, device=device), "tiny", f"seed={seed}", tokenizer,
                         shard)  # fmt: skip


def _random_model(config: LlamaConfig, draw: Callable[[str, tuple[int, ...]], torch.Tensor], name: str, origin: str,
                  tokenizer: Tokenizer | None, shard: Shard | None) -> LoadedModel:  # fmt: skip
    shapes = tensor_shapes(config)

    def get(tensor: str) -> torch.Tensor:
        return draw(tensor, shapes[tensor])

    model = Llama(config, get if shard is None else sharded(config, get, shard), shard)
    checksum = hashlib.sha256(f"{name} {config} {origin}".encode()).hexdigest()
    return LoadedModel(model, config, tokenizer, name, checksum, config.eos_token_ids)
