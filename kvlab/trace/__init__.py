"""What is recorded, and how: schema, recorder, outcomes for replay, run folders, summaries."""

from kvlab.trace.outcomes import read_outcomes
from kvlab.trace.plans import read_plans
from kvlab.trace.recorder import RecordConfig, Recorder
from kvlab.trace.run_folder import RunFolder
from kvlab.trace.summary import summarize

__all__ = ["RecordConfig", "Recorder", "RunFolder", "read_outcomes", "read_plans", "summarize"]
