"""kvlab.explain says what is known to have limited a run: runs made so that there is one answer, and figures worked out by hand."""

from __future__ import annotations

import json

import pytest
from trace_examples import BLOCKS, OUTCOMES, REQUESTS, STATS, plan, request, stats

import kvlab
from kvlab import advising
from kvlab.explaining import Advice
from kvlab.results import Run
from kvlab.trace import RecordConfig, Recorder
from kvlab.types import BlockEvent, UserError

SIMULATED = (
    "runner=simulated", "model=dummy_llama3_8b", "cost_model=constant", "workload=synthetic",
    "workload.num_requests=24", "num_blocks=1000", "prefix_cache=none",
    "workload.prompt_len={kind: uniform, min: 100, max: 100}", "workload.output_len={kind: uniform, min: 40, max: 40}",
)  # fmt: skip


def made(step_stats=STATS, records=REQUESTS, blocks=(), **config) -> Run:
    recorder = Recorder(None, RecordConfig(blocks=bool(blocks)))
    for row in step_stats:
        recorder.on_step(plan(0), OUTCOMES[0], row)
    for record in records:
        recorder.on_request(record)
    for event in blocks:
        recorder.on_block(event)
    return Run("made", config=config, recorder=recorder)


def served(tmp_path, *overrides) -> Run:
    return kvlab.run(kvlab.compose(*SIMULATED, *overrides), folder=tmp_path / "run", progress=False)


def value(found, subject: str) -> float:
    rows = found.table.set_index("subject")["value"]
    return float(rows[subject])


AT_ONCE = "workload.arrivals={kind: all_at_once}"
NO_CACHE = "a prefix cache (prefix_cache=hash)"


def test_a_pool_too_small_is_limited_by_blocks(tmp_path):
    found = kvlab.explain(served(tmp_path, AT_ONCE, "num_blocks=30"))
    assert found.limit == "blocks"
    assert found.shares["blocks"] > 0.6
    assert found.advice[0].knob.startswith("more KV blocks")


def test_one_sequence_at_a_time_is_limited_by_the_batch(tmp_path):
    found = kvlab.explain(served(tmp_path, AT_ONCE, "max_num_seqs=1"))
    assert found.limit == "batch"
    assert found.shares["batch"] == pytest.approx(23 / 24, abs=0.01)  # the last of 24 requests keeps nobody out
    assert [a.knob for a in found.advice] == ["raise max_num_seqs", NO_CACHE]
    assert "Nobody was preempted." in found.sentences


def test_a_low_token_budget_is_limited_by_tokens(tmp_path):
    found = kvlab.explain(served(tmp_path, AT_ONCE, "max_num_batched_tokens=16", "max_num_seqs=16"))
    assert found.limit == "tokens"
    assert "max_num_batched_tokens = 16" in found.text
    assert "raise max_num_batched_tokens" in [a.knob for a in found.advice]


def test_few_arrivals_limit_by_themselves(tmp_path):
    found = kvlab.explain(served(tmp_path, "workload.arrivals={kind: fixed, rate: 0.05}"))
    assert found.limit == "arrivals"
    assert found.shares["arrivals"] == pytest.approx(1.0)
    assert [a.knob for a in found.advice] == [NO_CACHE]
    assert value(found, "of it without any step (idle)") > 50


def test_requests_that_were_not_served_are_told_and_nothing_contradicts_it(tmp_path):
    short = served(tmp_path, "workload.arrivals={kind: fixed, rate: 5}", "workload.prompt_len={kind: uniform, min: 20, max: 90}",
                   "workload.output_len=2", "num_blocks=3")  # fmt: skip
    num, of = short.summary["num_refused"], short.summary["num_requests"]
    assert 0 < num < of
    found = kvlab.explain(short)
    assert f"{num} of {of} requests were refused (the first: Request 'synthetic-" in found.text
    assert "can never fit" in found.text
    assert "more load" not in found.text
    assert value(found, "refused") == num
    assert found.advice[0].knob.startswith("more KV blocks")
    assert found.advice[0].share == num / of
    by_hand = kvlab.explain(made()).text
    assert "1 of 4 requests were refused (the first: needs 12 blocks, the pool has 10)." in by_hand
    assert "1 of 4 requests were aborted (the client left)." in by_hand
    nothing = kvlab.explain(made((), REQUESTS[3:]))
    assert nothing.text.startswith("Nothing was served in this run: 1 of 1 requests were refused")
    assert "more load could be taken" in kvlab.explain(made(records=REQUESTS[:2])).text


