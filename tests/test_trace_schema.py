"""The schema is what the design promises, and the engine's tuples fit it."""

from trace_examples import BLOCKS, OUTCOMES, REQUESTS, STATS, plan

from kvlab.trace import schema
from kvlab.trace.__main__ import document
from kvlab.trace.frames import raw_frame, request_row, with_derived
from kvlab.trace.outcomes import outcome_row
from kvlab.trace.plans import plan_row
from kvlab.types import BlockEvent, StepStats

STEP_COLUMNS = [
    "step", "now_s", "num_running_reqs", "num_waiting_reqs", "num_swapped_reqs", "num_running_seqs", "num_ctx_tokens",
    "num_generation_tokens", "num_prompt_tokens_computed", "num_output_tokens", "num_scheduled_seqs",
    "num_decode_seqs", "num_kv_tokens_read", "num_attention_pairs", "kv_blocks_total", "kv_blocks_used", "kv_blocks_evictable",
    "kv_blocks_free", "kv_blocks_reserved", "external_fragmentation_blocks", "cpu_blocks_total", "cpu_blocks_used",
    "internal_fragmentation_tokens",
    "prefix_cache_queries", "prefix_cache_hits", "preempted_queries", "preempted_hits", "num_preemptions",
    "num_evicted_blocks", "swapped_in_blocks", "swapped_out_blocks", "cow_copies", "relocated_blocks", "recomputed_tokens",
    "admission_blocked_by", "watermark_blocks", "shared_blocks_saved", "schedule_ms", "execute_ms", "commit_ms", "end_s",
    "record_ms", "process_rss_bytes", "kv_bytes_allocated", "device_memory_allocated_bytes", "device_memory_reserved_bytes",
    "step_ms", "output_tokens_per_s", "prompt_tokens_per_s", "kv_cache_usage",
]  # fmt: skip

REQUEST_COLUMNS = [
    "request_id", "arrival_s", "first_scheduled_s", "finish_s", "num_prompt_tokens", "num_output_tokens",
    "num_cached_tokens", "num_computed_tokens", "num_wasted_tokens", "num_shareable_tokens_lost", "num_preemptions",
    "num_swaps", "finish_reason", "token_times_s", "span_states", "span_starts_s", "span_ends_s", "output_token_ids",
    "output_finish_reasons", "output_texts", "tenant", "session_id", "turn", "priority", "detail", "cache_until",
    "queue_time_s", "ttft_s", "tpot_s", "itl_mean_s", "itl_p99_s", "itl_max_s", "e2el_s",
]  # fmt: skip


def test_golden_column_names():
    """Names that people's notebooks use: a change here is a change of the public interface."""
    assert [c.name for c in schema.STEPS] == STEP_COLUMNS
    assert [c.name for c in schema.REQUESTS] == REQUEST_COLUMNS
    assert [c.name for c in schema.BLOCKS] == ["step", "kind", "tier", "block_id", "ref_count", "content", "request_id", "parent"]


def test_schema_follows_the_engines_tuples():
    assert tuple(c.name for c in schema.STEPS_RAW) == StepStats._fields
    assert tuple(c.name for c in schema.BLOCKS) == BlockEvent._fields
    assert len(request_row(REQUESTS[0])) == len(schema.REQUESTS_RAW)


def test_every_column_is_described_once():
    for columns in schema.TABLES.values():
        assert len({c.name for c in columns}) == len(columns)
        assert all(c.unit and len(c.meaning) > 4 for c in columns)
        assert all(c.unit == {"_s": "s", "_ms": "ms", "_bytes": "bytes"}[s] for c in columns
                   for s in ("_s", "_ms", "_bytes") if c.name.endswith(s) and not c.name.endswith("per_s"))  # fmt: skip


def test_frames_have_the_schemas_dtypes_with_and_without_rows():
    steps = [(*s, 0.5, None, None, None, None) for s in STATS]
    rows = {"steps": steps, "requests": [request_row(r) for r in REQUESTS], "blocks": BLOCKS}
    pandas = {"int64": "int64", "int64?": "Int64", "float64": "float64", "str": "str"}
    rows["outcomes"] = [outcome_row(plan(i), outcome, STATS[i]) for i, outcome in enumerate(OUTCOMES)]
    rows["plans"] = [plan_row(plan(0))]
    for table, columns in schema.TABLES.items():
        for given in (rows[table], []):
            frame = with_derived(table, raw_frame(table, given))
            assert len(frame) == len(given)
            assert {c: str(t) for c, t in frame.dtypes.items()} == {c.name: pandas.get(c.dtype, "object") for c in columns}


def test_markdown_table():
    text = schema.markdown_table(schema.BLOCKS)
    assert text.splitlines()[:3] == [
        "| column | dtype | unit | from | meaning |",
        "|---|---|---|---|---|",
        "| `step` | `int64` | - | engine | step in which it happened |",
    ]
    assert len(text.splitlines()) == 2 + len(schema.BLOCKS)


def test_the_docs_name_every_column_and_figure():
    text = document()
    for columns in schema.TABLES.values():
        assert all(f"| `{c.name}` |" in text for c in columns)
    assert "| `p99_ttft_ms` | P99 TTFT | ms | time to first token, from arrival |" in text
    assert all(line.count("|") in (0, 5, 6) for line in text.splitlines())  # no cell breaks its row
