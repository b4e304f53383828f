"""`load_model(spec, dtype, device)`: from a spec (what to load) to a `LoadedModel` (the model and all that belongs to it)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from kvlab.kernels.device_errors import is_out_of_memory
from kvlab.model.config import LlamaConfig
from kvlab.model.llama import Llama, tensor_shapes
from kvlab.model.parallel import Shard
from kvlab.model.tokenizer import Tokenizer
from kvlab.types import UserError, unknown_name

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
          "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # fmt: skip


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: weights on their device, of their dtype (`model.dtype`, `model.device`); one rank's, where ranks share a model. `config` is
            the whole model's.
        tokenizer: None where there is none (dummy weights, a folder without tokenizer.json): token ids only.
        name: short name for tables, e.g. "smollm2". checksum: hex digest that changes when a weight or the config does.
        eos_token_ids: ids that end a text, of generation_config.json, config.json and the tokenizer.
    """

    model: Llama
    config: LlamaConfig
    tokenizer: Tokenizer | None
    name: str
    checksum: str
    eos_token_ids: tuple[int, ...]


class ModelSpec(Protocol):
    """Something that can be loaded; the functions in kvlab.model.specs make them. Cheap to build, compare and print."""

    def load(self, dtype: torch.dtype | None, device: torch.device, shard: Shard | None = None) -> LoadedModel:
        """Load it. `dtype` None: the dtype it was stored in, or float32 on a CPU. `shard`: one rank's part (asked for with
        tensor_parallel_size only).

        Raises:
            UserError: it can't be loaded; the message names the file and what to do.
        """

    def shape(self) -> LlamaConfig:
        """Its sizes, without loading weights (for simulated runs)."""

    def text(self) -> tuple[Tokenizer | None, tuple[int, ...]]:
        """Its tokenizer and the ids that end a text, without loading weights (for replaying recorded runs)."""


def resolve_dtype(name: str | torch.dtype) -> torch.dtype | None:
    """A dtype's name ("auto": None) as torch's dtype; UserError for another name."""
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return None
    if name not in DTYPES:
        raise unknown_name("dtype", name, ["auto", *DTYPES])
    return DTYPES[name]


def resolve_device(name: str | torch.device) -> torch.device:
    """A device's name ("auto": CUDA where there is one, else the CPU) as torch's device; UserError for one that isn't there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"Unknown device {name!r}. Valid: auto, cpu, cuda, cuda:0, ...") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"Device {name!r} was asked for, but torch sees no CUDA device. Use device=cpu or device=auto.")
    return device


def load_model(spec: ModelSpec, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto",
               shard: Shard | None = None) -> LoadedModel:  # fmt: skip
    """Load a model: `load_model(smollm2())`, `load_model(hf(path="folder"), "float32", "cpu")`.

    "auto" takes float32 on a CPU (half types are slower there unless it has units for them) and the stored dtype on CUDA.

    Raises:
        UserError: unknown dtype or device, weights that a CUDA device has no room for, or whatever the spec refuses.
    """
    more = () if shard is None else (shard,)  # a spec of somebody's own may know nothing of ranks
    chosen, where = resolve_dtype(dtype), resolve_device(device)
    try:
        loaded = spec.load(chosen, where, *more)
        loaded.model.prepare_for_inference()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        num_weights = sum(map(math.prod, tensor_shapes(spec.shape()).values()))
        num_bytes = (chosen or torch.bfloat16).itemsize
        raise UserError(f"{where} has too little memory for the model: {num_weights / 1e9:.2f} billion weights, of {num_bytes} bytes each "
                        f"{num_weights * num_bytes / 2**30:.1f} GiB. Take a smaller model, a dtype of fewer bytes, or more devices "
                        "(tensor_parallel_size).") from error  # fmt: skip
    return loaded
