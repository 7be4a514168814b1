"""Triton's interpreter (3.6), where it differs from a device: it multiplies bf16 matrices as if their bytes
were integers, cuts fp32 to bf16 where a device rounds, and takes no loaded number as the bound of a `for`,
because NumPy no longer makes an integer of an array of one. It also takes milliseconds for each call of one
jitted function by another, because it prepares the whole language again: once for a launch is enough."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle, _patch_lang

_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
_patch_tensor = interpreter._patch_lang_tensor
_prepared = set[str]()


def round_to_bf16(data: np.ndarray) -> np.ndarray:
    """fp32 → the bytes of bf16: to the nearest, of two to the even one."""
    bits = np.ascontiguousarray(data).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def cast(builder: InterpreterBuilder, source: TensorHandle, to: tl.dtype) -> TensorHandle:
    if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
        return TensorHandle(round_to_bf16(source.data), tl.bfloat16)
    return _cast(builder, source, to)


def dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
    if a.dtype.scalar == tl.bfloat16:
        a, b = (_cast(builder, each, tl.float32) for each in (a, b))
    return _dot(builder, a, b, *rest)


def patch_tensor(tensor: type[tl.tensor], scope: interpreter._LangPatchScope) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())


def call(function: InterpretedFunction, *arguments: object, **named: object) -> object:
    """A launch prepares `triton.language`; Triton's own functions use modules below it, prepared for good."""
    home = function.fn.__module__
    if home.startswith("triton.") and home not in _prepared:
        _patch_lang(function.fn)
        _prepared.add(home)
    return function.rewrite()(*arguments, **named)


def repair() -> None:
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot
    InterpretedFunction.__call__ = call
    interpreter._patch_lang_tensor = patch_tensor
