"""Logits against transformers: float64 is the truth, transformers' own float32 error the yardstick."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_support import PagedRun, hf_llama, our_llama, random_weights

from kvlab.kernels.torch_backend import TorchBackend
from kvlab.model import LlamaConfig, RopeScaling

BASE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 112, "num_layers": 3, "max_position_embeddings": 512}
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
CONFIGS = {
    "gqa1_untied": LlamaConfig(**BASE, num_heads=6, num_kv_heads=6, head_dim=8),
    "gqa3_tied": LlamaConfig(**BASE, num_heads=6, num_kv_heads=2, head_dim=8, tie_word_embeddings=True),
    "gqa8_llama3_rope": LlamaConfig(**BASE, num_heads=8, num_kv_heads=1, head_dim=6, rope_theta=500000.0, rope_scaling=LLAMA3),
    "linear_rope_biases": LlamaConfig(**BASE, num_heads=4, num_kv_heads=2, head_dim=20, attention_bias=True, mlp_bias=True,
                                      rope_scaling=RopeScaling("linear", 4.0)),
    "gqa3_tied_llama3_rope": LlamaConfig(**(BASE | {"hidden_size": 72}), num_heads=9, num_kv_heads=3, head_dim=16, rms_norm_eps=1e-6,
                                         rope_scaling=LLAMA3, tie_word_embeddings=True),
}  # fmt: skip
LENGTH = 60


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest) -> tuple[LlamaConfig, dict[str, torch.Tensor], list[int], torch.Tensor, float]:
    """Config, weights, tokens, true logits [LENGTH, V], and transformers' largest float32 error."""
    config = CONFIGS[request.param]
    weights = random_weights(config, seed=len(request.param))
    ids = torch.randint(0, config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        truth = hf_llama(config, weights, torch.float64)(torch.tensor([ids])).logits[0]
        in_float32 = hf_llama(config, weights, torch.float32)(torch.tensor([ids])).logits[0]
    return config, weights, ids, truth, float((in_float32.double() - truth).abs().max())


def run_all_ways(config: LlamaConfig, weights: dict[str, torch.Tensor], ids: list[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Logits of all positions from prefill, chunked prefill beside another sequence, decode, and decode on another's cached blocks."""
    run = PagedRun(our_llama(config, weights, dtype), num_blocks=64, block_size=5)
    run.tables = {0: list(range(20)), 1: list(range(40, 20, -1)), 2: list(range(60, 40, -1))}
    found = {"prefill": run.step({0: ids})[0]}
    chunks = [run.step({1: ids[:1], 2: ids[:7]})[1]]
    chunks += [run.step({1: ids[start : start + 13]})[1] for start in range(1, LENGTH, 13)]
    found["chunked prefill"] = torch.cat(chunks)
    chunks = [run.step({2: ids[7:40]})[2]] + [run.step({2: [token]})[2] for token in ids[40:]]
    found["decode"] = torch.cat(chunks)
    run.tables[3], run.lengths[3] = [*run.tables[1][:8], 61, 62, 63], 40  # 8 blocks of 5 tokens that sequence 1 computed
    chunks = [run.step({3: ids[40:44], 0: [1]})[3]] + [run.step({3: [token], 0: [2]})[3] for token in ids[44:50]]
    found["decode on cached blocks"] = torch.cat(chunks)
    return found


POSITIONS = {"prefill": slice(0, LENGTH), "chunked prefill": slice(0, LENGTH), "decode": slice(7, LENGTH),
             "decode on cached blocks": slice(40, 50)}  # fmt: skip


def test_float64_equals_transformers(case) -> None:
    config, weights, ids, truth, _ = case
    for way, logits in run_all_ways(config, weights, ids, torch.float64).items():
        torch.testing.assert_close(logits, truth[POSITIONS[way]], rtol=0, atol=1e-11, msg=lambda text, way=way: f"{way}: {text}")


def test_float32_error_is_at_most_twice_that_of_transformers(case) -> None:
    config, weights, ids, truth, their_error = case
    assert 1e-7 < their_error < 1e-3
    for way, logits in run_all_ways(config, weights, ids, torch.float32).items():
        assert logits.dtype == torch.float32
        error = float((logits.double() - truth[POSITIONS[way]]).abs().max())
        assert error <= 2 * their_error, f"{way}: {error:.2e} against {their_error:.2e}"


@pytest.mark.parametrize(("num_tokens", "portions"), [(4, {4: 1}), (5, {4: 1, 1: 1}), (8, {4: 2}), (11, {4: 2, 3: 1})])
def test_an_mlp_in_portions_is_the_mlp(monkeypatch: pytest.MonkeyPatch, num_tokens: int, portions: dict[int, int]) -> None:
    """Portions of 4 tokens of prompts that fill them, and that do not. The wide products see at most a portion."""
    config = CONFIGS["linear_rope_biases"]
    weights, ids = random_weights(config, seed=3), list(range(num_tokens))
    found, seen = [], []
    for rows in (100, 4):
        monkeypatch.setattr("kvlab.model.llama.MLP_ROWS", rows)
        run = PagedRun(our_llama(config, weights, torch.float64), block_size=16)
        run.backend, run.tables = Portions(), {0: [5]}
        found.append(run.step({0: ids})[0])
        seen.append(run.backend.paths)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-13)
    assert seen[0] == {num_tokens: config.num_layers}
    assert seen[1] == {rows: count * config.num_layers for rows, count in portions.items()}


class Portions(TorchBackend):
    """Counts the tokens of each call for the gate."""

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        self.paths[len(gate_up_T2F)] += 1
        return super().silu_and_mul(gate_up_T2F)


class Norms(TorchBackend):
    """Counts the norms asked of it."""

    def rms_norm(self, *args: Any) -> torch.Tensor:
        self.paths["alone"] += 1
        return super().rms_norm(*args)

    def add_rms_norm(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.paths["with the sum"] += 1
        return super().add_rms_norm(*args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])  # of types that are packed the sum is in the product
def test_every_norm_is_the_backends_and_has_the_sum_in_it(dtype: torch.dtype) -> None:
    """3 layers: the first norm has no sum before it, the last is the one before the logits."""
    config = CONFIGS["gqa3_tied"]
    run = PagedRun(our_llama(config, {k: v.to(dtype) for k, v in random_weights(config, seed=3).items()}, dtype))
    run.backend, run.tables = Norms(), {0: [5]}
    run.step({0: [1, 2, 3]})
    assert run.backend.paths == {"alone": 1, "with the sum": 2 * config.num_layers}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_as_near_as_transformers(dtype: torch.dtype) -> None:
    config = CONFIGS["gqa3_tied"]
    weights = {name: tensor.to(dtype).double() for name, tensor in random_weights(config, seed=3).items()}
    ids = list(range(40))
    with torch.inference_mode():
        truth = hf_llama(config, weights, torch.float64)(torch.tensor([ids])).logits[0]
        theirs = hf_llama(config, weights, dtype)(torch.tensor([ids])).logits[0]
    run = PagedRun(our_llama(config, weights, dtype), block_size=16)
    run.tables = {0: [5, 3, 9]}
    ours = torch.cat([run.step({0: ids[:30]})[0]] + [run.step({0: [token]})[0] for token in ids[30:]])
    assert ours.dtype == torch.float32
    assert (ours - truth).abs().max() <= 2 * (theirs.float() - truth).abs().max()


def test_window_hides_old_tokens() -> None:
    """With one layer and a window of 8, token 20 can't depend on token 12, and does on token 13."""
    config = LlamaConfig(vocab_size=97, hidden_size=48, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=12)
    model = our_llama(config, random_weights(config, seed=5), torch.float64)

    def last_logits(changed: int | None, chunk: int) -> torch.Tensor:
        run = PagedRun(model, block_size=3, window=8)
        run.tables = {0: list(range(10, 17))}
        ids = [(7 * i + (50 if i == changed else 0)) % 97 for i in range(21)]
        return [run.step({0: ids[start : start + chunk]}) for start in range(0, 21, chunk)][-1][0][-1]

    for chunk in (21, 5, 1):
        assert torch.equal(last_logits(None, chunk), last_logits(12, chunk))
        assert not torch.allclose(last_logits(None, chunk), last_logits(13, chunk))
    torch.testing.assert_close(last_logits(None, 21), last_logits(None, 1), rtol=0, atol=1e-12)
