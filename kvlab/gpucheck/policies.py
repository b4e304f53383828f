"""Tokens across policies on the card: in float32, every lossless policy must give the tokens of an undisturbed run.

A policy changes the composition of batches and the split of attention, so sums are taken in another order; where float32's two best
logits lie closer than four times the error measured on this card, the token is arithmetic's to choose. Such ties are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from kvlab.cache.tensors import KVTensors
from kvlab.engine import EngineConfig, PolicySet
from kvlab.gpucheck.findings import Finding
from kvlab.gpucheck.serving import Served, make_runner, serve
from kvlab.gpucheck.sizes import Sizes
from kvlab.gpucheck.tokens import forced_logits, prompts, spec_of
from kvlab.kernels.interface import Backend
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.kernels.triton_backend import TritonBackend
from kvlab.model.loading import LoadedModel, load_model
from kvlab.policies.eviction import Fifo
from kvlab.policies.preemption import Lifo
from kvlab.policies.preemption.mode import Swap
from kvlab.policies.prefix_cache import Radix

MAX_MODEL_LEN = 1024
GOAL = "all, ties at most one in 16"


class Case(NamedTuple):
    """A setting, and how often its mechanism acted in a run of as many steps more than the undisturbed one; prompts may come twice."""

    name: str
    config: EngineConfig
    policies: PolicySet
    acted: Callable[[Served, int], int]
    num_rounds: int = 1


def cases(sizes: Sizes) -> list[Case]:
    """Small pools that make requests give way, other block sizes, chunks, swap, sharing, depth 1."""
    longest = sizes.prompt_len + sizes.num_new

    def config(block_size: int, share: float) -> EngineConfig:
        blocks = -(-longest // block_size)
        return EngineConfig(max(blocks + 1, int(share * blocks * sizes.num_prompts)), block_size, max_model_len=MAX_MODEL_LEN,
                            max_num_seqs=sizes.num_prompts)  # fmt: skip

    swapping = replace(config(5, 0.6), num_cpu_blocks=4 * sizes.num_prompts * longest)
    chunks = replace(config(17, 2.0), max_num_batched_tokens=max(8, sizes.num_prompts))
    return [
        Case("recompute, 3 tokens a block", config(3, 0.6), PolicySet(eviction=Fifo()), lambda run, more: run.total("num_preemptions")),
        Case("swap, 5 tokens a block", swapping, PolicySet(preemption=Lifo(Swap())), lambda run, more: run.total("swapped_in_blocks")),
        Case("chunks, 17 tokens a block", chunks, PolicySet(), lambda run, more: more),
        Case("radix, prompts twice", config(1, 3.0), PolicySet(prefix_cache=Radix()), lambda run, more: run.total("prefix_cache_hits"), 2),
        Case("depth 1", replace(config(64, 2.0), depth=1), PolicySet(), lambda run, more: len(run.steps)),
    ]


def across_policies(device: torch.device, sizes: Sizes, model: str) -> list[Finding]:
    """Tokens of each case against an undisturbed run's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded = load_model(spec_of(model, sizes), torch.float32, device)
    prompts_ST = prompts(load_model(spec_of(model, sizes), torch.float32, "cpu"), sizes)
    work = prompts_ST.tolist()
    runner = make_runner(loaded, device)
    room = 4 * sizes.num_prompts * (sizes.prompt_len + sizes.num_new)
    plain = EngineConfig(room, 16, max_num_seqs=len(work), max_model_len=MAX_MODEL_LEN)
    wanted = serve(runner, torch.float32, plain, PolicySet(), work, sizes.num_new)
    tie = 4 * _deviation(loaded, device, prompts_ST, wanted)
    found = []
    for case in cases(sizes):
        got = serve(runner, torch.float32, case.config, case.policies, work * case.num_rounds, sizes.num_new)
        found.append(_compare(case, got, wanted, loaded, work, tie))
    return found


