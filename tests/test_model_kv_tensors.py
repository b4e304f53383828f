"""KV tensors: sizes, copies and swaps, and that none of them, nor the block size, changes a bit of KV or logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from model_support import PagedRun

from kvlab.cache.tensors import KVTensors
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.model import Llama, load_model, tiny
from kvlab.types import UserError

PROMPT = [int(i) for i in torch.randint(0, 256, (37,), generator=torch.Generator().manual_seed(0))]


@pytest.fixture(scope="module", params=["float32", "float64", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Llama:
    return load_model(tiny(), request.param, "cpu").model


def contents(run: PagedRun, seq: int) -> torch.Tensor:
    """K and V of a sequence in order of position, [L, 2, tokens, K, D]."""
    flat = run.kv.gpu[:, :, run.tables[seq]].flatten(2, 3)
    return flat[:, :, : run.lengths[seq]].clone()


def test_sizes_are_what_was_allocated() -> None:
    kv = KVTensors(3, 10, 5, 2, 8, torch.float16, num_cpu_blocks=4)
    assert kv.gpu.shape == (3, 2, 10, 5, 2, 8)
    assert (kv.nbytes, kv.cpu_nbytes, kv.block_bytes) == (3 * 2 * 10 * 5 * 2 * 8 * 2, 3 * 2 * 4 * 5 * 2 * 8 * 2, 960)
    assert KVTensors.bytes_per_block(30, 16, 3, 64, torch.float32) == 737_280
    kv.layer(1).k_NBKD[7, 4, 1, 3] = 5
    kv.layer(2).v_NBKD[0, 0, 0, 0] = 6
    assert kv.gpu.nonzero().tolist() == [[1, 0, 7, 4, 1, 3], [2, 1, 0, 0, 0, 0]]


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(UserError, match="block_size = 0 is not allowed"):
        KVTensors(1, 1, 0, 1, 2, torch.float32)
    with pytest.raises(UserError, match="num_cpu_blocks = -1 is not allowed"):
        KVTensors(1, 1, 1, 1, 2, torch.float32, num_cpu_blocks=-1)
    with pytest.raises(UserError, match=r"Not enough memory on cpu for 1000000000 KV blocks \(7629.39 GiB, 8192 bytes each\)"):
        KVTensors(1, 10**9, 16, 1, 64, torch.float32)
    with pytest.raises(UserError, match=r"smaller num_cpu_blocks"):
        KVTensors(1, 1, 16, 1, 64, torch.float32, num_cpu_blocks=10**9)


def test_swap_space_of_a_gpu_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and int8's scales of each tier; nothing is pinned."""
    asked: list[dict[str, Any]] = []
    zeros = torch.zeros

    def made(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        asked.append(options)
        return zeros(shape, **{**options, "device": "cpu"})

    monkeypatch.setattr(torch, "zeros", made)
    KVTensors(1, 2, 4, 1, 8, torch.int8, "cuda", num_cpu_blocks=3)
    assert [options["device"].type for options in asked] == ["cuda", "cuda", "cpu", "cpu"]
    assert all(options.keys() == {"dtype", "device"} for options in asked)


def test_swap_and_copy_move_blocks() -> None:
    kv = KVTensors(2, 4, 3, 1, 2, torch.float32, num_cpu_blocks=2)
    kv.gpu.copy_(torch.arange(kv.gpu.numel()).view_as(kv.gpu))
    before, backend = kv.gpu.clone(), TorchBackend()
    kv.swap_out([(3, 0), (1, 1)], backend)
    assert torch.equal(kv.cpu, before[:, :, [3, 1]])
    kv.gpu.fill_(-1)
    kv.swap_in([(1, 2), (0, 0)], backend)
    assert torch.equal(kv.gpu[:, :, [2, 0]], before[:, :, [1, 3]])
    assert (kv.gpu[:, :, [1, 3]] == -1).all()
    kv.copy([(2, 1), (0, 2)], backend)
    assert torch.equal(kv.gpu[:, :, [1, 2]], before[:, :, [1, 3]])
    kv.swap_out([], backend)
    assert torch.equal(kv.cpu, before[:, :, [3, 1]])


@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 64])
def test_block_size_and_placement_change_no_bit(model: Llama, block_size: int) -> None:
    """Two sequences: a prompt in two chunks beside the other's decodes, over poisoned pools."""

    def results(block_size: int, seed: int) -> list[torch.Tensor]:
        per_seq = math.ceil(48 / block_size)
        run = PagedRun(model, num_blocks=2 * per_seq + 2, block_size=block_size)
        run.kv.gpu.fill_(math.nan)
        order = torch.randperm(2 * per_seq + 2, generator=torch.Generator().manual_seed(seed)).tolist()
        run.tables = {0: order[:per_seq], 1: order[per_seq : 2 * per_seq]}
        found = [run.step({0: PROMPT[:9]})[0], *run.step({0: PROMPT[9:10], 1: PROMPT[:20]}).values()]
        found += [*run.step({0: PROMPT[10:11], 1: PROMPT[20:37]}).values(), *run.step({0: [7], 1: [8]}).values()]
        return [*found, contents(run, 0), contents(run, 1)]

    for first, other in zip(results(16, 0), results(block_size, 1), strict=True):
        assert torch.isfinite(first).all()
        assert torch.equal(first, other)


def test_swap_and_copy_on_write_change_no_bit(model: Llama) -> None:
    run = PagedRun(model, num_blocks=12, block_size=5)
    run.kv = KVTensors(model.config.num_layers, 12, 5, 4, 8, model.dtype, num_cpu_blocks=8)
    run.tables = {0: [3, 8, 0, 10, 5, 7, 1, 2], 1: []}
    run.step({0: PROMPT})
    kept = contents(run, 0)
    # A fork writes token 37 into its own copy of the last, partial block; the original then writes another token there.
    run.tables[1], run.lengths[1] = [*run.tables[0][:7], 11], 37
    run.kv.copy([(2, 11)], run.backend)
    forked = run.step({1: [65]})[1]
    undisturbed = run.step({0: [66]})[0]
    assert torch.equal(contents(run, 0)[:, :, :37], kept)
    # Swap the original out, spoil the pool, swap it in elsewhere.
    run.kv.swap_out([(block, i) for i, block in enumerate(run.tables[0])], run.backend)
    run.kv.gpu.fill_(math.nan)
    run.tables[0] = [11, 1, 9, 6, 0, 4, 2, 3]
    run.kv.swap_in([(i, block) for i, block in enumerate(run.tables[0])], run.backend)
    run.lengths[0] = 37
    assert torch.equal(run.step({0: [66]})[0], undisturbed)
    run.lengths[0] = 37
    assert torch.equal(run.step({0: [65]})[0], forked)
