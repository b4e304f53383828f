"""Real decoding on torch: applies plans to paged KV tensors, runs the model, samples. The same code on a CPU and on CUDA."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from kvlab.cache.tensors import KVTensors, storage_dtype
from kvlab.engine.runners.base import DeviceMemory, Handle, Ready, RunnerConfig
from kvlab.engine.runners.late_tokens import LastTokens
from kvlab.engine.runners.memory import Limits, available_memory, check_fits, cuda_budget, free_memory
from kvlab.engine.runners.rows import BlockRows, Ints, ragged_positions
from kvlab.engine.sampler import SamplingState, beam_candidates, sample
from kvlab.kernels.device_errors import is_out_of_memory
from kvlab.kernels.interface import AttentionMetadata, Backend, UnsupportedError
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.model.loading import LoadedModel
from kvlab.types import BlockTransfer, Candidate, Outcome, Plan, ScheduledSeq, TokenLogprobs, UserError
from kvlab.types.columns import Decodes, OneEach

_NUM_FIELDS = len(ScheduledSeq._fields)


@dataclass(slots=True)
class Batch:
    """A plan's forward pass: decodes first, longest context first. S scheduled sequences, T tokens.

    Attributes:
        order: index into `plan.scheduled` of each of the batch's sequences.
        token_ids_T, positions_T, meta: what the model takes.
        last_S: index of each sequence's last token; num_samples_S: tokens to choose after it; next_S: position they will have.
    """

    order: Ints
    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    meta: AttentionMetadata
    last_S: Ints
    num_samples_S: Ints
    next_S: Ints


@dataclass(slots=True)
class Numbers:
    """A plan's forward pass as arrays on the host, decodes first.

    Attributes:
        order: index into `plan.scheduled` of each of the batch's sequences. rows_S: their rows in the tables.
        token_ids_T (`LATE` where only the device knows it), positions_T, slots_T, context_S, tables_SM: see `AttentionMetadata`.
        new_S: new tokens. num_samples_S: tokens to choose after the last. next_S: position they will have.
    """

    order: Ints
    rows_S: Ints
    token_ids_T: Ints
    positions_T: Ints
    slots_T: Ints
    context_S: Ints
    tables_SM: Ints
    new_S: Ints
    num_samples_S: Ints
    next_S: Ints


class TorchRunner:
    """Runs plans with a real model; synchronous: `submit` returns when the step is done.

    Args:
        loaded: the model, on the device where everything happens.
        backend: cache kernels; plain torch unless given.
    """

    def __init__(self, loaded: LoadedModel, backend: Backend | None = None) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._backend: Backend = backend or TorchBackend()
        self._device = loaded.model.device
        self._config: RunnerConfig | None = None
        self._kv: KVTensors | None = None
        self._rows = BlockRows()
        self._states: dict[int, SamplingState] = {}
        self._last = LastTokens()

    def initialize(self, config: RunnerConfig) -> None:
        """Allocate the KV tensors and forget every sequence.

        Raises:
            UserError: the model has too few positions for `max_model_len`, an unknown kv_dtype, something the backend has no
                kernels for, or not enough memory.
        """
        shape = self._model.config  # of this rank, where there are several
        if config.max_model_len > shape.max_position_embeddings:
            raise UserError(f"max_model_len = {config.max_model_len} is not allowed: model {self._loaded.name!r} has"
                            f" {shape.max_position_embeddings} positions. Use at most that.")  # fmt: skip
        dtype = storage_dtype(config.kv_dtype)
        try:
            self._backend.check(shape.head_dim, shape.num_heads, shape.num_kv_heads, config.block_size, self._model.dtype, dtype,
                                config.window, self._device)  # fmt: skip
        except UnsupportedError as error:
            raise UserError(str(error)) from error
        self.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # an earlier pool's memory is free, and counts as such
        block_bytes = KVTensors.bytes_per_block(shape.num_layers, config.block_size, shape.num_kv_heads, shape.head_dim, dtype)
        check_fits("num_blocks", config.num_blocks, block_bytes, free_memory(self._device), str(self._device))
        taken = config.num_blocks * block_bytes if self._device.type == "cpu" else 0
        check_fits("num_cpu_blocks", config.num_cpu_blocks, block_bytes, available_memory() - taken, "cpu")
        self._kv = KVTensors(shape.num_layers, config.num_blocks, config.block_size, shape.num_kv_heads, shape.head_dim, dtype,
                             self._device, config.num_cpu_blocks, config.kv_scales)  # fmt: skip
        self._config = config
        pool = config.num_blocks * config.block_size
        self._model.reserve_positions(config.max_model_len if config.window else min(config.max_model_len, pool))

    def kv_budget(self, limits: Limits) -> int:
        """Bytes for the gpu tier: see `kvlab.engine.runners.memory`."""
        if self._device.type != "cuda":
            return int(limits.memory_fraction * available_memory())
        try:
            return cuda_budget(lambda: self.profile(limits), self._device, limits.gpu_memory_utilization, torch.cuda)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(f"{self._device} has too little memory beside the weights for a step of max_num_batched_tokens = "
                            f"{limits.max_num_batched_tokens} and max_num_seqs = {limits.max_num_seqs}, before any KV block: lower these, "
                            "or take a smaller model or dtype.") from error  # fmt: skip

    def profile(self, limits: Limits) -> None:
        """A forward pass as large as a step may be, and a token for as many sequences: max_num_batched_tokens shared out evenly. All of it
        reads and writes one block, whose content means nothing."""
        shape, block_size = self._model.config, 16
        num_seqs = max(min(limits.max_num_seqs, limits.max_num_batched_tokens), -(-limits.max_num_batched_tokens // limits.max_model_len))
        lens = np.diff(np.arange(num_seqs + 1) * limits.max_num_batched_tokens // num_seqs)
        lens = lens[np.argsort(lens > 1, kind="stable")]
        positions_T = ragged_positions(np.zeros(num_seqs, dtype=np.int64), lens)
        self._model.reserve_positions(int(lens.max()))
        table_SM = np.zeros((num_seqs, -(-int(lens.max()) // block_size)), dtype=np.int64)
        on_device = self._to_device([positions_T % block_size, positions_T, lens, table_SM.ravel()])
        meta = AttentionMetadata(on_device[0], on_device[3].view(table_SM.shape), on_device[2], lens.tolist(), lens.tolist(),
                                 int((lens == 1).sum()), block_size)  # fmt: skip
        kv = KVTensors(shape.num_layers, 1, block_size, shape.num_kv_heads, shape.head_dim, self._model.dtype, self._device)
        hidden_TE = self._model.forward(torch.zeros_like(on_device[1]), on_device[1], kv, meta, self._backend)
        last_S = torch.from_numpy(np.cumsum(lens) - 1).to(self._device)
        self._model.logits(hidden_TE[last_S]).argmax(dim=-1)

    @property
    def kv_bytes_allocated(self) -> int:
        """Bytes of the gpu tier's tensors; 0 before `initialize`."""
        return 0 if self._kv is None else self._kv.nbytes

    def device_memory(self) -> DeviceMemory | None:
        """What torch has allocated and reserved on a CUDA device; None on a CPU."""
        if self._device.type != "cuda":
            return None
        return DeviceMemory(torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device))

    def close(self) -> None:
        """Let go of the KV tensors and of every sequence."""
        self._kv = self._config = None
        self._rows = BlockRows()
        self._states = {}
        self._last = LastTokens()

    def submit(self, plan: Plan) -> Handle:
        """Carry out a step.

        Raises:
            RuntimeError: not initialised, a plan whose tables lack a block, or logits without a number.
        """
        begin = time.perf_counter()
        if self._kv is None or self._config is None:
            raise RuntimeError("TorchRunner.initialize must be called before the first step.")
        self._apply(plan, self._kv)
        if self._config.depth:
            plan = self._last.fill(plan)
        outcome = self._run(plan, self._kv, self._config) if plan.scheduled else Outcome(plan.step, ())
        if self._config.depth:
            self._last.note(plan, outcome)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # where nothing was sampled nothing has waited for the device yet
        return Ready(outcome._replace(execute_s=time.perf_counter() - begin))

    def _apply(self, plan: Plan, kv: KVTensors) -> None:
        """All that a plan says before its forward pass, in its order."""
        for seq_id in plan.released:
            self._rows.remove(seq_id)
            self._states.pop(seq_id, None)
        for start in plan.starts:
            self._rows.add(start.seq_id)
            self._states[start.seq_id] = SamplingState.of(start, self._config.eos_token_ids if self._config else ())
        for seq_id, block_ids in plan.fresh_tables.items():
            self._rows.replace(seq_id, block_ids)
        self._rows.append(plan.tables)
        self._move(plan, kv)

    def _move(self, plan: Plan, kv: KVTensors) -> None:
        """Blocks that go out, are copied, come in."""
        kv.swap_out(pairs(plan.swap_out), self._backend)
        kv.copy([(copy.source, copy.destination) for copy in plan.copies], self._backend)
        kv.swap_in(pairs(plan.swap_in), self._backend)

    def _run(self, plan: Plan, kv: KVTensors, config: RunnerConfig) -> Outcome:
        """Forward pass and sampling."""
        for entry, token_ids in zip(plan.scheduled, plan.token_ids, strict=True):
            state = self._states[entry.seq_id]
            if state.history is not None:
                state.write_history(entry.first_position, token_ids)
        batch = self._batch(self._numbers(plan, config), config)
        hidden_TE = self._model.forward(batch.token_ids_T, batch.positions_T, kv, batch.meta, self._backend)
        asked = np.flatnonzero(batch.num_samples_S)
        if not len(asked):
            return Outcome(plan.step, ((),) * len(plan.scheduled))
        last = batch.last_S[asked]
        # lm_head on the last tokens only; a decode batch is all last tokens and needs no gathering.
        rows_SE = hidden_TE if len(last) == len(hidden_TE) else hidden_TE[torch.from_numpy(last).to(self._device)]
        return self._choose(plan, self._model.logits(rows_SE), batch.order[asked].tolist(), batch.num_samples_S[asked].tolist(),
                            batch.next_S[asked].tolist())  # fmt: skip

    def _choose(self, plan: Plan, logits_SV: torch.Tensor, entries: list[int], num_samples: list[int],
                positions: list[int]) -> Outcome:  # fmt: skip
        """Tokens, forks and candidates from the logits of the `entries` of `plan.scheduled`."""
        tokens: list[tuple[int, ...]] = [()] * len(plan.scheduled)
        forks: dict[int, tuple[int, ...]] = {}
        candidates: dict[int, tuple[Candidate, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        seq_ids = [plan.scheduled[entry].seq_id for entry in entries]
        states = [self._states[seq_id] for seq_id in seq_ids]
        beams = [row for row, state in enumerate(states) if state.sampling.beam_width]
        if beams:
            best = beam_candidates(logits_SV[beams], [states[row] for row in beams])
            candidates = {seq_ids[row]: found for row, found in zip(beams, best, strict=True)}
        others = [row for row, state in enumerate(states) if not state.sampling.beam_width] if beams else range(len(states))
        if others:
            chosen = sample(logits_SV[others] if beams else logits_SV, [states[row] for row in others],
                            [positions[row] for row in others], [num_samples[row] for row in others])  # fmt: skip
            for row, row_tokens, row_logprobs in zip(others, chosen.tokens, chosen.logprobs, strict=True):
                tokens[entries[row]] = row_tokens[:1]
                if len(row_tokens) > 1:
                    forks[seq_ids[row]] = row_tokens[1:]
                if row_logprobs:
                    logprobs[seq_ids[row]] = row_logprobs
        return Outcome(plan.step, tuple(tokens), forks, candidates, logprobs)

    def _numbers(self, plan: Plan, config: RunnerConfig) -> Numbers:
        """All index arithmetic is numpy's over the whole batch."""
        fields_SF, flat_T = _fields(plan.scheduled), _flat(plan.token_ids)
        is_prefill = fields_SF[:, 2] > 1
        # Longest decodes first: those that attention takes together then lie side by side (slices, no gathering of rows).
        order = np.lexsort((np.where(is_prefill, 0, fields_SF[:, 4] - fields_SF[:, 1]), is_prefill))
        seq_ids, first_S, new_S, num_samples_S, dropped_S = fields_SF[order].T[:5]
        starts_S = np.cumsum(fields_SF[:, 2]) - fields_SF[:, 2]
        token_ids_T = flat_T[ragged_positions(starts_S[order], new_S)]
        rows_S = self._rows.rows(seq_ids.tolist())
        positions_T = ragged_positions(first_S, new_S)
        slots_T = self._rows.slots(np.repeat(rows_S, new_S), positions_T - np.repeat(dropped_S, new_S), config.block_size)
        context_S = first_S + new_S - dropped_S
        tables_SM = self._rows.tables(rows_S, -(-int(context_S.max()) // config.block_size))
        return Numbers(order, rows_S, token_ids_T, positions_T, slots_T, context_S, tables_SM, new_S, num_samples_S, first_S + new_S)

    def _batch(self, n: Numbers, config: RunnerConfig) -> Batch:
        """The same as tensors; one transfer carries it to the device."""
        on_device = self._to_device([n.token_ids_T, n.positions_T, n.slots_T, n.context_S, n.tables_SM.ravel()])
        meta = AttentionMetadata(
            slot_mapping_T=on_device[2],
            block_tables_SM=on_device[4].view(n.tables_SM.shape),
            context_lens_S=on_device[3],
            context_lens=n.context_S.tolist(),
            query_lens=n.new_S.tolist(),
            num_decodes=int((n.new_S == 1).sum()),
            block_size=config.block_size,
            window=config.window,
            num_sink_tokens=config.num_sink_tokens,
        )
        return Batch(n.order, on_device[0], on_device[1], meta, np.cumsum(n.new_S) - 1, n.num_samples_S, n.next_S)

    def _to_device(self, arrays: Sequence[Ints]) -> list[torch.Tensor]:
        """Arrays as tensors on the device, through one copy where that is not the CPU."""
        if self._device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        joined = torch.from_numpy(np.concatenate(arrays))
        if self._device.type == "cuda":
            joined = joined.pin_memory()
        return list(torch.split(joined.to(self._device, non_blocking=True), [len(array) for array in arrays]))


def _fields(scheduled: Sequence[ScheduledSeq]) -> Ints:
    """[S, fields of a `ScheduledSeq`]; what decodes in columns is not made into tuples."""
    others = scheduled.rest if isinstance(scheduled, Decodes) else scheduled
    fields = np.fromiter(chain.from_iterable(others), np.int64, len(others) * _NUM_FIELDS).reshape(len(others), _NUM_FIELDS)
    if not isinstance(scheduled, Decodes):
        return fields
    head = np.zeros((len(scheduled.seq_ids), _NUM_FIELDS), dtype=np.int64)
    head[:, 0] = scheduled.seq_ids
    head[:, 1] = scheduled.first + scheduled.offset
    head[:, 2:4] = 1
    return np.concatenate((head, fields)) if len(fields) else head


def _flat(token_ids: Sequence[tuple[int, ...]]) -> Ints:
    """All ids of a plan, one after the other."""
    if not isinstance(token_ids, OneEach):
        return np.fromiter(chain.from_iterable(token_ids), np.int64)
    rest = np.fromiter(chain.from_iterable(token_ids.rest), np.int64)
    return np.concatenate((token_ids.ids, rest)) if len(rest) else token_ids.ids


def pairs(transfers: Sequence[BlockTransfer]) -> list[tuple[int, int]]:
    """(source, destination) of each."""
    return [(transfer.source, transfer.destination) for transfer in transfers]
