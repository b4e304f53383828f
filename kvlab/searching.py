"""Trials of a search: Optuna proposes (ask), a run is made in this process with the model kept loaded, Optuna hears of it (tell)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvlab.config import check_config
from kvlab.objectives import POOL, Objective, objective, pareto_front, unserved, value_of
from kvlab.progress import Progress
from kvlab.pruning import Hopeless, Pruner
from kvlab.results import Runs, load_runs
from kvlab.running import run
from kvlab.shared import local_only
from kvlab.sweep_attempt import give_back_memory, is_full_disk
from kvlab.sweep_folder import SweepFolder
from kvlab.sweep_points import Composer, Workloads
from kvlab.trace.store import write_json
from kvlab.types import UserError

DEFAULT_OBJECTIVES = ("output_token_throughput_per_s", "p99_ttft_ms", POOL)
STUDY, JOURNAL = "study.json", "optuna.journal"


class Range(NamedTuple):
    """Numbers from `low` to `high`, both included: whole ones if both are. `log`: searched on a logarithmic scale."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def read(cls, key: str, text: str) -> Range:
        """"0..0.2", "log:64..512". UserError: no such range."""
        body = text.removeprefix("log:")
        low, _, high = body.partition("..")
        try:
            ends = [int(end) if end.lstrip("-").isdecimal() else float(end) for end in (low, high)]
        except ValueError:
            raise UserError(f"{key} = {text!r} is no range: LOW..HIGH, e.g. 0..0.2, or log:64..512.") from None
        return cls(ends[0], ends[1], text != body).checked(key)

    def checked(self, key: str) -> Range:
        """Itself. UserError: empty, or a logarithm of what is not above 0."""
        if not self.low < self.high or (self.log and self.low <= 0):
            raise UserError(f"{key}: the range {self.low}..{self.high} is not allowed: LOW below HIGH, and above 0 on a logarithmic scale.")
        return self


@dataclass
class Found:
    """What a search came to. `runs`: all trials; `trials`: state and reason of each, as Optuna has it."""

    folder: Path
    objectives: list[Objective]
    runs: Runs
    trials: pd.DataFrame = field(repr=False)

    @property
    def front(self) -> pd.DataFrame:
        """Rows of `runs.frame` that no other trial beats in every objective."""
        return pareto_front(self.runs.frame, self.objectives)

    def front_table(self, keys: Sequence[str]) -> pd.DataFrame:
        """The front's run, the values of these keys, and its objectives."""
        params = self.trials.set_index(self.trials["trial"].astype(str))
        front = self.front
        table = {"run": front["run"], **{key: [params[key][name] for name in front["run"]] for key in keys}}
        return pd.DataFrame({**table, **{o.figure: front[o.figure] for o in self.objectives}})

    def commonest_reason(self) -> str:
        """Why most of the trials that didn't finish didn't, and how many those are; nothing where all did."""
        reasons = self.trials.loc[self.trials["reason"].astype(bool), "reason"].value_counts()
        return "" if reasons.empty else f"{reasons.iloc[0]} of {len(self.trials)} trials: {reasons.index[0]}"

    def counts(self) -> str:
        """How many trials finished, were pruned, failed."""
        return ", ".join(f"{number} {state}" for state, number in self.trials["state"].value_counts().sort_index().items())


