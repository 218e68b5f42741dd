"""Reads a dataflow block as the operators that know the channel-blocked layout, and the values between them.

Three ways an operator may care about layouts:

* *free*: a dense or grouped convolution reads either layout and writes either: it loads its data one element at a time
  (broadcast over output channels), so only the order of its output is at stake;
* *tied*: pooling, depthwise convolution, padding, element-wise, concatenation, windows over depth, interleaved
  phases: what is read and written must agree;
* everything else reads and writes NCHW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

from tvm_ext._tvm import (
    CALL_TIR,
    Attrs,
    Call,
    Constant,
    DataflowBlock,
    Expr,
    IRModule,
    PrimFunc,
    Var,
    ir,
    nodes_in,
    tirx,
)
from tvm_ext.analysis.computations import Computation, OperatorBody, read_operator, replace_loads
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.serialise import record_of

from .blocked import shape_of
from .depth import DEPTH
from .weave import WEAVE, Weave

Role = Literal["convolution", "depthwise", "pool", "pad", "weave", "element-wise", "concat", "reduce", "depth"]

_ELEMENT_WISE = """
abs add astype ceil clip cos divide erf exp floor log maximum minimum multiply negative power round rsqrt sigmoid sign
sin sqrt square subtract tanh nn.gelu nn.gelu_tanh nn.leakyrelu nn.relu nn.relu6 nn.selu nn.silu nn.softplus
"""
ELEMENT_WISE = frozenset(f"relax.{name}" for name in _ELEMENT_WISE.split())
POOLS = frozenset(("relax.nn.max_pool2d", "relax.nn.avg_pool2d"))
ADAPTIVE_POOL = "relax.nn.adaptive_avg_pool2d"
NUMBERS = ("float32", "bfloat16", "int32", "uint8", "int8")
"""Types of tensors that may be blocked: floats, and those of quantised operators."""
CONVOLVED = (("float32", "float32", "float32"), ("bfloat16", "bfloat16", "float32"), ("uint8", "int8", "int32"))
"""Types of a convolution's data, weights and result."""
REDUCTIONS = frozenset(f"relax.{name}" for name in ("mean", "sum", "max", "min"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operator:
    """A binding ``variable = call`` that can be written in the blocked layout.

    ``data`` are the values whose layout is at stake; the other arguments broadcast over rows and columns.
    ``computation`` is the body of an element-wise ``call_tir``, with ``body`` around it. ``may_be_blocked``: whether
    the operator itself has a blocked form (a convolution to 1000 channels reads blocks of 16, but cannot write them).
    """

    variable: Var
    call: Call
    role: Role
    data: tuple[Expr, ...]
    block: int
    computation: Computation | None = None
    body: OperatorBody | None = None
    may_be_blocked: bool = True

    @property
    def name(self) -> str:
        return str(
            self.call.args[0].name_hint if self.call.op == CALL_TIR else self.call.op.name.removeprefix("relax.")
        )

    @property
    def is_free(self) -> bool:
        return self.role == "convolution"

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.variable)


_Make = Callable[..., Operator]
"""An `Operator` of a call, by what else there is to say of it."""


def elements(value: Expr) -> int:
    """What a transform of ``value`` has to move: nothing where a channel is one element, for that is a view."""
    shape = shape_of(value)
    return 0 if len(shape) < 4 or shape[2] == shape[3] == 1 else prod(shape)


def read_block(mod: IRModule, block: DataflowBlock, lanes: int) -> tuple[Operator, ...]:
    """The operators of a dataflow block that have a form for blocks of ``lanes`` channels."""
    found = []
    for binding in block.bindings:
        value = getattr(binding, "value", None)
        if isinstance(value, Call):
            operator = _read(mod, binding.var, value, lanes)
            found += [operator] if operator is not None else []
    return tuple(found)


def _read(mod: IRModule, variable: Var, call: Call, lanes: int) -> Operator | None:
    make = partial(Operator, variable=variable, call=call, block=lanes)
    if call.op == CALL_TIR:
        return _element_wise_function(mod, make, variable, call, lanes)
    if not isinstance(call.op, ir.Op) or not all(_is_static(item) for item in (variable, *call.args) if _typed(item)):
        return None
    name, data = str(call.op.name), call.args[0]
    if name == "relax.nn.conv2d":
        return _convolution(make, variable, call, lanes)
    if name in ELEMENT_WISE:
        return _element_wise(make, variable, call, lanes)
    if name == "relax.concat":
        parts = tuple(getattr(data, "fields", ()))
        legal = parts and call.attrs.axis is not None and all(is_blockable(part, lanes) for part in (variable, *parts))
        return make(role="concat", data=parts) if legal else None
    role = _role_by_channel(name, call.attrs)
    return make(role=role, data=(data,)) if role is not None and is_blockable(data, lanes) else None


def _role_by_channel(name: str, attrs: Attrs) -> Role | None:
    """Of an operator on one tensor that leaves channels apart; "reduce": over all rows and columns."""
    if name in POOLS:
        return "pool" if attrs.layout == attrs.out_layout == "NCHW" else None
    if name == "relax.nn.pad":
        return "pad" if not any(attrs.pad_width[:4]) else None
    if name == ADAPTIVE_POOL:
        whole = tuple(int(size) for size in attrs.output_size) == (1, 1)
        return "reduce" if whole and attrs.layout == attrs.out_layout == "NCHW" else None
    axes = attrs.axis if name in REDUCTIONS else None
    return "reduce" if axes is not None and sorted(int(axis) % 4 for axis in axes) == [2, 3] else None


def is_blockable(value: Expr, lanes: int) -> bool:
    """Whether ``value`` is a tensor (n, c, h, w) of `NUMBERS`, of static shape and whole blocks of channels."""
    if not _typed(value) or not _is_static(value) or str(value.ty.dtype) not in NUMBERS:
        return False
    shape = shape_of(value)
    return len(shape) == 4 and shape[1] % lanes == 0 and prod(shape) > 0


def _typed(value: Expr) -> bool:
    return getattr(getattr(value, "ty", None), "shape", None) is not None


def _is_static(value: Expr) -> bool:
    try:
        shape_of(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_image(value: Expr) -> bool:
    return _typed(value) and len(shape_of(value)) == 4


def _convolution(make: _Make, variable: Var, call: Call, lanes: int) -> Operator | None:
    data, weight = call.args
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)
    if layouts != ("NCHW", "OIHW", "NCHW") or not isinstance(weight, Constant):
        return None
    tensors = (data, weight, variable)
    if not all(map(_is_image, tensors)) or tuple(str(tensor.ty.dtype) for tensor in tensors) not in CONVOLVED:
        return None
    if elements(variable) == 0:
        return None  # one output element per channel is a matrix-vector product: it has kernels of its own
    features, depth = shape_of(weight)[:2]
    groups = int(attrs.groups)
    if groups == features == shape_of(data)[1] and groups > 1:
        legal = depth == 1 and is_blockable(data, lanes)
        return make(role="depthwise", data=(data,)) if legal else None
    if groups > 1 and (depth % lanes or (features // groups) % lanes):
        return None
    return make(role="convolution", data=(data,), may_be_blocked=is_blockable(variable, lanes))


def _element_wise(make: _Make, variable: Var, call: Call, lanes: int) -> Operator | None:
    if not is_blockable(variable, lanes):
        return None
    tensors = [argument for argument in call.args if _typed(argument)]
    data = tuple(
        tensor for tensor in tensors if shape_of(tensor) == shape_of(variable) and not isinstance(tensor, Constant)
    )
    if not data or any(str(tensor.ty.dtype) not in NUMBERS or len(shape_of(tensor)) > 4 for tensor in tensors):
        return None
    return make(role="element-wise", data=data)


def _element_wise_function(mod: IRModule, make: _Make, variable: Var, call: Call, lanes: int) -> Operator | None:
    """A ``call_tir`` of one element-wise computation over tensors of the result's shape and scalars (a Clip, say)."""
    func = mod[call.args[0]]
    arguments = list(call.args[1].fields)
    blockable = all(is_blockable(item, lanes) for item in arguments)
    if DEPTH in (func.attrs or {}):
        return make(role="depth", data=(arguments[0],)) if blockable else None
    weave = record_of(func, WEAVE, Weave)
    if weave is not None:
        legal = blockable and shape_of(variable)[1] % (weave.groups * lanes) == 0
        return make(role="weave", data=tuple(arguments)) if legal else None
    if not is_blockable(variable, lanes) or not isinstance(func, PrimFunc):
        return None
    try:
        body = read_operator(func, call.args[0].name_hint)
    except IllegalRewrite:
        return None
    if (
        len(body.computations) != 1
        or len(body.params) != len(arguments) + 1
        or not _is_element_wise(body.computations[0])
    ):
        return None
    data = tuple(
        argument
        for argument in arguments
        if shape_of(argument) == shape_of(variable) and not isinstance(argument, Constant)
    )
    if not data:
        return None
    computation = body.computations[0]
    return make(role="element-wise", data=data, computation=computation, body=body)


def _is_element_wise(computation: Computation) -> bool:
    if computation.is_reduction or not computation.writes_at_its_own_axes():
        return False
    if not all(_at(load.indices, computation.variables) or not len(load.indices) for load in computation.loads()):
        return False
    # The axes must not appear outside of loads: a value such as `x[i] * i` depends on where it is.
    return not nodes_in(replace_loads(computation.value, lambda item: tirx.const(0, str(item.source.ty.dtype))), Var)


def _at(indices: Sequence[Expr], variables: Sequence[Var]) -> bool:
    return len(indices) == len(variables) and all(i.same_as(v) for i, v in zip(indices, variables, strict=True))


def uses(block: DataflowBlock, operators: Sequence[Operator], results: Sequence[Expr]) -> set[Var]:
    """Variables of ``block`` that something other than ``operators`` reads, so that they must exist as NCHW.

    ``results`` are read by what comes after the block.
    """
    covered = {operator.variable for operator in operators}
    values = [binding.value for binding in block.bindings if binding.var not in covered]
    return {*results, *nodes_in(values, Var)}
