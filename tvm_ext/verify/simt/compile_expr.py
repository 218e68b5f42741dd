"""Expressions of TensorIR as closures: ``closure(machine)`` is the expression's value in all active lanes.

What a lane that is not active holds is arbitrary. Conditions are evaluated as the C that stock TVM prints evaluates
them: `Select`, ``if_then_else``, ``&&`` and ``||`` do not touch memory for lanes that do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_ext._tvm import Analyzer, Expr, TensorLoad, nodes_in, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.analysis.device_code import NAMED_CALLS, called_name, constant_int, op_name, split_dtype
from tvm_ext.analysis.predicates import reads_memory
from tvm_ext.errors import InputError
from tvm_ext.ir.device_sync import CALL as CALL_WITH_TEXT
from tvm_ext.support.arrays import DType

from .arithmetic import BINARY, CALLS, EXTERNS, BinaryRow, linear_closure, linear_form
from .local_memory import View
from .machine import Closure, Engine
from .number_types import is_float, storage_dtype, to_dtype
from .scope import BufferBinding, Scope
from .values import Tainted, Value, aligned, apply, choose, is_uniform, strip

INDEX_TYPES = ("int32", "int64")


def compile_expression(scope: Scope, expr: Expr) -> Closure:
    """The closure of ``expr``; raises InputError for what the interpreter does not know."""
    kind = type(expr).__name__
    if kind in BINARY:
        return _binary(scope, expr, BINARY[kind])
    maker = _MAKERS.get(kind)
    if maker is None:
        raise InputError(f"{scope.kernel}: the interpreter does not know {kind}: {expr}")
    return maker(scope, expr)


# --- constants, variables, vectors --------------------------------------------------------------------------------
def _int(scope: Scope, expr: Expr) -> Closure:
    dtype = dtype_of(expr)
    value: Value = int(expr.value)
    if dtype == "bool":
        value = bool(value)
    elif dtype not in INDEX_TYPES:
        value = storage_dtype(dtype).type(value)
    return lambda m: value


def _float(scope: Scope, expr: Expr) -> Closure:
    value = to_dtype(float(expr.value), dtype_of(expr))[()]
    return lambda m: value


def _variable(scope: Scope, expr: Expr) -> Closure:
    slot = scope.variable(expr)
    return lambda m: m.env[slot]


def _ramp(scope: Scope, expr: Expr) -> Closure:
    base, stride = compile_expression(scope, expr.base), compile_expression(scope, expr.stride)
    steps = np.arange(constant_int(expr.lanes, "the length of a ramp"), dtype=np.int64)

    def make(first: Value, step: Value) -> Value:
        return np.reshape(first, (-1, 1)) + np.reshape(step, (-1, 1)) * steps

    return lambda m: apply(make, base(m), stride(m))


def _broadcast(scope: Scope, expr: Expr) -> Closure:
    value, dtype = compile_expression(scope, expr.value), storage_dtype(dtype_of(expr.value))
    lanes = constant_int(expr.lanes, "the length of a vector")

    def make(one: Value) -> Value:
        column = np.asarray(one, dtype).reshape(-1, 1)
        return np.broadcast_to(column, (column.shape[0], lanes))

    return lambda m: apply(make, value(m))


def _shuffle(scope: Scope, expr: Expr) -> Closure:
    parts = [compile_expression(scope, vector) for vector in expr.vectors]
    indices = [constant_int(index, "the index of a vector's element") for index in expr.indices]

    def make(*vectors: Value) -> Value:
        columns = [np.asarray(v).reshape(np.shape(v)[0] if np.ndim(v) else 1, -1) for v in vectors]
        rows = max(column.shape[0] for column in columns)
        joined = np.concatenate([np.broadcast_to(c, (rows, c.shape[1])) for c in columns], axis=1)
        if len(indices) > 1:
            return joined[:, indices]
        return joined[:, indices[0]] if rows > 1 else joined[0, indices[0]]

    def run(m: Engine) -> Value:
        values = [part(m) for part in parts]
        result = make(*map(strip, values))
        if not any(type(value) is Tainted for value in values):
            return result
        origins = [np.broadcast_to(aligned(v.origin, 2), np.shape(v.value)) if type(v) is Tainted
                   else np.zeros(np.shape(v), np.int32) for v in values]  # fmt: skip
        return Tainted(result, np.asarray(make(*origins)))

    return run


def _cast(scope: Scope, expr: Expr) -> Closure:
    value = compile_expression(scope, expr.value)
    source, target = split_dtype(dtype_of(expr.value))[0], split_dtype(dtype_of(expr))[0]
    if source in INDEX_TYPES and target in INDEX_TYPES:
        dtype = storage_dtype(target)
        return lambda m: apply(lambda x: int(x) if is_uniform(x) else x.astype(dtype, copy=False), value(m))
    convert = _conversion(storage_dtype(source), target)
    return lambda m: apply(convert, value(m))


def _conversion(source: DType, target: str) -> Callable[[Value], Value]:
    dtype = storage_dtype(target)
    if is_float(source) and is_float(dtype) and dtype.itemsize >= 4:
        return lambda x: np.asarray(x, source).astype(dtype)[()]
    if target not in INDEX_TYPES and target != "bool":
        return lambda x: to_dtype(x, target)[()]

    def to_python(x: Value) -> Value:
        """Uniform indices and conditions are Python's."""
        converted = to_dtype(x, target)
        return converted.item() if is_uniform(x) else converted

    return to_python


