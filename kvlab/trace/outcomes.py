"""What a runner produced in each step, kept so that a run can be replayed: `outcomes.jsonl`, one line a step, numbers exact.

With a step's clock readings (`now_s`, `end_s`) and its time (`execute_s`) an outcome is all that a recorded runner needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.types import Candidate, Outcome, Plan, StepStats, TokenLogprobs, UserError

OUTCOMES_FILE = "outcomes.jsonl"


class RecordedStep(NamedTuple):
    """One step of a recorded run.

    `now_s`, `end_s`: the engine's clock when the plan was made and after its commit. `seq_ids`, `num_new_tokens`: the plan's
    scheduled sequences, to notice a replay that decides otherwise.
    """

    now_s: float
    end_s: float
    seq_ids: tuple[int, ...]
    num_new_tokens: tuple[int, ...]
    outcome: Outcome


def outcome_line(plan: Plan, outcome: Outcome, stats: StepStats) -> str:
    """One step as one line of JSON. Floats are written with repr's digits, so they come back exactly; infinities too."""
    line: dict[str, Any] = {
        "step": outcome.step,
        "now_s": plan.now_s,
        "end_s": stats.end_s,
        "execute_s": outcome.execute_s,
        "seq_ids": [s.seq_id for s in plan.scheduled],
        "num_new_tokens": [s.num_new_tokens for s in plan.scheduled],
        "tokens": outcome.tokens,
    }
    for name in ("forks", "candidates", "logprobs"):  # whole-number keys become strings here; reading turns them back
        if value := getattr(outcome, name):
            line[name] = value
    return json.dumps(line, separators=(",", ":")) + "\n"


def parse_outcome(line: str) -> RecordedStep:
    """The step that `outcome_line` wrote. Raises ValueError or KeyError for a line that is not one."""
    d = json.loads(line)
    outcome = Outcome(
        step=d["step"],
        tokens=tuple(tuple(t) for t in d["tokens"]),
        forks={int(k): tuple(v) for k, v in d.get("forks", {}).items()},
        candidates={int(k): tuple(Candidate(*c) for c in v) for k, v in d.get("candidates", {}).items()},
        logprobs={
            int(k): tuple(TokenLogprobs(p, tuple(ids), tuple(values)) for p, ids, values in v)
            for k, v in d.get("logprobs", {}).items()
        },
        execute_s=d["execute_s"],
    )
    return RecordedStep(d["now_s"], d["end_s"], tuple(d["seq_ids"]), tuple(d["num_new_tokens"]), outcome)


def read_outcomes(path: Path) -> Iterator[RecordedStep]:
    """The steps in a run folder's `outcomes.jsonl` (or the file itself), in order, one in memory at a time.

    A run that was killed may end in half a line: it is left out. Damage before the last line, or no file, is a UserError.
    """
    path = Path(path)
    path = path / OUTCOMES_FILE if path.is_dir() else path
    if not path.exists():
        raise UserError(f"{path} does not exist: the run kept no outcomes. Record one with record.outcomes=true.")
    last = -1
    for number, value in read_lines(path, parse_outcome):
        if value.outcome.step <= last:
            raise UserError(f"{path}, line {number}: step {value.outcome.step} after step {last}. Record the run again.")
        last = value.outcome.step
        yield value


def read_lines(path: Path, parse: Any) -> Iterator[tuple[int, Any]]:
    """(line number from 1, parsed line) of a JSON-lines file whose last line may be cut off."""
    with open(path, encoding="utf-8", errors="replace") as file:
        line = file.readline()
        number = 1
        while line:
            following = file.readline()
            try:
                value = parse(line)
            except (ValueError, KeyError, TypeError) as error:
                if following:
                    raise UserError(f"{path}, line {number} is damaged ({error}). Record the run again.") from error
                return
            yield number, value
            line, number = following, number + 1
