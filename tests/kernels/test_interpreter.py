"""Triton's interpreter, made quicker: it replaces and restores what it did before, and knows the same types."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter as tritons

from kvlab.kernels import interpreter, triton_norm
from kvlab.kernels.triton_common import INTERPRET


def builtins() -> dict[str, object]:
    return {name: member for name, member in inspect.getmembers(tl) if tl.core.is_builtin(member)}


def test_a_launch_replaces_the_language_and_puts_it_back() -> None:
    assert INTERPRET.value
    before = builtins()
    assert len(before) > 50
    triton_norm.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5)
    assert builtins() == before
    scope = tritons._LangPatchScope()
    tritons._patch_builtin(tl, None, scope)
    try:
        assert builtins() == {}
        num_changes = len(scope._changes)
        tritons._patch_builtin(tl, None, scope)  # what is replaced stays
        assert len(scope._changes) == num_changes == len(before)
    finally:
        scope.restore()
    assert builtins() == before


def test_types_are_tritons_own() -> None:
    assert tritons._get_np_dtype is interpreter._get_np_dtype
    assert interpreter._np_dtype_of is not None
    for dtype in (tl.int1, tl.int8, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float8e4nv, tl.pointer_type(tl.int8)):
        for kind in (dtype, tl.block_type(dtype, [4, 2])):
            assert tritons._get_np_dtype(kind) == interpreter._np_dtype_of(kind)
    assert tritons._get_np_dtype(tl.bfloat16) == np.dtype(np.uint16)
    with pytest.raises(KeyError):
        tritons._get_np_dtype(tl.void)


def test_a_tensor_of_one_element_bounds_a_loop() -> None:
    """Under numpy 2.5, whose arrays of one element are no numbers, with Triton 3.6 too; afterwards Triton's tensors are as before."""
    before = getattr(tl.tensor, "__index__", None)
    scope = tritons._LangPatchScope()
    tritons._patch_lang_tensor(tl.tensor, scope)
    try:
        bound = tl.tensor(tritons.TensorHandle(np.array([3], dtype=np.int32), tl.int32), tl.int32)
        assert list(range(bound)) == [0, 1, 2]  # type: ignore[call-overload]
        assert scope._changes[-1][:2] == (tl.tensor, "__index__")
        several = tl.tensor(tritons.TensorHandle(np.array([3, 4], dtype=np.int32), tl.int32), tl.block_type(tl.int32, [2]))
        with pytest.raises(ValueError):
            range(several)  # type: ignore[call-overload]
    finally:
        scope.restore()
    assert getattr(tl.tensor, "__index__", None) is before
