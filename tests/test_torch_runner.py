"""The torch runner on plans made by hand, against a full recompute of each sequence (float64 tiny model)."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from model_support import PagedRun

from kvlab.engine.runners.base import RunnerConfig
from kvlab.engine.runners.rows import BlockRows
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.model import load_model, tiny
from kvlab.model.loading import LoadedModel
from kvlab.types import BlockCopy, BlockTransfer, Outcome, Plan, SamplingParams, ScheduledSeq, SeqStart, UserError

GREEDY = SamplingParams(max_tokens=100, logprobs=5)
PROMPT = tuple((7 * i * i + 3 * i + 11) % 256 for i in range(11))
OTHER = tuple((5 * i * i + i + 90) % 256 for i in range(6))


@lru_cache(maxsize=1)
def model() -> LoadedModel:
    return load_model(tiny(), "float64", "cpu")


def runner(num_blocks: int = 16, block_size: int = 4, num_cpu_blocks: int = 0, window: int | None = None,
           kv_dtype: str = "float64") -> TorchRunner:  # fmt: skip
    made = TorchRunner(model())
    made.initialize(RunnerConfig(num_blocks, num_cpu_blocks, block_size, 8, 256, window, kv_dtype, model().eos_token_ids))
    return made


def recomputed(tokens: tuple[int, ...], window: int | None = None) -> torch.Tensor:
    """Log-probabilities after `tokens`, from one prefill over a cache of its own."""
    run = PagedRun(model().model, num_blocks=1, block_size=len(tokens), window=window)
    run.tables[0] = [0]
    return run.step({0: list(tokens)})[0][-1].log_softmax(-1)


def continued(tokens: tuple[int, ...], count: int, window: int | None = None) -> tuple[int, ...]:
    """`count` greedy tokens, each from a full recompute."""
    for _ in range(count):
        tokens = (*tokens, int(recomputed(tokens, window).argmax()))
    return tokens[-count:]


def start(seq_id: int, tokens: tuple[int, ...], sampling: SamplingParams = GREEDY, cause: str = "admit", num_prompt: int | None = None,
          seed: int = 0, stream: int = 0) -> SeqStart:  # fmt: skip
    return SeqStart(seq_id, 0, cause, sampling, seed, stream, len(tokens) if num_prompt is None else num_prompt, tokens)


def check(outcome: Outcome, seq_id: int, entry: int, tokens: tuple[int, ...], window: int | None = None) -> int:
    """The chosen token and its five best log-probabilities are those of a recompute; returns the token."""
    expected = recomputed(tokens, window)
    top = expected.topk(5)
    found = outcome.logprobs[seq_id][0]
    assert outcome.tokens[entry] == (int(expected.argmax()),)
    assert found.top_ids == tuple(top.indices.tolist())
    assert found.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-11)
    assert found.logprob == found.top_logprobs[0]
    return outcome.tokens[entry][0]


def decode(run: TorchRunner, seq_id: int, tokens: tuple[int, ...], count: int, table: list[int], unused: list[int], block_size: int = 4,
           dropped: int = 0) -> tuple[int, ...]:  # fmt: skip
    """`count` decode steps of one sequence whose last token is not computed yet; new blocks from the front of `unused`."""
    for _ in range(count):
        grown = ()
        if (len(tokens) - 1 - dropped) // block_size == len(table):
            grown = (unused.pop(0),)
            table.extend(grown)
        entry = ScheduledSeq(seq_id, len(tokens) - 1, 1, 1, dropped)
        plan = Plan(0, 0.0, (entry,), (tokens[-1:],), tables={seq_id: grown} if grown else {})
        tokens = (*tokens, check(run.submit(plan).result(), seq_id, 0, tokens))
    return tokens


def prefill(run: TorchRunner, seq_id: int, tokens: tuple[int, ...], blocks: tuple[int, ...], sampling: SamplingParams = GREEDY) -> Outcome:
    plan = Plan(0, 0.0, (ScheduledSeq(seq_id, 0, len(tokens)),), (tokens,), (start(seq_id, tokens, sampling),), {seq_id: blocks})
    return run.submit(plan).result()


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_prefill_then_decode_over_scattered_blocks(block_size: int) -> None:
    run = runner(num_blocks=40, block_size=block_size)
    unused = [(17 * i + 5) % 40 for i in range(40)]
    table = [unused.pop(0) for _ in range(-(-11 // block_size))]
    tokens = (*PROMPT, check(prefill(run, 3, PROMPT, tuple(table)), 3, 0, PROMPT))
    tokens = decode(run, 3, tokens, 9, table, unused, block_size)
    assert tokens[11:] == continued(PROMPT, 10)


def test_chunks_and_a_decode_in_one_step_and_outcomes_in_the_plans_order() -> None:
    run = runner()
    outcome = run.submit(Plan(0, 0.0, (ScheduledSeq(1, 0, 6),), (OTHER,), (start(1, OTHER),), {1: (3, 8)})).result()
    other = (*OTHER, check(outcome, 1, 0, OTHER))
    outcome = run.submit(Plan(1, 0.0, (ScheduledSeq(0, 0, 5, 0), ScheduledSeq(1, 6, 1)), (PROMPT[:5], other[-1:]), (start(0, PROMPT),),
                              {0: (1, 5)})).result()  # fmt: skip
    assert outcome.step == 1
    assert outcome.tokens[0] == ()
    other = (*other, check(outcome, 1, 1, other))
    # Chunk [5, 10) next to a decode, then the prompt's last token alone, which is a "decode" to the kernels.
    outcome = run.submit(Plan(2, 0.0, (ScheduledSeq(0, 5, 5, 0), ScheduledSeq(1, 7, 1)), (PROMPT[5:10], other[-1:]), (),
                              {0: (0,)})).result()  # fmt: skip
    other = (*other, check(outcome, 1, 1, other))
    outcome = run.submit(Plan(3, 0.0, (ScheduledSeq(0, 10, 1), ScheduledSeq(1, 8, 1)), (PROMPT[10:], other[-1:]), (), {1: (9,)})).result()
    assert check(outcome, 0, 0, PROMPT) == continued(PROMPT, 1)[0]
    assert (*other, check(outcome, 1, 1, other))[6:] == continued(OTHER, 4)
    assert outcome.execute_s > 0


def test_a_chunk_alone_samples_nothing() -> None:
    outcome = runner().submit(Plan(0, 0.0, (ScheduledSeq(0, 0, 5, 0),), (PROMPT[:5],), (start(0, PROMPT),), {0: (1, 5)})).result()
    assert (outcome.tokens, outcome.logprobs) == (((),), {})


def test_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    run = runner()
    sampling = SamplingParams(n=3, temperature=1.5, max_tokens=20, logprobs=5)
    plan = Plan(0, 0.0, (ScheduledSeq(0, 0, 11, 3),), (PROMPT,), (start(0, PROMPT, sampling, seed=5),), {0: (2, 7, 4)})
    outcome = run.submit(plan).result()
    first = (*outcome.tokens[0], *outcome.forks[0])
    assert len(first) == 3
    assert len(set(first)) > 1
    assert len(outcome.logprobs[0]) == 3
    expected = recomputed(PROMPT)
    assert [entry.logprob for entry in outcome.logprobs[0]] == pytest.approx([float(expected[token]) for token in first])
    # Children get the full blocks 2 and 7, and copies of block 4; all three then write different tokens into their own.
    histories = [(*PROMPT, token) for token in first]
    starts = tuple(start(i, histories[i], GREEDY, "fork", 11, 5, i) for i in (1, 2))
    plan = Plan(1, 0.0, tuple(ScheduledSeq(i, 11, 1) for i in range(3)), tuple(h[-1:] for h in histories), starts,
                fresh_tables={1: (2, 7, 9), 2: (2, 7, 10)}, copies=(BlockCopy(4, 9), BlockCopy(4, 10)))  # fmt: skip
    outcome = run.submit(plan).result()
    expected_rows = [recomputed(history) for history in histories]
    for i in (1, 2):  # sequence 0 still samples at random
        check(outcome, i, i, histories[i])
    assert outcome.logprobs[0][0].top_logprobs == pytest.approx(expected_rows[0].topk(5).values.tolist(), abs=1e-11)


def test_forked_streams_draw_as_if_alone() -> None:
    sampling = SamplingParams(n=2, temperature=1.2, max_tokens=20)
    both, alone = runner(), runner()
    plan = Plan(0, 0.0, (ScheduledSeq(0, 0, 11, 2),), (PROMPT,), (start(0, PROMPT, sampling, seed=9),), {0: (2, 7, 4)})
    forked = both.submit(plan).result().forks[0][0]
    plan = Plan(0, 0.0, (ScheduledSeq(6, 0, 11),), (PROMPT,), (start(6, PROMPT, sampling, seed=9, stream=1),), {6: (0, 1, 2)})
    assert alone.submit(plan).result().tokens[0] == (forked,)


def test_swap_out_and_in_while_another_sequence_uses_the_blocks() -> None:
    run = runner(num_blocks=4, num_cpu_blocks=4)
    tokens = (*PROMPT, check(prefill(run, 0, PROMPT, (0, 1, 2)), 0, 0, PROMPT))
    out = tuple(BlockTransfer("gpu", block, "cpu", 3 - block, 4) for block in (0, 1, 2))
    plan = Plan(1, 0.0, (ScheduledSeq(1, 0, 6),), (OTHER,), (start(1, OTHER),), {1: (1, 2)}, released=(0,), swap_out=out)
    check(run.submit(plan).result(), 1, 0, OTHER)
    back = tuple(BlockTransfer("cpu", 3 - block, "gpu", gpu, 4) for block, gpu in ((0, 3), (1, 0), (2, 2)))
    plan = Plan(2, 0.0, (ScheduledSeq(0, 11, 1),), (tokens[-1:],), (start(0, tokens, cause="swap_in", num_prompt=11),),
                fresh_tables={0: (3, 0, 2)}, released=(1,), swap_in=back)  # fmt: skip
    tokens = (*tokens, check(run.submit(plan).result(), 0, 0, tokens))
    assert tokens[11:] == continued(PROMPT, 2)
    only_moves = run.submit(Plan(3, 0.0, swap_out=(BlockTransfer("gpu", 3, "cpu", 0, 4),))).result()
    assert (only_moves.step, only_moves.tokens) == (3, ())


def test_a_resumed_sequence_is_recomputed_into_other_blocks() -> None:
    run = runner()
    tokens = (*PROMPT, check(prefill(run, 0, PROMPT, (0, 1, 2)), 0, 0, PROMPT))
    plan = Plan(1, 0.0, (ScheduledSeq(0, 0, 12),), (tokens,), (start(0, tokens, cause="resume", num_prompt=11),),
                fresh_tables={0: (9, 3, 5)}, released=(0,))  # fmt: skip
    assert check(run.submit(plan).result(), 0, 0, tokens) == continued(PROMPT, 2)[1]


@pytest.mark.parametrize("window", [5, 8])
def test_dropped_blocks_change_slots_but_not_positions(window: int) -> None:
    run = runner(window=window)
    outcome = prefill(run, 0, PROMPT, (0, 1, 2))
    tokens = (*PROMPT, check(outcome, 0, 0, PROMPT, window))
    table = [0, 1, 2]
    dropped, unused = 0, [7, 6, 5, 4]
    for _ in range(9):
        position = len(tokens) - 1
        num_droppable = max(0, position + 1 - window) // 4 * 4
        if num_droppable > dropped:
            table = table[(num_droppable - dropped) // 4 :]
            dropped = num_droppable
        if (position - dropped) // 4 == len(table):
            table.append(unused.pop(0))
        plan = Plan(0, 0.0, (ScheduledSeq(0, position, 1, 1, dropped),), (tokens[-1:],), fresh_tables={0: tuple(table)})
        tokens = (*tokens, check(run.submit(plan).result(), 0, 0, tokens, window))
    assert dropped >= 8
    assert tokens[11:] == continued(PROMPT, 10, window)
    assert tokens[11:] != continued(PROMPT, 10)  # the window matters


def test_stale_values_of_a_recycled_block_are_never_seen() -> None:
    run = runner(num_blocks=3)
    prefill(run, 0, PROMPT, (0, 1, 2))
    assert run._kv is not None
    run._kv.gpu[:, :, 1:].fill_(float("nan"))
    plan = Plan(1, 0.0, (ScheduledSeq(1, 0, 6),), (OTHER,), (start(1, OTHER),), {1: (1, 2)}, released=(0,))
    check(run.submit(plan).result(), 1, 0, OTHER)


def test_penalties_see_the_whole_history_also_after_a_preemption() -> None:
    sampling = SamplingParams(max_tokens=50, repetition_penalty=1.2, frequency_penalty=1.5)
    prompt = tuple((3 * i * i + 3 * i + 3) % 256 for i in range(20))
    assert len(set(continued(prompt, 10))) == 5  # greedy, it soon repeats one token
    undisturbed, resumed = runner(), runner()
    tokens = (*prompt, *prefill(undisturbed, 0, prompt, (0, 1, 2, 3, 4), sampling).tokens[0])
    for step in range(9):
        grown = {0: (5 + step,)} if (len(tokens) - 1) % 4 == 0 else {}
        plan = Plan(0, 0.0, (ScheduledSeq(0, len(tokens) - 1, 1),), (tokens[-1:],), tables=grown)
        tokens = (*tokens, *undisturbed.submit(plan).result().tokens[0])
    assert len(set(tokens[20:])) == 10  # penalised, it doesn't
    for length in (23, 26, 29):
        plan = Plan(0, 0.0, (ScheduledSeq(0, 0, length),), (tokens[:length],), (start(0, tokens[:length], sampling, "resume", 20),),
                    fresh_tables={0: (7, 6, 5, 4, 3, 2, 1, 0)}, released=(0,))  # fmt: skip
        assert resumed.submit(plan).result().tokens[0] == tokens[length : length + 1]


def test_beams_get_candidates_and_no_tokens() -> None:
    run = runner()
    sampling = SamplingParams(beam_width=3, max_tokens=10)
    plan = Plan(0, 0.0, (ScheduledSeq(0, 0, 11), ScheduledSeq(1, 0, 6)), (PROMPT, OTHER), (start(0, PROMPT, sampling), start(1, OTHER)),
                {0: (0, 1, 2), 1: (3, 4)})  # fmt: skip
    outcome = run.submit(plan).result()
    assert outcome.tokens[0] == ()
    check(outcome, 1, 1, OTHER)
    best = recomputed(PROMPT).topk(6)
    assert [c.token_id for c in outcome.candidates[0]] == best.indices.tolist()
    assert [c.logprob for c in outcome.candidates[0]] == pytest.approx(best.values.tolist(), abs=1e-11)
    assert list(outcome.candidates) == [0]


def test_min_tokens_uses_the_runners_eos() -> None:
    eos = continued(PROMPT, 1)[0]
    run = TorchRunner(model())
    run.initialize(RunnerConfig(8, 0, 4, 8, 256, None, "float64", (eos,)))
    token = prefill(run, 0, PROMPT, (0, 1, 2), SamplingParams(min_tokens=1)).tokens[0][0]
    assert token == recomputed(PROMPT).topk(2).indices[1]


def test_half_precision_storage_stays_close_and_is_half_the_bytes() -> None:
    exact, half = runner(), runner(kv_dtype="float16")
    expected = prefill(exact, 0, PROMPT, (0, 1, 2)).logprobs[0][0]
    found = prefill(half, 0, PROMPT, (0, 1, 2)).logprobs[0][0]
    assert found.logprob == pytest.approx(expected.logprob, abs=0.02)
    assert found.logprob != expected.logprob
    # 2 layers, K and V, 16 blocks of 4 tokens, 4 KV heads of 8.
    assert exact.kv_bytes_allocated == 2 * 2 * 16 * 4 * 4 * 8 * 8
    assert half.kv_bytes_allocated * 4 == exact.kv_bytes_allocated


def test_life_cycle_and_errors() -> None:
    run = TorchRunner(model())
    assert run.kv_bytes_allocated == 0
    assert run.device_memory() is None
    with pytest.raises(RuntimeError, match="initialize"):
        run.submit(Plan(0, 0.0))
    with pytest.raises(UserError, match="max_model_len = 5000 is not allowed: model 'tiny' has 4096 positions"):
        run.initialize(RunnerConfig(4, 0, 4, 8, 5000))
    run.initialize(RunnerConfig(4, 0, 4, 8, 256, kv_dtype="float64"))
    with pytest.raises(RuntimeError, match="tables hold no block"):
        prefill(run, 0, PROMPT, (0, 1))
    run.close()
    assert run.kv_bytes_allocated == 0
    run.initialize(RunnerConfig(4, 0, 4, 8, 256, kv_dtype="float64"))
    check(prefill(run, 0, PROMPT, (2, 0, 1)), 0, 0, PROMPT)


def test_block_rows_grow_and_are_clean_when_reused() -> None:
    rows = BlockRows()
    for seq_id in range(200):
        rows.add(seq_id)
        rows.append({seq_id: tuple(range(1, seq_id + 2))})
    assert rows.tables(rows.rows([199, 1]), 200)[1].tolist() == [1, 2] + [0] * 198
    rows.append({3: (90, 91), 0: (80,)})
    assert rows.tables(rows.rows([3, 0]), 6).tolist() == [[1, 2, 3, 4, 90, 91], [1, 80, 0, 0, 0, 0]]
    rows.replace(199, (7,))
    assert rows.tables(rows.rows([199]), 3).tolist() == [[7, 0, 0]]
    rows.remove(150)
    rows.remove(150)
    rows.add(500)
    assert len(rows) == 200
    assert rows.tables(rows.rows([500]), 151).tolist() == [[0] * 151]
