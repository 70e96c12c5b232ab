"""Faster and stricter operations of Triton's interpreter, which stands in for a GPU in tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np


def patch() -> None:
    """Apply all changes. The interpreter must not have run before."""
    _patch_language_once()
    _drop_nan_as_gpus_do()
    _describe_blocks_once()
    _make_constants_once()
    _broadcast_directly()
    _convert_directly()
    _skip_idle_checks()
    _compute_directly()


def _patch_language_once() -> None:
    """Save Triton's interpreter a third of its time.

    It patches `triton.language` at every launch, and again at every call of a device function, where nothing is left to
    patch: skip the second. At a launch, it looks for functions to patch among all members: look once.
    """
    from triton.runtime import interpreter

    core, patch = interpreter.tl.core, interpreter._patch_lang
    languages_of: dict[Callable[..., object], list[Any]] = {}

    def patch_lang(fn: Callable[..., object]) -> Any:
        languages = languages_of.get(fn)
        if not languages:
            languages = [x for x in fn.__globals__.values() if x is interpreter.tl or x is core]
            languages_of[fn] = languages
        patched = languages and not any(core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if patched else patch(fn)

    builtins_of: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        if owner not in builtins_of:
            builtins_of[owner] = inspect.getmembers(owner, core.is_builtin)
        for name, member in builtins_of[owner]:
            interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._patch_lang, interpreter._patch_builtin = patch_lang, patch_builtin


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
    element type and shape. Handles lose a check of the item size, which no operation of the interpreter can fail.
    """
    from triton.runtime import interpreter

    core, find_dtype = interpreter.tl.core, interpreter._get_np_dtype
    build_type, build_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[object, ...], dict[str, object]] = {}
    retyped: dict[tuple[object, ...], object] = {}
    tensors: dict[str, dict[str, object]] = {}
    dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.value if isinstance(shape, core.constexpr) else shape
        key = (element_ty.name, *(sizes.values if type(sizes) is core.tuple else sizes))
        known = types.get(key)
        if known is None:
            build_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        else:
            self.__dict__.update(known)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = (scalar_ty.name, *self.shape.values)
        if key not in retyped:
            retyped[key] = core.block_type(scalar_ty, self.shape)
        return retyped[key]

    def init_tensor(self: Any, handle: Any, dtype: Any) -> None:
        known = tensors.get(dtype.name)
        if known is None:
            build_tensor(self, handle, dtype)
            known = {name: value for name, value in vars(self).items() if name != "handle"}
            tensors[dtype.name] = known
        self.__dict__.update(known)
        self.handle = handle

    def init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, object] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def np_dtype(tt_dtype: Any) -> Any:
        if tt_dtype.name not in dtypes:
            dtypes[tt_dtype.name] = find_dtype(tt_dtype)
        return dtypes[tt_dtype.name]

    core.block_type.__init__, core.block_type.with_element_ty = init_type, with_element_ty
    core.tensor.__init__, interpreter.TensorHandle.__init__ = init_tensor, init_handle
    interpreter._get_np_dtype = np_dtype


