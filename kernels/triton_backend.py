"""The Triton backend: paged attention, cache writes, block moves and the operations between matrix products as Triton kernels.

Launch shapes are a function of the work (each kernel's `default_config`); nothing is tuned while a run is measured. `paths` counts which
kernel ran with which shape.

Shapes: T tokens, S sequences, H query heads, K KV heads, D head size, B block size.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from dataclasses import dataclass

import torch

from kvlab.kernels import triton_activation, triton_block_copy, triton_cache_write, triton_norm, triton_rotary
from kvlab.kernels.attention_args import MAX_HEAD_DIM, QUERY_TYPES
from kvlab.kernels.decode_attention import choose_num_splits, decode_attention
from kvlab.kernels.decode_attention import default_config as decode_config
from kvlab.kernels.interface import AttentionMetadata, LayerCache, UnsupportedError
from kvlab.kernels.launch import LaunchConfig
from kvlab.kernels.prefill_attention import default_config as prefill_config
from kvlab.kernels.prefill_attention import prefill_attention
from kvlab.kernels.quantize import FP8
from kvlab.kernels.transfer import on_device
from kvlab.kernels.triton_common import INTERPRET, capability, num_sms

LEAST_CAPABILITY = (8, 0)
LEAST_TRITON = (3, 6)
STORAGE = (*QUERY_TYPES, FP8, torch.int8)


@dataclass(slots=True)
class StepShapes:
    """What is the same for every layer of a step.

    Attributes:
        tables_SM: the decodes' block tables, no wider than they need. num_splits, decode: how they are cut; None without decodes.
        query_starts_S1: int64, first row of each prefill chunk from the first chunk's on, and the end; None without prefills.
        max_query_len, prefill: of the chunks.
    """

    tables_SM: torch.Tensor
    num_splits: int = 1
    decode: LaunchConfig | None = None
    query_starts_S1: torch.Tensor | None = None
    max_query_len: int = 0
    prefill: LaunchConfig | None = None


def check_platform(device: torch.device) -> None:
    """Raise UnsupportedError unless kernels run on this device: CUDA of compute capability 8.0 or more with a driver that takes what this
    Triton compiles, or the CPU in Triton's interpreter."""
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TRITON:
        raise UnsupportedError(f"backend=triton needs Triton 3.6 or later; {version} is installed. Install that, or use backend=torch.")
    if device.type == "cpu" and INTERPRET.value:
        return
    if device.type != "cuda":
        raise UnsupportedError(f"backend=triton needs a CUDA device, and this run is on {device.type}: use backend=torch. (For tests, "
                               "kernels run on the CPU in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts.)")  # fmt: skip
    if INTERPRET.value:
        raise UnsupportedError("TRITON_INTERPRET is set, and kernels would be interpreted, not compiled: unset it, or use device=cpu.")
    found, card = capability(device), torch.cuda.get_device_name(device)
    if found < LEAST_CAPABILITY:
        raise UnsupportedError(f"backend=triton needs compute capability 8.0 or more; {card} has {found[0]}.{found[1]}. Use backend=torch.")
    blocks = torch.arange(64, dtype=torch.int32, device=device).view(1, 1, 4, 16)
    try:
        moved = triton_block_copy.gather_blocks(blocks, [3])
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever compiler, driver or loader raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"Triton {version} can't run a kernel on {card} (torch {torch.__version__}, CUDA {torch.version.cuda}): "
                               f"{reason}. A driver older than that CUDA version is the usual reason: update it, or use "
                               "backend=torch.") from error  # fmt: skip
    if moved.flatten().tolist() != list(range(48, 64)):
        raise UnsupportedError(f"Triton {version} ran a kernel on {card} with a wrong result: use backend=torch.")