def search(
    space: Mapping[str, Any], *overrides: str, trials: int = 30, objectives: Sequence[str] = DEFAULT_OBJECTIVES,
    folder: str | Path | None = None, seed: int = 0, prune: bool = True, progress: bool = True,
) -> Found:  # fmt: skip
    """Look for the configurations that no other beats: `kvlab.search({"eviction": ["lru", "sieve"], "num_blocks": (64, 512)})`.

    Optuna's multi-objective TPE sampler proposes; a trial that refuses requests, or whose combination can't work, is pruned with its
    reason; one that a finished trial beats in every objective whatever it still does is ended early (`kvlab.pruning`), and its run's
    status is "pruned".

    Args:
        space: key -> list of choices, or (low, high) or (low, high, "log"). overrides: what all trials share.
        trials: in all, finished or pruned; a study that has some already goes on to this number.
        objectives: figures of the summary, or "kv_pool_tokens" (memory: slots of the KV pool); "max:"/"min:" in front turns one round.
        folder: the study's; None: a new one under runs/. With a study in it: goes on, if space and objectives are the same.
        seed: the sampler's. prune: end hopeless trials early. progress: a bar over the trials.

    Raises:
        UserError: unknown key, value or objective, another study in the folder, Optuna missing; a full disk, later.
        KeyboardInterrupt: trials until then are kept; the same call goes on.
    """
    optuna = _optuna()
    if folder is not None:
        local_only(folder, "a study")
    wanted = [objective(text) for text in objectives]
    if not wanted or len({o.figure for o in wanted}) < len(wanted):
        raise UserError(f"objectives = {list(objectives)} is not allowed: at least one, each once.")
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise UserError(f"trials = {trials!r} is not allowed: a positive integer.")
    axes = {key: _axis(key, values) for key, values in space.items()}
    if not axes:
        raise UserError("The space is empty: name at least one key to search over, e.g. num_blocks=64..512.")
    composer, workloads = Composer(overrides), Workloads()
    for point in _corners(axes):  # a wrong name anywhere ends the search before it starts
        config = composer.config(point)
        check_config(config)
        workloads.check(config["workload"])
    root = Path(folder) if folder is not None else Path("runs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f-search")
    with SweepFolder(root).claim("search") as ours:
        if not ours:
            raise UserError(f"{SweepFolder(root).holder('search')} is searching in {root}. Wait for it, or choose another folder.")
        study = _open(optuna, root, axes, wanted, seed, overrides)
        _loop(optuna, study, _Trials(root, composer, axes, wanted, prune), trials, progress)
    return Found(root, wanted, load_runs([p for p in sorted(root.iterdir()) if p.name.isdecimal()]), _trial_frame(study))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UserError("kvlab.search needs Optuna, which is not installed: pip install 'kvlab[search]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _axis(key: str, values: Any) -> list[Any] | Range:
    if isinstance(values, Range):
        return values
    if isinstance(values, list) and values and all(isinstance(v, (str, int, float, bool)) or v is None for v in values):
        return values
    if isinstance(values, tuple) and 2 <= len(values) <= 3 and all(isinstance(v, (int, float)) for v in values[:2]):
        return Range(values[0], values[1], values[2:] == ("log",)).checked(key)
    raise UserError(f"space[{key!r}] = {values!r} is not allowed: a list of names or numbers, (low, high) or (low, high, 'log').")


def _corners(axes: Mapping[str, list[Any] | Range]) -> list[dict[str, Any]]:
    """Points that hold every choice and every end of a range once."""
    ends = {key: [axis.low, axis.high] if isinstance(axis, Range) else axis for key, axis in axes.items()}
    return [{key: values[min(i, len(values) - 1)] for key, values in ends.items()} for i in range(max(map(len, ends.values())))]


def _open(optuna: Any, root: Path, axes: Mapping[str, Any], wanted: Sequence[Objective], seed: int, overrides: Sequence[str]) -> Any:
    """The study of a folder. UserError: it holds another one, or the runs of something else."""
    described = json.loads(json.dumps({"space": axes, "objectives": list(map(str, wanted)), "overrides": list(overrides)}))
    path = root / STUDY
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        for name, value in described.items():
            if known.get(name) != value:
                raise UserError(f"{root} holds another study: its {name} are {known.get(name)}, not {value}. Choose another folder.")
    elif root.is_dir() and any(not p.name.startswith(".") for p in root.iterdir()):
        raise UserError(f"{root} holds something else than a study. Choose another folder.")
    else:
        write_json(path, described)
    backend = optuna.storages.journal.JournalFileBackend(str(root / JOURNAL))
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=False)
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend), study_name="kvlab", load_if_exists=True, sampler=sampler,
                                directions=["maximize" if o.maximize else "minimize" for o in wanted])  # fmt: skip
    running = optuna.trial.TrialState.RUNNING
    for trial in study.get_trials(deepcopy=False, states=(running,)):  # nobody else searches here: these were cut off
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    if len(study.trials):  # a sampler that starts anew would propose the first trials again
        sampler.reseed_rng()
    return study