def _let(scope: Scope, expr: Expr) -> Closure:
    value, slot = compile_expression(scope, expr.value), scope.define(expr.var)
    body = compile_expression(scope, expr.body)

    def run(m: Engine) -> Value:
        m.env[slot] = value(m)
        return body(m)

    return run


# --- arithmetic ---------------------------------------------------------------------------------------------------
def _binary(scope: Scope, expr: Expr, row: BinaryRow) -> Closure:
    name, lanes = split_dtype(dtype_of(expr.a))
    if name in INDEX_TYPES and lanes == 1:
        linear = linear_form(scope, expr)
        if linear is not None:
            return linear_closure(*linear)
    floating = is_float(storage_dtype(name))
    function = row[0] if floating else row[1]
    if floating:
        scope.flops += row[2] * lanes
    a, b = compile_expression(scope, expr.a), compile_expression(scope, expr.b)
    if not floating and type(expr).__name__ in ("Max", "Min") and name in INDEX_TYPES:
        inner = function
        function = lambda x, y: int(inner(x, y)) if is_uniform(x) and is_uniform(y) else inner(x, y)  # noqa: E731

    def run(m: Engine) -> Value:
        x, y = a(m), b(m)
        if type(x) is Tainted or type(y) is Tainted:
            return apply(function, x, y)
        return function(x, y)

    return run


def _logical(scope: Scope, expr: Expr) -> Closure:
    """``a && b``, ``a || b``: b only in the lanes that a does not decide."""
    a, b = compile_expression(scope, expr.a), compile_expression(scope, expr.b)
    conjunction = type(expr).__name__ == "And"
    site = scope.site()
    plain = not reads_memory(expr.b)

    def run(m: Engine) -> Value:
        first = a(m)
        if plain and type(first) is not Tainted and not is_uniform(first):
            return apply(np.logical_and if conjunction else np.logical_or, first, b(m))
        first = m.decided(first, site, "a condition")
        if is_uniform(first):
            return b(m) if bool(first) == conjunction else bool(first)
        if first.ndim == 2:
            return apply(np.logical_and if conjunction else np.logical_or, first, b(m))
        mask = m.restrict(first if conjunction else ~first)
        if not mask.count:
            return first
        with m.masked(mask):
            second = b(m)
        return choose(first, second, False) if conjunction else choose(first, True, second)

    return run


def _where(which: Value, yes: Value, no: Value) -> Value:
    dimensions = max(np.ndim(value) for value in (which, yes, no))
    return np.where(*(aligned(value, dimensions) for value in (which, yes, no)))


def _leaves_registers(scope: Scope, expr: Expr) -> bool:
    return any(scope.buffer(load.source).scope != "local" for load in nodes_in(expr, TensorLoad))


def _not(scope: Scope, expr: Expr) -> Closure:
    value = compile_expression(scope, expr.a)
    return lambda m: apply(lambda x: (not x) if is_uniform(x) else np.logical_not(x), value(m))


def _bitwise_not(scope: Scope, expr: Expr) -> Closure:
    value = compile_expression(scope, expr.a)
    return lambda m: apply(lambda x: ~x, value(m))


def conditional(scope: Scope, condition: Expr, yes: Expr, no: Expr) -> Closure:
    """``condition ? yes : no``, each side evaluated only in the lanes that take it.

    Between registers it is an instruction like any other, through which uninitialised values travel: stock TVM's
    allreduce of a maximum compares what lanes beyond the last partner hold, and throws the result away.
    """
    test, site = compile_expression(scope, condition), scope.site()
    a, b = compile_expression(scope, yes), compile_expression(scope, no)
    in_registers = not any(_leaves_registers(scope, part) for part in (condition, yes, no))

    def run(m: Engine) -> Value:
        given = test(m)
        if in_registers and type(given) is Tainted:
            return apply(_where, given, a(m), b(m))
        which = m.decided(given, site, "a condition")
        if is_uniform(which):
            return a(m) if which else b(m)
        if which.ndim == 2:
            return choose(which, a(m), b(m))
        taken, rest = m.restrict(which), m.restrict(~which)
        if not rest.count or not taken.count:
            return a(m) if taken.count else b(m)
        with m.masked(taken):
            first = a(m)
        with m.masked(rest):
            second = b(m)
        return choose(which, first, second)

    return run