class TritonBackend:
    """`Backend` on Triton kernels. float64 is not served.

    Raises:
        UnsupportedError: kernels can't run on `device`.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        check_platform(device)
        self.paths: Counter[str] = Counter()
        self._capability, self._sms = capability(device), num_sms(device)

    def check(self, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype,
              window: int | None, device: torch.device) -> None:  # fmt: skip
        """Raise UnsupportedError for what no kernel serves; block size and window may be anything."""
        def refuse(what: str, allowed: str) -> UnsupportedError:
            return UnsupportedError(f"backend=triton has no kernels for {what}: {allowed}, or use backend=torch.")

        if dtype not in QUERY_TYPES:
            raise refuse(f"a model in {_name(dtype)}", f"use dtype={', '.join(map(_name, QUERY_TYPES))}")
        if kv_dtype not in STORAGE:
            raise refuse(f"K and V in {_name(kv_dtype)}", f"store them as {', '.join(map(_name, STORAGE))}")
        if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
            raise refuse(f"heads of {head_dim} numbers", f"even head sizes up to {MAX_HEAD_DIM} work")
        if num_heads % num_kv_heads:
            raise refuse(f"{num_heads} query heads over {num_kv_heads} KV heads", "query heads must be a multiple of KV heads")
        if device.type != "cuda" and not INTERPRET.value:
            raise refuse(f"tensors on {device.type}", "use device=cuda")

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """See `kvlab.kernels.triton_norm`."""
        return triton_norm.rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor,
                     eps: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See `kvlab.kernels.triton_norm`."""
        return triton_norm.add_rms_norm(x_TE, residual_TE, weight_E, eps)

    def rotary(self, heads_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
        """See `kvlab.kernels.triton_rotary`."""
        return triton_rotary.rotary(heads_THD, cos_T1D, sin_T1D)

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """See `kvlab.kernels.triton_activation`."""
        return triton_activation.silu_and_mul(gate_up_T2F)

    def write_kv(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata) -> None:
        """See `kvlab.kernels.triton_cache_write`."""
        self.paths[f"write_kv {_name(cache.k_NBKD.dtype)}"] += 1
        triton_cache_write.write_kv(k_TKD, v_TKD, cache, meta.slot_mapping_T)

    def attention(self, q_THD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
        """Decodes through split-KV attention, prefill chunks through tiles of queries; both read the cache."""
        shapes = self._shapes(q_THD, cache, meta)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        num_decodes, lengths = meta.num_decodes, meta.context_lens_S
        if shapes.decode is not None:
            self.paths[f"decode_attention tile={shapes.decode.tile} rows={shapes.decode.rows} splits={shapes.num_splits}"] += 1
            decode_attention(q_THD[:num_decodes], cache.k_NBKD, cache.v_NBKD, shapes.tables_SM, lengths[:num_decodes], scale,
                             window=meta.window, num_sink_tokens=meta.num_sink_tokens, num_splits=shapes.num_splits,
                             config=shapes.decode, out=out_THD[:num_decodes], k_scale=cache.k_scale, v_scale=cache.v_scale)  # fmt: skip
        if shapes.prefill is not None and shapes.query_starts_S1 is not None:
            self.paths[f"prefill_attention tile={shapes.prefill.tile} rows={shapes.prefill.rows}"] += 1
            prefill_attention(q_THD[num_decodes:], cache.k_NBKD, cache.v_NBKD, meta.block_tables_SM[num_decodes:], shapes.query_starts_S1,
                              lengths[num_decodes:], shapes.max_query_len, scale, window=meta.window,
                              num_sink_tokens=meta.num_sink_tokens, config=shapes.prefill, out=out_THD[num_decodes:],
                              k_scale=cache.k_scale, v_scale=cache.v_scale)  # fmt: skip
        return out_THD

    def copy_blocks(self, cache_LXN: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """See `kvlab.kernels.triton_block_copy`."""
        triton_block_copy.copy_blocks(cache_LXN, pairs)

    def gather_blocks(self, cache_LXN: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        """See `kvlab.kernels.triton_block_copy`."""
        return triton_block_copy.gather_blocks(cache_LXN, block_ids)

    def scatter_blocks(self, cache_LXN: torch.Tensor, block_ids: list[int], blocks_LXn: torch.Tensor) -> None:
        """See `kvlab.kernels.triton_block_copy`."""
        triton_block_copy.scatter_blocks(cache_LXN, block_ids, blocks_LXn)

    def _shapes(self, q_THD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata) -> StepShapes:
        """Made at the first call of a step."""
        if isinstance(meta.derived, StepShapes):
            return meta.derived
        num_decodes, query_lens = meta.num_decodes, meta.query_lens[meta.num_decodes :]
        num_kv_heads, head_dim = cache.k_NBKD.shape[2:]
        group = q_THD.shape[1] // num_kv_heads
        tables_SM = meta.block_tables_SM[:num_decodes]
        if num_decodes and query_lens:  # a long prompt's table is no reason to cut short decodes up
            tables_SM = tables_SM[:, : max(1, -(-max(meta.context_lens[:num_decodes]) // meta.block_size))]
        shapes = StepShapes(tables_SM)
        if num_decodes:
            shapes.decode = decode_config(head_dim, group, q_THD.dtype, self._capability)
            programs = num_decodes * num_kv_heads * -(-group // shapes.decode.rows)
            shapes.num_splits = choose_num_splits(programs, tables_SM.shape[1] * meta.block_size, shapes.decode.tile, self._sms)
        if query_lens:
            starts = [0]
            for length in query_lens:
                starts.append(starts[-1] + length)
            shapes.query_starts_S1 = on_device(starts, torch.int64, q_THD.device)
            shapes.max_query_len = max(query_lens)
            shapes.prefill = prefill_config(head_dim, group, q_THD.dtype, cache.k_NBKD.dtype, self._capability, shapes.max_query_len)
        meta.derived = shapes
        return shapes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