def _loop(optuna: Any, study: Any, work: _Trials, number: int, progress: bool) -> None:
    states = optuna.trial.TrialState
    counted = (states.COMPLETE, states.PRUNED)
    attempts = 0
    with Progress(number, "search", "trial", progress) as bar:
        while (done := len(study.get_trials(deepcopy=False, states=counted))) < number:
            if attempts > 2 * number:
                raise UserError(f"Most trials fail; the last: {study.trials[-1].user_attrs.get('reason')}. Folder: {work.root}")
            attempts += 1
            trial = study.ask()
            values, state, reason = work.one(trial)
            if reason:
                trial.set_user_attr("reason", reason)
            study.tell(trial, values, state=None if values is not None else getattr(states, state))
            bar.update(done + 1, reason or "finished")


class _Trials:
    """Makes the runs of a study."""

    def __init__(self, root: Path, composer: Composer, axes: Mapping[str, list[Any] | Range], wanted: list[Objective], prune: bool) -> None:
        self.root, self._composer, self._axes, self._wanted, self._prune = root, composer, axes, wanted, prune
        self._finished: list[tuple[str, list[float]]] = []
        self._most_tokens, self._num_requests = 0.0, 0
        for run_ in load_runs(root).finished():
            if run_.summary.get("num_requests") and not unserved(run_.summary):
                self._keep(run_.name, run_.config, run_.summary)

    def _keep(self, name: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[float | None]:
        values = [value_of(o.figure, config, summary) for o in self._wanted]
        self._finished.append((name, [o.loss(v) for o, v in zip(self._wanted, values, strict=True)]))
        self._most_tokens = max(self._most_tokens, summary["num_output_tokens"] or 0)
        self._num_requests = summary["num_requests"]
        return values

    def one(self, trial: Any) -> tuple[list[float] | None, str, str]:
        """(values, "COMPLETE"), or (None, "PRUNED" or "FAIL", why). UserError: the disk is full."""
        chosen = {key: _suggest(trial, key, axis) for key, axis in self._axes.items()}
        label = ", ".join(f"{k}={v}" for k, v in chosen.items())
        try:
            config = self._composer.config(chosen)
            done = run(config, folder=self.root / str(trial.number), name=label, progress=False, listeners=self._pruners(config))
        except Hopeless as error:
            return None, "PRUNED", str(error)
        except UserError as error:
            if is_full_disk(error):
                raise
            return None, "PRUNED", str(error)
        except Exception as error:
            return None, "FAIL", f"{type(error).__name__}: {error}"
        finally:
            give_back_memory()
        if why := unserved(done.summary):
            return None, "PRUNED", why
        values = self._keep(str(trial.number), done.config, done.summary)
        if any(v is None or v != v for v in values):
            undefined = [str(o) for o, v in zip(self._wanted, values, strict=True) if v is None or v != v]
            return None, "PRUNED", f"{', '.join(undefined)}: not defined in this run"
        return [float(v) for v in values if v is not None], "COMPLETE", ""

    def _pruners(self, config: Mapping[str, Any]) -> list[Pruner]:
        """Nothing to compare with at first; a workload whose size may differ between trials gives no bound."""
        if not self._prune or not self._finished or any(key.split(".")[0] == "workload" for key in self._axes):
            return []
        blocks = config["num_blocks"] or (config["kv_cache_tokens"] or 0) // config["block_size"]
        return [Pruner(self._wanted, self._finished, self._num_requests, self._most_tokens, blocks * config["block_size"])]


def _suggest(trial: Any, key: str, axis: list[Any] | Range) -> Any:
    if isinstance(axis, list):
        return trial.suggest_categorical(key, axis)
    if isinstance(axis.low, int) and isinstance(axis.high, int):
        return trial.suggest_int(key, axis.low, axis.high, log=axis.log)
    return trial.suggest_float(key, axis.low, axis.high, log=axis.log)


def _trial_frame(study: Any) -> pd.DataFrame:
    rows = [
        {"trial": t.number, "state": {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}.get(t.state.name, "running"),
         "reason": t.user_attrs.get("reason", ""), **t.params}
        for t in study.get_trials(deepcopy=False)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(dict.fromkeys(["trial", "state", "reason", *(k for r in rows for k in r)])))