def _make_constants_once() -> None:
    """Make a read-only tensor of each number once. The interpreter makes one wherever a kernel names a number.

    Numbers that are equal share a tensor of one dtype: Triton itself replaces -0.0 by 0.0, on a GPU, too.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    tensor, convert, constant = interpreter.tl.core.tensor, TritonSemantic.to_tensor, TritonSemantic.scalar_constant
    numbers, constexpr = (int, float, bool), interpreter.tl.core.constexpr
    converted: dict[tuple[object, ...], Any] = {}
    constants: dict[tuple[object, ...], Any] = {}

    def read_only(made: Any) -> Any:
        made.handle.data.flags.writeable = False
        return made

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        if type(x) is constexpr:  # a number, or a number times a tensor, which Triton 3.8 does not unwrap
            x = x.value
        kind = type(x)
        if kind is tensor:
            return x
        if kind not in numbers:
            return convert(self, x, check_type)
        if (kind, x) not in converted:
            converted[kind, x] = read_only(convert(self, x))
        return converted[kind, x]

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        if dtype is None or type(value) not in numbers:
            return constant(self, value, dtype)
        if (value, dtype.name) not in constants:
            constants[value, dtype.name] = read_only(constant(self, value, dtype))
        return constants[value, dtype.name]

    TritonSemantic.to_tensor, TritonSemantic.scalar_constant = to_tensor, scalar_constant


def _broadcast_directly() -> None:
    """Broadcast two operands by one call of NumPy. The interpreter compares both shapes with a new one, size by size.

    What is left to it here: blocks with different numbers of axes.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    core, tensor, handle = interpreter.tl.core, interpreter.tl.core.tensor, interpreter.TensorHandle
    broadcast = TritonSemantic.broadcast_impl_value

    def fill(value: Any, like: Any) -> Any:
        data = np.empty(like.shape.values, interpreter._get_np_dtype(value.dtype))
        data[...] = value.handle.data
        return tensor(handle(data, value.dtype), like.with_element_ty(value.dtype))

    def expand(block: Any, shape: tuple[int, ...]) -> Any:
        if block.handle.data.shape == shape:
            return block
        data = np.broadcast_to(block.handle.data, shape)
        return tensor(handle(data, block.dtype), core.block_type(block.dtype, list(shape)))

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block() or not right.is_block():
            if left.is_block():
                rhs = fill(rhs, left)
            elif right.is_block():
                lhs = fill(lhs, right)
            return lhs, rhs
        if left.shape.values == right.shape.values:
            return lhs, rhs
        if len(left.shape) != len(right.shape):
            return broadcast(self, lhs, rhs)
        shape = np.broadcast_shapes(tuple(left.shape.values), tuple(right.shape.values))
        return expand(lhs, shape), expand(rhs, shape)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _convert_directly() -> None:
    """Convert between float32 and bfloat16, which it rounds toward zero, by a shift; add an axis by one call of NumPy.

    The interpreter takes each number apart into sign, exponent and significand.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    core = interpreter.tl.core
    cast, expand = InterpreterBuilder.cast_impl, TritonSemantic.expand_dims

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        names = (src.dtype.scalar.name, dst_type.scalar.name)
        if names == ("bf16", "fp32"):
            data = (src.data.astype(np.uint32, order="C") << np.uint32(16)).view(np.float32)
        elif names == ("fp32", "bf16"):
            data = (src.data.view(np.uint32) >> np.uint32(16)).astype(np.uint16, order="C")
        else:
            return cast(self, src, dst_type)
        return TensorHandle(data, dst_type.scalar)

    def expand_dims(self: Any, block: Any, axis: int) -> Any:
        if not block.type.is_block():
            return expand(self, block, axis)
        shape = [*block.type.shape.values]
        shape.insert(axis, 1)
        type_ = core.block_type(block.dtype, shape)
        return core.tensor(TensorHandle(block.handle.data.reshape(shape), block.dtype), type_)

    InterpreterBuilder.cast_impl, TritonSemantic.expand_dims = cast_impl, expand_dims


def _skip_idle_checks() -> None:
    """Skip checks that cannot fail.

    It computes every integer sum and product again in 64 bits, for an assertion that it makes in its debug mode only.
    Before every operation, it looks for the type of the result, also if both operands have that type. It compares
    dtypes by name, also if they are one object, and looks for constants inside of tensors.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    core = interpreter.tl.core
    tensor, check, cast = core.tensor, TritonSemantic.binary_op_type_checking_impl, TritonSemantic.cast
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {tensor, core.dtype, int, float, bool, type(None)}

    def check_operands(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        alike = type(lhs) is tensor and type(rhs) is tensor and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr()
        if alike and not named.get("div_or_mod") and len(options) <= 3:
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *options, **named)

    def cast_operand(self: Any, input: Any, dst_ty: Any, *options: Any) -> Any:  # noqa: A002
        return input if input.dtype is dst_ty.scalar else cast(self, input, dst_ty, *options)

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.cast = check_operands, cast_operand
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, *given: None
    core._unwrap_if_constexpr = lambda x: x if type(x) in plain else unwrap(x)
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _compute_directly() -> None:
    """Compute arithmetic and comparisons of float32 and of integers by one call of NumPy each; also sums with pointers.

    The interpreter converts, broadcasts and describes both operands first, in about ten calls. What is left to it here:
    other dtypes, floating-point operands of two dtypes and blocks with different numbers of axes. Functions of the
    language also lose a layer of calls that copies their arguments.
    """
    from triton.runtime import interpreter
    from triton.runtime.interpreter import TensorHandle, TritonSemantic

    core = interpreter.tl.core
    tensor, constexpr, select = core.tensor, core.constexpr, TritonSemantic.where
    numbers = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
    signed = ("int32", "int64")
    arithmetic = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    comparisons = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    comparisons |= {"eq": np.equal, "ne": np.not_equal}

    def number(value: Any, dtype: str) -> Any:
        """Return a number in a dtype, without an axis; `None` if Triton would compute in another dtype."""
        if type(value) is float and dtype == "fp32":
            return np.float32(value)
        if type(value) is int and dtype in numbers and (dtype == "fp32" or -(2**31) <= value < 2**31):
            return numbers[dtype](value)
        return None

    def common_type(left: Any, right: Any, dtype: Any) -> Any:
        """Return the type of an operation's result in a dtype; `None` if the numbers of axes differ."""
        if not right.is_block():
            return left.with_element_ty(dtype)
        if not left.is_block() or left.shape.values == right.shape.values:
            return right.with_element_ty(dtype)
        if len(left.shape) != len(right.shape):
            return None
        return core.block_type(dtype, list(np.broadcast_shapes(tuple(left.shape.values), tuple(right.shape.values))))

    def direct(operation: Any, swapped: bool, otherwise: Any, result: Any, dtypes: tuple[str, ...]) -> Any:
        def run(self: Any, other: Any) -> Any:
            dtype = self.dtype
            if dtype.name not in dtypes:
                return otherwise(self, other)
            if type(other) is tensor:
                if other.dtype is not dtype:
                    if dtype.name not in signed or other.dtype.name not in signed:
                        return otherwise(self, other)
                    dtype = core.int64
                type_ = common_type(self.type, other.type, result or dtype)
                if type_ is None:
                    return otherwise(self, other)
                value = other.handle.data
            else:
                value = number(other.value if type(other) is constexpr else other, dtype.name)
                if value is None:
                    return otherwise(self, other)
                type_ = self.type.with_element_ty(result) if result else self.type
            data = operation(value, self.handle.data) if swapped else operation(self.handle.data, value)
            return tensor(TensorHandle(data, result or dtype), type_)

        return run

    def offset(otherwise: Any) -> Any:
        """Return a sum that also adds offsets to pointers."""

        def run(self: Any, other: Any) -> Any:
            dtype = self.dtype
            if not dtype.is_ptr() or type(other) is not tensor or other.dtype.name not in signed:
                return otherwise(self, other)
            type_ = common_type(self.type, other.type, dtype)
            if type_ is None:
                return otherwise(self, other)
            size = max(1, dtype.element_ty.primitive_bitwidth // 8)
            return tensor(TensorHandle(self.handle.data + size * other.handle.data.astype(np.uint64), dtype), type_)

        return run

    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        if condition.dtype is core.int1 and type(x) is tensor and type(y) is tensor and x.dtype is y.dtype:
            type_ = common_type(x.type, y.type, x.dtype)
            type_ = type_ and common_type(condition.type, type_, x.dtype)
            if type_ is not None:
                data = np.where(condition.handle.data, x.handle.data, y.handle.data)
                return tensor(TensorHandle(data, x.dtype), type_)
        return select(self, condition, x, y)

    def fast(name: str, otherwise: Any) -> Any:
        """Return a faster form of a method of tensors."""
        name = name.strip("_")
        if name in comparisons:
            return direct(comparisons[name], False, otherwise, core.int1, (*numbers,))
        if name in ("and", "or"):
            return direct(np.bitwise_and if name == "and" else np.bitwise_or, False, otherwise, None, ("int1", *signed))
        if name in ("truediv", "rtruediv"):
            return direct(np.divide, name[0] == "r", otherwise, None, ("fp32",))
        if name in arithmetic or name[1:] in arithmetic:
            swapped = name not in arithmetic
            run = direct(arithmetic[name[swapped:]], swapped, otherwise, None, (*numbers,))
            return offset(run) if name in ("add", "radd") else run
        return otherwise

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*given, **named)

        scope.set_attr(owner, name, fast(name, call) if owner is tensor else call)

    interpreter._patch_attr, TritonSemantic.where = patch_attr, where
