"""Where a user's files lie: `~` in a path, and the folder of what kvlab fetches and converts."""

from __future__ import annotations

import os
from pathlib import Path

from kvlab.types.errors import UserError


def expanded(path: str | Path) -> Path:
    """A path whose `~` or `~user` is the home of that user. UserError: there is none (containers with a user of no name)."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{str(path)!r} begins in a home folder that is not known here. Write the whole path, or set HOME.") from None


def cache_folder() -> Path:
    """Where models and traces are kept: $KVLAB_CACHE, else $XDG_CACHE_HOME/kvlab, else ~/.cache/kvlab.

    Raises:
        UserError: none of the variables is set, and the user has no home.
    """
    if own := os.environ.get("KVLAB_CACHE"):
        return expanded(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvlab"
    try:
        return Path.home() / ".cache" / "kvlab"
    except RuntimeError:
        raise UserError("This user has no home folder to keep models and traces in. Name a folder that can be written: "
                        "KVLAB_CACHE=FOLDER in the environment.") from None  # fmt: skip
