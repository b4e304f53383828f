"""The main door: `python -m kvlab.experiment +policy=lru`, and sweeps with `-m +policy=lru,fifo block_size=8,16,32`.

Exit codes: 0 every run ended well; 1 a run failed, or refused some requests that can never fit; 2 a user's error: a wrong key, name,
value or file, a combination that can't work, a pool that fits no request; 130 interrupted (Ctrl-C), 143 ended by SIGTERM. A sweep's is
1 if a run failed by itself or refused requests, else 2 if one met a user's error; 2 too if its folder holds another sweep, or one of
other code or configuration, or if the disk is full.
Each run writes its own folder; one that fails in a sweep doesn't stop the others, and the sweep ends with a table of all of them.
`resume=true`, `on_error=stop`, `repeats=5` and `jobs=2` are settings of a sweep (`kvlab.sweep_command`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvlab.composition import as_user_error, check_overrides, compose_hydra
from kvlab.doors import exit_code
from kvlab.interrupts import exit_code as interrupt_code
from kvlab.interrupts import interrupted_by, say, unwinding
from kvlab.results import Run, Runs, load_runs
from kvlab.shared import local_only, named
from kvlab.sweep_command import SweepCommand, split_settings, sweep_command
from kvlab.sweep_folder import MANIFEST
from kvlab.trace.store import disk_error
from kvlab.types import UserError

OK, FAILED, USER_ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
KEPT = "What was recorded until now is in the run's folder."
RESUME = "To go on: the same command with resume=true, and this folder as hydra.sweep.dir."


class _Process:
    """What this process's command came to: single runs leave their exit code here, a sweep its folder."""

    exit_code = OK
    sweep_dir: Path | None = None


class SweepFolder(Callback):
    """Hydra callback that notes a sweep's folder, in the process that started the sweep."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the first job."""
        _Process.sweep_dir = Path(config.hydra.sweep.dir).absolute()


@hydra.main(version_base=None, config_path="pkg://kvlab.conf", config_name="config")
def _job(config: DictConfig) -> None:
    """One run. Its folder holds what became of it; nothing but an interruption leaves this function as an exception."""
    from kvlab.running import run
    from kvlab.tables import run_table

    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    single = settings.mode != RunMode.MULTIRUN
    try:
        with unwinding():
            done = run(config, folder=folder, name=", ".join(settings.overrides.task))
    except UserError as error:
        _Process.exit_code = USER_ERROR
        _say(f"kvlab: {error}", f"Folder: {_shown(folder)}" if not single else "")
    except Exception as error:  # the folder's status.json and run.log hold the traceback
        if interrupted_by():
            raise KeyboardInterrupt from error
        _Process.exit_code = FAILED
        what = "; ".join([f"{type(error).__name__}: {error}".removesuffix(": "), *getattr(error, "__notes__", ())])
        _say(f"kvlab: the run failed with {what}", f"Traceback: {_shown(folder / 'status.json')}")
    else:
        if single:
            print(run_table(done))
            print(f"\nFolder: {_shown(done.folder or folder)}")
            _refused(done)