def outgrown(found) -> Advice:
    return next(a for a in found.advice if a.knob == "more KV blocks (num_blocks or kv_cache_tokens), or a limit on the output")


def test_requests_that_outgrew_the_pool_are_told_how_many_blocks_would_have_done(tmp_path):
    """Three blocks of 16 hold 48 tokens: prompts of 20 end when their 49th token, the 29th of the output, is there to be computed."""
    run = served(tmp_path, AT_ONCE, "workload.num_requests=4", "workload.prompt_len=20", "num_blocks=3", "max_model_len=500",
                 "workload.output_len={kind: uniform, min: 10, max: 100}")  # fmt: skip
    cut = run.requests()[run.requests()["finish_reason"] == "kv_capacity"]
    assert list(cut["num_output_tokens"]) == [29] * 3
    found = kvlab.explain(run)
    advice = outgrown(found)
    assert advice.gain == ("3 requests that ended early would have gone on; at least 4 blocks (the pool has 3); "
                           "32 hold whatever they may become (max_model_len: 500 tokens)")  # fmt: skip
    assert advice.share == 0.75
    assert value(found, "ended out of KV space") == 3
    assert value(found, "longest of them") == 49
    assert value(found, "blocks that the next token of any takes at least") == 4
    assert value(found, "blocks in which all of them can end") == 32
    pair = request("p", 0.0, (1.0,), reason="kv_capacity", outputs=(((1,), "kv_capacity"), ((2,), "kv_capacity")))
    by_hand = kvlab.explain(made(STATS[:1], (pair, *REQUESTS[:1]), block_size=16, max_model_len=90))
    assert outgrown(by_hand).gain == ("1 request that ended early would have gone on; at least 11 blocks (the pool has 10); "
                                      "12 hold whatever they may become (max_model_len: 2 sequences of 90 tokens)")  # fmt: skip
    unknown = kvlab.explain(made((), (pair, *REQUESTS[:1])))
    assert outgrown(unknown).gain == "1 request that ended early would have gone on"
    regions = kvlab.explain(made(STATS[:1], (pair,), block_size=16, max_model_len=90, layout={"_target_": "x.Regions"}))
    assert outgrown(regions).gain.endswith("at least 11 blocks (the pool has 10)")


def test_advice_is_given_from_a_hundredth_on_and_never_for_what_is_unknown():
    assert advising.for_evicted(0.0099) == []
    assert advising.for_partial_blocks(float("nan")) == []
    assert advising.for_partial_blocks(0.123) == [Advice(
        "a smaller block_size (or prefix_cache=radix prefix_cache.partial_block_copy=true)",
        "at most 12 % more of the prompt tokens from the cache", 0.123)]  # fmt: skip
    assert advising.for_partly_filled(0.2, 0.5, block_size=1) == []  # there is no smaller one
    assert advising.for_partly_filled(0.2, 0.5, block_size=16)[0].share == pytest.approx(0.1)
    assert advising.for_waiting("batch", 0.5, 0.25, "a request (mean)") == [
        Advice("raise max_num_seqs", "at most 250 ms less waiting a request (mean), if steps take no longer", 0.5)]  # fmt: skip


