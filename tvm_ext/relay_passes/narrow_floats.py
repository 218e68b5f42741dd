"""float32 products and convolutions with constant weights as those of bfloat16, whose sums stay float32.

Weights are rounded when a model is built. Data are rounded where they are made: the conversion joins the epilogue of
what is before, and goes ahead of views and transposes. Sums, biases, norms, softmax and residual additions stay
float32, as does what no instruction serves: depthwise convolutions, odd reductions. Of products of two tensors those of
an attention are narrowed by `FuseAttention`.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes

from tvm_ext._tvm import (
    Call,
    Constant,
    DataflowBlock,
    Expr,
    IRModule,
    Pass,
    PassContext,
    copy_module,
    expr_mutator,
    module_pass,
    nodes_in,
    relax,
)
from tvm_ext.analysis.relax_values import dtype_of, operator_name, static_shape
from tvm_ext.devices.dot_instructions import DOT_INSTRUCTIONS, WIDENED, DotInstruction, dot_instruction, has_row
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.records.packed import ROUNDED
from tvm_ext.records.precision import (
    BEYOND_BOUND,
    PRECISION,
    NarrowedProduct,
    PrecisionRecord,
    kept_in_float32,
    precision_record,
)
from tvm_ext.records.serialise import to_json

from .composites import OwnTime
from .narrowed_time import ExpectedGain
from .rewriting import CallRewriter

_MATMUL, _CONV = "relax.matmul", "relax.nn.conv2d"
_MOVES = ("relax.reshape", "relax.permute_dims", "relax.squeeze", "relax.expand_dims", "relax.flatten")
"""What has the same elements in another order: its operand is rounded instead."""

BFLOAT16 = "bfloat16"

ProductJudge = Callable[[NarrowedProduct, Call], str]
"""Why a product stays float32; empty where it does not."""


def narrow_floats(device: DeviceSpec, options: BuildOptions, own_time: OwnTime) -> list[Pass]:
    """What ``options.precision`` asks for on ``device``; raises OptionError where that has no such instruction."""
    precision = options.precision
    if precision == "float32":
        return []
    if device.kind != "cpu" or options.enable_roller is False:
        raise OptionError(
            f"option 'precision' is {precision!r}, and that takes kernels that Roller constructs for a CPU.",
            "leave the option out: a GPU's half precision is that of the model (tvm_ext.relay.frontend)",
        )
    if precision == "int8":
        return [RequireQuantised()]
    row = dot_instruction(device, BFLOAT16, BFLOAT16, "float32")
    if precision == "auto":
        return [] if row is None else [NarrowFloats(device, row, ExpectedGain(device, row.group, own_time))]
    if precision == BFLOAT16 and (row is None or row.name == WIDENED):
        raise OptionError(
            f"option 'precision' is {precision!r}, and {device.description} has no instruction for it: {_has(device)}.",
            "pass 'auto' and a bound for what is faster, or 'bfloat16-emulated': the same values by float32 arithmetic",
        )
    return [NarrowFloats(device, row, lambda *_: "")]


def _has(device: DeviceSpec) -> str:
    names = [name for name in (row.name for row in DOT_INSTRUCTIONS if has_row(device, row)) if name != WIDENED]
    return f"of dot products it has {', '.join(dict.fromkeys(names))}" if names else "it has no dot products"


@module_pass(opt_level=0, name="tvm_ext.RequireQuantised")
class RequireQuantised:
    """For ``precision="int8"``: raise OptionError where no product of the module adds up integers."""

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        products = [call for call in nodes_in(mod, Call) if operator_name(call) in (_MATMUL, _CONV)]
        has_sums = any(dtype_of(call) == "int32" for call in products)
        if has_sums or any(func.attrs and ROUNDED in func.attrs for _, func in mod.functions_items()):
            return copy_module(mod)
        raise OptionError(
            "option 'precision' is 'int8', and the model has no quantised products.",
            "quantise the model first (`tvm-ext quantize`); quantised models run so without the option",
        )


@module_pass(opt_level=0, name="tvm_ext.NarrowFloats")
class NarrowFloats:
    """Rewrite float32 ``matmul`` and ``conv2d`` by constants to operands of bfloat16, where ``judge`` has nothing
    against it.

    ``row`` is the instruction of the ``device`` that serves them; None: plain arithmetic. What was decided is left in
    module attribute `PRECISION`, behind what `KeepHalves` left there.
    """

    def __init__(self, device: DeviceSpec, row: DotInstruction | None, judge: ProductJudge) -> None:
        self.name, self.group = (row.name, row.group) if row is not None else ("float32 arithmetic", 1)
        self.lanes, self.judge = device.teu_lanes, judge

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        rewriter = _RoundedOperands(mod, self.group, self.lanes, self.judge)
        result = rewriter.run()
        record = PrecisionRecord(instruction=self.name, products=tuple(rewriter.products))
        return relax.transform.DeadCodeElimination()(result).with_attr(PRECISION, to_json(record))


@expr_mutator
class _RoundedOperands(CallRewriter):
    def prepare(self, group: int, lanes: int, judge: ProductJudge) -> None:
        self.group, self.lanes, self.judge = group, lanes, judge
        self.kept = kept_in_float32(self.mod)
        found = precision_record(self.mod)
        self.products = [*found.products] if found is not None else []
        self.rounded: dict[Expr, Expr] = {}  # by value, inside one block: the same as bfloat16

    def visit_dataflow_block_(self, block: DataflowBlock) -> DataflowBlock:
        self.rounded = {}
        return super().visit_dataflow_block_(block)

    def rewritten(self, call: Call) -> Expr:
        name = operator_name(call)
        if name not in (_MATMUL, _CONV) or dtype_of(call) != "float32" or not isinstance(call.args[1], Constant):
            return call
        types = {dtype_of(value) for value in call.args[:2]}
        if types != {"float32"} or isinstance(call.args[0], Constant):
            return call
        shapes = [static_shape(value) for value in (call, *call.args[:2])]
        if None in shapes:
            return call
        why = self._refused_product(call) if name == _MATMUL else self._refused_convolution(call)
        result, data, weights = (shape or () for shape in shapes)
        product = NarrowedProduct(
            kind=name.removeprefix("relax.").removeprefix("nn."), data=data, weights=weights, result=result, reason=why
        )
        if not why and len(self.products) in self.kept:
            product = product.refused(BEYOND_BOUND)
        if not product.reason:
            product = product.refused(self.judge(product, call))
        self.products.append(product)
        if product.reason:
            return call
        narrow = relax.const(call.args[1].value.numpy().astype(ml_dtypes.bfloat16), BFLOAT16)
        operands = [self._as_bfloat16(call.args[0]), narrow]
        if name == _MATMUL:
            return relax.op.matmul(*operands, out_dtype="float32")
        attrs = call.attrs
        return relax.op.nn.conv2d(
            *operands, attrs.strides, attrs.padding, attrs.dilation, int(attrs.groups), out_dtype="float32"
        )

    def _as_bfloat16(self, value: Expr) -> Expr:
        """``value`` rounded, once for all that read it."""
        known = self.rounded.get(value)
        if known is not None:
            return known
        made = self.bound(value)
        if operator_name(made) in _MOVES:
            moved = relax.Call(made.op, [self._as_bfloat16(made.args[0]), *made.args[1:]], made.attrs)
            result = self.builder_.emit(moved)
        else:
            result = self.builder_.emit(relax.op.astype(value, BFLOAT16))
        self.rounded[value] = result
        return result

    # --- what no instruction serves ---------------------------------------------------------------------------------
    def _refused_product(self, call: Call) -> str:
        weights = static_shape(call.args[1]) or ()
        if len(weights) != 2 or len(static_shape(call.args[0]) or ()) < 2:
            return "its weights are no matrix"
        return self._odd(weights[0])

    def _refused_convolution(self, call: Call) -> str:
        attrs, groups = call.attrs, int(call.attrs.groups)
        if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCHW", "OIHW", "NCHW"):
            return "its layout is not NCHW"
        filters, depth, *_ = static_shape(call.args[1]) or ()
        if groups == 1:
            return "" if (static_shape(call) or ())[2:] != (1, 1) else "it has one output a channel"
        if depth == 1:
            return "depthwise convolutions stay float32"
        whole = depth % self.lanes == 0 and filters // groups % self.lanes == 0
        return "" if whole else "its groups are no whole blocks of channels"

    def _odd(self, depth: int) -> str:
        return "" if depth % self.group == 0 else f"its reduction over {depth} is no whole groups of {self.group}"
