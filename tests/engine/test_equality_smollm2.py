"""The bundled model on sixteen real prompts, greedy in float32: transformers' tokens, and the same again under a pool far too small.

A divergence is excused only where arithmetic itself leaves it open: where the reference's best two logits at the first position that
differs are closer than four times the measured deviation of the logits. It is printed and counted; one prompt in sixteen may need it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import Log, policies, policy_names, serve
from equality_support import modes, tiny_engine
from model_support import PagedRun

import kvlab.workload
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.model import LoadedModel, load_model, smollm2
from kvlab.model.bundled import bundled_folder
from kvlab.policies.layout import Ring
from kvlab.types import Request, SamplingParams

pytestmark = pytest.mark.slow

NUM_PROMPTS, NUM_TOKENS, MOST_EXCUSED = 16, 32, 1
MAX_MODEL_LEN = 640
POOL = 1.6
"""Tokens of the small pool, in longest requests."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(smollm2(), "float32", "cpu")


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    """The first sixteen bundled chats, as the model's template puts them."""
    assert loaded.tokenizer is not None
    path = Path(kvlab.workload.__file__).with_name("chat_prompts.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    found = [loaded.tokenizer.apply_chat(json.loads(line)["messages"]) for line in lines]
    assert len(found) == NUM_PROMPTS
    assert max(map(len, found)) > 200
    assert max(map(len, found)) + NUM_TOKENS <= MAX_MODEL_LEN
    return found


@pytest.fixture(scope="module")
def reference(loaded: LoadedModel) -> Any:
    """transformers' model from the same folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32).eval()


def requests_of(prompts: list[list[int]]) -> list[Request]:
    return [Request(f"chat-{i}", prompt, SamplingParams(max_tokens=NUM_TOKENS)) for i, prompt in enumerate(prompts)]


def outputs_of(log: Log) -> list[list[int]]:
    return [list(log.records[f"chat-{i}"].outputs[0][0]) for i in range(len(log.records))]


@pytest.fixture(scope="module")
def undisturbed(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Blocks for everybody, whole prompts, no cache."""
    num_tokens = sum(map(len, prompts)) + NUM_PROMPTS * (NUM_TOKENS + 16)
    engine, log = tiny_engine(-(-num_tokens // 16), 16, policies(prefix_cache="none", admission="none"), loaded=loaded,
                              max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=1 << 14)  # fmt: skip
    serve(engine, requests_of(prompts), check=False)
    assert log.total("num_preemptions") == 0
    assert len(log.plans[0].scheduled) == NUM_PROMPTS
    assert all(entry.num_samples for plan in log.plans for entry in plan.scheduled)
    return outputs_of(log)


def last_logits(loaded: LoadedModel, reference: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, transformers') logits [V] after the same tokens."""
    run = PagedRun(loaded.model, num_blocks=MAX_MODEL_LEN // 16, block_size=16)
    run.tables = {0: list(range(MAX_MODEL_LEN // 16))}
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1]
    return run.step({0: tokens})[0][-1], theirs


def excused(loaded: LoadedModel, reference: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    """Whether arithmetic leaves the first difference open; says what it found."""
    same = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    mine, truth = last_logits(loaded, reference, prompt + theirs[:same])
    deviation = float((mine - truth).abs().max())
    best = truth.topk(2).values
    gap = float(best[0] - best[1])
    print(f"output token {same}: {ours[same]} against {theirs[same]}; gap {gap:.2e}, deviation {deviation:.2e}")
    return gap < 4 * deviation


def compare(loaded: LoadedModel, reference: Any, prompts: list[list[int]], found: list[list[int]], expected: list[list[int]]) -> None:
    different = [i for i in range(len(found)) if found[i] != expected[i]]
    not_excused = [i for i in different if not excused(loaded, reference, prompts[i], found[i], expected[i])]
    print(f"{len(different)} of {len(found)} prompts differ, {len(different) - len(not_excused)} of them excused")
    assert not not_excused
    assert len(different) <= MOST_EXCUSED


def test_tokens_are_transformers_tokens(loaded: LoadedModel, reference: Any, prompts: list[list[int]],
                                        undisturbed: list[list[int]]) -> None:  # fmt: skip
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
        expected.append(out[0, len(prompt) :].tolist())
    assert sum(map(len, expected)) > NUM_PROMPTS * NUM_TOKENS / 2
    compare(loaded, reference, prompts, undisturbed, expected)


@pytest.mark.parametrize(
    ("block_size", "batching", "mode", "eviction"),
    [(16, "chunked", "recompute", "lru"), (3, "walkthrough", "swap", "fifo")],
)
def test_a_pool_far_too_small_changes_no_token(loaded: LoadedModel, reference: Any, prompts: list[list[int]], undisturbed: list[list[int]],
                                               block_size: int, batching: str, mode: str, eviction: str) -> None:  # fmt: skip
    """Preempted, swapped, in chunks, on cached blocks: the chat template's own beginning is shared."""
    num_tokens = int(POOL * (max(map(len, prompts)) + NUM_TOKENS))
    policy_set = policies(prefix_cache="hash", batching=batching, mode=mode, eviction=eviction, admission="none")
    engine, log = tiny_engine(num_tokens // block_size, block_size, policy_set, loaded=loaded, runner=TorchRunner(loaded),
                              num_cpu_blocks=4096 // block_size, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=96)  # fmt: skip
    serve(engine, requests_of(prompts), check=False)
    compare(loaded, reference, prompts, outputs_of(log), undisturbed)
    assert log.total("num_preemptions") > 0
    assert mode in modes(log)
    assert log.total("prefix_cache_hits") > 0
    assert log.total("num_evicted_blocks") > 0
    if mode == "swap":
        assert log.total("swapped_in_blocks") > 0
    if batching == "chunked":
        assert any(entry.num_samples == 0 for plan in log.plans for entry in plan.scheduled)


@pytest.mark.parametrize("layout", [name for name in policy_names("layout") if name != "paged"])
def test_eight_chats_in_regions_have_the_same_tokens(loaded: LoadedModel, reference: Any, prompts: list[list[int]],
                                                     undisturbed: list[list[int]], layout: str) -> None:  # fmt: skip
    """In chunks of 96 tokens, in a pool of two regions of the longest: regions that are outgrown move, or others give way."""
    requests = [replace(request, oracle_output_len=len(tokens)) for request, tokens in zip(requests_of(prompts), undisturbed, strict=True)]
    longest = max(map(len, prompts[:8])) + NUM_TOKENS
    blocks = 1 << (-(-longest // 4) - 1).bit_length()
    chosen = Ring(n_parallel=3) if layout == "ring" else layout
    engine, log = tiny_engine(2 * blocks, 4, policies(prefix_cache="none", layout=chosen, admission="none"), loaded=loaded,
                              runner=TorchRunner(loaded), max_model_len=longest, max_num_batched_tokens=96)  # fmt: skip
    serve(engine, requests[:8], check=False)
    compare(loaded, reference, prompts, outputs_of(log), undisturbed)
    reasons = {stats.admission_blocked_by for stats in log.stats}
    print(f"{layout}: {log.total('num_preemptions')} preemptions, {log.total('relocated_blocks')} blocks moved, "
          f"{log.total('prefix_cache_hits')} tokens kept, blocked by {sorted(reasons)}")  # fmt: skip
    assert reasons & {"blocks", "fragmentation", "slots", "preemption"}
    assert (log.total("relocated_blocks") > 0) == (layout == "contiguous_pow2")
    assert (log.total("prefix_cache_hits") > 0) == (layout == "ring")  # the template's beginning, in a slot that served another
