"""The engine's limits and its policies, and which combinations are impossible."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from kvlab.policies import base
from kvlab.policies.admission import Watermark
from kvlab.policies.batching import Chunked
from kvlab.policies.block_sizing import Fixed
from kvlab.policies.compression import Full
from kvlab.policies.eviction import Lru
from kvlab.policies.kv_dtype import Auto
from kvlab.policies.layout import Paged
from kvlab.policies.preemption import Lifo
from kvlab.policies.preemption.mode import Recompute
from kvlab.policies.prefix_cache import Hash
from kvlab.policies.scheduling import Fcfs
from kvlab.types import UserError


@dataclass(frozen=True)
class EngineConfig:
    """Limits.

    Attributes:
        num_blocks: blocks of the KV pool. num_cpu_blocks: blocks of swap space (0: none). block_size: tokens per block.
        max_num_seqs: sequences that may run at once. max_num_batched_tokens: tokens a step may compute.
        max_model_len: longest prompt + output of a sequence (tokens).
        seed: randomness of requests without a seed of their own follows from it.
        depth: 0: a plan waits for the last outcome. 1: it is made while the last one runs; a finish is seen one step late.
        track_shareable: count cached tokens that block granularity kept from being reused (costs about 2 us per published block).
    """

    num_blocks: int
    block_size: int = 16
    num_cpu_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    seed: int = 0
    depth: int = 0
    track_shareable: bool = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} = {value!r} is not allowed: a positive integer.")
        if not isinstance(self.num_cpu_blocks, int) or isinstance(self.num_cpu_blocks, bool) or self.num_cpu_blocks < 0:
            raise UserError(f"num_cpu_blocks = {self.num_cpu_blocks!r} is not allowed: 0 (no swap) or a positive integer.")
        if self.depth not in (0, 1) or isinstance(self.depth, bool):
            raise UserError(f"depth = {self.depth!r} is not allowed: 0 (a plan waits for the last outcome) or 1 (it is made meanwhile).")


_CONTRACTS: dict[str, type] = {
    "scheduling": base.SchedulingPolicy, "batching": base.BatchingPolicy, "admission": base.AdmissionPolicy,
    "preemption": base.PreemptionPolicy, "eviction": base.EvictionPolicy, "prefix_cache": base.PrefixCachePolicy,
    "block_sizing": base.BlockSizingPolicy, "layout": base.LayoutPolicy, "compression": base.CompressionPolicy,
    "kv_dtype": base.KVDtypePolicy,
}  # fmt: skip


@dataclass
class PolicySet:
    """One policy a seam. Defaults: first come first served, chunked prefill, watermark 0.01, latest preempted first (recompute),
    LRU, hashed prefix cache, 16 tokens a block, paged, nothing compressed, the model's own dtype."""

    scheduling: base.SchedulingPolicy = field(default_factory=Fcfs)
    batching: base.BatchingPolicy = field(default_factory=Chunked)
    admission: base.AdmissionPolicy = field(default_factory=Watermark)
    preemption: base.PreemptionPolicy = field(default_factory=lambda: Lifo(Recompute()))
    eviction: base.EvictionPolicy = field(default_factory=Lru)
    prefix_cache: base.PrefixCachePolicy = field(default_factory=Hash)
    block_sizing: base.BlockSizingPolicy = field(default_factory=Fixed)
    layout: base.LayoutPolicy = field(default_factory=Paged)
    compression: base.CompressionPolicy = field(default_factory=Full)
    kv_dtype: base.KVDtypePolicy = field(default_factory=Auto)

    def __post_init__(self) -> None:
        for part in fields(self):
            value: Any = getattr(self, part.name)
            if not isinstance(value, _CONTRACTS[part.name]):
                raise UserError(f"{part.name} = {value!r} is not a policy of this seam: a kvlab.policies.base."
                                f"{_CONTRACTS[part.name].__name__} (an object, made with its parameters) is needed.")  # fmt: skip

    def reset(self) -> None:
        """Make policies that keep state as new, so that the same objects can serve another run."""
        for policy in (*(getattr(self, part.name) for part in fields(self)), self.preemption.mode):
            reset = getattr(policy, "reset", None)
            if reset is not None:
                reset()

    @property
    def lossless(self) -> bool:
        """No policy here changes a token."""
        return self.compression.lossless and self.kv_dtype.lossless

    def check(self, config: EngineConfig) -> None:
        """Raise UserError for a combination that can't work. Called before a model is loaded."""
        if self.eviction.sees_future:
            raise UserError(f"eviction {type(self.eviction).__name__} must know all accesses in advance, which an engine does not: use it "
                            "in kvlab.replay, where the workload's future is given, or choose another eviction policy.")  # fmt: skip
        self._check_masks()
        layout = type(self.layout).__name__
        if not self.layout.shares_blocks:
            if self.prefix_cache.enabled:
                raise UserError(f"layout {layout} gives each sequence a region of its own, so blocks can't be shared: "
                                "choose prefix_cache=none, or layout=paged.")  # fmt: skip
            region = self.layout.reserve_blocks(base.RegionNeed(1, 1, 1, 1, config.max_model_len, config.block_size))
            if region > config.num_blocks:
                raise UserError(f"layout {layout} takes {region} blocks of {config.block_size} tokens for one sequence of max_model_len = "
                                f"{config.max_model_len}, and the pool has {config.num_blocks}: raise num_blocks to at least {region}, "
                                f"or lower max_model_len to at most {config.num_blocks * config.block_size}.")  # fmt: skip
            if self.compression.attention_window is not None:
                raise UserError(f"layout {layout} can't give back the blocks that compression {type(self.compression).__name__} drops: "
                                "choose layout=paged, or compression=full.")  # fmt: skip

    def _check_masks(self) -> None:
        """What a compression policy says that queries see, which every part of an engine reads once."""
        window, sinks, name = self.compression.attention_window, self.compression.num_sink_tokens, type(self.compression).__name__
        if window is not None and not (base.is_whole(window) and window >= 1):
            raise UserError(f"{name}.attention_window = {window!r} is not allowed: a positive integer (tokens), or None (all are seen).")
        if not (base.is_whole(sinks) and sinks >= 0):
            raise UserError(f"{name}.num_sink_tokens = {sinks!r} is not allowed: 0 or a positive integer (tokens).")
        if window is not None and self.compression.lossless:
            raise UserError(f"{name} says lossless = True and has a window: what leaves it is lost. Set lossless = False.")
        if sinks and window is None:
            raise UserError(f"{name}.num_sink_tokens = {sinks} without a window is not allowed: every token is seen. "
                            "Set attention_window, or leave num_sink_tokens at 0.")  # fmt: skip
