"""A Llama in a GGUF file (llama.cpp's format) as Hugging Face tensors, config and tokenizer.json.

Done with the `gguf` package's own dequantisation: seconds, where transformers' loader takes half a minute. Same values, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlab.model.config import LlamaConfig

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight",
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight", "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight", "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}  # fmt: skip
CONTROL_TOKEN = 3
"""llama.cpp's token type of special tokens."""


class GGUFFile:
    """A GGUF file, memory-mapped. Opening it parses the vocabulary (about 3 s for 49,152 tokens)."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader: Any = GGUFReader(path)

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata value."""
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def config(self) -> LlamaConfig:
        """The shape, from the metadata."""
        names = {tensor.name for tensor in self._reader.tensors}
        hidden_size, num_heads = self.field("llama.embedding_length"), self.field("llama.attention.head_count")
        return LlamaConfig(
            vocab_size=self.field("llama.vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.field("llama.feed_forward_length"),
            num_layers=self.field("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=self.field("llama.attention.head_count_kv", num_heads),
            head_dim=self.field("llama.rope.dimension_count", hidden_size // num_heads),
            max_position_embeddings=self.field("llama.context_length"),
            rms_norm_eps=float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.7g}"),  # float32 1e-5 back to 1e-5
            rope_theta=self.field("llama.rope.freq_base", 10000.0),
            tie_word_embeddings="output.weight" not in names,
            bos_token_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_token_ids=(self.field("tokenizer.ggml.eos_token_id"),),
            stored_dtype="float32",
        )

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._reader.tensors)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and float32 values of every tensor."""
        from gguf.quants import dequantize

        num_heads = self.field("llama.attention.head_count")
        num_kv_heads = self.field("llama.attention.head_count_kv", num_heads)
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            name = hf_name(tensor.name)
            if name.endswith("q_proj.weight"):
                values = undo_rotary_permutation(values, num_heads)
            elif name.endswith("k_proj.weight"):
                values = undo_rotary_permutation(values, num_kv_heads)
            yield name, torch.from_numpy(np.array(values, dtype=np.float32, order="C"))

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja for a byte-level BPE vocabulary."""
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        _byte_level_bpe(tokens, self.field("tokenizer.ggml.merges"), self.field("tokenizer.ggml.token_type")).save(
            str(folder / "tokenizer.json")
        )
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        special = {name: tokens[self.field(f"tokenizer.ggml.{key}_token_id")] for name, key in keys.items()}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": self.field("llama.context_length"),
                  "clean_up_tokenization_spaces": False, **special}  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / "chat_template.jinja").write_text(self.field("tokenizer.chat_template"), encoding="utf-8")


def hf_name(name: str) -> str:
    """llama.cpp's tensor name as Hugging Face's: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        return f"model.layers.{layer}.{NAMES[rest]}"
    return NAMES[name]


def undo_rotary_permutation(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp turns neighbouring coordinates, Hugging Face the halves of a head; its converter permutes the rows of q and k for that.

    [H * D, E], rows (head, pair, half) -> (head, half, pair).
    """
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _byte_level_bpe(tokens: list[str], merges: list[str], token_types: list[int]) -> Any:
    """The tokenizer of SmolLM ("smollm" in llama.cpp): each digit by itself, then GPT-2's byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ", 1)) for merge in merges]))  # type: ignore[misc]
    splitters = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, token_types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