def test_shares_of_the_time_by_hand():
    # STATS: 0.5 s in which nobody was kept out, 0.5 s by the watermark, 1 s in which nobody was; then a budget of one token.
    found = kvlab.explain(made(max_num_batched_tokens=2048, block_size=4))
    assert found.shares["blocks"] == pytest.approx(0.25)
    assert found.shares["arrivals"] == pytest.approx(0.75)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert kvlab.explain(made(max_num_batched_tokens=40)).shares["tokens"] == pytest.approx(0.25)  # the first step spends it
    idle = kvlab.explain(made((stats(0, 0.0, 1.0), stats(1, 3.0, 4.0))))
    assert value(idle, "of it without any step (idle)") == 50.0


def test_losses_by_hand():
    lived = request("p", 0.0, (1.0,), spans=(("decode", 0.0, 3.0), ("preempted", 3.0, 4.0)))
    rows = (
        stats(0, 0.0, 1.0, num_prompt_tokens_computed=60, num_preemptions=1, kv_blocks_used=5, kv_blocks_free=5,
              internal_fragmentation_tokens=8, prefix_cache_queries=100, prefix_cache_hits=20),
        stats(1, 1.0, 2.0, num_prompt_tokens_computed=40, recomputed_tokens=20, swapped_in_blocks=3, swapped_out_blocks=4,
              kv_blocks_used=5, kv_blocks_free=5, internal_fragmentation_tokens=8),
    )  # fmt: skip
    found = kvlab.explain(made(rows, (lived._replace(num_shareable_tokens_lost=6),), block_size=16))
    assert value(found, "preemptions") == 1
    assert value(found, "computed again") == 20.0  # 20 of 100
    assert value(found, "time for it, by tokens of each step") == 25.0  # half of the second of two seconds
    assert value(found, "swap traffic") == 7
    assert value(found, "life spent preempted or swapped out") == 25.0
    assert value(found, "empty slots in used blocks") == 5.0  # 8 of 10 * 16
    assert value(found, "prefix cache hit rate") == 20.0
    assert value(found, "shared, but not in full blocks") == 6.0
    knobs = {a.knob: a.gain for a in found.advice}
    assert "at most 6.0 %" in knobs["a smaller block_size (or prefix_cache=radix prefix_cache.partial_block_copy=true)"]
    assert "at most 20 % fewer tokens" in next(gain for knob, gain in knobs.items() if knob.startswith("a higher watermark"))


def test_blocks_computed_again_after_their_eviction_are_counted():
    def event(kind: str, content: str, step: int) -> BlockEvent:
        return BlockEvent(step, kind, "gpu", 3, 1, content, "a")

    events = (event("publish", "aa", 0), event("evict", "aa", 1), event("publish", "aa", 2), event("publish", "bb", 2), BLOCKS[1])
    found = kvlab.explain(made(blocks=events, block_size=4))
    assert value(found, "evicted, then computed again") == 1
    assert "at most 8.0 % more" in found.text  # 4 of 50 tokens asked for
    assert "record.blocks" not in found.text
    assert "record.blocks=true" in kvlab.explain(made(block_size=4)).text


