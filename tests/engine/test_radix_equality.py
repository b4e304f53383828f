"""The radix tree with copies of parts of blocks changes no token and no bit: the tiny model in float64, real attention, real tensors."""

from __future__ import annotations

import pytest
import torch
from engine_support import Log, policies, serve
from equality_support import kv_by_position, modes, recording, tiny, tiny_engine
from test_equality_tiny import KINDS, MAX_MODEL_LEN, PREFIX, engine_for, requests_of, small_pool, undisturbed

from kvlab.policies.prefix_cache import Radix
from kvlab.types import Request, SamplingParams


def num_copied(log: Log, kind: str, block_size: int) -> int:
    """Groups that entered with tokens out of the middle of a block."""
    return sum(a.num_cached_tokens % block_size != 0 for plan in log.plans for a in plan.admitted if a.kind == kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("block_size", [3, 16, 20])
def test_copies_of_parts_change_no_token(block_size: int, mode: str, kind: str) -> None:
    """Ten requests of one beginning crowd each other out, in chunks of 16 tokens: greedy, four samples, beams, preempted by recompute
    and by swap. Tokens are the undisturbed ones; copies were made for newcomers and for those who came back."""
    case = {"block_size": block_size, "batching": "chunked", "budget": 16, "admission": "none", "scheduling": "fcfs", "mode": mode}
    engine, log = engine_for(case, small_pool(requests_of(kind), block_size), prefix_cache=Radix(partial_block_copy=True))
    serve(engine, requests_of(kind))
    assert log.outputs == undisturbed(kind)
    assert mode in modes(log)
    assert log.total("num_evicted_blocks") > 0
    assert num_copied(log, "new", block_size) > 0
    assert mode == "swap" or num_copied(log, "resumed", block_size) > 0


@pytest.mark.parametrize("block_size", [3, 16, 17, 32])
def test_what_is_copied_are_the_same_bits(block_size: int) -> None:
    """40 tokens, then a prompt that shares 34 of them: K and V of the 34 are the first request's, bit for bit, in full blocks and in the
    copied part. Then the recorded run, replayed: the same plans."""
    engine, log = tiny_engine(40, block_size, policies(prefix_cache=Radix(partial_block_copy=True)), max_model_len=MAX_MODEL_LEN)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request("first", [*PREFIX, 1, 2, 3, 4, 5, 6], sampling), Request("second", [*PREFIX, 7, 8, 9], sampling)]
    seen = list[torch.Tensor]()
    for request in requests:
        engine.add_request(request)
        while engine.has_work:
            engine.step()
            if engine.groups and engine.groups[request.request_id].num_output_tokens == 29:
                seen += kv_by_position(engine, engine.sequences.values()).values()
    assert log.records["second"].num_cached_tokens == 34
    assert [len(plan.copies) for plan in log.plans if plan.admitted] == [0, int(34 % block_size > 0)]
    assert len(seen) == 2
    assert seen[1][:, :, :34].equal(seen[0][:, :, :34])
    assert float(seen[1].abs().sum(dim=(0, 1, 3, 4)).min()) > 0
    cold, cold_log = tiny_engine(40, block_size, policies(prefix_cache="none"), max_model_len=MAX_MODEL_LEN)
    serve(cold, requests, check=False)
    assert log.outputs == cold_log.outputs

    runner = recording(log)
    replayed, replay_log = tiny_engine(40, block_size, policies(prefix_cache=Radix(partial_block_copy=True)), runner=runner,
                                       clock=runner.clock(), loaded=tiny(), max_model_len=MAX_MODEL_LEN)  # fmt: skip
    for request in requests:
        serve(replayed, [request], check=False)
    assert [plan.decisions() for plan in replay_log.plans] == [plan.decisions() for plan in log.plans]
    assert replay_log.outputs == log.outputs
