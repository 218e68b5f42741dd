"""What stock ConvertLayout leaves to do: operators it has no rules for, filters of groups, transposes."""

from __future__ import annotations

import numpy as np

from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    Constant,
    Expr,
    IRModule,
    Node,
    Var,
    expr_mutator,
    relax,
)
from tvm_ext.analysis.relax_values import dtype_of, is_tensor, operator_name, static_shape
from tvm_ext.byoc_cutlass.activations import is_spelling
from tvm_ext.byoc_cutlass.graph_values import GraphValues

from ..rewriting import CallRewriter

CONVOLUTION, TRANSPOSE = "relax.nn.conv2d", "relax.permute_dims"


def is_call_of(node: Node, operator: str) -> bool:
    return isinstance(node, Call) and getattr(node.op, "name", "") == operator


@expr_mutator
class SpellForLayouts(CallRewriter):
    """Operators as stock ConvertLayout has rules for them: it knows no functions, no clip, no operands of fewer axes.

    Worked example: BatchNormalization's scale of shape (64, 1, 1) becomes (1, 64, 1, 1), and goes along.
    """

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.values: GraphValues | None = None

    def run(self) -> IRModule:
        for gv, func in self.mod.functions_items():
            if isinstance(func, relax.Function) and isinstance(func.body, relax.SeqExpr):
                self.values = GraphValues(self.mod, func)
                self.builder_.update_func(gv, self.visit_expr(func))
        return self.builder_.get()

    def visit_call_(self, call: Call) -> Expr:
        known = self.values.operator_of(call) if self.values is not None else None
        visited = self.visit_expr_post_order(call)
        if known is None:
            return visited
        if call.op == CALL_TIR:
            return getattr(relax.op, known[0])(*visited.args[1].fields)
        if known[0] == "clip":
            low, high = (relax.const(bound.value, dtype_of(call)) for bound in visited.args[1:])
            return relax.op.minimum(self.builder_.emit(relax.op.maximum(visited.args[0], low)), high)
        if is_spelling(known[0]) and any(isinstance(argument, Constant) for argument in visited.args):
            operands = [_of_rank(argument, len(static_shape(call) or ())) for argument in visited.args]
            return Call(visited.op, operands, visited.attrs, visited.ty_args)
        return visited


def _of_rank(operand: Expr, rank: int) -> Expr:
    """A constant with leading axes of one; what has no axes, or is no constant, as it is."""
    if not isinstance(operand, Constant) or not 0 < len(operand.value.shape) < rank:
        return operand
    array = operand.value.numpy()
    return relax.const(array.reshape((1,) * (rank - array.ndim) + array.shape), str(array.dtype))


@expr_mutator
class TurnFilters(CallRewriter):
    """Filters of NHWC convolutions from OIHW to OHWI."""

    def rewritten(self, call: Call) -> Expr:
        if not is_call_of(call, CONVOLUTION) or str(call.attrs.data_layout) != "NHWC":
            return call
        if str(call.attrs.kernel_layout) != "OIHW":
            return call
        turned = self.builder_.emit(relax.op.permute_dims(call.args[1], (0, 2, 3, 1)))
        attrs = call.attrs
        return relax.op.nn.conv2d(
            call.args[0],
            turned,
            strides=list(attrs.strides),
            padding=list(attrs.padding),
            dilation=list(attrs.dilation),
            groups=int(attrs.groups),
            data_layout="NHWC",
            kernel_layout="OHWI",
            out_layout=str(attrs.out_layout),
            out_dtype=str(call.ty.dtype),
        )


@expr_mutator
class SinkTransposes(CallRewriter):
    """Transposes move behind element-wise operators that read nothing else; one that meets its inverse is gone.

    Stock's conversion has no rule for `where`: around each it leaves a transpose for every operand and one behind it.
    """

    def rewritten(self, call: Call) -> Expr:
        name = (operator_name(call) or "").removeprefix("relax.")
        if name == "permute_dims":
            return self._joined(call)
        return self._sunk(call) if is_spelling(name) else call

    def _transpose(self, operand: Expr) -> Call | None:
        """The transpose that a value is bound to, its axes given."""
        bound = self.lookup_binding(operand) if isinstance(operand, Var) else None
        if bound is None or not is_call_of(bound, TRANSPOSE):
            return None
        return bound if bound.attrs.axes is not None else None

    def _joined(self, call: Call) -> Expr:
        inner = self._transpose(call.args[0])
        if inner is None or call.attrs.axes is None:
            return call
        axes = tuple(axes_of(inner)[axis] for axis in axes_of(call))
        return inner.args[0] if axes == tuple(range(len(axes))) else relax.op.permute_dims(inner.args[0], axes)

    def _sunk(self, call: Call) -> Expr:
        found = [self._transpose(argument) for argument in call.args]
        axes = {axes_of(item) for item in found if item is not None}
        if len(axes) != 1:
            return call
        (common,) = axes
        operands = [
            item.args[0] if item is not None else _turned(operand, common)
            for item, operand in zip(found, call.args, strict=True)
        ]
        if any(operand is None for operand in operands):
            return call
        value = self.builder_.emit(Call(call.op, operands, call.attrs, call.ty_args))
        return relax.op.permute_dims(value, common)


def axes_of(call: Call) -> tuple[int, ...]:
    """The axes of a transpose, none of them negative."""
    return tuple(int(axis) % len(call.attrs.axes) for axis in call.attrs.axes)


def _turned(operand: Expr, axes: tuple[int, ...]) -> Expr | None:
    """An operand as it is before a transpose by ``axes``; None where that would have to be computed."""
    if not is_tensor(operand) or static_shape(operand) == ():
        return operand
    if not isinstance(operand, Constant) or operand.value.numpy().ndim != len(axes):
        return None
    array = operand.value.numpy().transpose(np.argsort(axes))
    return relax.const(np.ascontiguousarray(array), str(array.dtype))


@expr_mutator
class FoldTransposes(CallRewriter):
    """Transposes constants; stock FoldConstant would compile a kernel for each."""

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.done: dict[tuple[Expr, tuple[int, ...]], Expr] = {}

    def rewritten(self, call: Call) -> Expr:
        if not is_call_of(call, TRANSPOSE):
            return call
        source = call.args[0] if isinstance(call.args[0], Constant) else self.lookup_binding(call.args[0])
        if not isinstance(source, Constant) or call.attrs.axes is None:
            return call
        axes = tuple(int(axis) for axis in call.attrs.axes)
        if (source.value, axes) not in self.done:
            array = source.value.numpy()
            self.done[source.value, axes] = relax.const(np.ascontiguousarray(array.transpose(axes)), str(array.dtype))
        return self.done[source.value, axes]
