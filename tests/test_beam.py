"""Beam search bookkeeping: by hand, and exactly as transformers' generate on a model recomputed from scratch each step."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from kvlab.engine.beam import Beam, BeamMove, BeamState, Hypothesis, num_beam_candidates
from kvlab.engine.sampler import SamplingState, beam_candidates
from kvlab.types import Candidate, SamplingParams, UserError

EOS = 9


def state(beam_width: int = 2, n: int = 1, length_penalty: float = 1.0, early_stopping: bool = False, max_tokens: int = 10,
          min_tokens: int = 0) -> BeamState:  # fmt: skip
    return BeamState(0, beam_width, n, length_penalty, early_stopping, (EOS,), max_tokens, min_tokens)


def choices(**logprobs: float) -> tuple[Candidate, ...]:
    return tuple(Candidate(int(name[1:]), value) for name, value in logprobs.items())


def test_the_prompt_gives_one_beam_in_place_and_forks_for_the_rest() -> None:
    beams = state(beam_width=3)
    step = beams.advance({0: choices(t4=-0.1, t5=-0.5, t6=-0.9, t7=-1.0)}, itertools.count(1).__next__)
    assert step.continued == (BeamMove(0, 0, 4, -0.1),)
    assert step.forks == (BeamMove(1, 0, 5, -0.5), BeamMove(2, 0, 6, -0.9))
    assert (step.dropped, step.ended, step.is_done) == ((), (), False)
    assert beams.live == (Beam(0, (4,), -0.1), Beam(1, (5,), -0.5), Beam(2, (6,), -0.9))


def test_a_beam_without_children_is_dropped_and_the_other_forks_from_its_own_history() -> None:
    beams = state()
    beams.advance({0: choices(t4=-0.1, t5=-3.0)}, lambda: 1)
    step = beams.advance({0: choices(t1=-0.2, t2=-0.3), 1: choices(t3=-0.1, t1=-0.2)}, lambda: 2)
    assert step.continued == (BeamMove(0, 0, 1, pytest.approx(-0.3)),)
    assert step.forks == (BeamMove(2, 0, 2, pytest.approx(-0.4)),)
    assert step.dropped == (1,)
    assert [beam.token_ids for beam in beams.live] == [(4, 1), (4, 2)]


def test_only_eos_among_the_best_beam_width_ends_a_hypothesis() -> None:
    beams = state()
    # Places: 4 (-0.1), 5 (-0.2), EOS (-0.3): EOS is third of two beams, it only stands by.
    step = beams.advance({0: choices(t4=-0.1, t5=-0.2, t9=-0.3, t6=-4.0)}, lambda: 1)
    assert (step.ended, len(beams.live)) == ((), 2)
    # EOS of beam 0 is first now; two live beams are left behind it.
    step = beams.advance({0: choices(t9=-0.1, t1=-0.5), 1: choices(t9=-5.0, t2=-0.6)}, lambda: 2)
    assert step.ended == (Hypothesis((4, 9), pytest.approx(-0.1), pytest.approx(-0.2), "stop"),)
    assert [beam.token_ids for beam in beams.live] == [(4, 1), (5, 2)]


def test_early_stopping_ends_with_enough_hypotheses_and_the_default_waits_for_better_ones() -> None:
    def run(early_stopping: bool) -> BeamState:
        beams = state(early_stopping=early_stopping)
        beams.advance({0: choices(t4=-0.1, t5=-0.2)}, lambda: 1)
        beams.advance({0: choices(t9=-5.0, t1=-6.0), 1: choices(t9=-5.5, t2=-6.0)}, lambda: 2)
        return beams

    assert run(True).is_done
    assert [h.token_ids for h in run(True).best()] == [(4, 9)]
    late = run(False)  # worst hypothesis -5.7 / 2 = -2.85, best live beam -6.1 / 2 = -3.05: it can't win either
    assert late.is_done
    penalised = state(length_penalty=-1.0)  # scores: sum * length; live -6.1 * 2 < -5.7 * 2
    penalised.advance({0: choices(t4=-0.1, t5=-0.2)}, lambda: 1)
    assert penalised.advance({0: choices(t9=-5.0, t1=-6.0), 1: choices(t9=-5.5, t2=-6.0)}, lambda: 2).is_done
    hopeful = state()
    hopeful.advance({0: choices(t4=-0.1, t9=-0.2)}, lambda: 1)
    step = hopeful.advance({0: choices(t9=-1.0, t1=-0.1)}, lambda: 2)
    assert step.ended[0].token_ids == (4, 9)
    assert not step.is_done  # finished: -0.2 and -0.55; live -0.2 / 2 = -0.1 may still win


def test_a_live_beam_that_could_only_draw_level_ends_the_search() -> None:
    """Scores are sums here. Hypotheses of -1 and -2 are as many as beams; the best live beam, of -2, would not beat the worse one."""
    beams = state(length_penalty=0.0)
    assert not beams.advance({0: choices(t3=-1.0, t9=-1.0, t5=-1.5)}, lambda: 1).is_done
    assert beams.advance({0: choices(t1=-1.0, t9=-1.0), 1: choices(t2=-4.0, t6=-5.0)}, lambda: 2).is_done
    assert beams.best() == (Hypothesis((9,), -1.0, -1.0, "stop"),)
    better = state(length_penalty=0.0)
    better.advance({0: choices(t3=-1.0, t9=-1.0, t5=-1.5)}, lambda: 1)
    assert not better.advance({0: choices(t1=-0.9375, t9=-1.0), 1: choices(t2=-4.0, t6=-5.0)}, lambda: 2).is_done


def test_of_two_hypotheses_with_one_score_the_earlier_is_better() -> None:
    beams = state(n=2, length_penalty=0.0)
    beams.advance({0: choices(t3=-1.0, t9=-1.0, t5=-1.5)}, lambda: 1)
    beams.advance({0: choices(t9=0.0, t1=-1.0), 1: choices(t2=-4.0, t6=-5.0)}, lambda: 2)
    assert [(h.token_ids, h.score) for h in beams.best()] == [((9,), -1.0), ((3, 9), -1.0)]


def test_early_stopping_waits_for_as_many_hypotheses_as_beams_though_fewer_are_asked_for() -> None:
    beams = state(n=1, early_stopping=True)
    assert not beams.advance({0: choices(t9=-0.1, t4=-0.5, t5=-0.6)}, lambda: 1).is_done  # one of two
    assert beams.advance({0: choices(t9=-0.1, t1=-0.5), 1: choices(t2=-4.0, t6=-5.0)}, lambda: 2).is_done


def test_max_tokens_ends_every_beam_and_min_tokens_hides_eos() -> None:
    beams = state(n=2, max_tokens=2, min_tokens=2)
    step = beams.advance({0: choices(t9=-0.01, t4=-0.1, t5=-0.2)}, lambda: 1)
    assert step.ended == ()
    assert [beam.token_ids for beam in beams.live] == [(4,), (5,)]
    step = beams.advance({0: choices(t9=-0.01, t1=-2.0), 1: choices(t2=-0.5, t9=-0.01)}, lambda: 2)
    assert (step.is_done, step.dropped) == (True, (0, 1))
    assert [(h.token_ids, h.reason) for h in beams.best()] == [((5, 2), "length"), ((4, 1), "length")]
    assert [h.score for h in beams.best()] == pytest.approx([-0.35, -1.05])
    with pytest.raises(RuntimeError):
        beams.advance({}, lambda: 3)


def test_ignore_eos_leaves_only_the_stop_token_ids() -> None:
    sampling = SamplingParams(beam_width=2, ignore_eos=True, stop_token_ids=(7,), max_tokens=50)
    assert BeamState.of(0, sampling, (EOS,), max_tokens=20).end_ids == frozenset((7,))
    assert BeamState.of(0, sampling, (EOS,), max_tokens=20).max_tokens == 20
    assert BeamState.of(0, SamplingParams(beam_width=2, max_tokens=50), (EOS, 3)).end_ids == frozenset((3, 9))


def test_ties_go_to_the_better_beam_then_to_the_lower_id() -> None:
    beams = state()
    step = beams.advance({0: choices(t8=-1.0, t3=-1.0, t5=-1.0)}, lambda: 1)
    assert [move.token_id for move in step.continued + step.forks] == [3, 5]
    step = beams.advance({0: choices(t2=-1.0), 1: choices(t1=-1.0)}, lambda: 2)
    assert [beam.token_ids for beam in beams.live] == [(3, 2), (5, 1)]


def test_stop_from_outside_keeps_the_live_beams_as_they_are() -> None:
    beams = state(n=2)
    beams.advance({0: choices(t4=-0.1, t5=-0.2)}, lambda: 1)
    assert beams.stop("kv_capacity") == (0, 1)
    assert beams.best() == (Hypothesis((4,), -0.1, -0.1, "kv_capacity"), Hypothesis((5,), -0.2, -0.2, "kv_capacity"))


def test_enough_candidates_for_several_end_ids() -> None:
    assert [num_beam_candidates(4, ends) for ends in (0, 1, 2, 3)] == [8, 8, 12, 16]


def test_beams_refuse_stop_strings_and_logprobs() -> None:
    with pytest.raises(UserError, match="stop_token_ids but no stop strings"):
        SamplingParams(beam_width=2, stop=("x",))
    with pytest.raises(UserError, match="scores instead"):
        SamplingParams(beam_width=2, logprobs=1)


# ------------------------------------------------------------------------------------------------ against transformers


@pytest.fixture(scope="module")
def hf_model() -> Any:
    """A random float64 Llama over 24 tokens, of which id 20 is likely enough to be an EOS that fires early, late or never."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(9)
    config = LlamaConfig(vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=HF_EOS, pad_token_id=3,
                         initializer_range=0.4)  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def our_beams(model: Any, prompt: list[int], sampling: SamplingParams, eos: tuple[int, ...]) -> BeamState:
    """Recompute everything: the history of each beam is its parent's before the step, and the new token."""
    beams = BeamState.of(0, sampling, eos)
    histories = {0: prompt}
    new_id = itertools.count(1).__next__
    row = SamplingState(sampling, 0, 0, len(prompt), tuple(sorted(beams.end_ids)))
    while not beams.is_done:
        with torch.no_grad():
            logits = model(torch.tensor([histories[beam.seq_id] for beam in beams.live])).logits[:, -1]
        offered = beam_candidates(logits, [row] * len(beams.live))
        step = beams.advance({beam.seq_id: found for beam, found in zip(beams.live, offered, strict=True)}, new_id)
        before = dict(histories)
        for move in step.continued + step.forks:
            histories[move.seq_id] = [*before[move.parent], move.token_id]
        for seq_id in step.dropped:
            del histories[seq_id]
        assert [histories[beam.seq_id][len(prompt) :] for beam in beams.live] == [list(beam.token_ids) for beam in beams.live]
    return beams


