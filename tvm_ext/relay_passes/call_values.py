"""The value of a call whose operands are constants, by NumPy: for `FoldCalls`, and for tables of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from tvm_ext._tvm import (
    ALREADY_SCHEDULED,
    CALL_TIR,
    Call,
    Constant,
    Expr,
    GlobalVar,
    IRModule,
    PrimFunc,
    Type,
    Var,
    ir,
    relax,
    tensor,
    tirx,
)
from tvm_ext.analysis.computation_values import operator_values
from tvm_ext.analysis.computations import read_operator
from tvm_ext.errors import IllegalRewrite
from tvm_ext.support.arrays import Array
from tvm_ext.support.limits import check_count, limits
from tvm_ext.support.tensors import array_over

from .indexing_values import RULES
from .legalize_floats import LEGALIZATIONS

_VIEWS = frozenset(f"relax.{name}" for name in ("reshape", "expand_dims", "squeeze", "flatten"))
_KEPT = frozenset({"relax.call_dps_packed", "relax.call_pure_packed", "relax.call_inplace_packed", "relax.null_value"})


def is_known(argument: Expr) -> bool:
    if isinstance(argument, relax.Tuple):
        return all(map(is_known, argument.fields))
    if isinstance(argument, relax.ShapeExpr):
        return all(isinstance(extent, tirx.IntImm) for extent in argument.values)
    return not isinstance(argument, Var | Call) or isinstance(argument, GlobalVar)


def all_known(arguments: Sequence[Expr]) -> bool:
    return all(map(is_known, arguments))


def folded(call: Call, arguments: Sequence[Expr], mod: IRModule) -> Expr:
    """The value of ``call`` on ``arguments``, a constant, a shape or a tuple; IllegalRewrite where it stays a call."""
    if not isinstance(call.op, ir.Op) or not call.op.get_attr("FPurity") or call.op.name in _KEPT:
        raise IllegalRewrite("it is no operator without effects")
    if call.op.name == "relax.shape_of":
        return _static_extents(arguments[0].ty)
    if not all_known(arguments):
        raise IllegalRewrite("an operand is not known")
    if call.op.name in _SHAPES:
        return _SHAPES[call.op.name](arguments[0])
    arrays = [array for argument in arguments for array in _arrays(argument)]
    _check_size(call.ty, arrays)
    return _constants(call.ty, _values(call, arguments, arrays, mod))


def _static_extents(kind: Type) -> Expr:
    values = getattr(getattr(kind, "shape", None), "values", None)
    if values is None or not all(isinstance(extent, tirx.IntImm) for extent in values):
        raise IllegalRewrite("its shape is only known at run time")
    return relax.ShapeExpr([int(extent) for extent in values])


def _to_tensor(shape: Expr) -> Expr:
    return _constant(np.asarray([int(extent) for extent in shape.values], "int64"))


def _to_shape(value: Expr) -> Expr:
    return relax.ShapeExpr([int(extent) for extent in value.value.numpy()])


_SHAPES: dict[str, Callable[[Expr], Expr]] = {"relax.shape_to_tensor": _to_tensor, "relax.tensor_to_shape": _to_shape}


def _arrays(argument: Expr) -> list[Array]:
    if isinstance(argument, relax.Tuple):
        return [array for field in argument.fields for array in _arrays(field)]
    return [array_over(argument.value)] if isinstance(argument, Constant) else []


def _check_size(kind: Type, arrays: Sequence[Array]) -> None:
    count = sum(prod(int(extent) for extent in _static_extents(tensor).values) for tensor in _tensors(kind))
    operands = sum(array.size for array in arrays)
    if operands <= len(arrays) and count > max(operands, limits().folded_filling):
        raise IllegalRewrite("it fills a tensor with one number")  # which is no loss to compute, and not worth a note
    if count > operands:
        check_count("folded_elements", count, "elements")


def _tensors(kind: Type) -> list[Type]:
    if isinstance(kind, relax.TupleType):
        return [tensor for field in kind.fields for tensor in _tensors(field)]
    if not isinstance(kind, relax.TensorType):
        raise IllegalRewrite("its result is no tensor")
    return [kind]


def _values(call: Call, arguments: Sequence[Expr], arrays: Sequence[Array], mod: IRModule) -> list[Array]:
    """The tensors that ``call`` computes."""
    name = str(call.op.name)
    if name in RULES:
        return [RULES[name](call.attrs, *arrays)]
    if name in _VIEWS:
        return [arrays[0].reshape([int(extent) for extent in _static_extents(call.ty).values])]
    if call.op == CALL_TIR:
        return _function_values(mod[call.args[0]], arrays)
    return _legalized_values(type(call)(call.op, list(arguments), call.attrs, call.ty_args))


def _function_values(func: PrimFunc, arrays: Sequence[Array]) -> list[Array]:
    if not isinstance(func, PrimFunc) or (func.attrs and ALREADY_SCHEDULED in func.attrs):
        raise IllegalRewrite("it calls what is no unscheduled function")
    return operator_values(read_operator(func, "folded"), arrays)


def _legalized_values(call: Call) -> list[Array]:
    """The values of an operator by the PrimFunc that `legalize_operators` would make of it."""
    rule = LEGALIZATIONS.get(str(call.op.name)) or call.op.get_attr("FLegalize")
    if rule is None:
        raise IllegalRewrite(f"{call.op.name} has no tensor expression")
    builder = relax.BlockBuilder()
    with builder.function("legalized", []):  # for rules that make several calls, of which nothing is known here
        made = rule(builder, builder.normalize(call))
        builder.emit_func_output(made)
    return _values_of(made, call, builder.get())


def _values_of(made: Expr, call: Call, mod: IRModule) -> list[Array]:
    if isinstance(made, Constant):
        return _arrays(made)
    if not isinstance(made, Call) or made.op != CALL_TIR:
        if isinstance(made, Call) and made.op != call.op:
            # Of what the rule has made a function of already: the cast of a mean.
            known = [
                _constant(_operand(argument, mod)) if isinstance(argument, (Call, Var)) else argument
                for argument in made.args
            ]
            return _legalized_values(Call(made.op, known, made.attrs, made.ty_args))
        raise IllegalRewrite(f"{call.op.name} is not one function of tensors")
    return _function_values(mod[made.args[0]], [_operand(field, mod) for field in made.args[1].fields])


def _operand(field: Expr, mod: IRModule) -> Array:
    """An operand of a legalized call, which may be a call itself: of a cast of what the operator was given, say."""
    if isinstance(field, Var):
        bindings = (binding for block in mod["legalized"].body.blocks for binding in block.bindings)
        return _operand(next(binding.value for binding in bindings if binding.var.same_as(field)), mod)
    if isinstance(field, Call):
        return _values_of(field, field, mod)[0] if field.op == CALL_TIR else _legalized_values(field)[0]
    if not isinstance(field, Constant):
        raise IllegalRewrite("an operand is not known")
    return _arrays(field)[0]


def _constants(kind: Type, values: Sequence[Array]) -> Expr:
    for own, value in zip(_tensors(kind), values, strict=True):
        if str(value.dtype) != str(own.dtype) or value.shape != tuple(map(int, own.shape.values)):
            raise IllegalRewrite(f"a value of type {value.dtype} where {own.dtype} is expected")
    made = [_constant(value) for value in values]
    return relax.Tuple(made) if isinstance(kind, relax.TupleType) else made[0]


def _constant(value: Array) -> Expr:
    return relax.const(tensor(np.ascontiguousarray(value).reshape(value.shape)))  # of an array int64 becomes int32
