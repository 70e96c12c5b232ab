"""Faster and stricter operations of Triton's interpreter, which stands in for a GPU in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def patch() -> None:
    """Apply all changes. The interpreter must not have run before."""
    _patch_language_once()
    _drop_nan_as_gpus_do()
    _describe_blocks_once()
    _skip_idle_broadcasts()
    _skip_idle_checks()
    _compute_directly()


def _patch_language_once() -> None:
    """Save Triton's interpreter a third of its time.

    It patches `triton.language` at every launch, and again at every call of a device function, where nothing is left to
    patch: skip the second.
    """
    from triton.runtime import interpreter

    core, patch = interpreter.tl.core, interpreter._patch_lang

    def patch_lang(fn: Callable[..., object]) -> Any:
        languages = [x for x in fn.__globals__.values() if x is interpreter.tl or x is core]
        patched = languages and not any(core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if patched else patch(fn)

    interpreter._patch_lang = patch_lang


def _drop_nan_as_gpus_do() -> None:
    """Let `tl.maximum` and `tl.minimum` of a number and NaN return the number in Triton's interpreter, as on a GPU.

    The interpreter returns NaN, which hides a kernel that loses NaN on a GPU. `propagate_nan` keeps NaN in both.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)


def _describe_blocks_once() -> None:
    """Save Triton's interpreter a third of its time.

    Every operation builds the type of its result, and the objects that describe its shape. Build them once for each
    element type and shape.
    """
    from triton.runtime import interpreter

    core, find_dtype = interpreter.tl.core, interpreter._get_np_dtype
    build_type, build_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[object, ...], dict[str, object]] = {}
    tensors: dict[str, dict[str, object]] = {}
    dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.value if isinstance(shape, core.constexpr) else shape
        key = (element_ty.name, *(s.value if isinstance(s, core.constexpr) else s for s in sizes))
        if key not in types:
            build_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def init_tensor(self: Any, handle: Any, dtype: Any) -> None:
        if dtype.name not in tensors:
            build_tensor(self, handle, dtype)
            tensors[dtype.name] = {name: value for name, value in vars(self).items() if name != "handle"}
        vars(self).update(tensors[dtype.name])
        self.handle = handle

    def np_dtype(tt_dtype: Any) -> Any:
        if tt_dtype.name not in dtypes:
            dtypes[tt_dtype.name] = find_dtype(tt_dtype)
        return dtypes[tt_dtype.name]

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    interpreter._get_np_dtype = np_dtype


def _skip_idle_broadcasts() -> None:
    """Return two blocks of one shape as they are. The interpreter compares both shapes with a new one, size by size."""
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _skip_idle_checks() -> None:
    """Skip checks that cannot fail.

    It computes every integer sum and product again in 64 bits, for an assertion that it makes in its debug mode only.
    Before every operation, it looks for the type of the result, also if both operands have that type.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    tensor, check = interpreter.tl.core.tensor, TritonSemantic.binary_op_type_checking_impl

    def check_operands(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        alike = type(lhs) is tensor and type(rhs) is tensor and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr()
        if alike and not named.get("div_or_mod") and len(options) <= 3:
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *options, **named)

    TritonSemantic.binary_op_type_checking_impl = check_operands
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, *given: None


def _compute_directly() -> None:
    """Compute sums, differences and products of float32 and of integers by one call of NumPy each.

    The interpreter converts, broadcasts and describes both operands first, in about ten calls. What is left to it here:
    pointers, other dtypes, operands of two dtypes and blocks with different numbers of axes. Functions of the language
    also lose a layer of calls that copies their arguments.
    """
    from triton.runtime import interpreter
    from triton.runtime.interpreter import TensorHandle, TritonSemantic

    core = interpreter.tl.core
    tensor, constexpr = core.tensor, core.constexpr
    numbers = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    names = {f"__{r}{name}__": (operation, bool(r)) for name, operation in operations.items() for r in ("", "r")}

    def number(value: Any, dtype: str) -> Any:
        """Return a number in a dtype, without an axis; `None` if Triton would compute in another dtype."""
        if type(value) is float and dtype == "fp32":
            return np.float32(value)
        if type(value) is int and (dtype == "fp32" or -(2**31) <= value < 2**31):
            return numbers[dtype](value)
        return None

    def direct(operation: Any, swapped: bool, otherwise: Any) -> Any:
        def run(self: Any, other: Any) -> Any:
            dtype, result = self.dtype, self.type
            if dtype.name not in numbers:
                return otherwise(self, other)
            if type(other) is tensor:
                if other.dtype is not dtype:
                    return otherwise(self, other)
                value, shape = other.handle.data, other.type.shape if other.type.is_block() else None
                if shape is not None and not result.is_block():
                    result = other.type
                elif shape is not None and shape.values != result.shape.values:
                    if len(shape) != len(result.shape):
                        return otherwise(self, other)
                    sizes = np.broadcast_shapes(tuple(shape.values), tuple(result.shape.values))
                    result = core.block_type(dtype, list(sizes))
            else:
                value = number(other.value if type(other) is constexpr else other, dtype.name)
                if value is None:
                    return otherwise(self, other)
            data = operation(value, self.handle.data) if swapped else operation(self.handle.data, value)
            return tensor(TensorHandle(data, dtype), result)

        return run

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*given, **named)

        scope.set_attr(owner, name, direct(*names[name], call) if owner is tensor and name in names else call)

    interpreter._patch_attr = patch_attr