def test_an_unlimited_cache_by_hand():
    def publish(content: str, request_id: str, parent: str = "") -> BlockEvent:
        return BlockEvent(0, "publish", "gpu", 3, 1, content, request_id, parent)

    def asked(request_id: str, num_prompt_tokens: int, num_cached_tokens: int = 0):
        computed = num_prompt_tokens - num_cached_tokens
        return request(request_id, 0.0, (1.0,))._replace(num_prompt_tokens=num_prompt_tokens, num_cached_tokens=num_cached_tokens,
                                                        num_computed_tokens=computed, num_wasted_tokens=0)  # fmt: skip

    # Blocks of 4. Each may find (tokens - 1) // 4 blocks: a 2 (aa bb), b 2 (aa cc), c 2 (aa bb), d 1 (aa: its last token is computed).
    rows = (stats(0, 0.0, 1.0, prefix_cache_queries=36, prefix_cache_hits=8),)
    records = (asked("a", 9), asked("b", 9, 4), asked("c", 10, 4), asked("d", 8))
    events = (publish("aa", "a"), publish("bb", "a", "aa"), publish("cc", "b", "aa"))
    found = kvlab.explain(made(rows, records, events, block_size=4))
    assert value(found, "an unlimited cache would have found") == pytest.approx(100 * 16 / 36, abs=1e-4)  # all but aa, bb, cc once
    assert "(an unlimited one would have found 44 %)" in found.text
    assert "22 % were asked for before they had been computed" in found.text  # nothing was evicted
    assert [a.knob for a in found.advice] == ["requests that begin alike one after the other (a lower max_num_seqs)"]
    unknown = (
        ((), {"block_size": 4}, "record.blocks=true records it"),
        (events, {}, "no block_size"),
        (events[1:], {"block_size": 4}, "what came before some of the blocks was not recorded"),
        (events, {"block_size": 4, "prefix_cache": {"partial_block_copy": True}}, "parts of blocks were found too"),
        (BLOCKS[:1], {"block_size": 4}, "no block was published"),
    )
    for blocks, config, why in unknown:
        found = kvlab.explain(made(rows, records, blocks, **config))
        assert f"is unknown ({why})" in found.text
        assert found.table.set_index("subject").loc["an unlimited cache would have found", "from"] == why
        assert " unknown % of prompt tokens" in str(found)
        assert '<td style="text-align: right">unknown</td>' in found._repr_html_()


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_the_unlimited_bound_is_what_a_pool_without_limit_finds(tmp_path, cache):
    """Requests side by side in a short pool, with preemptions; then one after the other in a long one, where nothing is missed."""
    common = ("runner=simulated", "model=tiny", "cost_model=cpu", "workload=shared_prefix", "workload.num_requests=30",
              "workload.arrivals.rate=150", "kv_cache_tokens=null", f"prefix_cache={cache}", "record.blocks=true")  # fmt: skip
    short = kvlab.run(kvlab.compose(*common, "num_blocks=40"), folder=tmp_path / "short", progress=False)
    free = kvlab.run(kvlab.compose(*common, "num_blocks=2000", "max_num_seqs=1"), folder=tmp_path / "free", progress=False)
    assert short.summary["num_preemptions"] > 0
    bounds = [value(kvlab.explain(run), "an unlimited cache would have found") for run in (short, free)]
    most = value(kvlab.explain(free), "prefix cache hit rate")
    assert bounds == [most, most]
    assert value(kvlab.explain(short), "prefix cache hit rate") < most - 5


def test_beginnings_too_short_to_match_are_not_blamed_on_requests_side_by_side(tmp_path):
    config = kvlab.compose(*SIMULATED[:3], "workload=shared_prefix", "workload.num_requests=12", "workload.output_len=2",
                           "workload.prompt_len=20", "workload.concurrency=1", "num_blocks=1000", "record.blocks=true",
                           "prefix_cache=hash", "prefix_cache.min_match_tokens=128")  # fmt: skip
    run = kvlab.run(config, folder=tmp_path / "run", progress=False)
    assert 0 < (run.requests()["num_cached_tokens"] >= 128).sum() < 11
    found = kvlab.explain(run)
    assert value(found, "an unlimited cache would have found") == value(found, "prefix cache hit rate")
    assert "in beginnings shorter than min_match_tokens" in found.text
    assert "side by side" not in found.text
    assert [a.knob for a in found.advice] == ["a lower prefix_cache.min_match_tokens"]


