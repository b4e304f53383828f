"""Ids that end a sequence and that the model cannot say: one rule for real, simulated and recorded runs.

A model's own EOS outside its vocabulary ends nothing; a request that names such an id is refused, before it starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import Log, make_engine, prompt_of, request, serve
from equality_support import recording, tiny_engine

from kvlab.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.engine.sampler import SamplingState, processed
from kvlab.engine.stopping import ids_of_the_model
from kvlab.llm import LLM
from kvlab.model.checkpoint import save_folder
from kvlab.model.config import LlamaConfig
from kvlab.model.random_weights import TINY, tiny_weights
from kvlab.types import Request, SamplingParams, UserError

VOCAB = 320  # of the tiny model
OUTSIDE = (VOCAB, 128009, -1)


def real(eos: tuple[int, ...]) -> tuple[Engine, Log]:
    engine, log = tiny_engine(32, 4)
    return Engine(engine.config, type(engine.policies)(), engine.runner, eos_token_ids=eos, listeners=[log], vocab_size=VOCAB), log


def simulated(eos: tuple[int, ...]) -> tuple[Engine, Log]:
    log = Log()
    return Engine(make_engine(32, 4)[0].config, make_engine(32, 4)[0].policies, SimulatedRunner(VOCAB), eos_token_ids=eos,
                  listeners=[log], vocab_size=VOCAB), log  # fmt: skip


def end(engine: Engine, log: Log, **sampling: Any) -> tuple[tuple[int, ...], str]:
    serve(engine, [request("a", prompt_of(6), 6, ignore_eos=False, **sampling)])
    return log.outputs["a"][0]


@pytest.mark.parametrize("make", [real, simulated])
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_an_eos_outside_the_vocabulary_ends_nothing(make: Callable[..., tuple[Engine, Log]], min_tokens: int) -> None:
    """The last id of the vocabulary is not forbidden in its place, and the real EOS beside it still is, below min_tokens."""
    plain = end(*make(()))
    assert plain[1] == "length"
    for outside in (OUTSIDE, OUTSIDE[:1], OUTSIDE[-1:]):
        engine, log = make(outside)
        assert engine.eos_token_ids == ()
        assert end(engine, log, min_tokens=min_tokens) == plain
    first = plain[0][0]
    engine, log = make((*OUTSIDE, first))
    assert engine.eos_token_ids == (first,)
    ids, reason = end(engine, log, min_tokens=min_tokens)
    if min_tokens:
        assert first not in ids[:min_tokens]
    else:
        assert (ids, reason) == ((first,), "stop")


def test_the_last_id_stays_allowed_below_min_tokens() -> None:
    """-1 as an index is the last column: there it would have been forbidden in silence."""
    logits = torch.zeros(1, 4, dtype=torch.float64)
    state = SamplingState(SamplingParams(min_tokens=2), 0, 0, 1, (-1, 1, 4, 128009))
    assert processed(logits, [state], [1]).tolist() == [[0.0, -torch.inf, 0.0, 0.0]]
    assert ids_of_the_model((-1, 0, 3, 4), 4) == (0, 3)
    assert ids_of_the_model((-1, 0, 128009), None) == (0, 128009)


def test_a_recorded_run_decides_the_same() -> None:
    engine, log = real((VOCAB, 7))
    serve(engine, [request("a", prompt_of(6), 6, ignore_eos=False, min_tokens=3)])
    again = Log()
    replay = Engine(engine.config, type(engine.policies)(), recording(log), eos_token_ids=(VOCAB, 7), listeners=[again], vocab_size=VOCAB)
    serve(replay, [request("a", prompt_of(6), 6, ignore_eos=False, min_tokens=3)])
    assert again.outputs == log.outputs
    assert [tuple(plan.scheduled) for plan in again.plans] == [tuple(plan.scheduled) for plan in log.plans]


@pytest.mark.parametrize("make", [real, simulated])
@pytest.mark.parametrize("more", [{}, {"min_tokens": 2}, {"beam_width": 2}, {"temperature": 1.0, "n": 2}])
def test_a_request_that_stops_at_no_token_is_refused(make: Callable[..., tuple[Engine, Log]], more: dict[str, Any]) -> None:
    engine, _ = make(())
    for outside in OUTSIDE:
        refused = Request("a", [1, 2], SamplingParams(stop_token_ids=(5, outside), **more))
        with pytest.raises(UserError, match=rf"Request 'a' has {outside} in stop_token_ids; ids of this model are 0 to 319\."):
            engine.add_request(refused)
    assert not engine.groups
    engine.add_request(Request("a", [1, 2], SamplingParams(stop_token_ids=(0, VOCAB - 1))))


def test_where_no_vocabulary_is_known_a_negative_id_is_refused() -> None:
    engine, _ = make_engine(32, 4)
    assert engine.vocab_size is None
    with pytest.raises(UserError, match=r"has -2 in stop_token_ids; ids of this model are from 0 on"):
        engine.add_request(Request("a", [1], SamplingParams(stop_token_ids=(-2,))))
    engine.add_request(Request("a", [1], SamplingParams(stop_token_ids=(128009,))))


@pytest.mark.parametrize("make", [real, simulated])
def test_some_id_must_be_left_below_min_tokens(make: Callable[..., tuple[Engine, Log]]) -> None:
    """All ids masked: the sampler would have met a row without a number in mid-run."""
    every = tuple(range(VOCAB - 1))
    engine, log = make((VOCAB - 1,))
    with pytest.raises(UserError, match="every id of the vocabulary ends it"):
        engine.add_request(Request("a", [1], SamplingParams(stop_token_ids=every, min_tokens=1)))
    assert not engine.groups
    serve(engine, [request("a", [1], 4, stop_token_ids=every, min_tokens=2, ignore_eos=True)])
    ids, reason = log.outputs["a"][0]
    assert (ids[:2], reason) == ((VOCAB - 1,) * 2, "stop" if len(ids) < 4 else "length")


@pytest.mark.parametrize("wrong", ["2", True, 2.0, ((2,),), ["</s>"], (2.5,), (False,)])
def test_eos_ids_are_whole_numbers(wrong: Any) -> None:
    made, _ = make_engine(32, 4)
    with pytest.raises(UserError, match=r"Engine: eos_token_id = .* is not allowed: a token id, a list of token ids, or null"):
        Engine(made.config, type(made.policies)(), SimulatedRunner(VOCAB), eos_token_ids=wrong)


def test_eos_ids_may_come_as_any_sequence() -> None:
    made, _ = make_engine(32, 4)
    for ids in ((2, 3), [2, 3], range(2, 4), iter((2, 3)), frozenset((2, 3))):
        assert sorted(Engine(made.config, type(made.policies)(), SimulatedRunner(VOCAB), eos_token_ids=ids).eos_token_ids) == [2, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize("eos", [VOCAB, 128009, -1, [VOCAB, -1]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_folder_whose_eos_its_model_cannot_say(tmp_path: Path, eos: Any, file: str) -> None:
    """Tokens are those of the same folder without EOS, at any min_tokens."""
    config = LlamaConfig.from_hf({**TINY.to_hf(), "eos_token_id": None}, "here")
    save_folder(tmp_path, config, tiny_weights(0))
    greedy = SamplingParams(max_tokens=6, min_tokens=4)
    plain = LLM(tmp_path, dtype="float64", kv_cache_tokens=256).generate([5, 6, 7], greedy)[0]
    if file == "config.json":
        config_json = json.loads((tmp_path / file).read_text(encoding="utf-8"))
        (tmp_path / file).write_text(json.dumps({**config_json, "eos_token_id": eos}), encoding="utf-8")
    else:
        (tmp_path / file).write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    found = LLM(tmp_path, dtype="float64", kv_cache_tokens=256)
    assert found.engine.eos_token_ids == ()
    assert found.generate([5, 6, 7], greedy)[0].token_ids == plain.token_ids
    assert plain.finish_reason == "length"
