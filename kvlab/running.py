"""One run, in process: `kvlab.run(kvlab.compose("+policy=lru"))` serves a workload, writes a run folder and returns a `Run`."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from kvlab.assembly import Parts, check_early, engine_config, make_engine, no_swap_space, policy_objects, policy_set
from kvlab.building import build, describe
from kvlab.calibration import WORK_COLUMNS, describe_cost
from kvlab.config import SINCE, check_config, to_plain
from kvlab.effects import without_effect
from kvlab.engine import driver
from kvlab.engine.config import PolicySet
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.identifying import identity
from kvlab.model.loading import ModelSpec
from kvlab.model.tokenizer import dated
from kvlab.policies.base import BlockSizingPolicy
from kvlab.policies.registry import SEAMS as CONTRACTS
from kvlab.policies.registry import seam_of
from kvlab.progress import Progress
from kvlab.pruning import Hopeless
from kvlab.results import Run
from kvlab.shared import local_only
from kvlab.trace import RecordConfig, Recorder, RunFolder, summarize
from kvlab.trace.summary import REQUEST_COLUMNS, STEP_COLUMNS, Goals
from kvlab.types import KvlabError, Listener, UserError
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.shapes import first_shapes

_log = logging.getLogger("kvlab.run")


@dataclass
class Setup:
    """A checked configuration with everything that can be made before a model is loaded."""

    config: dict[str, Any]
    given: dict[str, Any]
    policies: PolicySet
    spec: ModelSpec
    workload: Workload

    @classmethod
    def of(cls, config: dict[str, Any], given: Mapping[str, Any]) -> Setup:
        """Check and build.

        Raises:
            UserError: a wrong key, value or class, or a combination that can't work.
        """
        check_config(config)
        objects = policy_objects(given)
        policies = policy_set(config, objects)
        check_early(config, policies)
        workload = build(config["workload"])
        if not isinstance(workload, Workload):
            raise UserError(f"workload = {config['workload']!r} is no kvlab.workload.base.Workload.")
        return cls(config, objects, policies, build(config["model"]), workload)


def run(
    config: Any,
    *,
    folder: str | Path | None = None,
    name: str = "",
    listeners: Sequence[Listener] = (),
    progress: bool = True,
    **policies: Any,
) -> Run:
    """Serve a workload to its end and return the run.

    Args:
        config: from `kvlab.compose(...)`, or a plain dict with all its keys (a run folder's config.yaml).
        folder: where to write; beside it with -2, -3 ... if it is taken; None: a new folder under runs/.
        name: what to call the run. listeners: further listeners of the engine, e.g. a live plot.
        progress: show a bar on terminals and in notebooks.
        policies: policies to use in place of configured ones, by seam: an object, a class, or a name: `eviction=MyPolicy()`.

    Raises:
        UserError: a wrong key, value, file or combination, or a workload of which no request can be served.
        KeyboardInterrupt: what was recorded is in the folder, with the status "interrupted".
    """
    plain = to_plain(config)
    if folder is not None:
        local_only(folder, "a run")
    try:
        setup = Setup.of(plain, policies)
    except UserError as error:
        if folder is not None:  # a sweep's point, or the command line: the folder says what was wrong
            out = RunFolder.create(folder)
            out.start(_yaml(plain), name=name)
            out.fail(error)
        raise
    out = RunFolder.create(folder if folder is not None else Path("runs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f"))
    with _logging_to(out), _torch_threads(plain["threads"]):
        recorder: Recorder | None = None
        try:
            out.start(_yaml(plain | _described(setup.given)), name=name)
            parts = build(plain["runner"], config=plain | _described(setup.given), spec=setup.spec)
            recorder = Recorder(out.path, RecordConfig(**plain["record"]), memory=parts.runner)
            _serve(setup, parts, out, [recorder, *listeners], progress, name)
            recorder.close()
            summary = _summary(recorder, plain["record"], Goals(**plain.get("goals", {})))
            if isinstance(parts.runner, SimulatedRunner):
                summary["step_cost"] = describe_cost(parts.runner.cost, recorder.steps(WORK_COLUMNS))
            if parts.backend is not None and parts.backend.paths:
                summary["kernel_paths"] = dict(sorted(parts.backend.paths.items()))
            _refuse_nothing_served(summary, recorder)
            out.finish(summary)
            counts = [f"{summary[f'num_{what}']} {what}" for what in ("requests", "steps") if summary[f"num_{what}"] is not None]
            _log.info("finished: %s", ", ".join(counts) or "nothing counted, as neither steps nor requests were recorded")
        except Hopeless as why:
            _log.info("pruned: %s", why)
            out.prune(why, _what_there_is(recorder, plain["record"]))
            raise
        except BaseException as error:
            _blame(error)
            _log.info("ended by %s: %s", type(error).__name__, error, exc_info=not isinstance(error, UserError))
            out.fail(error, _what_there_is(recorder, plain["record"]))
            raise
    done = Run.load(out.path, name or out.path.name)
    done.notes += [note for note in (*setup.workload.notes, *parts.notes) if note not in done.notes]
    return done


def _serve(setup: Setup, parts: Parts, out: RunFolder, listeners: list[Listener], progress: bool, name: str) -> None:
    """Make the engine and drive the workload through it. The folder's config gets the sizes that were left open."""
    sizes = engine_config(setup.config, setup.policies, parts)
    tokenizer = dated(parts.tokenizer, setup.config.get("chat_date", SINCE["chat_date"]))
    bos = None if tokenizer is None else tokenizer.bos_token_id
    special = sorted({*parts.eos_token_ids, *(() if bos is None else (bos,))})
    context = WorkloadContext(tokenizer, parts.shape.vocab_size, sizes.max_model_len, sizes.seed, tuple(special))
    setup.workload.start(context)
    sizing = setup.policies.block_sizing
    if type(sizing).foresee is not BlockSizingPolicy.foresee:
        sizing.foresee(first_shapes(setup.workload, context, setup.policies.prefix_cache.enabled))
        sizes = engine_config(setup.config, setup.policies, parts)
    chosen = list(sizing.explain())
    unable = (*no_swap_space(sizes, setup.policies), *without_effect(setup.config, setup.policies, setup.given))
    config = {**setup.config, "block_size": sizes.block_size, "num_blocks": sizes.num_blocks, "max_model_len": sizes.max_model_len,
              "dtype": parts.dtype}  # fmt: skip
    shown = _yaml(config | _described(setup.given))
    key = identity(config, parts.checksum, setup.given)
    backend = None if parts.backend is None else parts.backend.name
    out.start(shown, parts.device, backend, name=name, identity=key, notes=[*setup.workload.notes, *parts.notes, *unable, *chosen[:1]],
              **({"block_sizing": chosen} if chosen else {}))  # fmt: skip
    engine = make_engine(sizes, setup.policies, parts, listeners)
    _log.info("%s on %s: %d blocks of %d tokens, max_model_len %d", parts.dtype, parts.device, sizes.num_blocks, sizes.block_size,
              sizes.max_model_len)  # fmt: skip
    for note in setup.workload.notes:
        _log.info("workload: %s", note)
    for note in parts.notes:
        _log.info("cost model: %s", note)
    for line in (*unable, *chosen):
        _log.info("%s", line)
    parts.notes += (*unable, *chosen)  # for the table that is printed
    with Progress(setup.workload.num_requests, name or "run", "req", progress) as bar:

        def show(state: driver.Progress) -> None:
            bar.update(state.num_finished, f"{state.num_output_tokens} tokens, step {state.num_steps}", state.num_requests)

        try:
            driver.drive(engine, setup.workload, show)
        finally:
            engine.close()
            parts.runner.close()


def _described(given: Mapping[str, Any]) -> dict[str, Any]:
    """What config.yaml says of policies that came as objects: it names what ran, not what it took the place of."""
    return {seam: describe(policy) for seam, policy in given.items()}


def _refuse_nothing_served(summary: dict[str, Any], recorder: Recorder) -> None:
    """A run in which every request was refused is a user's error, not a result."""
    if summary["num_requests"] and summary["num_refused"] == summary["num_requests"]:
        details = recorder.requests(("detail",))["detail"]
        raise UserError(f"Every request of the workload was refused. The first: {details.iloc[0]}")


def _blame(error: BaseException) -> None:
    """Note on an exception which policy it was raised in, if any: the one that was called last."""
    if isinstance(error, KvlabError) or not isinstance(error, Exception):
        return  # says so itself; or it is Ctrl-C, which hits whatever runs just then
    if isinstance(error, MemoryError) and not str(error):  # which Python mostly leaves without a word
        error.add_note("the process got no more memory: give the run a smaller pool or less to record, or run fewer at once (jobs)")
    culprit = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, tuple(CONTRACTS.values())):
            culprit = f"raised in the {seam_of(type(owner))} policy {type(owner).__name__} ({frame.f_code.co_filename}, line {line})"
    if culprit is not None:
        error.add_note(culprit)


