"""Mooncake and Azure traces: loaders on small files written here, and the known facts of the real files where there are any."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workload_helpers import all_due, context, serve

from kvlab.types import UserError
from kvlab.workload import AzureWorkload, MooncakeWorkload, find_trace
from kvlab.workload.azure import read_azure
from kvlab.workload.hashed import scaled
from kvlab.workload.mooncake import read_mooncake

# ---------------------------------------------------------------- Mooncake, small

ROWS: list[dict[str, Any]] = [
    {"timestamp": 3000, "input_length": 1200, "output_length": 100, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 512, "hash_ids": [0, 1]},
    {"timestamp": 6500, "input_length": 1030, "output_length": 3, "hash_ids": [0, 7, 8]},
]


def mooncake(folder: Path, rows: list[Any], name: str = "trace.jsonl") -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_same_hash_id_is_the_same_512_tokens(tmp_path: Path, name: str) -> None:
    a, b, c = all_due(MooncakeWorkload(mooncake(tmp_path, ROWS, name)))
    assert [len(r.prompt_token_ids) for r in (a, b, c)] == [1200, 1024, 1030]
    assert a.prompt_token_ids[:1024] == b.prompt_token_ids
    assert a.prompt_token_ids[:512] == c.prompt_token_ids[:512]
    assert a.prompt_token_ids[512:515] != c.prompt_token_ids[512:515]
    assert a.prompt_token_ids[1024:1030] != c.prompt_token_ids[1024:1030]
    assert [r.arrival_s for r in (a, b, c)] == [0.0, 0.0, 3.5]
    assert [(r.sampling.max_tokens, r.oracle_output_len, r.sampling.ignore_eos) for r in (a, b, c)] == [
        (100, 100, True), (512, 512, True), (3, 3, True),
    ]  # fmt: skip
    assert [r.request_id for r in (a, b, c)] == ["mooncake-1", "mooncake-2", "mooncake-3"]


def test_a_partial_block_holds_the_first_tokens_of_its_id(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "input_length": 700, "hash_ids": [4, 5]}, {**ROWS[0], "input_length": 1024, "hash_ids": [4, 5]}]
    short, long = all_due(MooncakeWorkload(mooncake(tmp_path, rows)))
    assert short.prompt_token_ids == long.prompt_token_ids[:700]


def test_scaling_shrinks_blocks_and_lengths_alike(tmp_path: Path) -> None:
    # 1200 = 2 blocks and 176: 2 * 16 + 176 * 16 // 512 = 37. 1030 = 2 blocks and 6: 32 + 1. Outputs 100 -> 3, 512 -> 16, 3 -> 1.
    a, b, c = all_due(MooncakeWorkload(mooncake(tmp_path, ROWS), block_tokens=16))
    assert [len(r.prompt_token_ids) for r in (a, b, c)] == [37, 32, 33]
    assert [r.sampling.max_tokens for r in (a, b, c)] == [3, 16, 1]
    assert a.prompt_token_ids[:32] == b.prompt_token_ids
    assert a.prompt_token_ids[:16] == c.prompt_token_ids[:16]
    assert scaled(np.array([1, 511, 512, 513, 1024]), 16, 512).tolist() == [1, 15, 16, 17, 32]
    assert scaled(np.array([1, 511, 512, 513, 1024]), 512, 512).tolist() == [1, 511, 512, 513, 1024]


def test_time_skip_limit_and_clipping(tmp_path: Path) -> None:
    path = mooncake(tmp_path, ROWS)
    b, c = all_due(MooncakeWorkload(path, skip=1, time_scale=0.5))
    assert [(r.request_id, r.arrival_s) for r in (b, c)] == [("mooncake-2", 0.0), ("mooncake-3", 1.75)]
    clipped = MooncakeWorkload(path, limit=2, max_input=1024, max_output=110)
    a, b = all_due(clipped)
    assert a.prompt_token_ids == b.prompt_token_ids
    assert [r.sampling.max_tokens for r in (a, b)] == [100, 110]
    assert clipped.notes == [
        "workload.max_input=1024 clipped 1 of 2 requests.",
        "workload.max_output=110 clipped 1 of 2 requests.",
    ]


def test_token_ids_depend_on_the_seed_and_avoid_special_ids(tmp_path: Path) -> None:
    path = mooncake(tmp_path, ROWS)
    first = all_due(MooncakeWorkload(path), context(vocab_size=40, special_ids=(0, 3)))
    assert first == all_due(MooncakeWorkload(path), context(vocab_size=40, special_ids=(0, 3)))
    assert first != all_due(MooncakeWorkload(path), context(vocab_size=40, special_ids=(0, 3), seed=1))
    assert {t for r in first for t in r.prompt_token_ids} == set(range(40)) - {0, 3}


def test_blocks_too_short_to_tell_ids_apart_are_told(tmp_path: Path) -> None:
    workload = MooncakeWorkload(mooncake(tmp_path, ROWS), block_tokens=1)
    all_due(workload, context(vocab_size=10))
    assert workload.notes == [
        "5 hash ids as blocks of 1 tokens out of 10: expect about 1.2 pairs of equal blocks; more block_tokens avoid them."
    ]


def test_repairs_are_counted(tmp_path: Path) -> None:
    rows = [{**ROWS[2], "output_length": 0}, {**ROWS[0], "input_length": 0, "hash_ids": []}, ROWS[1], ROWS[0]]
    workload = MooncakeWorkload(mooncake(tmp_path, rows))
    requests = all_due(workload)
    assert [(r.request_id, r.arrival_s, r.sampling.max_tokens) for r in requests] == [
        ("mooncake-3", 0.0, 512), ("mooncake-4", 0.0, 100), ("mooncake-1", 3.5, 1),
    ]  # fmt: skip
    assert workload.notes == [
        "trace.jsonl: 1 of 4 rows have no input tokens and were left out.",
        "trace.jsonl: 1 rows have no output tokens; each was given 1.",
        "trace.jsonl: 1 rows arrive before the row above them; the trace was sorted by arrival.",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"timestamp": 0', r"trace\.jsonl, line 2: broken JSON"),
        ("7", r"line 2: a JSON object is expected, not int"),
        ({"timestamp": 0, "input_length": 5, "output_length": 1}, r"line 2: the field 'hash_ids' is missing"),
        ({**ROWS[0], "timestamp": "now"}, r"line 2: timestamp = 'now'"),
        ({**ROWS[0], "input_length": 1200.0}, r"line 2: input_length = 1200\.0 is not allowed: a whole number"),
        ({**ROWS[0], "output_length": True}, r"line 2: output_length = True"),
        ({**ROWS[0], "hash_ids": [0, 1]}, r"line 2: 2 hash_ids for 1200 input tokens"),
        ({**ROWS[0], "hash_ids": [0, 1, "x"]}, r"line 2: hash_ids must be a list of whole numbers"),
        ({**ROWS[0], "input_length": -1, "hash_ids": []}, r"line 2: input length -1 is negative"),
        ({**ROWS[0], "output_length": -5}, r"line 2: output length -5 is negative"),
    ],
)
def test_a_malformed_mooncake_row_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MooncakeWorkload(mooncake(tmp_path, [ROWS[0], row])).start(context())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tokens": 0}, r"workload\.block_tokens = 0"),
        ({"time_scale": -1}, r"workload\.time_scale = -1"),
        ({"limit": 0}, r"workload\.limit = 0"),
        ({"skip": 3}, r"has 3 requests: workload\.skip=3 leaves none"),
        ({"max_input": 0}, r"workload\.max_input = 0"),
        ({"sampling": {"max_tokens": 4}}, r"max_tokens has no effect"),
        ({"sampling": {"min_tokens": 4}}, r"min_tokens = 4 is not allowed: between 0 and max_tokens \(3\)"),
    ],
)
def test_wrong_parameters_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MooncakeWorkload(mooncake(tmp_path, ROWS), **changes).start(context())


def test_prompts_longer_than_the_model_are_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"2 of 3 prompts leave no room .* 1200 tokens\)\. Shrink .* workload\.block_tokens"):
        MooncakeWorkload(mooncake(tmp_path, ROWS)).start(context(max_model_len=1030))


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no requests"):
        MooncakeWorkload(mooncake(tmp_path, [])).start(context())


# ------------------------------------------------------------------- Azure, small

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:51.2224670,879,55\r\n"
)


def azure(folder: Path, text: str) -> Path:
    path = folder / "azure.csv"
    path.write_bytes(text.encode())
    return path


def test_azure_rows_become_requests_of_random_tokens(tmp_path: Path) -> None:
    requests = all_due(AzureWorkload(azure(tmp_path, AZURE)))
    assert [len(r.prompt_token_ids) for r in requests] == [374, 396, 879]
    assert [r.sampling.max_tokens for r in requests] == [44, 109, 55]
    assert [r.arrival_s for r in requests] == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-9)
    assert [r.request_id for r in requests] == ["azure-2", "azure-3", "azure-4"]
    assert len({tuple(r.prompt_token_ids[:4]) for r in requests}) == 3


def test_the_tokens_of_a_row_do_not_depend_on_the_window(tmp_path: Path) -> None:
    path = azure(tmp_path, AZURE)
    alone = all_due(AzureWorkload(path, skip=2, length_scale=0.5))
    assert [(r.request_id, r.arrival_s, len(r.prompt_token_ids)) for r in alone] == [("azure-4", 0.0, 440)]
    assert alone[0].prompt_token_ids == all_due(AzureWorkload(path))[2].prompt_token_ids[:440]


def test_azure_2024_times_have_a_zone_and_columns_may_be_in_any_order(tmp_path: Path) -> None:
    path = azure(
        tmp_path,
        "GeneratedTokens,TIMESTAMP,ContextTokens\n5,2024-05-10 23:59:59.5+00:00,10\n6,2024-05-11 00:00:00+00:00,20\n"
        "7,2024-05-11T02:00:01Z,30\n",
    )
    trace = read_azure(path)
    assert trace.arrivals_s.tolist() == [0.0, 0.5, 7201.5]
    assert trace.input_lens.tolist() == [10, 20, 30]
    assert trace.output_lens.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"azure\.csv: the first line must be a header"),
        ("a,b,c\n1,2,3\n", r"the first line must be a header with TIMESTAMP, ContextTokens, GeneratedTokens, not 'a,b,c'"),
        (AZURE + "2023-11-16 18:15:52,7\n", r"line 5: 2 columns where the header has 3"),
        (AZURE + "yesterday,7,7\n", r"line 5: TIMESTAMP = 'yesterday' is not a time"),
        (AZURE + "2023-13-16 18:15:52,7,7\n", r"line 5: TIMESTAMP = '2023-13-16 18:15:52' is not a time"),
        (AZURE + "2023-11-16 18:15:52,7.5,7\n", r"line 5: ContextTokens = '7\.5' is not a whole number"),
        (AZURE + "2023-11-16 18:15:52,-7,7\n", r"line 5: input length -7 is negative"),
        (AZURE.splitlines()[0] + "\n", r"azure\.csv holds no requests"),
    ],
)
def test_a_malformed_azure_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        AzureWorkload(azure(tmp_path, text)).start(context())


# ------------------------------------------------------------------ finding files


def test_a_trace_is_found_by_path_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mooncake(tmp_path, ROWS, "small_trace.jsonl.gz")
    assert find_trace(path) == path
    assert find_trace("small_trace", [tmp_path / "nowhere", tmp_path]) == path
    assert find_trace("small_trace.jsonl.gz", [tmp_path]) == path
    monkeypatch.setenv("KVLAB_TRACES", str(tmp_path))
    assert find_trace("small_trace") == path
    assert len(all_due(MooncakeWorkload("small_trace"))) == 3


def test_a_missing_trace_says_where_it_was_looked_for_and_what_is_there(tmp_path: Path) -> None:
    mooncake(tmp_path, ROWS, "small_trace.jsonl.gz")
    with pytest.raises(UserError) as caught:
        find_trace("smal_trace", [tmp_path])
    message = str(caught.value)
    assert f"looked for a file of that path, and in {tmp_path}" in message
    assert "Did you mean 'small_trace.jsonl.gz'?" in message
    assert "KVLAB_TRACES" in message
    with pytest.raises(UserError, match="There are no traces there"):
        find_trace("x", [tmp_path / "empty"])


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = mooncake(tmp_path, ROWS * 200, "cut.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: damaged gzip data"):
        read_mooncake(path)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: damaged gzip data after line 0"):
        read_mooncake(path)


# ------------------------------------------------------------------ the real files

FOLDER = Path(os.environ.get("KVLAB_TRACES") or Path(__file__).resolve().parents[1].parent / "shared" / "data" / "traces")


def real(name: str) -> Path:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {FOLDER} (set KVLAB_TRACES to the folder of the traces)")
    return path


@pytest.mark.traces
def test_facts_of_the_mooncake_conversation_trace() -> None:
    trace = read_mooncake(real("mooncake_conversation.jsonl.gz"))
    assert len(trace) == 12_031
    assert len(trace.hash_ids) == 288_500
    ids, counts = np.unique(trace.hash_ids, return_counts=True)
    assert len(ids) == 182_790
    assert round((counts > 1).mean(), 2) == 0.24
    assert round(1 - len(ids) / len(trace.hash_ids), 3) == 0.366  # hit rate of an infinite cache, by block reference
    assert {int(trace.ids(row)[0]) for row in range(len(trace))} == {0}
    assert np.percentile(trace.input_lens, [50, 90, 99]).round().tolist() == [6909, 27367, 85400]
    assert round(trace.input_lens.mean()) == 12_035
    assert round(trace.output_lens.mean()) == 343


@pytest.mark.traces
def test_facts_of_the_mooncake_synthetic_trace() -> None:
    trace = read_mooncake(real("mooncake_synthetic.jsonl.gz"))
    assert (len(trace), len(trace.hash_ids), len(np.unique(trace.hash_ids))) == (3_993, 121_877, 43_924)


@pytest.mark.traces
def test_token_blocks_are_shared_as_the_hash_ids_are() -> None:
    path = real("mooncake_conversation.jsonl.gz")
    workload = MooncakeWorkload(path, block_tokens=4, limit=1500)
    requests = all_due(workload)
    trace = read_mooncake(path)
    of_id: dict[int, tuple[int, ...]] = {}
    for row, request in enumerate(requests):
        for i, hash_id in enumerate(trace.ids(row).tolist()):
            block = tuple(request.prompt_token_ids[4 * i : 4 * i + 4])
            assert of_id.setdefault(hash_id, block) == block
    full = [block for block in of_id.values() if len(block) == 4]
    assert len(full) > 10_000
    assert len(set(full)) == len(full)
    assert workload.notes == []


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "num", "mean", "percentiles", "mean_output", "rate", "cv"),
    [
        ("azure_2023_conv.csv.gz", 19_366, 1155, [1020, 2734, 4142], 211, 5.53, 1.09),
        ("azure_2023_code.csv.gz", 8_819, 2048, [1469, 5188, 7436], 28, 2.57, 13.2),
    ],
)
def test_facts_of_the_azure_traces(
    name: str, num: int, mean: int, percentiles: list[int], mean_output: int, rate: float, cv: float
) -> None:
    trace = read_azure(real(name))
    assert len(trace) == num
    assert round(trace.input_lens.mean()) == mean
    assert np.percentile(trace.input_lens, [50, 90, 99]).round().tolist() == percentiles
    assert round(trace.output_lens.mean()) == mean_output
    gaps = np.diff(trace.arrivals_s)
    assert num / trace.arrivals_s[-1] == pytest.approx(rate, abs=0.006)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.06)
    assert gaps.min() >= 0


@pytest.mark.traces
def test_a_real_trace_is_served_in_closed_loop() -> None:
    workload = AzureWorkload(real("azure_2023_conv.csv.gz"), length_scale=0.05, limit=300, concurrency=8)
    handed, records, most = serve(workload, context(), lambda request: 0.01 * request.sampling.max_tokens)
    assert (len(handed), len(records), most) == (300, 300, 8)
