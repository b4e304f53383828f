"""What a runner produced in each step, kept so that a run can be replayed: the table `outcomes`, one row a step, numbers exact.

With a step's clock readings (`now_s`, `end_s`) and its time (`execute_s`) an outcome is all that a recorded runner needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.trace.store import iter_rows
from kvlab.types import Candidate, Outcome, Plan, RecordedStep, StepStats, TokenLogprobs, UserError


def outcome_row(plan: Plan, outcome: Outcome, stats: StepStats) -> tuple[Any, ...]:
    """One step in the order of `schema.OUTCOMES`. Rare parts are JSON text, whose floats (infinities too) come back exactly."""
    columns = list(zip(*plan.scheduled, strict=True)) or [(), (), ()]  # seq_id, first_position, num_new_tokens, ...
    rare = (json.dumps(part) if part else "" for part in (outcome.forks, outcome.candidates, outcome.logprobs))
    return (outcome.step, plan.now_s, stats.end_s, outcome.execute_s, columns[0], columns[2], tuple(outcome.tokens), *rare)


def recorded_step(row: tuple[Any, ...]) -> RecordedStep:
    """The step that `outcome_row` made, after a way through a file."""
    step, now_s, end_s, execute_s, seq_ids, num_new_tokens, tokens, *rare = row
    forks, candidates, logprobs = (json.loads(part) if part else {} for part in rare)
    outcome = Outcome(
        step,
        tuple(map(tuple, tokens)),
        {int(k): tuple(v) for k, v in forks.items()},  # JSON made text of the sequence ids
        {int(k): tuple(Candidate(*c) for c in v) for k, v in candidates.items()},
        {int(k): tuple(TokenLogprobs(p, tuple(ids), tuple(values)) for p, ids, values in v) for k, v in logprobs.items()},
        execute_s,
    )
    return RecordedStep(now_s, end_s, tuple(seq_ids), tuple(num_new_tokens), outcome)


def read_outcomes(folder: Path | str) -> Iterator[RecordedStep]:
    """The steps that a run recorded, in order, a thousand in memory at a time; those of a killed run as far as it came.

    Raises UserError when the run kept none, or a file of them is damaged.
    """
    if not Path(folder).is_dir():
        raise UserError(f"{folder} is not a folder. Give the folder of a run that was made with record.outcomes=true.")
    last = -1
    for row in iter_rows(Path(folder), "outcomes"):
        if row[0] <= last:
            raise UserError(f"{folder} holds the outcome of step {row[0]} after that of step {last}. Record the run again.")
        last = row[0]
        yield recorded_step(row)
    if last < 0:
        raise UserError(f"{folder} holds no outcomes to replay. Record the run again with record.outcomes=true.")
