"""Every preset through the command's own door, on the tiny model: it finishes, with the same greedy tokens, and does what it claims."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pandas as pd
import pytest
from engine_support import Log

import kvlab
from kvlab.experiment import OK, main
from kvlab.types import Plan, ScheduledSeq

PRESETS = sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "conf" / "policy").glob("*.yaml"))

LOAD = [
    "model=tiny", "runner=torch", "dtype=float64", "threads=1", "workload=shared_prefix", "workload.num_requests=14",
    "workload.arrivals.kind=all_at_once", "workload.prefix={depth: 2, branching: 2, tokens_per_node: 12}",
    "workload.prompt_len={kind: uniform, min: 4, max: 40}", "workload.output_len={kind: uniform, min: 8, max: 30}",
    "block_size=4", "max_model_len=128", "max_num_batched_tokens=80",
]  # fmt: skip
TIGHT = "num_blocks=40"
ROOMY = "num_blocks=128"  # four regions of 128 tokens


def overrides_of(preset: str) -> list[str]:
    more = {"vtc": ["workload.tenants={a: 0.5, b: 0.5}"], "nano_vllm": ["max_num_batched_tokens=100"]}.get(preset, [])
    return [*LOAD, *more, f"+policy={preset}", ROOMY if preset in ("transformers", "orca_max") else TIGHT]


@lru_cache
def undisturbed() -> dict[str, list[list[int]]]:
    """Tokens with blocks for everybody and no cache."""
    log = Log()
    run = kvlab.run(kvlab.compose(*LOAD, "num_blocks=1000", "prefix_cache=none", "max_num_batched_tokens=4096"), listeners=[log],
                    progress=False)  # fmt: skip
    assert log.total("num_preemptions") == log.total("prefix_cache_hits") == 0
    assert len(log.plans[0].scheduled) == 14
    return tokens_of(run.requests())


def tokens_of(requests: pd.DataFrame) -> dict[str, list[list[int]]]:
    return {row.request_id: [list(ids) for ids in row.output_token_ids] for row in requests.itertuples()}


def decodes(entry: ScheduledSeq, plan: Plan, log: Log) -> bool:
    """One token after the prompt; a prompt, or a request that comes back, may have a single token to compute too, after a hit."""
    num_prompt = next(s.num_prompt_tokens for p in log.plans for s in p.starts if s.seq_id == entry.seq_id)
    enters = any(s.seq_id == entry.seq_id and s.cause in ("admit", "resume") for s in plan.starts)
    return entry.num_new_tokens == 1 and entry.first_position >= num_prompt and not enters


def check_claims(preset: str, steps: pd.DataFrame, requests: pd.DataFrame, log: Log) -> None:
    """What each preset's file says it does."""
    mixed = any({decodes(entry, plan, log) for entry in plan.scheduled} == {True, False} for plan in log.plans)
    chunks = any(entry.num_samples == 0 for plan in log.plans for entry in plan.scheduled)
    hits, evicted = steps["prefix_cache_hits"].sum(), steps["num_evicted_blocks"].sum()
    swapped, preempted = steps["swapped_in_blocks"].sum(), steps["num_preemptions"].sum()
    if preset in ("lru", "fifo", "lfu", "vllm"):
        assert mixed
        assert chunks
        assert min(hits, evicted, preempted) > 0
        assert swapped == 0
        assert set(steps["watermark_blocks"]) == {0}  # int(0.01 * 40), or none at all
    elif preset == "vllm_v0":
        assert not mixed
        assert hits == evicted == swapped == 0
        assert preempted > 0
    elif preset == "walkthrough":
        assert mixed
        assert not chunks
        assert hits == 0
        assert swapped > 0
        assert {entry.mode for plan in log.plans for entry in plan.preempted} == {"swap"}
    elif preset in ("sglang", "mini_sglang", "nano_vllm", "vtc", "tgi"):
        assert not mixed  # prompts in steps of their own
        assert not chunks
        assert swapped == 0
        assert (hits > 0) == (preset in ("sglang", "mini_sglang", "nano_vllm"))
        assert (preempted == 0) or preset in ("sglang", "nano_vllm")
    elif preset in ("sarathi", "transformers_cb"):
        assert mixed
        assert chunks
        assert preempted > 0
        assert (hits > 0) == (preset == "transformers_cb")
        assert set(steps["watermark_blocks"]) == {8 if preset == "transformers_cb" else 0}  # int(0.2 * 40), int(0.01 * 40)
    elif preset == "llamacpp":
        assert steps["num_running_reqs"].max() == 4
        assert hits > 0  # a slot's sequence, not a shared block
        assert evicted > 0  # what a slot held after the common beginning
        assert swapped == 0
    elif preset == "fastserve":
        assert swapped > 0
        assert "scheduling" in {entry.cause for plan in log.plans for entry in plan.preempted}
    elif preset.startswith("orca_"):
        assert mixed
        assert not chunks
        assert hits == evicted == swapped == 0
        check_regions(preset, steps, log)
    else:
        assert preset == "transformers"
        assert hits == evicted == swapped == preempted == 0
        assert steps["num_running_reqs"].max() <= 4
        assert (steps["kv_blocks_used"] % 32 == 0).all()  # regions of max_model_len
        starts = requests.sort_values("first_scheduled_s")["first_scheduled_s"].round(9).nunique()
        assert starts == 4  # 14 requests in batches of four


def check_regions(preset: str, steps: pd.DataFrame, log: Log) -> None:
    """Consecutive blocks: as many as max_model_len needs, as prompt and true output need, or a power of two."""
    tables = [ids for plan in log.plans for ids in plan.fresh_tables.values()]
    assert tables
    assert all(list(ids) == list(range(ids[0], ids[0] + len(ids))) for ids in tables)
    if preset == "orca_max":
        assert {len(ids) for ids in tables} == {32}
    elif preset == "orca_pow2":
        assert {len(ids) for ids in tables} <= {1, 2, 4, 8, 16, 32}
        assert all(ids[0] % len(ids) == 0 for ids in tables)
        assert steps["num_preemptions"].sum() > 0
    else:
        assert len({len(ids) for ids in tables}) > 4
        assert steps["num_preemptions"].sum() == 0  # nobody ever grows


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_does_what_it_says_and_changes_no_token(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = Log()
    run = kvlab.run(kvlab.compose(*overrides_of(preset)), folder=tmp_path / "in process", listeners=[log], progress=False)
    assert tokens_of(run.requests()) == undisturbed()
    check_claims(preset, run.steps(), run.requests(), log)
    assert main([*overrides_of(preset), f"hydra.run.dir={tmp_path / 'command'}"]) == OK
    command = kvlab.load_runs(tmp_path / "command")[0]
    assert command.state == "finished"
    assert tokens_of(command.requests()) == undisturbed()
    same = ["num_ctx_tokens", "num_generation_tokens", "num_preemptions", "num_evicted_blocks", "prefix_cache_hits", "swapped_in_blocks"]
    pd.testing.assert_frame_equal(command.steps()[same], run.steps()[same])


def test_all_presets_are_here() -> None:
    assert PRESETS == [
        "fastserve", "fifo", "lfu", "llamacpp", "lru", "mini_sglang", "nano_vllm", "orca_max", "orca_oracle", "orca_pow2", "sarathi",
        "sglang", "tgi", "transformers", "transformers_cb", "vllm", "vllm_v0", "vtc", "walkthrough",
    ]  # fmt: skip