def graphs(device: torch.device, sizes: Sizes, model: str) -> list[Finding]:
    """Tokens of decodes recorded as CUDA graphs against eager ones; batches shrink, so rows are padded.

    The kernels are the same, not their order of summing: a graph cuts attention for the longest context there may be, and padded rows are
    other matrix products. So ties are counted as `across_policies` counts them.
    """
    loaded = load_model(spec_of(model, sizes), torch.float32, device)
    prompts_ST = prompts(load_model(spec_of(model, sizes), torch.float32, "cpu"), sizes)
    work = prompts_ST.tolist()
    config = EngineConfig(4 * len(work) * (sizes.prompt_len + sizes.num_new), 16, max_num_seqs=len(work), max_model_len=MAX_MODEL_LEN)
    lengths = [1 + sizes.num_new * (index + 1) // len(work) for index in range(len(work))]
    runs = []
    counts: dict[str, int] = {}
    for graph_sizes in ((), (1, 2, 4, len(work))):
        runner = make_runner(loaded, device, sorted(set(graph_sizes)))
        runs.append(serve(runner, torch.float32, config, PolicySet(), work, lengths))
        counts = {path: count for path, count in runner.paths.items() if path.startswith("graph")}
        runner.close()
    eager, recorded = runs
    compared = Compared.of(recorded, eager, loaded, work, 4 * _deviation(loaded, device, prompts_ST, eager))
    note = f"{compared.note}; steps by graph: {counts}"
    return [Finding("graphs", "requests with identical tokens", compared.num_same, f"of {len(work)}", {}, None, GOAL,
                    compared.ok and bool(counts), note)]  # fmt: skip


def _deviation(loaded: LoadedModel, device: torch.device, prompts_ST: torch.Tensor, wanted: Served) -> float:
    """Largest difference of logits between Triton's and torch's kernels along the wanted tokens (of which short ones go on as any text)."""
    longest = max(map(len, wanted.tokens))
    tokens_ST = torch.cat([prompts_ST, torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in wanted.tokens])], dim=1)
    triton = forced_logits(loaded.model, TritonBackend(device), tokens_ST, prompts_ST.shape[1])
    plain = forced_logits(loaded.model, TorchBackend(), tokens_ST, prompts_ST.shape[1])
    return float((triton - plain).abs().max())


class Compared(NamedTuple):
    """Requests by their tokens: as wanted, another one at a tie, a wrong one."""

    num_same: int
    num_ties: int
    num_wrong: int
    tie: float

    @classmethod
    def of(cls, got: Served, wanted: Served, loaded: LoadedModel, work: list[list[int]], tie: float) -> Compared:
        """`tie`: two logits that are closer may change places. `got` may hold the prompts of `work` several times over."""
        counts = Counter[str]()
        for index, tokens in enumerate(got.tokens):
            prompt, right = work[index % len(work)], wanted.tokens[index % len(work)]
            first = next((at for at, (a, b) in enumerate(zip(tokens, right, strict=True)) if a != b), None)
            counts["same" if first is None else "tie" if _gap(loaded, [*prompt, *right[:first]]) < tie else "wrong"] += 1
        return cls(counts["same"], counts["tie"], counts["wrong"], tie)

    @property
    def ok(self) -> bool:
        """None wrong, ties at most one in 16."""
        return self.num_wrong == 0 and self.num_ties <= max(1, (self.num_same + self.num_ties) // 16)

    @property
    def note(self) -> str:
        """In words."""
        return f"{self.num_ties} ties (gap under {self.tie:.2g}), {self.num_wrong} wrong"


def _compare(case: Case, got: Served, wanted: Served, loaded: LoadedModel, work: list[list[int]], tie: float) -> Finding:
    compared = Compared.of(got, wanted, loaded, work, tie)
    acted = case.acted(got, len(got.steps) - len(wanted.steps))
    note = f"{compared.note}; the mechanism acted {acted} times"
    return Finding("policies", "requests with identical tokens", compared.num_same, f"of {len(got.tokens)}", {"case": case.name}, None,
                   GOAL, compared.ok and acted > 0, note)  # fmt: skip


def _gap(loaded: LoadedModel, ids: list[int]) -> float:
    """Distance of the two best logits after these tokens."""
    tokens = torch.tensor([[*ids, 0]])
    best = forced_logits(loaded.model, TorchBackend(), tokens, len(ids))[0, 0].topk(2).values
    return float(best[0] - best[1])


def swap_round_trip(device: torch.device, sizes: Sizes) -> list[Finding]:
    """Blocks swapped out, overwritten, and swapped in elsewhere come back bit for bit, in every storage type."""
    found = []
    num_heads, head_dim = sizes.heads[1:]
    backend: Backend = TritonBackend(device)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        kv = KVTensors(2, 12, 17, num_heads, head_dim, dtype, device, num_cpu_blocks=6)
        moved = [kv.gpu] if kv.gpu_scales is None else [kv.gpu, kv.gpu_scales]
        for tensor in moved:
            tensor.view(torch.uint8).random_(0, 255)
        before = [tensor.view(torch.uint8)[:, :, [3, 0, 7]].clone() for tensor in moved]
        kv.swap_out([(3, 5), (0, 1), (7, 2)], backend)
        for tensor in moved:
            tensor.view(torch.uint8).fill_(255)
        kv.swap_in([(5, 4), (1, 11), (2, 8)], backend)
        after = [tensor.view(torch.uint8)[:, :, [4, 11, 8]] for tensor in moved]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append(Finding("swap", "bytes after a round trip", float(same), "", {"dtype": str(dtype).removeprefix("torch.")}, 1.0,
                             "identical", same))  # fmt: skip
    return found