def _refused(done: Run) -> None:
    """Requests that could never fit don't stop the others, but the command has not done all it was asked for."""
    if done.summary.get("num_refused"):
        _Process.exit_code = FAILED
        requests = done.requests(("finish_reason", "detail"))
        first = requests[requests["finish_reason"] == "refused"].iloc[0]
        _say(f"kvlab: {done.summary['num_refused']} of {len(requests)} requests were refused. {first['detail']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _overrides_together(list(sys.argv[1:] if argv is None else argv))
    _Process.exit_code, _Process.sweep_dir = OK, None
    refused = False
    try:
        command, arguments = _sweep_of(arguments)
        with _hydra_environment(arguments):
            if command is None:
                _job()
            else:
                _Process.sweep_dir = command.root
                with unwinding():
                    command.run()
        code = _Process.exit_code
    except (UserError, HydraException, OmegaConfBaseException) as error:
        refused = True
        _say(f"kvlab: {error if isinstance(error, UserError) else as_user_error(error)}")
        code = USER_ERROR
    except OSError as error:  # Hydra makes the run's folder before the run, whose own errors never come this far
        if isinstance(error, BrokenPipeError):
            raise
        _say(f"kvlab: {disk_error(Path(str(error.filename or 'the run folder')), error)}")
        code = USER_ERROR
    except KeyboardInterrupt:
        resumable = _Process.sweep_dir is not None and (_Process.sweep_dir / MANIFEST).exists()
        say(f"kvlab: interrupted. {RESUME if resumable else KEPT}")
        code = interrupt_code()
    except SystemExit as end:  # --help, --cfg and errors of the argument parser
        code = end.code if isinstance(end.code, int) else FAILED
    return _end_of_sweep(code, refused) if _Process.sweep_dir is not None else code


def _overrides_together(arguments: list[str]) -> list[str]:
    """The command line with its overrides in a row: Hydra's parser gives up on those that follow an option that follows another."""
    try:
        parsed, left = get_args_parser().parse_known_args(arguments)
    except SystemExit:  # said again, where it is caught, by the parser's next turn
        return arguments
    if not left or any(word.startswith("-") for word in left):
        return arguments
    options = list(arguments)
    for word in [*parsed.overrides, *left]:
        options.remove(word)
    return [*parsed.overrides, *left, *options]


def _sweep_of(arguments: list[str]) -> tuple[SweepCommand | None, list[str]]:
    """(the sweep that is asked for, its folder opened, or None; arguments for Hydra).

    Looks at the overrides before Hydra does: a better message, and a sweep that can't end in a typing error half-way.
    """
    args = get_args_parser().parse_args(arguments)
    if args.help or args.hydra_help or args.shell_completion:
        return None, arguments
    settings, overrides = split_settings(args.overrides)
    multirun = args.multirun or "hydra.mode=MULTIRUN" in overrides
    if settings and not multirun:
        raise UserError(f"{', '.join(settings)}: settings of a sweep, which this is not. Add -m, or leave them out.")
    searched = [f"hydra.searchpath=[file://{Path(args.config_dir).absolute()}]"] if args.config_dir else []
    check_overrides([*overrides, *searched], multirun)
    for word in overrides:
        key, _, text = word.partition("=")
        if key in ("hydra.run.dir", "hydra.sweep.dir"):
            value = text.strip("'\"")
            if "${" in value:  # of the environment, perhaps
                value = str(OmegaConf.select(compose_hydra([word]), key.removeprefix("hydra.")))
            (local_only if key == "hydra.run.dir" else named)(value, "a run" if key == "hydra.run.dir" else "a sweep")
    rest = [word for word in arguments if word not in args.overrides]
    if not multirun or args.cfg or args.info or args.config_name or args.config_path:
        if settings:
            arguments = [*overrides, *rest]
        return None, arguments
    return sweep_command([*overrides, *searched], settings), arguments


@contextmanager
def _hydra_environment(arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads sys.argv; HYDRA_FULL_ERROR makes it raise errors instead of printing them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["kvlab.experiment", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _end_of_sweep(code: int, refused: bool) -> int:
    """Print the table of all runs in the sweep's folder; the exit code is that of the worst one, unless the sweep was `refused`."""
    from kvlab.tables import sweep_table

    folder = _Process.sweep_dir
    if folder is None or not folder.is_dir():
        return code
    runs = load_runs(folder)
    if refused and all(run.state in ("empty", "foreign") for run in runs):
        return code
    begun = [run for run in runs if run.folder is None or run.folder.resolve() != folder.resolve()]  # a sweep's own folder is no run
    print(sweep_table(runs)[0] if begun else "No run had begun.")
    print(f"\nFolder: {_shown(folder)}")
    return code if refused or code in (INTERRUPTED, TERMINATED) else _code_of(runs) or code


def _code_of(runs: Runs) -> int:
    """What a sweep's runs came to, read from their folders: launchers may have run them in other processes."""
    failed = [run for run in runs if run.state not in ("finished", "pruned")]
    kinds: list[type] = [UserError, *UserError.__subclasses__()]
    names = {kind.__name__ for kind in kinds}
    by_user = [run for run in failed if (run.status.get("error") or {}).get("type") in names]
    if len(by_user) < len(failed) or any(run.summary.get("num_refused") for run in runs if run.state == "finished"):
        return FAILED
    return USER_ERROR if by_user else OK


def _say(*lines: str) -> None:
    print(*[line for line in lines if line], sep="\n", file=sys.stderr, flush=True)


def _shown(path: Path) -> str:
    """A path as a user would type it."""
    try:
        return str(Path(path).absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    # The functions of the imported module, not of __main__: launchers that start other processes can pickle them.
    from kvlab.experiment import main as imported_main

    raise SystemExit(exit_code(imported_main))
