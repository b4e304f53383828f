"""Whether a model served on the card says what it says in float32 on the CPU.

Teacher forcing: the CPU's float32 greedy tokens are fed, prompt in one prefill, then token by token through decode attention, and logits
are compared position by position with float32's; transformers in the same type on the same card is the yardstick. Where the best token
differs, float32 itself must have been undecided: its two best logits closer than twice the error of transformers' logits at that position
(our own error there would excuse any difference: the best token changes only if some error is at least half the gap).

Shapes: S sequences (of one length), T tokens of each, V vocabulary.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvlab.cache.tensors import KVTensors
from kvlab.gpucheck.findings import Finding
from kvlab.gpucheck.sizes import Sizes
from kvlab.kernels.interface import AttentionMetadata, Backend
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.kernels.triton_backend import TritonBackend
from kvlab.model.checkpoint import save_folder
from kvlab.model.llama import Llama, tensor_shapes
from kvlab.model.loading import LoadedModel, ModelSpec, load_model
from kvlab.model.random_weights import TINY, shape_named
from kvlab.model.specs import hf, smollm2, tiny

BLOCK_SIZE = 17
"""An odd one on purpose."""


RANDOM = "random"
"""In place of a folder: the bundled model's shape with random weights, for a machine that can't fetch the real ones."""


def spec_of(name: str, sizes: Sizes) -> ModelSpec:
    """The model whose tokens are compared: a folder, `RANDOM`, the bundled model, or in a dry run the tiny one."""
    if name == RANDOM:
        return hf(path=str(random_folder("tiny" if sizes.model == "tiny" else "smollm2")))
    if name:
        return hf(path=name)
    return tiny() if sizes.model == "tiny" else smollm2()


@functools.cache
def random_folder(shape: str) -> Path:
    """A checkpoint of this shape, of weights with unit gain (the same on every machine), in a folder that goes when Python ends."""
    config = TINY if shape == "tiny" else shape_named(shape)
    generator = torch.Generator().manual_seed(11)
    weights = {
        name: torch.ones(size) if len(size) == 1 else torch.empty(size).normal_(0.0, size[1] ** -0.5, generator=generator)
        for name, size in tensor_shapes(config).items()
    }
    folder = Path(tempfile.mkdtemp(prefix="kvlab-gpucheck-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_folder(folder / f"random_{shape}", config, weights)
    return folder / f"random_{shape}"


def teacher_forced(device: torch.device, sizes: Sizes, model: str) -> list[Finding]:
    """Logits against the CPU's float32, ours and transformers'."""
    spec = spec_of(model, sizes)
    reference = load_model(spec, torch.float32, "cpu")
    prompts_ST = prompts(reference, sizes)
    tokens_ST, wanted_STV = greedy(reference.model, prompts_ST, sizes.num_new)
    loaded = load_model(spec, torch.bfloat16, device)
    ours = forced_logits(loaded.model, TritonBackend(device), tokens_ST, prompts_ST.shape[1])
    theirs = their_logits(transformers_model(spec, loaded, torch.bfloat16, device), tokens_ST, prompts_ST.shape[1])
    a, b = agreement(ours, wanted_STV, theirs), agreement(theirs, wanted_STV, theirs)
    note = f"{loaded.name}, {len(prompts_ST)} prompts of {prompts_ST.shape[1]} tokens and {sizes.num_new} new ones, bf16"
    return [
        Finding("tokens", "logit error, RMS", a.rms, "", {}, b.rms, "<= 1.1 x transformers'", a.rms <= 1.1 * b.rms,
                f"predicted: transformers'. {note}"),
        Finding("tokens", "top-1 agreement with float32", a.top1, "", {}, b.top1, ">= transformers' - 1 %", a.top1 >= b.top1 - 0.01,
                f"predicted: transformers' ({b.num_differing} differ)"),
        Finding("tokens", "disagreements", a.num_differing, f"of {wanted_STV.shape[0] * wanted_STV.shape[1]} positions"),
        Finding("tokens", "disagreements where float32 was decided", a.num_unexcused, "", {}, 0, "== 0", a.num_unexcused == 0,
                "float32's two best logits at least twice transformers' error of that position apart"),
    ]  # fmt: skip


def prompts(loaded: LoadedModel, sizes: Sizes) -> torch.Tensor:
    """Token ids int64 [S, T]: bundled chat prompts where there is a tokenizer, each repeated to the same length; else drawn."""
    if loaded.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, loaded.config.vocab_size, (sizes.num_prompts, sizes.prompt_len), generator=generator)
    import json

    path = Path(__file__).parent.parent / "workload" / "chat_prompts.jsonl"
    texts = [json.dumps(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    ids = [loaded.tokenizer.encode(text) for text in texts]
    return torch.tensor([(one * sizes.prompt_len)[: sizes.prompt_len] for one in ids[: sizes.num_prompts]])


@dataclass
class Forcing:
    """Sequences of equal length in a paged cache, stepped together by hand: one prefill, then decodes."""

    model: Llama
    backend: Backend
    num_seqs: int
    max_len: int

    def __post_init__(self) -> None:
        config, device = self.model.config, self.model.device
        blocks = -(-self.max_len // BLOCK_SIZE)
        order = torch.randperm(self.num_seqs * blocks, generator=torch.Generator().manual_seed(1))
        self.tables_SM = order.view(self.num_seqs, blocks).to(device)
        self.kv = KVTensors(config.num_layers, self.num_seqs * blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim,
                            self.model.dtype, device)  # fmt: skip
        self.length = 0

    def step(self, tokens_ST: torch.Tensor) -> torch.Tensor:
        """Feed T more tokens of every sequence; float32 logits [S, V] after the last."""
        num_seqs, num_new = tokens_ST.shape
        device = self.model.device
        positions = torch.arange(self.length, self.length + num_new, device=device)
        self.length += num_new
        slots_ST = self.tables_SM[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        lengths = [self.length] * num_seqs
        used_SM = self.tables_SM[:, : -(-self.length // BLOCK_SIZE)].contiguous()
        meta = AttentionMetadata(slots_ST.flatten(), used_SM, torch.tensor(lengths, device=device), lengths, [num_new] * num_seqs,
                                 num_seqs if num_new == 1 else 0, BLOCK_SIZE)  # fmt: skip
        hidden = self.model.forward(tokens_ST.flatten().to(device), positions.repeat(num_seqs), self.kv, meta, self.backend)
        return self.model.logits(hidden[num_new - 1 :: num_new]).float()


def greedy(model: Llama, prompts_ST: torch.Tensor, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(prompt and greedy tokens [S, T + num_new], logits [S, num_new, V] they were taken from), by torch on the model's device."""
    forcing = Forcing(model, TorchBackend(), len(prompts_ST), prompts_ST.shape[1] + num_new)
    tokens_ST, all_logits = prompts_ST, []
    logits_SV = forcing.step(prompts_ST)
    for index in range(num_new):
        all_logits.append(logits_SV)
        new_S1 = logits_SV.argmax(-1, keepdim=True)
        tokens_ST = torch.cat([tokens_ST, new_S1.cpu()], dim=1)
        if index + 1 < num_new:
            logits_SV = forcing.step(new_S1)
    return tokens_ST, torch.stack(all_logits, dim=1).cpu()