def _summary(recorder: Recorder, record: Mapping[str, bool], goals: Goals | None = None, cut_off: bool = False) -> dict[str, Any]:
    """Figures of what was recorded."""
    steps = recorder.steps(STEP_COLUMNS) if record.get("steps", True) else None
    return summarize(steps, recorder.requests(REQUEST_COLUMNS) if record.get("requests", True) else None, goals, cut_off)


def _what_there_is(recorder: Recorder | None, record: Mapping[str, bool]) -> dict[str, Any] | None:
    """Close a recorder whose run went wrong, and sum up what it has; None where that isn't possible."""
    if recorder is None:
        return None
    with suppress(Exception):
        recorder.close()
    with suppress(Exception):
        return _summary(recorder, record, cut_off=True)
    return None


def _yaml(config: Mapping[str, Any]) -> str:
    """YAML text; JSON, which is YAML too, where PyYAML is missing."""
    try:
        import yaml
    except ImportError:
        return json.dumps(config, indent=2) + "\n"
    return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


@contextmanager
def _logging_to(out: RunFolder) -> Iterator[None]:
    """kvlab's log messages go to the folder's run.log while the run goes."""
    logger = logging.getLogger("kvlab")
    handler, level = out.log_handler(), logger.level
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


@contextmanager
def _torch_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
