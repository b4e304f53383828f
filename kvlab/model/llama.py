"""Llama in one readable module: weights as plain tensors, K and V through a paged cache, one ragged batch a call.

Shapes: T tokens in the batch, S sequences, E hidden size, F intermediate size, H query heads, K KV heads, D head size, V vocabulary.
Numerically it follows transformers' LlamaForCausalLM: norms and softmax in float32 for half types; in float64 all is float64
(transformers' norms stay float32 there).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kvlab.kernels.interface import AttentionMetadata, Backend, LayerCache
from kvlab.model.config import LlamaConfig
from kvlab.model.linear import Linear
from kvlab.model.parallel import Shard, embed, rank_config
from kvlab.model.rope import rotary_table

GetTensor = Callable[[str], torch.Tensor]

MLP_ROWS = 512
"""Tokens that go through an MLP at a time on a CPU: of a prompt of 4,096 tokens in one step this takes an eighth off the processor time (of
page faults, mostly); below 1,024 tokens it makes no difference."""

FIRST_POSITIONS = 8192
"""Positions that the rotary table has before `Llama.reserve_positions`."""


class LayerCaches(Protocol):
    """What a model needs of the KV tensors (kvlab.cache.tensors.KVTensors)."""

    def layer(self, index: int) -> LayerCache:
        """K and V of one layer."""


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer. `qkv` and `gate_up` are the checkpoint's projections, stacked: fewer, larger products."""

    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A Llama of any shape. It holds no state between calls: that is all in the KV tensors.

    Args:
        config: its shape.
        get: name in a Hugging Face checkpoint -> tensor, already of the wanted dtype and device (and cut: kvlab.model.parallel.sharded).
        shard: the rank this is of several (`config` is the whole model's all the same, `self.config` the rank's); None: all of it.
    """

    def __init__(self, config: LlamaConfig, get: GetTensor, shard: Shard | None = None) -> None:
        self._shard, self._vocab_size = shard, config.vocab_size
        if shard is not None:
            config = rank_config(config, shard.size)
        self.config = config
        self.embed_VE = get("model.embed_tokens.weight")
        self.layers = [_layer(config, get, f"model.layers.{i}.") for i in range(config.num_layers)]
        self.final_norm = get("model.norm.weight")
        self.lm_head = Linear(self.embed_VE if config.tie_word_embeddings else get("lm_head.weight"))
        self.dtype, self.device = self.embed_VE.dtype, self.embed_VE.device
        self._rotary = rotary_table(config, min(config.max_position_embeddings, FIRST_POSITIONS), self.dtype, self.device)
        self._outgrown: list[torch.Tensor] = []
        self._scale = config.head_dim**-0.5
        self._rotated_counts = [config.num_heads, config.num_kv_heads]
        self._head_counts = [config.num_heads + config.num_kv_heads, config.num_kv_heads]

    def reserve_positions(self, num_positions: int) -> None:
        """Make the rotary table long enough for positions 0 to `num_positions` - 1; `FIRST_POSITIONS` are there from the start.

        A runner calls it before its first step: the table of a config's whole length takes gigabytes where that is in the millions.
        Shorter tables stay allocated on CUDA, where recorded graphs of other engines read them.
        """
        if num_positions > len(self._rotary):
            if self.device.type == "cuda":
                self._outgrown.append(self._rotary)
            self._rotary = rotary_table(self.config, num_positions, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, kv: LayerCaches, meta: AttentionMetadata,
                backend: Backend) -> torch.Tensor:  # fmt: skip
        """Run new tokens through all layers; their K and V are written to `kv` at `meta.slot_mapping_T`.

        Args:
            token_ids_T, positions_T: int64 [T] on the model's device; positions count from 0 in each sequence, and are
                among those reserved (`reserve_positions`).
            kv: KV tensors on the same device. meta: where each sequence's tokens lie; decodes first.

        Returns:
            Hidden states [T, E] after the final norm, for `logits`.
        """
        shard = self._shard
        hidden_TE = self.embed_VE.index_select(0, token_ids_T) if shard is None else embed(self.embed_VE, token_ids_T, shard)
        cos_T1D, sin_T1D = self._rotary.index_select(0, positions_T).unbind(1)
        normed_TE = backend.rms_norm(hidden_TE, self.layers[0].input_norm, self.config.rms_norm_eps)
        inner_TF: torch.Tensor | None = None
        next_norms = [*[layer.input_norm for layer in self.layers[1:]], self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            attended_TE = self._attention(layer, index, normed_TE, cos_T1D, sin_T1D, kv, meta, backend)
            normed_TE, hidden_TE = self._add_and_norm(hidden_TE, layer.o, attended_TE, layer.post_norm, backend)
            inner_TF = self._gated(layer, normed_TE, inner_TF, backend)
            normed_TE, hidden_TE = self._add_and_norm(hidden_TE, layer.down, inner_TF, next_norm, backend)
        return normed_TE

    @torch.inference_mode()
    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of the asked rows of `forward`'s result; float32 for half types, else the model's dtype."""
        logits_SV = self.lm_head(hidden_SE)
        if self._shard is not None:
            logits_SV = self._shard.comm.all_gather(logits_SV)[:, : self._vocab_size]
        return logits_SV.float() if logits_SV.dtype.itemsize < 4 else logits_SV

    def prepare_for_inference(self) -> None:
        """Bring weights into the form that this device multiplies fastest (see kvlab.model.linear). Called once after loading."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                linear.pack()
        self.lm_head.pack()

    def _attention(self, layer: Layer, index: int, x_TE: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor,
                   kv: LayerCaches, meta: AttentionMetadata, backend: Backend) -> torch.Tensor:  # fmt: skip
        heads = layer.qkv(x_TE).view(x_TE.shape[0], -1, self.config.head_dim)
        rotated, v_TKD = heads.split(self._head_counts, dim=1)
        q_THD, k_TKD = backend.rotary(rotated, cos_T1D, sin_T1D).split(self._rotated_counts, dim=1)
        cache = kv.layer(index)
        backend.write_kv(k_TKD, v_TKD, cache, meta)
        return backend.attention(q_THD, cache, meta, self._scale).flatten(1)

    def _gated(self, layer: Layer, x_TE: torch.Tensor, room_TF: torch.Tensor | None, backend: Backend) -> torch.Tensor:
        """The MLP before its last product, [T, F]. On a CPU some rows at a time, so that the wide part stays in the caches and in memory
        that is there already: into `room_TF`, an earlier layer's result."""
        if self.device.type != "cpu" or len(x_TE) <= MLP_ROWS:
            return backend.silu_and_mul(layer.gate_up(x_TE))
        if room_TF is None:
            room_TF = x_TE.new_empty((len(x_TE), self.config.intermediate_size))
        for x, room in zip(x_TE.split(MLP_ROWS), room_TF.split(MLP_ROWS), strict=True):
            room.copy_(backend.silu_and_mul(layer.gate_up(x)))
        return room_TF

    def _add_and_norm(self, hidden_TE: torch.Tensor, linear: Linear, x_TF: torch.Tensor, norm_E: torch.Tensor,
                      backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(norm of the sum, sum) of hidden + linear(x), of which each rank has a part; the sum takes hidden's place. It is made within the
        product where the weight is packed, else within the norm."""
        if linear.is_packed and self._shard is None:
            hidden_TE = linear.add_to(hidden_TE, x_TF)
            return backend.rms_norm(hidden_TE, norm_E, self.config.rms_norm_eps), hidden_TE
        added_TE = linear(x_TF) if self._shard is None else self._shard.comm.all_reduce(linear(x_TF))
        return backend.add_rms_norm(added_TE, hidden_TE, norm_E, self.config.rms_norm_eps)


def _layer(config: LlamaConfig, get: GetTensor, prefix: str) -> Layer:
    def linear(has_bias: bool, *names: str) -> Linear:
        weights = [get(f"{prefix}{name}.weight") for name in names]
        biases = [get(f"{prefix}{name}.bias") for name in names] if has_bias else []
        return Linear(_stack(weights), _stack(biases) if biases else None)

    return Layer(
        input_norm=get(prefix + "input_layernorm.weight"),
        qkv=linear(config.attention_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=linear(config.attention_bias, "self_attn.o_proj"),
        post_norm=get(prefix + "post_attention_layernorm.weight"),
        gate_up=linear(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(config.mlp_bias, "mlp.down_proj"),
    )


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def tensor_shapes(config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint of this shape must hold, in the order they are read."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    projections = {
        "self_attn.q_proj": (q, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q, config.attention_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