def forced_logits(model: Llama, backend: Backend, tokens_ST: torch.Tensor, num_prompt: int) -> torch.Tensor:
    """Logits [S, new, V] at the positions that predict `tokens_ST` from `num_prompt` on: a prefill, then a decode a token."""
    forcing = Forcing(model, backend, *tokens_ST.shape)
    found = [forcing.step(tokens_ST[:, :num_prompt])]
    found += [forcing.step(tokens_ST[:, at : at + 1]) for at in range(num_prompt, tokens_ST.shape[1] - 1)]
    return torch.stack(found, dim=1).cpu()


def transformers_model(spec: ModelSpec, loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> Any:
    """The same model in transformers, as `from_pretrained` gives it."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    from transformers import LlamaConfig as TheirConfig

    from kvlab.model.bundled import bundled_folder
    from kvlab.model.random_weights import tiny_weights

    if loaded.name == "tiny":
        theirs: Any = LlamaForCausalLM(TheirConfig(**{k: v for k, v in loaded.config.to_hf().items() if k not in ("dtype", "torch_dtype")}))
        theirs.load_state_dict(tiny_weights(0), strict=False)
    else:
        theirs = AutoModelForCausalLM.from_pretrained(getattr(spec, "path", None) or bundled_folder(), dtype=dtype)
    return in_dtype(theirs, dtype).to(device).eval()


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """A model of transformers with its weights in another dtype, buffers as they are: they hold the rotary frequencies, which transformers
    keeps in float32 and `model.to(dtype)` would round (in bf16 a position of 1,000 is then some radians off)."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def their_logits(model: Any, tokens_ST: torch.Tensor, num_prompt: int) -> torch.Tensor:
    """As `forced_logits`, by transformers in one forward pass over all tokens."""
    with torch.inference_mode():
        logits = model(tokens_ST.to(next(model.parameters()).device)).logits
    return logits[:, num_prompt - 1 : -1].float().cpu()


class Agreement(NamedTuple):
    """RMS error of logits; share of positions with the same best token; how many differ; how many of them float32 had decided."""

    rms: float
    top1: float
    num_differing: int
    num_unexcused: int


def agreement(got_STV: torch.Tensor, wanted_STV: torch.Tensor, yardstick_STV: torch.Tensor) -> Agreement:
    """How far logits are from float32's; what a difference may be excused by is the error of `yardstick` at its position."""
    allowed_ST = 2 * (yardstick_STV - wanted_STV).abs().amax(-1)
    best_ST2 = wanted_STV.topk(2, dim=-1).values
    differs_ST = got_STV.argmax(-1) != wanted_STV.argmax(-1)
    decided_ST = (best_ST2[..., 0] - best_ST2[..., 1]) >= allowed_ST
    rms = float((got_STV - wanted_STV).square().mean().sqrt())
    return Agreement(rms, float((~differs_ST).float().mean()), int(differs_ST.sum()), int((differs_ST & decided_ST).sum()))
