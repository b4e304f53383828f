"""Beam search through the whole engine, paged and preempted, against transformers' generate (float64, the same random weights)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from model_support import hf_llama, our_llama, random_weights

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.model import LlamaConfig
from kvlab.model.loading import LoadedModel
from kvlab.policies.preemption import Lifo
from kvlab.policies.preemption.mode import Recompute, Swap
from kvlab.types import Request, SamplingParams

EOS = 20
CONFIG = LlamaConfig(vocab_size=24, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                     max_position_embeddings=128, eos_token_ids=(EOS,))  # fmt: skip
PROMPTS = [[0, 5, 11], [0, 20, 4, 17, 9], [0, 8], [0, 13, 13, 7, 1, 22, 6], [3, 2, 1, 9, 9, 14, 15, 16, 17, 4, 5]]
SAMPLINGS = [
    SamplingParams(beam_width=4, n=4, max_tokens=14),
    SamplingParams(beam_width=3, n=2, max_tokens=20, length_penalty=0.2, early_stopping=True),
    SamplingParams(beam_width=2, n=1, max_tokens=9, length_penalty=-0.5),
    SamplingParams(beam_width=4, n=3, max_tokens=16, length_penalty=2.0),
    SamplingParams(beam_width=3, n=3, max_tokens=12, min_tokens=5),
]


@lru_cache(maxsize=1)
def models() -> tuple[LoadedModel, Any]:
    torch.set_num_threads(1)
    weights = random_weights(CONFIG, seed=4)
    weights["lm_head.weight"][EOS] *= 1.5  # an end that really comes
    ours = LoadedModel(our_llama(CONFIG, weights, torch.float64), CONFIG, None, "beams", "", CONFIG.eos_token_ids)
    return ours, hf_llama(CONFIG, weights, torch.float64)


@lru_cache(maxsize=1)
def expected() -> list[list[tuple[list[int], float]]]:
    """transformers' hypotheses of each request: tokens up to the first end, score."""
    found = []
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        out = models()[1].generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            num_beams=sampling.beam_width, num_return_sequences=sampling.n, length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping, max_new_tokens=sampling.max_tokens, min_new_tokens=sampling.min_tokens or None,
            eos_token_id=EOS, pad_token_id=EOS, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        outputs = [row[len(prompt) :] for row in out.sequences.tolist()]
        cut = [output[: output.index(EOS) + 1] if EOS in output else output for output in outputs]
        found.append(list(zip(cut, out.sequences_scores.tolist(), strict=True)))
    return found


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "mode", "max_num_batched_tokens"),
    [(4, 400, None, 512), (1, 70, Recompute(), 16), (3, 26, Swap(), 16), (4, 20, Recompute(), 9), (16, 9, Swap(), 32)],
)
def test_beams_are_transformers_beams(block_size: int, num_blocks: int, mode: Recompute | Swap | None, max_num_batched_tokens: int) -> None:
    policies = PolicySet(preemption=Lifo(mode)) if mode else PolicySet()
    config = EngineConfig(num_blocks, block_size, num_cpu_blocks=200, max_model_len=64, max_num_batched_tokens=max_num_batched_tokens)
    engine = Engine(config, policies, TorchRunner(models()[0]), eos_token_ids=(EOS,), model_dtype="float64")
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.add_request(Request(str(i), prompt, sampling))
    outputs, times, num_preemptions, num_copies, num_swapped = {}, {}, 0, 0, 0
    while engine.has_work:
        result = engine.step()
        num_preemptions += result.stats.num_preemptions
        num_copies += result.stats.cow_copies
        num_swapped += result.stats.swapped_in_blocks
        outputs |= {record.request_id: record.outputs for record in result.finished}
        times |= {record.request_id: record.token_times_s for record in result.finished}
    for i, hypotheses in enumerate(expected()):
        assert [list(tokens) for tokens, _ in outputs[str(i)]] == [tokens for tokens, _ in hypotheses]
    # Every token of the best hypothesis has its time, also where it came with a beam that branched off later.
    assert {name: len(times[name]) for name in outputs} == {name: len(hypotheses[0][0]) for name, hypotheses in outputs.items()}
    assert all(list(each) == sorted(each) for each in times.values())
    reasons = [reason for hypotheses in outputs.values() for _, reason in hypotheses]
    assert reasons.count("stop") >= 3  # ends came
    assert reasons.count("length") >= 1
    assert (num_preemptions > 0) == (mode is not None)
    assert (num_swapped > 0) == isinstance(mode, Swap)
    assert (num_copies > 0) == (block_size > 1)
    assert engine.kv.pool.num_used == 0
