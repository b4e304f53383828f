"""Helpers of the model's and the kernels' tests: a hand-driven paged cache, and transformers' Llama as the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvlab.cache.tensors import KVTensors
from kvlab.kernels.interface import AttentionMetadata
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.model import Llama, LlamaConfig
from kvlab.model.llama import tensor_shapes


def random_weights(config: LlamaConfig, seed: int) -> dict[str, torch.Tensor]:
    """Float64 weights: unit-gain projections, norms around 1, small biases."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], name: str) -> torch.Tensor:
        noise = torch.empty(shape, dtype=torch.float64).normal_(generator=generator)
        if name.endswith("bias"):
            return 0.1 * noise
        return 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5

    return {name: draw(shape, name) for name, shape in tensor_shapes(config).items()}


def our_llama(config: LlamaConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Llama:
    model = Llama(config, lambda name: weights[name].to(dtype))
    model.prepare_for_inference()
    return model


def hf_llama(config: LlamaConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """transformers' LlamaForCausalLM; in float64 its norms are float64 too (as they come, they round to float32)."""
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(HFConfig(**{k: v for k, v in config.to_hf().items() if k not in ("dtype", "torch_dtype")}))
    state = {name: tensor.to(dtype) for name, tensor in weights.items()}
    missing, unexpected = model.to(dtype).load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if dtype == torch.float64:
        _make_norms_float64(model)
    return model.eval()


def _make_norms_float64(model: Any) -> None:
    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = norm.__get__(module)


torch.set_num_threads(1)  # the tensors are small: two threads would mostly wait for each other


class PagedRun:
    """Sequences of one model over a paged cache, with block tables by hand."""

    def __init__(self, model: Llama, num_blocks: int = 64, block_size: int = 16, kv_dtype: torch.dtype | None = None,
                 window: int | None = None) -> None:  # fmt: skip
        config = model.config
        self.model, self.block_size, self.window = model, block_size, window
        self.kv = KVTensors(config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim, kv_dtype or model.dtype)
        self.backend = TorchBackend()
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, batch: Mapping[int, list[int]]) -> dict[int, torch.Tensor]:
        """Compute new tokens of each sequence (decodes are put first). Returns the logits [n, V] of all new tokens by sequence."""
        order = sorted(batch, key=lambda seq: len(batch[seq]) > 1)
        slots, positions, ids, contexts = [], [], [], []
        for seq in order:
            start = self.lengths.get(seq, 0)
            for position in range(start, start + len(batch[seq])):
                block = self.tables[seq][position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
                positions.append(position)
            ids += batch[seq]
            self.lengths[seq] = start + len(batch[seq])
            contexts.append(self.lengths[seq])
        hidden = self.model.forward(torch.tensor(ids), torch.tensor(positions), self.kv,
                                    metadata(slots, [self.tables[seq] for seq in order], contexts, [len(batch[s]) for s in order],
                                             self.block_size, self.window), self.backend)  # fmt: skip
        rows = self.model.logits(hidden).split([len(batch[seq]) for seq in order])
        return dict(zip(order, rows, strict=True))


def metadata(slots: list[int], tables: list[list[int]], context_lens: list[int], query_lens: list[int], block_size: int,
             window: int | None = None) -> AttentionMetadata:  # fmt: skip
    """A batch's metadata from plain lists."""
    width = max(len(table) for table in tables)
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    num_decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    return AttentionMetadata(torch.tensor(slots), padded, torch.tensor(context_lens), context_lens, query_lens, num_decodes,
                             block_size, window)  # fmt: skip
