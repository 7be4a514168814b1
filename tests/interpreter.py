"""Triton's interpreter (3.6), where it differs from a device: it multiplies bf16 matrices as if their bytes
were integers, cuts fp32 to bf16 where a device rounds, and takes no loaded number as the bound of a `for`,
because NumPy no longer makes an integer of an array of one.

And where it is slow: it takes milliseconds for each call of one jitted function by another, because it
prepares the whole language again, and once for a launch is enough. It describes the shape and type of each
number anew: here equal ones are described once. It looks for integers that overflow, and tells what it found
only where `debug` is set."""

from functools import cache

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle, _patch_lang

_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
_patch_tensor, _np_dtype = interpreter._patch_lang_tensor, interpreter._get_np_dtype
_make_block, _broadcast = tl.block_type.__init__, TritonSemantic.broadcast_impl_value
_np_dtypes = dict[str, np.dtype]()
_blocks = dict[tuple[str, tuple[int, ...]], tl.block_type]()
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


def np_dtype(of: tl.dtype) -> np.dtype:
    if (found := _np_dtypes.get(of.name)) is None:
        found = _np_dtypes[of.name] = _np_dtype(of)
    return found


def make_block(block: tl.block_type, of: tl.dtype, shape: list[object] | tl.tuple) -> None:
    key = of.name, tuple(getattr(size, "value", size) for size in shape)
    if (known := _blocks.get(key)) is None:
        _make_block(block, of, shape)
        known = _blocks[key] = block
    block.__dict__.update(known.__dict__, element_ty=of)


@cache
def described(shape: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    return tl.constexpr(int(np.prod(shape))), tl.tuple([tl.constexpr(size) for size in shape])


def make_tensor(tensor: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.numel, tensor.shape = described(tuple(type.shape) if type.is_block() else ())


def broadcast(semantic: TritonSemantic, a: tl.tensor, b: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if a.shape is b.shape:
        return a, b
    return _broadcast(semantic, a, b)


def repair() -> None:
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot
    InterpretedFunction.__call__ = call
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._get_np_dtype = np_dtype
    tl.block_type.__init__, tl.tensor.__init__ = make_block, make_tensor
    TritonSemantic.broadcast_impl_value = broadcast
    if not interpreter.InterpreterOptions.debug:
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
