"""Channel-blocked layouts (NCHW16c with AVX-512) through chains of convolutions, poolings and what is between them.

Stock TVM's ConvertLayout rewrites every operator that it can, leaves a transform at every one that it cannot, and has
no kernel for blocked convolutions. Here a cost rule decides (`layout/choice.py`), a convolution at either end of a
chain changes the layout by itself, and blocked operators are written as tensor expressions that Roller tiles well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    Constant,
    DataflowBlock,
    Expr,
    IRModule,
    PassContext,
    RelaxFunction,
    Sequential,
    Var,
    VarBinding,
    copy_module,
    expr_mutator,
    functions_of,
    module_pass,
    relax,
)
from tvm_ext.devices.dot_instructions import dot_instruction
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.padding import LAYOUT, LayoutChain, LayoutRecord
from tvm_ext.records.serialise import from_json, to_json

from ..node_names import kept_label
from ..rewriting import CallRewriter
from .blocked import (
    ConvWindow,
    blocked_shape,
    broadcast_operand,
    convolution,
    depthwise_convolution,
    element_wise,
    in_groups,
    shape_of,
    to_blocked,
    to_plain,
)
from .choice import choose_layouts
from .depth import DEPTH, DepthWindow, over_depth
from .graph import CONVOLVED, Operator, read_block, uses
from .weave import WEAVE, Weave, woven


@module_pass(opt_level=0, name="tvm_ext.BlockChannels")
class BlockChannels:
    """Rewrite operators of NCHW, of float32 or quantised, to NCHW[b]c, b the lanes of a SIMD register, where that pays.

    Parameters and results of functions keep their layout. Weights must be constants (`BindParams` comes first) and
    shapes static; everything else is left as it is. The decision is left in module attribute ``tvm_ext.layout``.

    ``device``: the CPU whose register width is the block. ``layout``: ``"auto"``: where the gain pays the transforms;
    ``"NCHWc"``: wherever an operator has a blocked form.
    """

    def __init__(self, device: DeviceSpec, layout: Literal["auto", "NCHWc"] = "auto") -> None:
        self.block, self.always = device.teu_lanes, layout == "NCHWc"
        types = (own for own in CONVOLVED if own[0] != own[2])
        rows = {own[0]: dot_instruction(device, *own) for own in types}
        self.groups = {data: 1 if row is None else row.group for data, row in rows.items()}

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        mutator = _Rewrite(mod, self.block, self.groups)
        chains: list[LayoutChain] = []
        for func in functions_of(mod, RelaxFunction).values():
            chains += mutator.plan(mod, func, always=self.always)
        record = to_json(LayoutRecord(block=self.block, chains=tuple(chains)))
        if not mutator.operators:
            return copy_module(mod).with_attr(LAYOUT, record)
        blocked = mutator.run()
        # Transforms are written after every blocked value; those that nobody reads go.
        clean = Sequential([relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()])
        return clean(blocked).with_attr(LAYOUT, record)


@expr_mutator
class _Rewrite(CallRewriter):
    """Rewrites the planned bindings. A blocked operator's own variable becomes its result transformed back to NCHW."""

    def prepare(self, block: int, groups: Mapping[str, int]) -> None:
        self.block, self.groups = block, groups
        self.operators: dict[Var, Operator] = {}  # by variable: those to rewrite
        self.blocked_variables: set[Var] = set()
        self.blocked: dict[Var, Expr] = {}  # by the original variable: its blocked value, inside one dataflow block
        self.binding: VarBinding | None = None

    def plan(self, mod: IRModule, func: RelaxFunction, *, always: bool) -> list[LayoutChain]:
        """Decide for each dataflow block of ``func``; returns what was decided."""
        chains: list[LayoutChain] = []
        for block in getattr(func.body, "blocks", ()):
            if not isinstance(block, relax.DataflowBlock):
                continue
            operators = read_block(mod, block, self.block)
            results = [binding.var for binding in block.bindings if not isinstance(binding.var, relax.DataflowVar)]
            choice = choose_layouts(operators, uses(block, operators, results), always=always)
            chains += choice.chains
            self.blocked_variables |= choice.blocked
            for operator in operators:
                reads_blocks = any(value in choice.blocked for value in operator.data)
                if operator.variable in choice.blocked or (operator.is_free and reads_blocks):
                    self.operators[operator.variable] = operator
        return chains

    def visit_dataflow_block_(self, block: DataflowBlock) -> DataflowBlock:
        self.blocked = {}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: VarBinding) -> None:
        self.binding = binding.var
        super().visit_var_binding_(binding)

    def visit_call_(self, call: Call) -> Expr:
        operator = self.operators.get(self.binding)
        if operator is None or not operator.call.same_as(call):
            return self.visit_expr_post_order(call)
        write = {
            "convolution": self._convolution,
            "depthwise": self._depthwise,
            "pool": self._pool,
            "pad": self._pad,
            "element-wise": self._element_wise,
            "concat": self._concat,
            "reduce": self._reduce,
            "depth": self._depth,
            "weave": self._weave,
        }[operator.role]
        value = write(operator)
        if operator.variable not in self.blocked_variables or operator.role == "reduce":
            return value  # NCHW already
        self.blocked[operator.variable] = self.builder_.emit(value, kept_label(operator.variable, ""))
        return to_plain(self.builder_, self.blocked[operator.variable])

    def _blocked(self, value: Expr) -> Expr:
        """``value`` in the blocked layout, transformed where it is not yet."""
        if isinstance(value, Constant):
            return to_blocked(self.builder_, value, self.block)
        if value not in self.blocked:
            self.blocked[value] = self.builder_.emit(to_blocked(self.builder_, self.visit_expr(value), self.block))
        return self.blocked[value]

    # --- one method for each role ----------------------------------------------------------------------------------
    def _convolution(self, operator: Operator) -> Expr:
        data, weight = operator.call.args
        # A transform that some pooling asked for does not concern a convolution, which reads either layout.
        reads_blocks = data in self.blocked and data in self.blocked_variables
        source = self.blocked[data] if reads_blocks else self.visit_expr(data)
        group = self.groups.get(str(data.ty.dtype), 1)
        if not reads_blocks and group > 1 and int(operator.call.attrs.groups) == 1:
            # The image itself: a dot-product instruction wants a group of channels beside each other.
            source = self.builder_.emit(in_groups(self.builder_, source, group))
            weight = in_groups(self.builder_, weight, group)
        writes_blocks = operator.variable in self.blocked_variables
        attrs = operator.call.attrs
        compute = convolution(ConvWindow.of(attrs), int(attrs.groups), self.block, blocked_output=writes_blocks)
        return self.builder_.call_te(compute, source, weight, primfunc_name_hint=f"conv2d_NCHW{self.block}c")

    def _depthwise(self, operator: Operator) -> Expr:
        data, weight = operator.call.args
        window, value, pad = ConvWindow.of(operator.call.attrs), 0.0, self.operators.get(data)
        how = pad.call.attrs if pad is not None and pad.role == "pad" and str(data.ty.dtype) == "uint8" else None
        if pad is not None and how is not None and how.pad_mode == "constant" and not any(window.pads):
            # By the zero point of quantised data: the kernel adds what meets padding as a number.
            top, bottom, left, right = map(int, list(how.pad_width)[4:8])
            window, value = replace(window, pads=(top, left, bottom, right)), float(how.pad_value)
            data = pad.data[0]
        compute = depthwise_convolution(window, value)
        hint = f"depthwise_conv2d_NCHW{self.block}c"
        if str(data.ty.dtype) != "uint8":
            return self.builder_.call_te(compute, self._blocked(data), weight, primfunc_name_hint=hint)
        real = relax.const(weight.value.numpy().astype("float32"))  # sums of so few bytes are exact
        sums = self.builder_.emit(self.builder_.call_te(compute, self._blocked(data), real, primfunc_name_hint=hint))
        return relax.op.astype(sums, "int32")

    def _pool(self, operator: Operator) -> Expr:
        attrs = operator.call.attrs
        pool = relax.op.nn.max_pool2d if operator.name == "nn.max_pool2d" else relax.op.nn.avg_pool2d
        return pool(
            self._blocked(operator.data[0]),
            attrs.pool_size,
            attrs.strides,
            attrs.padding,
            attrs.dilation,
            attrs.ceil_mode,
            attrs.count_include_pad,
            layout=f"NCHW{self.block}c",
        )

    def _pad(self, operator: Operator) -> Expr:
        attrs = operator.call.attrs
        widths = [*map(int, attrs.pad_width), 0, 0]  # the block is a fifth axis, behind
        return relax.op.nn.pad(self._blocked(operator.data[0]), widths, attrs.pad_mode, float(attrs.pad_value))

    def _concat(self, operator: Operator) -> Expr:
        parts = [self._blocked(part) for part in operator.data]
        return relax.op.concat(parts, axis=int(operator.call.attrs.axis) % 4)  # the block is a fifth axis, behind

    def _depth(self, operator: Operator) -> Expr:
        window = from_json(DepthWindow, str(self.mod[operator.call.args[0]].attrs[DEPTH]))
        return over_depth(self.builder_, self._blocked(operator.data[0]), window)

    def _weave(self, operator: Operator) -> Expr:
        weave = from_json(Weave, str(self.mod[operator.call.args[0]].attrs[WEAVE]))
        return woven(self.builder_, [self._blocked(value) for value in operator.data], weave)

    def _reduce(self, operator: Operator) -> Expr:
        """One element per channel: as a view it is NCHW."""
        source = self._blocked(operator.data[0])
        name = operator.name if operator.name in ("sum", "max", "min") else "mean"
        reduced = getattr(relax.op, name)(source, axis=[2, 3], keepdims=True)
        return relax.op.reshape(self.builder_.emit(reduced), operator.shape)

    def _element_wise(self, operator: Operator) -> Expr:
        arguments = [self._operand(argument, operator) for argument in self._arguments(operator)]
        if operator.computation is None or operator.body is None:
            return relax.Call(operator.call.op, arguments, operator.call.attrs, operator.call.ty_args)
        shape = blocked_shape(operator.shape, self.block)
        compute = element_wise(operator.computation, operator.body.params, shape)
        return self.builder_.call_te(compute, *arguments, primfunc_name_hint=operator.name)

    def _arguments(self, operator: Operator) -> list[Expr]:
        return list(operator.call.args[1].fields if operator.call.op == CALL_TIR else operator.call.args)

    def _operand(self, value: Expr, operator: Operator) -> Expr:
        if getattr(value, "ty", None) is None or not hasattr(value.ty, "shape"):
            return value  # a number among the arguments
        if shape_of(value) == operator.shape:
            return self._blocked(value)
        return broadcast_operand(self.builder_, self.visit_expr(value), operator.shape[1], self.block)
