"""What a Llama is: the numbers of a Hugging Face `config.json`, checked, in one flat dataclass."""

from __future__ import annotations

from collections.abc import Mapping
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
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
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
        try:
            hidden_size, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            eos = config.get("eos_token_id")
            theta, scaling = _rope(config, source)
            return cls(
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or hidden_size // num_heads),
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope_theta=theta,
                rope_scaling=scaling,
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                bos_token_id=config.get("bos_token_id"),
                eos_token_ids=token_id_tuple(eos),
                stored_dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
            )
        except KeyError as missing:
            raise UserError(f"{source}: {missing.args[0]!r} is missing, and a Llama can't be built without it.") from None
        except (TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{source}: a size or constant is not a number ({error}). Copy the file again.") from None

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


def token_id_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    """An id field of Hugging Face's (None, one id or a list) as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _refuse_other_models(config: Mapping[str, Any], source: str) -> None:
    architectures = config.get("architectures") or []
    model_type = config.get("model_type", "")
    if model_type != "llama" or (architectures and "LlamaForCausalLM" not in architectures):
        found = ", ".join(architectures) or model_type or "none named"
        raise UserError(
            f"{source}: architecture {found} is not supported. Supported: LlamaForCausalLM (model_type 'llama':"
            " Llama 2 and 3, SmolLM2, TinyLlama and others of that architecture)."
        )
    if config.get("quantization_config"):
        raise UserError(f"{source}: quantised weights are not supported. Use a folder with float16, bfloat16 or float32 weights.")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{source}: hidden_act {config['hidden_act']!r} is not supported. Supported: 'silu'.")


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = parameters or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UserError(f"{source}: rope scaling {kind!r} is not supported. Supported: {', '.join(ROPE_TYPES)}.")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, float(scaling["factor"]))
    return theta, RopeScaling(kind, float(scaling["factor"]), float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"]),
                              int(scaling["original_max_position_embeddings"]))  # fmt: skip
