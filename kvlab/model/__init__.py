"""Llama, its weights and its tokenizer. `load_model(spec)` is the way in; importing this package does not import transformers."""

from kvlab.model.config import LlamaConfig, RopeScaling
from kvlab.model.llama import Llama
from kvlab.model.loading import LoadedModel, ModelSpec, load_model
from kvlab.model.specs import dummy, hf, smollm2, tiny
from kvlab.model.tokenizer import Tokenizer
from kvlab.types.chat import Message

__all__ = [
    "Llama", "LlamaConfig", "LoadedModel", "Message", "ModelSpec", "RopeScaling", "Tokenizer", "dummy", "hf",
    "load_model", "smollm2", "tiny",
]  # fmt: skip