def test_what_was_missed_by_requests_that_ran_alone_has_an_unknown_reason():
    def asked(request_id: str, start: float, end: float):
        return request(request_id, start, (end,))._replace(num_prompt_tokens=9, num_cached_tokens=0, num_computed_tokens=9,
                                                          num_wasted_tokens=0, first_scheduled_s=start)  # fmt: skip

    rows = (stats(0, 0.0, 1.0, prefix_cache_queries=27),)
    events = [BlockEvent(0, "publish", "gpu", 3, 1, content, "a", parent) for content, parent in (("aa", ""), ("bb", "aa"))]
    alone = (asked("a", 0.0, 1.0), asked("b", 1.0, 2.0), asked("c", 2.0, 3.0))
    found = kvlab.explain(made(rows, alone, events, block_size=4))
    assert "; why 59 % were missed is unknown" in found.text  # 16 of 27: b and c each miss two blocks of 4
    assert "side by side" not in found.text
    assert found.advice == ()
    text = kvlab.explain(made(rows, (*alone[:2], asked("c", 1.5, 3.0)), events, block_size=4)).text
    assert "30 % were asked for before they had been computed, by requests side by side; why 30 % were missed is unknown" in text


def test_requests_that_were_not_recorded_are_unknown(tmp_path):
    run = served(tmp_path, AT_ONCE, "max_num_seqs=8", "prefix_cache=hash", "record.requests=false")
    found = kvlab.explain(run)
    assert "how many requests ended, and how many were refused, is unknown (record.requests=true records it)" in found.text
    assert "0 requests" not in found.text
    assert "how many more were there, but not in full blocks, is unknown (record.requests=true records it)" in found.text
    assert found.table.set_index("subject")["value"].isna()["shared, but not in full blocks"]
    assert "less waiting of all requests together" in found.text
    idle = kvlab.explain(made(records=())).text
    assert "requests came no faster than they were served" in idle
    assert "more load could be taken" not in idle
    assert "0 requests ended in" in kvlab.explain(made(records=(), record={"requests": True})).text  # that is known: none had


@pytest.mark.parametrize("more", [(), ("record.blocks=true",)])
def test_a_run_without_a_prefix_cache_is_told_of_it(tmp_path, more):
    found = kvlab.explain(served(tmp_path, AT_ONCE, *more))
    assert "There was no prefix cache (prefix_cache=none); what one would have found is unknown." in found.text
    assert "after their eviction" not in found.text
    assert found.advice[-1].knob == NO_CACHE


def test_unknown_words_of_an_admission_policy_are_its_own_limit():
    found = kvlab.explain(made((stats(0, 0.0, 1.0, admission_blocked_by="moonphase", num_waiting_reqs=2),)))
    assert found.limit == "admission"
    assert found.advice[0].knob == "a less strict admission policy"


def test_a_folder_and_a_half_written_one(tmp_path):
    run = served(tmp_path, AT_ONCE, "max_num_seqs=1")
    assert run.folder is not None
    assert str(kvlab.explain(run.folder)) == str(kvlab.explain(run))
    status = json.loads((run.folder / "status.json").read_text(encoding="utf-8"))
    failed = {**status, "state": "failed", "error": {"type": "KeyError", "message": "x"}}
    (run.folder / "status.json").write_text(json.dumps(failed), encoding="utf-8")
    (run.folder / "summary.json").unlink()
    (run.folder / "config.yaml").unlink()
    (run.folder / "requests.parquet").write_bytes(b"cut off")
    found = kvlab.explain(str(run.folder))
    assert found.sentences[0] == "The run is failed (KeyError: x); this is what it had recorded."
    assert "Not everything could be read: requests.parquet is damaged" in found.sentences[1]
    assert found.limit == "batch"  # from the steps alone
    empty = tmp_path / "empty"
    empty.mkdir()
    found = kvlab.explain(empty)
    assert found.limit is None
    assert "unknown" in found.text
    assert found.table.empty


def test_html_escapes_and_wrong_arguments_are_named(tmp_path):
    run = made()
    run.name = "<b>&"
    shown = kvlab.explain(run)._repr_html_()
    assert "<b>&lt;b&gt;&amp;</b>" in shown
    assert "<table" in shown
    with pytest.raises(UserError, match="not list"):
        kvlab.explain([run])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not a folder"):
        kvlab.explain(tmp_path / "nothing")
