"""Mutants of kvlab/trace, and of what the engine tells it."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    # ---- kvlab/engine/scheduler.py
    Mutant("record-cached-beyond-prompt", "kvlab/engine/scheduler.py", 'if kind == "new":\n            group.num_cached_tokens',
           'if kind != "swapped_in":\n            group.num_cached_tokens',
           ("tests/engine/test_cases_accounting.py", "tests/engine/test_occupancy.py", "tests/engine/test_cases_prefix.py",
            "tests/engine/test_review_figures.py", "tests/engine/test_cases_statistics.py", "tests/engine/test_radix_engine.py",
            "tests/test_preemption_tax.py")),
    # ---- kvlab/engine/records.py
    Mutant("record-preempted-hits-as-hits", "kvlab/engine/records.py", 'if admitted.kind == "new":', 'if admitted.kind != "swapped_in":',
           ("tests/engine/test_review_figures.py::test_a_recomputed_chunk_over_the_prompts_end_counts_on_both_sides",)),
    Mutant("record-relocated-as-cow", "kvlab/engine/records.py", "len(plan.copies) - relocated,", "len(plan.copies),",
           ("tests/test_layout_fragmentation.py::test_a_region_that_is_outgrown_moves_where_its_buddy_is_taken",)),
    Mutant("record-pinned-not-used", "kvlab/engine/records.py", "pool.num_blocks, num_held + num_pinned, pool",
           "pool.num_blocks, num_held, pool",
           ("tests/test_eviction_llm_engine.py::test_pins_are_in_use_in_the_records_and_to_admission",)),
    Mutant("record-parked-not-counted", "kvlab/engine/records.py", "num_held - (num_blocks_held - parked), reserved",
           "num_held - num_blocks_held, reserved",
           ("tests/engine/test_occupancy.py::test_blocks_that_a_step_in_flight_keeps_busy_save_nothing",)),
    Mutant("record-evicted-cumulative", "kvlab/engine/records.py",
           "evicted, self._num_evicted = pool.num_evicted - self._num_evicted, pool.num_evicted", "evicted = pool.num_evicted",
           ("tests/engine/test_occupancy.py::test_evicted_blocks_are_those_of_the_step",)),
    Mutant("record-reason-order", "kvlab/engine/records.py", '("abort", "kv_capacity", "length", "stop")',
           '("stop", "length", "kv_capacity", "abort")',
           ("tests/engine/test_occupancy.py::test_a_request_whose_sequences_ended_in_several_ways_says_the_most_telling",)),
    # ---- kvlab/trace/summary.py
    Mutant("summary-itl-mean-of-means", "kvlab/trace/summary.py", 'gaps = [np.diff(times) for times in requests["token_times_s"]]',
           'gaps = [np.diff(times)[:1] for times in requests["token_times_s"]]', ("tests/test_trace_summary.py::test_figures",)),
    Mutant("summary-usage-unweighted", "kvlab/trace/summary.py", "weights=weights if weights.sum() > 0 else None", "weights=None",
           ("tests/test_trace_summary.py::test_figures",)),
    Mutant("summary-goal-strict", "kvlab/trace/summary.py", "good &= ~(done[name].to_numpy() * 1e3 > goal)",
           "good &= ~(done[name].to_numpy() * 1e3 >= goal)",
           ("tests/test_trace_summary.py::test_goodput_counts_finished_requests_that_meet_every_goal",)),
    Mutant("summary-goal-of-finished", "kvlab/trace/summary.py", "None if good is None else _over(good, len(requests))",
           "None if good is None else _over(good, len(done))",
           ("tests/test_trace_summary.py::test_goodput_counts_finished_requests_that_meet_every_goal",)),
    Mutant("summary-no-tpot-is-bad", "kvlab/trace/summary.py", "good &= ~(done[name].to_numpy() * 1e3 > goal)",
           "good &= done[name].to_numpy() * 1e3 <= goal",
           ("tests/test_trace_summary.py::test_goodput_counts_finished_requests_that_meet_every_goal",)),
    Mutant("summary-cut-off-from-requests", "kvlab/trace/summary.py", 'max(num_output, int(steps["num_output_tokens"].sum()))',
           "num_output", ("tests/test_trace_summary.py::test_output_of_a_run_that_was_cut_off_is_what_its_steps_made",)),
    # ---- kvlab/trace/frames.py
    Mutant("frames-step-overlap", "kvlab/trace/frames.py",
           'start = np.fmax(steps["now_s"].to_numpy(), before.to_numpy(dtype=np.float64))', 'start = steps["now_s"].to_numpy()',
           ("tests/test_trace_recorder.py::test_overlapping_steps_and_empty_pools_give_no_nonsense",)),
    Mutant("frames-part-border", "kvlab/trace/frames.py", "before.iloc[0] = previous_end_s", "pass",
           ("tests/test_trace_recorder.py::test_a_step_that_begins_before_the_one_in_the_part_before_it_ended",)),
    Mutant("frames-tpot-tokens", "kvlab/trace/frames.py", "np.divide(last - first, num_gaps,", "np.divide(last - first, num_gaps + 1,",
           ("tests/test_trace_recorder.py::test_request_rows_and_derived_columns",)),
    Mutant("frames-percentile", "kvlab/trace/frames.py", "below = int(fraction * (len(values) - 1))",
           "below = round(fraction * (len(values) - 1))", ("tests/test_trace_recorder.py::test_request_rows_and_derived_columns",)),
    # ---- kvlab/trace/recorder.py
    Mutant("recorder-part-overwritten", "kvlab/trace/recorder.py", "self._num_parts[table] += 1", "pass",
           ("tests/test_trace_recorder.py::test_a_folder_holds_the_same_frames_as_memory",)),
    Mutant("recorder-rows-kept", "kvlab/trace/recorder.py", "                self._num_parts[table] += 1\n                rows.clear()",
           "                self._num_parts[table] += 1",
           ("tests/test_trace_recorder.py::test_a_folder_holds_the_same_frames_as_memory",)),
    Mutant("recorder-record-ms-owed-twice", "kvlab/trace/recorder.py", "        self._owed_s = 0.0\n        rows.append",
           "        rows.append",
           ("tests/test_trace_recorder.py::test_the_time_of_recording_is_that_of_a_step_and_the_requests_since_the_last",)),
    # ---- kvlab/trace/store.py
    Mutant("store-parts-order", "kvlab/trace/store.py", "return sorted(found, key=lambda p: p.stem)", "return found",
           ("tests/test_trace_recorder.py::test_a_folder_holds_the_same_frames_as_memory",)),
    Mutant("store-not-atomic", "kvlab/trace/store.py", "            tmp.unlink()", "            pass",
           ("tests/test_trace_recorder.py::test_a_full_disk_in_mid_run_is_one_clear_error_and_loses_nothing_written",)),
    # ---- kvlab/trace/outcomes.py
    Mutant("outcomes-order", "kvlab/trace/outcomes.py", "if row[0] <= last:", "if row[0] < last:",
           ("tests/test_trace_recorder.py::test_outcomes_that_are_missing_or_damaged_are_a_users_error",)),
    Mutant("outcomes-first-positions", "kvlab/trace/outcomes.py", "outcome.execute_s, columns[0], columns[2]",
           "outcome.execute_s, columns[0], columns[1]", ("tests/test_trace_recorder.py::test_outcomes_and_plans_come_back_exactly",)),
]  # fmt: skip
