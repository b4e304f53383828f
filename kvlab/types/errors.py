"""Errors that users see. A message says what was wrong, what is allowed and what to do, in one or two lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class KvlabError(Exception):
    """Base of all errors raised on purpose."""


class UserError(KvlabError, ValueError):
    """A wrong value, name or file: the user can mend it. Raised before work starts wherever that is possible."""


class RequestTooLong(UserError):
    """A request that can never fit in the KV pool; the message holds the blocks needed, those there are and what would fit."""


class MissingOracle(UserError):
    """A policy needs to know the true output length of a request, and the run's workload does not: the run can't go on."""


class IllegalDecision(KvlabError, RuntimeError):
    """A policy decided something the engine cannot allow. The message names seam and policy, the decision and what is legal."""

    def __init__(self, seam: str, policy: object, decision: str, allowed: str) -> None:
        self.seam = seam
        self.policy = type(policy).__name__
        super().__init__(f"{seam} policy {self.policy} made an illegal decision: {decision}. Allowed: {allowed}.")


class ChangedView(KvlabError, RuntimeError):
    """A policy or a listener wrote to what it was given to look at; figures made with it would be wrong."""

    def __init__(self, what: str, of: str, there: object, here: object) -> None:
        super().__init__(f"{what} of {of} was changed from {there!r} to {here!r} by a policy or a listener: what they are given is to be "
                         "read only. kvlab.testing.check_policy(YourPolicy) finds which.")  # fmt: skip


def unknown_name(kind: str, name: str, valid: Iterable[str], seam: str = "") -> UserError:
    """A UserError for a name that does not exist, with the nearest match and the whole list.

    Args:
        seam: the Hydra group whose policies `valid` are ("eviction policy" needs none said): a name like a class's is taken for a class of
            the user's own, and how to give one is said.
    """
    names = sorted(valid)
    seam = seam or (kind.removesuffix(" policy") if kind.endswith(" policy") else "")
    is_class = bool(seam) and name[:1].isupper() and name.isidentifier()
    near = difflib.get_close_matches(name.lower() if is_class else name, names, n=1, cutoff=0.75 if is_class else 0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if is_class or (seam and not near):
        key, own = seam.replace("/", "."), name if is_class else "NAME"
        hint += (f" A class of your own is given by {key}._target_=MODULE.{own} on the command line (MODULE.py in the working folder or on "
                 "PYTHONPATH), and as an object in Python.")  # fmt: skip
    return UserError(f"Unknown {kind} {name!r}.{hint} Valid: {', '.join(names)}.")


def refuse_lfs_pointer(file: Path) -> None:
    """Raise UserError for a file that git-lfs left as a pointer to its content. A file that can't be read is left to its reader."""
    try:
        with file.open("rb") as stream:
            begin = stream.read(len(_LFS))
    except OSError:
        return
    if begin == _LFS:
        raise UserError(f"{file} is a Git LFS pointer: the repository was cloned without its large files. Run `git lfs pull` there, or "
                        "download the file itself.")  # fmt: skip


_LFS = b"version https://git-lfs.github.com/spec/"
