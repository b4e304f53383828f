"""Reading and writing Hugging Face folders: config.json, safetensors (one file or shards) and the tokenizer.

Everything that can be checked without reading weights is checked first: names, shapes and dtypes stand in the files' headers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvlab.model.config import LlamaConfig, token_id_tuple
from kvlab.model.llama import Llama, tensor_shapes
from kvlab.model.loading import DTYPES, LoadedModel
from kvlab.model.parallel import Shard, sharded
from kvlab.model.tokenizer import HFTokenizer, Tokenizer
from kvlab.types import UserError, refuse_lfs_pointer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


def load_folder(folder: Path, name: str, dtype: torch.dtype | None, device: torch.device, shard: Shard | None = None) -> LoadedModel:
    """Load a Llama from a Hugging Face folder.

    Args:
        shard: load this rank's part; only that goes to the device.
        dtype: None takes float32 on a CPU, elsewhere the dtype the weights were saved in.

    Raises:
        UserError: no config.json, another architecture, no weights, a broken file, a tensor that is missing, unknown or of another
            shape; the message names it. Nothing was loaded then.
    """
    config = read_config(folder)
    stored = DTYPES.get(config.stored_dtype, torch.float32)
    wanted = dtype or (torch.float32 if device.type == "cpu" else stored)
    tokenizer, eos_token_ids = read_text(folder)
    with ExitStack() as stack:
        weights = Weights(folder, stack)
        weights.check_num_layers(config.num_layers)
        config = weights.resolve_tying(config, wanted)
        weights.check(tensor_shapes(config), config.tie_word_embeddings)
        checksum = weights.checksum()
        get = weights.get if shard is None else sharded(config, weights.get, shard)  # cut on the CPU, where the file is mapped
        model = Llama(config, lambda tensor: get(tensor).to(dtype=wanted, device=device), shard)
    return LoadedModel(model, config, tokenizer, name, checksum, eos_token_ids)


def read_text(folder: Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """The tokenizer of a folder (None without tokenizer.json) and the ids that end a text, without looking at weights."""
    tokenizer: Tokenizer | None = HFTokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    return tokenizer, _eos_token_ids(folder, read_config(folder), tokenizer)


def save_folder(folder: Path, config: LlamaConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors so that this module and transformers can read them. OSError: there is no room or right to."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE, metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"{folder / SINGLE} can't be written ({error})") from error
    shutil.copymode(folder / "config.json", folder / SINGLE)  # safetensors makes it readable by its owner only


def read_config(folder: Path) -> LlamaConfig:
    """The checked config of a folder; UserError if there is none or it can't be read."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder} has no config.json: it is no Hugging Face model folder. Pass the folder that holds config.json.")
    return LlamaConfig.from_hf(_read_json(file), str(file))