def theirs(model: Any, prompt: list[int], sampling: SamplingParams, eos: tuple[int, ...]) -> list[tuple[list[int], float]]:
    """transformers' sequences (cut after the first end id, without padding) and scores."""
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        num_beams=sampling.beam_width, num_return_sequences=sampling.n, length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping, max_new_tokens=sampling.max_tokens, min_new_tokens=sampling.min_tokens or None,
        eos_token_id=list(eos) or None, pad_token_id=3, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    result = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        output = row[len(prompt) :]
        ends = [i for i, token in enumerate(output) if token in eos and i >= sampling.min_tokens]
        result.append((output[: ends[0] + 1] if ends else output, score))
    return result


HF_EOS = 20
PROMPTS = [[0, 5, 11], [0, 20, 4, 17, 9], [0, 8], [0, 13, 13, 7, 1, 22, 6]]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_same_hypotheses_as_transformers(hf_model: Any, width: int, length_penalty: float, early_stopping: bool) -> None:
    sampling = SamplingParams(beam_width=width, n=width, length_penalty=length_penalty, early_stopping=early_stopping,
                              max_tokens=12)  # fmt: skip
    reasons = []
    for prompt in PROMPTS:
        beams = our_beams(hf_model, prompt, sampling, (HF_EOS,))
        expected = theirs(hf_model, prompt, sampling, (HF_EOS,))
        assert [list(h.token_ids) for h in beams.best()] == [tokens for tokens, _ in expected]
        assert [h.score for h in beams.best()] == pytest.approx([score for _, score in expected], abs=1e-5)
        reasons += [h.reason for h in beams.best()]
    assert "stop" in reasons  # EOS really fired