# --- memory -------------------------------------------------------------------------------------------------------
def _load(scope: Scope, expr: Expr) -> Closure:
    binding = scope.buffer(expr.source)
    index = buffer_index(scope, binding, expr.indices)
    site = scope.site(binding.name)
    view = View(site=site, dtype=binding.dtype, vector=_provably_aligned(expr.indices[0], binding))
    slot = binding.slot
    return lambda m: m.memory[slot].read(m, view, index(m))


def buffer_index(scope: Scope, binding: BufferBinding, indices: Sequence[Expr]) -> Closure:
    """The flat index of an access, in elements of the buffer's scalar dtype."""
    if len(indices) != 1:
        raise InputError(f"{scope.kernel}: {binding.name} is not flat", "lower the function first, with simt.lower")
    index = compile_expression(scope, indices[0])
    lanes = binding.lanes
    if lanes == 1:
        return index
    inner = np.arange(lanes)  # an element of a buffer of float16x4 is four halves

    def spread(first: Value) -> Value:
        return np.reshape(first, (-1, 1)) * lanes + inner

    return lambda m: apply(spread, index(m))


def _provably_aligned(index: Expr, binding: BufferBinding) -> bool:
    """Whether stock code generation loads ``index``, a ramp of step 1, by one vector access.

    It asks whether the ramp's base is a multiple of its length whatever the variables are (CodeGenC, "modular_set").
    """
    if not isinstance(index, tirx.Ramp):
        return True
    if getattr(index.stride, "value", 0) != 1:
        return False
    modulus = Analyzer().modular_set(index.base)
    lanes = constant_int(index.lanes, "the length of a ramp")
    return bool(modulus.coeff % lanes == 0 and modulus.base % lanes == 0)


# --- calls --------------------------------------------------------------------------------------------------------
def _call(scope: Scope, expr: Expr) -> Closure:
    name = op_name(expr)
    if name in ("prim.if_then_else", "tirx.if_then_else"):
        return conditional(scope, *expr.args)
    if name in ("prim.likely", "tirx.likely"):
        return compile_expression(scope, expr.args[0])
    if name == "tirx.reinterpret":
        return _reinterpret(scope, expr)
    special = scope.special_calls.get(name)
    if special is not None:
        closure: Closure = special(scope, expr)
        return closure
    arguments, function = list(expr.args), CALLS.get(name.rpartition(".")[2])
    if name in NAMED_CALLS:
        called = called_name(expr)
        arguments = arguments[1:-1] if name == CALL_WITH_TEXT else arguments[1:]
        if called in scope.special_externs:
            special_function: Closure = scope.special_externs[called](scope, arguments)
            return special_function
        function = EXTERNS(called)
    if function is None:
        raise InputError(f"{scope.kernel}: the interpreter does not know the call {name}: {expr}")
    return _math(scope, expr, function, arguments)


def _math(scope: Scope, expr: Expr, function: Callable[..., Value], arguments: list[Expr]) -> Closure:
    parts = [compile_expression(scope, argument) for argument in arguments]
    target = split_dtype(dtype_of(expr))[0]
    narrow = target not in ("float32", "float64") and is_float(storage_dtype(target))

    def compute(*values: Value) -> Value:
        if narrow:  # halves are computed in float32 and rounded once
            return to_dtype(function(*(np.asarray(v).astype(np.float32) for v in values)), target)[()]
        result = function(*values)
        return to_dtype(result, target)[()] if getattr(result, "dtype", None) != storage_dtype(target) else result

    return lambda m: apply(compute, *(part(m) for part in parts))


def _reinterpret(scope: Scope, expr: Expr) -> Closure:
    value = compile_expression(scope, expr.args[0])
    source = storage_dtype(split_dtype(dtype_of(expr.args[0]))[0])
    target = storage_dtype(split_dtype(dtype_of(expr))[0])

    def view(x: Value) -> Value:
        return np.ascontiguousarray(np.asarray(x, source)).view(target).reshape(np.shape(x))[()]

    if source.itemsize == target.itemsize:
        return lambda m: apply(view, value(m))

    def run(m: Engine) -> Value:
        """A vector (lanes or 1, elements) as one number."""
        vector = value(m)
        packed = np.ascontiguousarray(strip(vector)).view(target)[:, 0]
        whole = packed[0] if len(packed) == 1 else packed
        if type(vector) is not Tainted:
            return whole
        return Tainted(whole, np.broadcast_to(vector.origin, strip(vector).shape).max(axis=1))

    return run


_MAKERS: dict[str, Callable[[Scope, Any], Closure]] = {
    "IntImm": _int,
    "FloatImm": _float,
    "Var": _variable,
    "Ramp": _ramp,
    "Broadcast": _broadcast,
    "Shuffle": _shuffle,
    "Cast": _cast,
    "Let": _let,
    "And": _logical,
    "Or": _logical,
    "Not": _not,
    "BitwiseNot": _bitwise_not,
    "Select": lambda scope, e: conditional(scope, e.condition, e.true_value, e.false_value),
    "TensorLoad": _load,
    "Call": _call,
}
