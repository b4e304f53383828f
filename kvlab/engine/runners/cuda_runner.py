"""Real decoding on a GPU: a step is queued, and the host waits for it when its outcome is asked for. Runs on a CPU too (for tests).

    plan -> blocks move (own stream) -> decode: graph, or eager forward -> ids chosen on the device -> copied to pinned memory -> a mark
                                                                                 result(): wait for the mark, read the ids

Ids that a plan names as `LATE` are taken from what the step before left on the device. The only synchronisation of a step is the one in
`result`. Steps with beams, log-probabilities or penalties choose on the host, as `TorchRunner` does, and wait for the step before.

Shapes: S sequences, T tokens, V vocabulary, R rows of the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kvlab.cache.tensors import KVTensors
from kvlab.engine.runners.backends import use_device
from kvlab.engine.runners.base import RunnerConfig
from kvlab.engine.runners.cuda_sampling import choose, needs_host
from kvlab.engine.runners.cuda_streams import Mark, Streams, streams_of
from kvlab.engine.runners.cuda_swap import BlockMover
from kvlab.engine.runners.decode_graphs import DecodeGraphs, StaticBatch, default_sizes
from kvlab.engine.runners.memory import free_memory
from kvlab.engine.runners.torch_runner import Numbers, TorchRunner, pairs
from kvlab.engine.sampler import SamplingState
from kvlab.kernels.device_errors import is_out_of_memory
from kvlab.kernels.interface import AttentionMetadata, Backend
from kvlab.kernels.transfer import on_device
from kvlab.model.loading import LoadedModel
from kvlab.types import LATE, Outcome, Plan, UserError
from kvlab.types.columns import Decodes, OneEach, seq_ids_of


class CudaRunner(TorchRunner):
    """Runs plans without waiting for them.

    Args:
        loaded, backend: as for `TorchRunner`. streams: of the model's device.
        graph_sizes: batch sizes recorded as graphs; None: `default_sizes`; (): no graphs. On CUDA the Triton backend's only: the torch
            backend makes its indices on the host.

    Attributes:
        paths: steps by the way they went: "graph[SIZE]", "eager", "host" (chosen there).
    """

    def __init__(self, loaded: LoadedModel, backend: Backend | None = None, streams: Streams | None = None,
                 graph_sizes: Sequence[int] | None = None) -> None:  # fmt: skip
        super().__init__(loaded, backend)
        self._streams = streams or streams_of(self._device)
        self._graph_sizes = graph_sizes
        self._forget()

    def _forget(self) -> None:
        self.paths = Counter[str]()
        self._mover: BlockMover | None = None
        self._graphs: DecodeGraphs | None = None
        self._last_R = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._previous: Pending | None = None
        self._known: tuple[tuple[int, ...], list[SamplingState] | None] = (), []

    def initialize(self, config: RunnerConfig) -> None:
        """Allocate, run each kernel once, and record the graphs.

        Raises:
            UserError: as `TorchRunner.initialize` does, or the device's memory ends while that is done.
        """
        use_device(self._device)
        super().initialize(config)
        try:
            self._prepare(config)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fits = self._blocks_that_fit(config)
            raise UserError(f"num_blocks = {config.num_blocks} leaves too little memory on {self._device} for activations and CUDA graphs: "
                            f"{fits} blocks would fit beside them. Lower num_blocks or gpu_memory_utilization, or use "
                            "runner.graph_sizes=[].") from error  # fmt: skip

    def _blocks_that_fit(self, config: RunnerConfig) -> int:
        """Measured: what is free once all but the pool is there."""
        try:
            super().initialize(replace(config, num_blocks=1, num_cpu_blocks=0))
            self._prepare(replace(config, num_blocks=1, num_cpu_blocks=0))
            assert self._kv is not None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return free_memory(self._device) // self._kv.block_bytes
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return 0
        finally:
            self.close()

    def _prepare(self, config: RunnerConfig) -> None:
        assert self._kv is not None
        self._mover = BlockMover(self._kv, self._backend, self._streams)
        if self._device.type == "cuda":
            self.warm_up()
        sizes = self._sizes(config)
        if sizes:
            batch = StaticBatch(max(sizes), -(-config.max_model_len // config.block_size), config.block_size, config.window,
                                config.max_model_len, self._device, self._device.type != "cuda", config.num_sink_tokens)  # fmt: skip
            self._graphs = DecodeGraphs(self._logits, batch, sizes, self._streams)
            self.paths = self._graphs.paths

    def warm_up(self) -> None:
        """Run everything that eager steps take, so that nothing is compiled amid a run: prefill of short and long chunks, decodes in one
        split and in several, moves of blocks. Nothing is written but zeros over zeros; the backend's `paths` don't count it."""
        assert self._kv is not None
        assert self._config is not None
        config, counted = self._config, self._backend.paths.copy()
        widest = -(-config.max_model_len // config.block_size)
        for num_new in [length for length in (2, 4, 8, 16, 32, 64, 128) if length <= config.max_model_len]:
            self._dry_pass(1, num_new, -(-num_new // config.block_size))
        for num_seqs, width in ((1, 1), (1, widest), (config.max_num_seqs, 1)):
            self._dry_pass(num_seqs, 1, width)
        if config.num_cpu_blocks and self._mover is not None:
            self._mover.swap_out([(0, 0)])
            self._mover.swap_in([(0, 0)])
        self._kv.copy([(0, min(1, config.num_blocks - 1))], self._backend)
        self._backend.paths.clear()
        self._backend.paths.update(counted)

    def _dry_pass(self, num_seqs: int, num_new: int, width: int) -> None:
        """Sequences of `num_new` tokens that are written nowhere, with tables of `width` times block 0."""
        config = self._config
        assert config is not None
        zeros = np.zeros(num_seqs * max(num_new, width), dtype=np.int64)
        positions_T = np.tile(np.arange(num_new), num_seqs)
        lens_S = np.full(num_seqs, num_new)
        token_ids_T, positions, slots_T, context_S, tables = self._to_device(
            [zeros[: num_seqs * num_new], positions_T, np.full(num_seqs * num_new, -1), lens_S, zeros[: num_seqs * width]]
        )
        meta = AttentionMetadata(slots_T, tables.view(num_seqs, width), context_S, lens_S.tolist(), lens_S.tolist(),
                                 num_seqs if num_new == 1 else 0, config.block_size, config.window, config.num_sink_tokens)  # fmt: skip
        self._logits(token_ids_T, positions, meta)

    def _sizes(self, config: RunnerConfig) -> Sequence[int]:
        can_record = self._device.type != "cuda" or self._backend.name == "triton"
        if self._graph_sizes is None:
            return default_sizes(config.max_num_seqs) if can_record else ()
        if self._graph_sizes and not can_record:
            raise UserError(f"runner.graph_sizes = {list(self._graph_sizes)} needs backend=triton on CUDA; backend={self._backend.name} "
                            "can't be recorded. Use runner.graph_sizes=[].")  # fmt: skip
        return self._graph_sizes

    def _logits(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        assert self._kv is not None
        return self._model.logits(self._model.forward(token_ids_T, positions_T, self._kv, meta, self._backend))

    def close(self) -> None:
        """Let go of everything."""
        super().close()
        self._forget()

    # --------------------------------------------------------------------- a step

    def submit(self, plan: Plan) -> Pending:
        """Queue a step.

        Raises:
            RuntimeError: not initialised, or a plan whose tables lack a block.
        """
        if self._kv is None or self._config is None:
            raise RuntimeError("CudaRunner.initialize must be called before the first step.")
        begin = self._streams.mark()
        self._apply(plan, self._kv)
        states = self._states_of(plan)
        if states is None:
            pending = self._on_host(plan, begin)
        else:
            pending = self._queue(plan, states, begin, self._config)
        self._previous = pending
        return pending

    def _states_of(self, plan: Plan) -> list[SamplingState] | None:
        """How each scheduled sequence samples; None: one of them on the host. Kept for the next plan of the same sequences."""
        seq_ids = seq_ids_of(plan.scheduled)
        if seq_ids is not self._known[0]:
            states = [self._states[seq_id] for seq_id in seq_ids]
            self._known = seq_ids, None if any(map(needs_host, states)) else states
        return self._known[1]

    def _move(self, plan: Plan, kv: KVTensors) -> None:
        assert self._mover is not None
        self._mover.swap_out(pairs(plan.swap_out))
        kv.copy([(copy.source, copy.destination) for copy in plan.copies], self._backend)
        self._mover.swap_in(pairs(plan.swap_in))

    def _on_host(self, plan: Plan, begin: Mark) -> Pending:
        """As `TorchRunner`, which must know every token."""
        assert self._kv is not None
        assert self._config is not None
        if self._previous is not None:
            self._previous.result()
        outcome = self._run(self._last.fill(plan), self._kv, self._config)
        self.paths["host"] += 1
        self._note_on_device(plan, outcome)
        return Pending(self, plan, begin, self._streams.mark(), outcome=outcome)

    def _note_on_device(self, plan: Plan, outcome: Outcome) -> None:
        """The next step may ask for these there."""
        known = [(entry.seq_id, ids[0]) for entry, ids in zip(plan.scheduled, outcome.tokens, strict=True) if ids]
        if known:
            rows_S = self._rows.rows([seq_id for seq_id, _ in known])
            ids_S = on_device([token for _, token in known], torch.int64, self._device)
            self._room(rows_S)[on_device(rows_S, torch.int64, self._device)] = ids_S

    def _room(self, rows_S: np.ndarray) -> torch.Tensor:
        """The tokens sampled last, by row."""
        num = int(rows_S.max()) + 1 if len(rows_S) else 0
        if num > len(self._last_R):
            self._last_R = torch.cat((self._last_R, self._last_R.new_zeros(2 * num - len(self._last_R))))
        return self._last_R

    def _queue(self, plan: Plan, states: list[SamplingState], begin: Mark, config: RunnerConfig) -> Pending:
        """Everything on the device."""
        if not plan.scheduled:
            return Pending(self, plan, begin, self._streams.mark(), outcome=Outcome(plan.step, ()))
        n = self._numbers(plan, config)
        asked = np.flatnonzero(n.num_samples_S)
        logits_SV = self._forward(n, asked, config)
        if logits_SV is None:
            return Pending(self, plan, begin, self._streams.mark(), outcome=Outcome(plan.step, ((),) * len(plan.scheduled)))
        entries, counts = n.order[asked].tolist(), n.num_samples_S[asked].tolist()
        ids_Sn = choose(logits_SV, [states[entry] for entry in entries], n.next_S[asked].tolist(), counts)
        (rows_S,) = self._to_device([n.rows_S[asked]])
        self._room(n.rows_S)[rows_S] = ids_Sn[:, 0]
        there = torch.empty(ids_Sn.shape, dtype=torch.int64, pin_memory=self._streams.is_pinned).copy_(ids_Sn, non_blocking=True)
        return Pending(self, plan, begin, self._streams.mark(), there, entries, counts)

    def _forward(self, n: Numbers, asked: np.ndarray, config: RunnerConfig) -> torch.Tensor | None:
        """Logits of the sequences that choose a token; None: there are none."""
        assert self._kv is not None
        num = len(n.order)
        graphs, size = self._graphs, None
        if graphs is not None and len(asked) == num == len(n.token_ids_T):
            size = graphs.size_for(num, n.tables_SM.shape[1])
        if graphs is not None and size is not None:
            graphs.batch.fill(size, n.token_ids_T, n.positions_T, n.slots_T, n.context_S, n.tables_SM)
            self._fill_late(graphs.batch.token_ids(size)[:num], n)
            return graphs.replay(size, num, n.tables_SM.shape[1])
        self.paths["eager"] += 1
        batch = self._batch(n, config)
        self._fill_late(batch.token_ids_T, n)
        hidden_TE = self._model.forward(batch.token_ids_T, batch.positions_T, self._kv, batch.meta, self._backend)
        if not len(asked):
            return None
        if len(asked) == len(hidden_TE):
            return self._model.logits(hidden_TE)
        (last,) = self._to_device([batch.last_S[asked]])
        return self._model.logits(hidden_TE[last])

    def _fill_late(self, token_ids_T: torch.Tensor, n: Numbers) -> None:
        """Ids that only the device knows, in place."""
        late = np.flatnonzero(n.token_ids_T == LATE)
        if len(late):
            rows_T = np.repeat(n.rows_S, n.new_S)[late]
            places, rows = self._to_device([late, rows_T])
            token_ids_T[places] = self._room(n.rows_S)[rows]

    def taken_in(self, plan: Plan, outcome: Outcome) -> None:
        """The outcome of a step is known on the host."""
        self._last.note(plan, outcome)
        if self._mover is not None:
            self._mover.finish()


class Pending:
    """A queued step. `ids`: [S, n] where they will be, of the `entries` of the plan that choose `counts` tokens."""

    def __init__(self, runner: CudaRunner, plan: Plan, begin: Mark, end: Mark, ids: torch.Tensor | None = None,
                 entries: Sequence[int] = (), counts: Sequence[int] = (), outcome: Outcome | None = None) -> None:  # fmt: skip
        self._runner, self._plan, self._begin, self._end = runner, plan, begin, end
        self._ids, self._entries, self._counts = ids, entries, counts
        self._outcome = outcome
        self._is_timed = False

    def result(self) -> Outcome:
        """Wait for the device; RuntimeError: logits without a number."""
        if self._is_timed:
            assert self._outcome is not None
            return self._outcome
        self._end.wait()
        outcome = self._outcome or self._read()
        self._outcome = outcome._replace(execute_s=self._end.seconds_since(self._begin))
        self._is_timed = True
        self._runner.taken_in(self._plan, self._outcome)
        return self._outcome

    def _read(self) -> Outcome:
        assert self._ids is not None
        num_broken = int((self._ids[:, 0] < 0).sum())
        if num_broken:
            raise RuntimeError(f"The model's logits are NaN (or all -inf) in {num_broken} of {len(self._ids)} rows.")
        scheduled = self._plan.scheduled
        if isinstance(scheduled, Decodes) and len(self._ids) == len(scheduled) and self._ids.shape[1] == 1:  # one of each
            column = np.empty(len(scheduled), dtype=np.int64)
            column[self._entries] = self._ids[:, 0].numpy()
            num = len(scheduled.seq_ids)
            return Outcome(self._plan.step, OneEach(column[:num], tuple(zip(column[num:].tolist()))))
        ids: list[list[int]] = self._ids.tolist()
        tokens: list[tuple[int, ...]] = [()] * len(self._plan.scheduled)
        forks: dict[int, tuple[int, ...]] = {}
        for entry, count, row in zip(self._entries, self._counts, ids, strict=True):
            tokens[entry] = (row[0],)
            if count > 1:
                forks[self._plan.scheduled[entry].seq_id] = tuple(row[1:count])
        return Outcome(self._plan.step, tuple(tokens), forks)


def real_runner(loaded: LoadedModel, backend: Backend, graph_sizes: Sequence[int] | None = None) -> TorchRunner:
    """The runner for a model's device."""
    return CudaRunner(loaded, backend, graph_sizes=graph_sizes) if loaded.model.device.type == "cuda" else TorchRunner(loaded, backend)