@pytest.mark.parametrize(
    ("eos", "min_tokens", "max_tokens", "n"),
    [((), 0, 9, 2), ((HF_EOS, 11, 5), 0, 12, 3), ((HF_EOS,), 6, 12, 3), ((HF_EOS,), 0, 1, 3), ((HF_EOS,), 0, 40, 1)],
)
def test_same_without_eos_with_several_and_at_the_limits(hf_model: Any, eos: tuple[int, ...], min_tokens: int, max_tokens: int,
                                                         n: int) -> None:  # fmt: skip
    sampling = SamplingParams(beam_width=3, n=n, max_tokens=max_tokens, min_tokens=min_tokens)
    for prompt in PROMPTS:
        beams = our_beams(hf_model, prompt, sampling, eos)
        expected = theirs(hf_model, prompt, sampling, eos)
        assert [list(h.token_ids) for h in beams.best()] == [tokens for tokens, _ in expected]
        assert [h.score for h in beams.best()] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_one_beam_is_greedy(hf_model: Any) -> None:
    sampling = SamplingParams(beam_width=1, max_tokens=12)
    for prompt in PROMPTS:
        best = our_beams(hf_model, prompt, sampling, ()).best()[0]
        tokens, total = list(prompt), 0.0
        for _ in range(12):
            with torch.no_grad():
                logprobs = hf_model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(logprobs.argmax()))
            total += float(logprobs.max())
        assert list(best.token_ids) == tokens[len(prompt) :]
        assert math.isclose(best.score, total / 12, rel_tol=1e-12)
