"""Channels-last layouts for convolutions of halves and bytes on GPUs with matrix units.

A matrix instruction takes runs of the reduction axis, a convolution's channels: with NHWC activations and OHWI weights
they are neighbours in memory, and a threadblock copies 16 bytes at a time to shared memory; with NCHW it gathers single
elements. Stock ConvertLayout carries the layout through what lies between the convolutions. What it cannot carry it
transposes, so the conversion is kept only where few transposes of activations remain; those of weights are done here,
once, at compile time.

Before and behind stock ConvertLayout comes what it leaves to do: operators it has no rules for, filters of groups,
transposes.
"""

from __future__ import annotations

import numpy as np

from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    Constant,
    Expr,
    IRModule,
    Node,
    PassContext,
    Sequential,
    copy_module,
    expr_mutator,
    module_pass,
    nodes_in,
    relax,
)
from tvm_ext.analysis.relax_values import dtype_of, is_tensor, operator_name, static_shape
from tvm_ext.byoc_cutlass.activations import is_spelling
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.padding import CHANNELS_LAST, LAYOUT, LayoutChain, LayoutRecord
from tvm_ext.records.serialise import to_json

from ..rewriting import CallRewriter

CONVOLUTION, TRANSPOSE = "relax.nn.conv2d", "relax.permute_dims"


def is_call_of(node: Node, operator: str) -> bool:
    return isinstance(node, Call) and getattr(node.op, "name", "") == operator


@expr_mutator
class SpellForLayouts(CallRewriter):
    """Operators as stock ConvertLayout has rules for them: it knows no functions, no clip, no operands of fewer axes.

    Worked example: BatchNormalization's scale of shape (64, 1, 1) becomes (1, 64, 1, 1), and goes along.
    """

    def prepare(self) -> None:
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
        bound = self.bound(operand)
        return bound if is_call_of(bound, TRANSPOSE) and bound.attrs.axes is not None else None

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


@expr_mutator
class ViewTransposes(CallRewriter):
    """Transposes that move axes of one element alone become reshapes, which are views and launch nothing.

    Worked example: a pool's (32, 1, 1, 2048) to (32, 2048, 1, 1), behind the last convolution of a ResNet.
    """

    def rewritten(self, call: Call) -> Expr:
        shape = static_shape(call.args[0]) if is_call_of(call, TRANSPOSE) else None
        if shape is None or call.attrs.axes is None:
            return call
        moved = [axis for axis in axes_of(call) if shape[axis] > 1]
        if moved != sorted(moved):
            return call
        return relax.op.reshape(call.args[0], [shape[axis] for axis in axes_of(call)])


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

    def prepare(self) -> None:
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


NHWC = ("NHWC", "OHWI")
TRANSPOSES_PER_CONVOLUTION = 0.5
"""Keep the new layout up to so many transposes of activations per convolution: each costs two passes over memory."""


@module_pass(opt_level=0, name="tvm_ext.ChannelsLast")
class ChannelsLast:
    """Rewrite convolutions of halves and bytes, and what is between them, from NCHW to NHWC where that pays.

    Parameters and results of functions keep their layout. What was decided is left in module attribute
    ``tvm_ext.layout``. Grouped convolutions stay: our kernels for matrix units do not serve them.

    * ``device``: the GPU; without matrix units for a convolution's type it stays as it is.
    * ``always``: convert whatever the number of transposes.
    * ``grouped``: grouped convolutions too, depthwise ones among them: CUTLASS's templates for them read NHWC alone.
    """

    def __init__(self, device: DeviceSpec, *, always: bool = False, grouped: bool = False) -> None:
        self.device, self.always, self.grouped = device, always, grouped

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        convolutions = [call for call in _calls(mod, CONVOLUTION) if self._is_served(call)]
        if not convolutions:
            return copy_module(mod)
        try:
            converted = FoldTransposes(self._converted(mod)).run()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = f"stock ConvertLayout fails: {str(error).strip().splitlines()[-1]}"
            return self._noted(copy_module(mod), 0, 0, len(convolutions), reason)
        added = len(_calls(converted, TRANSPOSE)) - len(_calls(mod, TRANSPOSE))
        if added > TRANSPOSES_PER_CONVOLUTION * len(convolutions) and not self.always:
            reason = f"{added} transposes of activations would remain for {len(convolutions)} convolutions"
            return self._noted(copy_module(mod), 0, 0, len(convolutions), reason)
        reason = "matrix units read channels that are neighbours in memory"
        return self._noted(converted, len(convolutions), added, len(convolutions), reason)

    def _converted(self, mod: IRModule) -> IRModule:
        bytes_read = any(dtype_of(call.args[0]) == "int8" for call in _calls(mod, CONVOLUTION))
        if not self.grouped and not bytes_read:  # whose results are clipped
            return relax.transform.ConvertLayout({}, self._layouts)(mod)
        converted = relax.transform.ConvertLayout({}, self._layouts)(SpellForLayouts(mod).run())
        # Stock's rule moves the data of grouped convolutions, and leaves their filters as they are.
        moved = ViewTransposes(SinkTransposes(TurnFilters(converted).run()).run()).run()
        # Transposes that cancelled out are `y = x` bindings, which would end an epilogue.
        return Sequential([relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()])(moved)

    @staticmethod
    def _noted(mod: IRModule, converted: int, transposes: int, candidates: int, reason: str) -> IRModule:
        """``mod`` with what was decided, for the report."""
        chain = LayoutChain(
            operators=(CONVOLUTION,) * candidates,
            blocked_count=converted,
            transform_count=transposes,
            saved_elements=0.0,
            reason=reason,
        )
        return mod.with_attr(LAYOUT, to_json(LayoutRecord(block=CHANNELS_LAST, chains=(chain,))))

    def _layouts(self, call: Call) -> dict[str, list[str]]:
        """What ConvertLayout asks for every call of the module."""
        return {CONVOLUTION: list(NHWC)} if is_call_of(call, CONVOLUTION) and self._is_served(call) else {}

    def _is_served(self, call: Call) -> bool:
        """Whether the matrix units may compute this convolution, given as NCHW."""
        attrs, dtype = call.attrs, str(call.args[0].ty.dtype)
        layouts = (str(attrs.data_layout), str(attrs.kernel_layout))
        has_units = self.device.peak_gflops_of(f"{dtype}_tensor") is not None
        grouped = int(attrs.groups) > 1 and not self.grouped
        return dtype in ("float16", "bfloat16", "int8") and has_units and not grouped and layouts == ("NCHW", "OIHW")


def _calls(mod: IRModule, operator: str) -> list[Call]:
    """The calls of ``operator`` in all Relax functions of ``mod``."""
    return [call for call in nodes_in(mod, Call) if is_call_of(call, operator)]
