"""What a Llama is: the numbers of a Hugging Face `config.json`, checked, in one flat dataclass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.types import UserError

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind` "linear": all divided by `factor`; "llama3": only the long wavelengths
    (Llama 3.1), between `low_freq_factor` and `high_freq_factor` of `original_max_position_embeddings`."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape and constants of a Llama. Sizes in elements, `max_position_embeddings` in tokens.

    `eos_token_ids`: ids that end a text, as config.json names them (a folder's generation_config.json may name more).
    `stored_dtype`: the dtype the weights were saved in ("" if unknown).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stored_dtype: str = ""

    def __post_init__(self) -> None:
        """Check what later code relies on.

        Raises:
            UserError: a size below 1, heads that don't divide, an odd head size.
        """
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "max_position_embeddings"):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"Model config: {name} = {getattr(self, name)} is not allowed: a whole number of at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"Model config: num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}.")
        if self.head_dim % 2:
            raise UserError(f"Model config: head_dim = {self.head_dim} must be even (rotary embeddings turn pairs).")

    @property
    def num_parameters(self) -> int:
        """Weights, tied embeddings counted once."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (qkv + self.num_heads * self.head_dim + 3 * self.intermediate_size + 2)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> LlamaConfig:
        """From the contents of a `config.json`; `source` (its path) is named in errors.

        Raises:
            UserError: another architecture, a missing number, or a feature that would change results if ignored.
        """
        _refuse_other_models(config, source)
        read = _Fields(config, source)
        num_positions = read.whole("max_position_embeddings", 2048)
        _refuse_other_attention(config, source, num_positions)
        hidden_size, num_heads = read.whole("hidden_size"), read.whole("num_attention_heads")
        theta, scaling = _rope(config, source)
        return cls(
            vocab_size=read.whole("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.whole("intermediate_size"),
            num_layers=read.whole("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=read.whole("num_key_value_heads", num_heads),
            head_dim=read.whole("head_dim", hidden_size // max(1, num_heads)),
            max_position_embeddings=num_positions,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            attention_bias=read.flag("attention_bias"),
            mlp_bias=read.flag("mlp_bias"),
            bos_token_id=read.whole("bos_token_id", -1) if config.get("bos_token_id") is not None else None,
            eos_token_ids=token_id_tuple(config.get("eos_token_id"), source),
            stored_dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        )

    def to_hf(self) -> dict[str, Any]:
        """As a `config.json` that transformers (before and since 5) and `from_hf` read."""
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling is not None:
            rope |= {"rope_type": self.rope_scaling.kind, "factor": self.rope_scaling.factor}
            if self.rope_scaling.kind == "llama3":
                names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
                rope |= {name: getattr(self.rope_scaling, name) for name in names}
        eos = list(self.eos_token_ids)
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps, "rope_theta": self.rope_theta, "rope_parameters": rope,
            "rope_scaling": None if self.rope_scaling is None else {k: v for k, v in rope.items() if k != "rope_theta"},
            "tie_word_embeddings": self.tie_word_embeddings, "attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias,
            "bos_token_id": self.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "torch_dtype": self.stored_dtype or "float32", "dtype": self.stored_dtype or "float32",
        }  # fmt: skip


def token_id_tuple(value: object, source: str) -> tuple[int, ...]:
    """An id field of Hugging Face's (None, one id or a list of ids) as a tuple; `source` (the file) is named in errors.

    Raises:
        UserError: anything else (a string, a fraction, a list within a list).
    """
    if value is None:
        return ()
    ids = value if isinstance(value, (list, tuple)) else [value]
    wrong = [item for item in ids if isinstance(item, bool) or not isinstance(item, int)]
    if wrong:
        raise UserError(f"{source}: eos_token_id = {value!r} is not allowed: a token id, a list of token ids, or null.")
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Fields of a config.json, of the kind that each must be. A null counts as absent, as in transformers."""

    config: Mapping[str, Any]
    source: str

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        return int(self._get(name, default, lambda v: isinstance(v, int) and not isinstance(v, bool), "a whole number"))

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        return float(self._get(name, default, is_positive, "a number above 0"))

    def flag(self, name: str) -> bool:
        """true or false; false where it is absent."""
        return bool(self._get(name, False, lambda v: isinstance(v, bool), "true or false"))

    def _get(self, name: str, default: Any, is_right: Callable[[Any], bool], what: str) -> Any:
        value = self.config.get(name)
        if value is None and default is None:
            raise UserError(f"{self.source}: {name!r} is missing, and a Llama can't be built without it.")
        value = default if value is None else value
        if not is_right(value):
            raise UserError(f"{self.source}: {name} = {value!r} is not allowed: {what}. Copy the file again.")
        return value


def is_positive(value: object) -> bool:
    """Whether it is a number above 0 that a float can hold (true and false are none)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _refuse_other_models(config: Mapping[str, Any], source: str) -> None:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UserError(f"{source}: architectures = {architectures!r} is not allowed: a list of class names.")
    model_type = config.get("model_type", "")
    if model_type != "llama" or (architectures and "LlamaForCausalLM" not in architectures):
        found = ", ".join(architectures) or str(model_type) or "none named"
        raise UserError(
            f"{source}: architecture {found} is not supported. Supported: LlamaForCausalLM (model_type 'llama':"
            " Llama 2 and 3, SmolLM2, TinyLlama and others of that architecture)."
        )
    if config.get("quantization_config"):
        raise UserError(f"{source}: quantised weights are not supported. Use a folder with float16, bfloat16 or float32 weights.")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"{source}: hidden_act {config['hidden_act']!r} is not supported. Supported: 'silu' (also called 'swish').")
    if config.get("transformers_weights"):
        raise UserError(f"{source}: transformers_weights = {config['transformers_weights']!r} is not supported. Save the weights as"
                        " model.safetensors and remove the key.")  # fmt: skip


def _refuse_other_attention(config: Mapping[str, Any], source: str, num_positions: int) -> None:
    """UserError for keys under which transformers has a Llama attend to other tokens than all before it, or differently by layer."""
    if not config.get("is_causal", True):
        raise UserError(f"{source}: is_causal = {config['is_causal']!r} is not supported: a token would attend to later ones as well.")
    for name in ("per_layer_config", "text_config"):
        if config.get(name):
            raise UserError(f"{source}: {name} is not supported. Supported: one setting for all layers, at the top level.")
    if (layer_types := config.get("layer_types")) is not None:
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise UserError(f"{source}: layer_types = {layer_types!r} is not supported. Supported: 'full_attention' for each layer.")
        return
    for name in ("sliding_window", "attention_chunk_size"):
        window = config.get(name)
        if window is not None and not (is_positive(window) and window >= num_positions):
            raise UserError(f"{source}: {name} = {window!r} is not supported: a Llama attends to all earlier tokens. Remove the key if the"
                            " model was trained so.")  # fmt: skip


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling. Where a config names them in several places, the one that transformers 5 takes counts:

    - `rope_scaling`, if it has any entry, stands in place of the whole of `rope_parameters`;
    - of that object `rope_theta` and `rope_type` come before the top level's `rope_theta` and the older `type`;
    - llama3's `original_max_position_embeddings` at the top level comes before the object's, and both before `max_position_embeddings`.
    """
    rope = _rope_object(config, source)
    read = _Fields(rope, source)
    if "rope_theta" in rope:
        theta = read.number("rope_theta")
    else:
        theta = _Fields(config, source).number("rope_theta", 10000.0)
    kind = rope["rope_type"] if "rope_type" in rope else rope.get("type", "default")
    if kind not in ROPE_TYPES:
        raise UserError(f"{source}: rope scaling {kind!r} is not supported. Supported: {', '.join(ROPE_TYPES)}.")
    if kind == "default":
        return theta, None
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UserError(f"{source}: partial_rotary_factor = {partial!r} is not supported with rope scaling {kind!r}: leave it out.")
    factor = read.number("factor")
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
    if low >= high:
        raise UserError(f"{source}: low_freq_factor = {low:g} must be below high_freq_factor = {high:g}.")
    outer = _Fields(config, source)
    if "original_max_position_embeddings" in config:
        original = outer.whole("original_max_position_embeddings")
    elif "original_max_position_embeddings" in rope:
        original = read.whole("original_max_position_embeddings")
    else:
        original = outer.whole("max_position_embeddings", 2048)
    if original < 1:
        raise UserError(f"{source}: original_max_position_embeddings = {original} is not allowed: a whole number of at least 1.")
    return theta, RopeScaling(kind, factor, low, high, original)


def _rope_object(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The object that describes the rotary embeddings; empty where there is none."""
    for name in ("rope_scaling", "rope_parameters"):
        found = config.get(name)
        if found is None or found == {}:
            continue
        if not isinstance(found, dict):
            raise UserError(f"{source}: {name} = {found!r} is not allowed: an object with rope_type, or null.")
        nested = next((key for key, value in found.items() if isinstance(value, dict)), None)
        if nested is not None:
            raise UserError(f"{source}: {name} holds settings for {nested!r} layers. Supported: one setting for all layers.")
        return found
    return {}