def _read_json(file: Path) -> dict[str, Any]:
    refuse_lfs_pointer(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} can't be read as JSON: {error}. Download or copy the file again.") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def _eos_token_ids(folder: Path, config: LlamaConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """What ends a text. generation_config.json is the author's word on it (Llama 3 names several ids there only)."""
    file = folder / "generation_config.json"
    named = token_id_tuple(_read_json(file).get("eos_token_id"), str(file)) if file.is_file() else ()
    found = (named or config.eos_token_ids) + (tokenizer.eos_token_ids if tokenizer is not None else ())
    return tuple(dict.fromkeys(found))


class Weights:
    """The safetensors files of a folder, opened (memory-mapped) but not read.

    Args:
        stack: closes the files.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.files = _weight_files(folder)
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        self._stored_name: dict[str, str] = {}
        for path in self.files:
            refuse_lfs_pointer(path)
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is broken ({error}). Download or copy the file again.") from None
            for name in names:
                if name in self._file_of:
                    raise UserError(f"{path} and {self._path_of[name].name} both hold tensor {name!r}, so that it is not said which counts."
                                    " Download or copy the folder again.")  # fmt: skip
                self._file_of[name], self._path_of[name] = file, path
        is_indexed = self.files[0].name != SINGLE and (folder / INDEX).is_file()
        for name, file_name in _weight_map(folder).items() if is_indexed else ():
            if self._path_of.get(name) != folder / file_name:
                raise UserError(f"{folder / INDEX} says that {file_name} holds tensor {name!r}, but it does not: the index belongs to other"
                                " files. Download or copy the folder again.")  # fmt: skip

    def check_num_layers(self, num_layers: int) -> None:
        """UserError for more layers than there are tensors, said before a name is made for each."""
        if num_layers > len(self._file_of):
            raise UserError(f"{self.folder}: config.json asks for {num_layers} layers (num_hidden_layers), but {_names(self.files)} hold"
                            f"{'s' if len(self.files) == 1 else ''} {len(self._file_of)} tensors. Copy the folder again.")  # fmt: skip

    def resolve_tying(self, config: LlamaConfig, dtype: torch.dtype) -> LlamaConfig:
        """The config as the stored embeddings say it, decided as transformers 5 does where both disagree.

        tie_word_embeddings with both tensors stored: tied if they are equal (as `dtype`), else each counts. With lm_head.weight alone: it
        is the embedding as well. Untied with one of them missing: refused by `check`.
        """
        has_embedding, has_head = EMBEDDING in self._file_of, HEAD in self._file_of
        if not config.tie_word_embeddings or not has_head:
            return config
        if not has_embedding:
            self._file_of[EMBEDDING], self._path_of[EMBEDDING] = self._file_of[HEAD], self._path_of[HEAD]
            self._stored_name[EMBEDDING] = HEAD
            return config
        shape = (config.vocab_size, config.hidden_size)
        for name in (EMBEDDING, HEAD):
            self._check_tensor(name, shape)
        is_equal = torch.equal(self.get(EMBEDDING).to(dtype), self.get(HEAD).to(dtype))
        return config if is_equal else replace(config, tie_word_embeddings=False)

    def check(self, shapes: Mapping[str, tuple[int, ...]], is_tied: bool) -> None:
        """Compare names, shapes and dtypes with what the config asks for; UserError at the first difference."""
        missing = [name for name in shapes if name not in self._file_of]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"{self.folder}: tensor {missing[0]!r}{more} is missing from {_names(self.files)}, but config.json asks for"
                            " it. Download or copy the folder again.")  # fmt: skip
        unknown = sorted(name for name in self._file_of if name not in shapes and not _may_be_ignored(name, is_tied))
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UserError(f"{self._path_of[unknown[0]]} holds tensor {unknown[0]!r}{more}, which the Llama of config.json has no place"
                            " for: ignoring it could change results. Check config.json (number of layers, biases).")  # fmt: skip
        for name, shape in shapes.items():
            self._check_tensor(name, shape)

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._file_of[name].get_slice(self._stored_name.get(name, name))
        if tuple(stored.get_shape()) != shape:
            raise UserError(f"{self._path_of[name]}: tensor {name!r} has shape {list(stored.get_shape())}, but config.json asks for"
                            f" {list(shape)}.")  # fmt: skip
        if stored.get_dtype() not in FLOAT_TYPES:
            raise UserError(f"{self._path_of[name]}: tensor {name!r} is stored as {stored.get_dtype()}. Supported:"
                            f" {', '.join(FLOAT_TYPES)} (no quantised weights).")  # fmt: skip

    def get(self, name: str) -> torch.Tensor:
        """A tensor as stored, on the CPU."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(self._stored_name.get(name, name))
        return tensor

    def checksum(self) -> str:
        """sha256 over config.json, the files' headers, and the first, middle and last 4 KiB of every tensor.

        Any training step, merge or edit changes every tensor it touches nearly everywhere, so samples tell models apart; hashing
        all of a large model would take minutes.
        """
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path in self.files:
            with path.open("rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
                header = file.read(header_size)
                digest.update(header)
                for name, entry in sorted(json.loads(header).items()):
                    if name != "__metadata__":
                        start, end = entry["data_offsets"]
                        for offset in (start, max(start, (start + end) // 2 - 2048), max(start, end - 4096)):
                            file.seek(8 + header_size + offset)
                            digest.update(file.read(min(4096, end - offset)))
        return digest.hexdigest()


def _may_be_ignored(name: str, is_tied: bool) -> bool:
    """Old checkpoints hold the rotary frequencies, and some with tied embeddings an equal copy of them as lm_head."""
    return name.endswith("rotary_emb.inv_freq") or (is_tied and name == HEAD)


def _names(files: list[Path]) -> str:
    return files[0].name if len(files) == 1 else f"{len(files)} safetensors files"


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file of the index; UserError for an index that says nothing of the kind."""
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{folder / INDEX} has no weight_map. Download or copy the file again.")
    return weight_map


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files to read, chosen as transformers does: the single one, else those of the index."""
    adapters = [file.name for file in folder.glob("adapter_*") if file.suffix in (".json", ".safetensors", ".bin")]
    if adapters:
        raise UserError(f"{folder} holds an adapter beside the model ({min(adapters)}), which would not be applied: merge it into the"
                        " weights (peft's merge_and_unload and save_pretrained), or move its files away.")  # fmt: skip
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        files = [folder / name for name in sorted(set(_weight_map(folder).values()))]
        for file in files:
            if not file.is_file():
                raise UserError(f"{file} is missing, but {INDEX} names it. Download or copy the folder again.")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise UserError(f"{folder} has {len(files)} safetensors files, but no {INDEX} that says what is in them.")
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    hint = f" It has {others[0]}: save the model as safetensors first (transformers' save_pretrained)." if others else ""
    raise UserError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}.{hint}")
