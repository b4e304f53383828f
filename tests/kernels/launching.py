"""What a GPU's launches ask Triton's compiler for, without a GPU: `PYTHONPATH=tests python tests/kernels/launching.py`, not interpreted.

A driver that is none stands in a GPU's place: kernels are bound and looked up as on a card of compute capability 9.0, and neither compiled
nor run. Engines of several settings go through chunks, decodes by graph and not, samples, swap and copies. Prints, a setting: kernels
compiled before its first step, those compiled after it, and launches of which `Launch.variant` says something else than Triton.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from random import Random
from typing import Any

import torch
from engine_support import policies
from equality_support import tiny_engine
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvlab.engine.runners.cuda_runner import CudaRunner
from kvlab.kernels import launch, triton_backend
from kvlab.model.config import LlamaConfig
from kvlab.model.llama import Llama, tensor_shapes
from kvlab.model.loading import LoadedModel
from kvlab.types import Request, SamplingParams

MAX_LEN, MAX_SEQS, VOCAB = 300, 20, 128


class NoDriver:
    """Of a card that is not there."""

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """sm_90."""
        return GPUTarget("cuda", 90, 32)


class NoKernel:
    """What is launched in a compiled kernel's place."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        """Nothing."""

    def run(self, *args: Any) -> None:
        """Nothing happens."""


class Watch:
    """Hears what Triton is asked to compile, and asks a launch's `variant` for the same."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.unlike: list[str] = []
        self._kernels: list[Any] = []
        asked: list[Any] = []

        def compiles(kernel: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, *_: Any) -> NoKernel:
            self._kernels.append(kernel)
            given = {at: value for at, value in attrs.items() if value}
            asked.append((signature, {kernel.arg_names[at[0]]: value for at, value in constexprs.items()}, given))
            kernel.device_caches[device][0][key] = found = NoKernel()
            return found

        def watched(launched: launch.Launch) -> None:
            asked.clear()
            run(launched)
            if asked:
                variant = launched.variant()
                self.compiled.append(variant.kernel.__name__)
                if asked[0] != (variant.signature, variant.constexprs, variant.attrs):
                    self.unlike.append(variant.label)

        run, launch.Launch.run = launch.Launch.run, watched  # type: ignore[method-assign]
        JITFunction._do_compile = compiles

    def begin(self) -> None:
        """Nothing is compiled yet."""
        for kernel in self._kernels:
            kernel.device_caches.clear()
        self.compiled, self.unlike, self._kernels = [], [], []


class Backend(triton_backend.TritonBackend):
    """For tensors on a CPU, as if it were a card with 132 multiprocessors."""

    def __init__(self) -> None:
        self.paths, self._capability, self._sms = Counter[str](), (9, 0), 132

    def check(self, *args: Any) -> None:
        """Everything goes."""


class Warm(CudaRunner):
    """Made ready as on a card."""

    def _prepare(self, config: Any) -> None:
        super()._prepare(config)
        self.warm_up()


def runner_of(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> CudaRunner:
    """For a model of one layer, all weights 0, whose next token is always 0: what kernels leave undone does not matter."""
    shape = LlamaConfig(vocab_size=VOCAB, hidden_size=heads * head_dim, intermediate_size=256, num_layers=1, num_heads=heads,
                        num_kv_heads=kv_heads, head_dim=head_dim, max_position_embeddings=MAX_LEN)  # fmt: skip
    sizes = tensor_shapes(shape)
    model: Any = Llama(shape, lambda name: torch.zeros(sizes[name], dtype=dtype))
    model.logits = lambda hidden: torch.zeros(len(hidden), VOCAB)
    return Warm(LoadedModel(model, shape, None, "zeros", "", ()), Backend())


def served(watch: Watch, runner: CudaRunner, block_size: int, depth: int, **seams: Any) -> dict[str, Any]:
    """Twelve requests in a pool for two of the longest, so that blocks move; every fifth samples twice."""
    watch.begin()
    blocks, random = 2 * -(-MAX_LEN // block_size), Random(1)
    engine, log = tiny_engine(blocks, block_size, policies(mode="swap", admission="none", **seams), loaded=runner._loaded, runner=runner,
                              max_model_len=MAX_LEN, max_num_seqs=MAX_SEQS, max_num_batched_tokens=200, num_cpu_blocks=4 * blocks,
                              depth=depth)  # fmt: skip
    num_before = len(watch.compiled)
    for number in range(12):
        prompt = [random.randrange(VOCAB) for _ in range((1, 3, 90, 200)[number % 4])]
        samples = {"n": 2, "temperature": 1.0} if number % 5 == 0 else {}
        engine.add_request(Request(f"r{number}", prompt, SamplingParams(max_tokens=(5, 60)[number % 2], ignore_eos=True, **samples)))
    while engine.has_work:
        engine.step()
    return {"before": sorted(set(watch.compiled[:num_before])), "after": watch.compiled[num_before:], "unlike": watch.unlike,
            "swapped": log.total("swapped_in_blocks"), "copied": log.total("cow_copies"), "paths": sorted(runner.paths)}  # fmt: skip


def main() -> None:
    """A line a setting."""
    driver.set_active(NoDriver())
    ours: Any = [module for name, module in sys.modules.items() if name.startswith("kvlab.kernels.")]
    for module in [module for module in ours if hasattr(module, "require_device")]:
        module.require_device = lambda tensor: None
    watch = Watch()
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for shape, block_size, depth, kv_dtype in [((4, 2, 64, bf16), 16, 0, "auto"), ((3, 1, 80, fp16), 5, 1, "auto"),
                                               ((4, 2, 64, fp32), 17, 1, "auto"), ((9, 3, 64, bf16), 3, 1, "int8"),
                                               ((4, 4, 128, bf16), 1, 0, "fp8")]:  # fmt: skip
        print(json.dumps(served(watch, runner_of(*shape), block_size, depth, kv_dtype=kv_dtype)), flush=True)


if __name__ == "__main__":
    main()
