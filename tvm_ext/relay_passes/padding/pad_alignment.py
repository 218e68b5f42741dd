"""Pads channels, K and N to copies of 16 bytes where the model says that it pays (Bolt §3.2.3).

Decided padding is written block by block: prepared weights, wider values, copies where both forms are needed. A value
keeps its variable in the form without padding, so that whatever reads it stays as it is; the padded form has a variable
of its own. Either is made where it is first asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tvm_ext._tvm import (
    BlockBuilder,
    Call,
    Constant,
    DataflowBlock,
    DataflowVar,
    Expr,
    GlobalVar,
    IRModule,
    Node,
    PassContext,
    RelaxFunction,
    Sequential,
    Var,
    VarBinding,
    copy_module,
    module_pass,
    relax,
)
from tvm_ext.analysis.relax_values import dtype_of, is_graph, is_tensor, shapes_of, static_shape
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.padding import PADDING, PaddingRecord, PaddingSource, ProductPadding
from tvm_ext.records.serialise import to_json
from tvm_ext.support.arrays import Array

from ..rewriting import with_blocks
from .choice import PaddingChoice
from .graph import PaddableBlock, PaddingNode, Runs, constant_content, last_extent


@module_pass(opt_level=0, name="tvm_ext.PadAlignment")
class PadAlignment:
    """Pad the operands of products on matrix units so that both can be copied 16 bytes at a time.

    Weights are padded here and now, activations by the product that writes them, or by a kernel before the first
    one; what needs the values without padding reads a part of them. Behind the layout's passes, in front of
    `PartitionCutlass`. What was decided is the module's attribute ``tvm_ext.padding``, a `PaddingRecord`.

    Products of halves, bfloat16, int8 and 8-bit floats: convolutions in NHWC without groups, and matrix products.

    ``device``: the GPU; products of a type that it has no matrix units for stay as they are. ``always``: pad whatever
    the model says.
    """

    def __init__(self, device: DeviceSpec, *, always: bool = False) -> None:
        self.device, self.always = device, always

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        builder = BlockBuilder(copy_module(mod))
        products: list[ProductPadding] = []
        for gv, func in mod.functions_items():
            if is_graph(func):
                builder.update_func(gv, self._function(func, GraphValues(mod, func), builder, products))
        record = PaddingRecord(device=self.device.name, alignment_bytes=VECTOR_BYTES, products=tuple(products))
        # What importers emitted as functions may be operators now.
        cleaned = Sequential([relax.transform.Normalize(), relax.transform.DeadCodeElimination()])(builder.get())
        return cleaned.with_attr(PADDING, to_json(record))

    def _function(
        self, func: RelaxFunction, values: GraphValues, builder: BlockBuilder, products: list[ProductPadding]
    ) -> RelaxFunction:
        blocks, changed = [], False
        for block in func.body.blocks:
            if isinstance(block, DataflowBlock):
                choice = PaddingChoice(PaddableBlock(block, values), self.device, always=self.always)
                products += [record_of(choice, node) for node in choice.odd_products()]
                changed = changed or bool(choice.changed)
                block = PaddingWriter(choice, builder).write(block) if choice.changed else block
            blocks.append(block)
        return with_blocks(func, blocks) if changed else func


def record_of(choice: PaddingChoice, node: PaddingNode) -> ProductPadding:
    """What was decided about one product; of one that stays as it is, what padding its input would come to."""
    reads, writes = choice.reads(node), choice.writes(node.variable)
    padded = reads or writes
    if not padded:
        reads = choice.block.is_odd(node.data[0])
    extent_of = choice.block.extent_of
    source: PaddingSource = choice.source_of(node.data[0]) if reads else "none"
    record = ProductPadding(
        value=node.variable.name,
        operator=f"relax.{node.operator}",
        described=shapes_of(choice.call(node)),
        depth=(extent_of(node.data[0], padded=False), extent_of(node.data[0], padded=reads)),
        columns=(extent_of(node.variable, padded=False), extent_of(node.variable, padded=writes)),
        source=source,
        plain_us=choice.product_time(node, reads=False, writes=False),
        padded_us=choice.product_time(node, reads=reads, writes=writes),
        padding_us=choice.copy_us(node.data[0]) if source in ("folded", "kernel") else 0.0,
        padded=padded,
        reason="",
    )
    return replace(record, reason=_reason(record, choice, node))


def _reason(record: ProductPadding, choice: PaddingChoice, node: PaddingNode) -> str:
    if record.padded and record.depth[0] == record.depth[1]:
        return "it writes the padding that products behind it read"
    if record.padded:
        return f"predicted {record.speed_up:.2f} times as fast"
    if choice.stores_transposed(node):
        return "its weights are stored transposed instead: along K copies are wide"
    if choice.reads_in_place(node):
        return "its first operand is read in place, transposed"
    if record.depth[0] == record.depth[1]:
        return "both operands are read in wide copies as they are"
    saved = record.plain_us - record.padded_us
    return f"predicted: wide copies save {saved:.1f} us, padding costs {record.padding_us:.1f} us"


op = relax.op


class PaddingWriter:
    """One block, written anew."""

    def __init__(self, choice: PaddingChoice, builder: BlockBuilder) -> None:
        self.choice, self.block, self.values, self.builder = choice, choice.block, choice.values, builder
        self.bindings: list[VarBinding] = []
        self.padded: dict[Expr, Var] = {}
        self._missing: set[Var] = set()  # values that have been written with padding only

    def write(self, block: DataflowBlock) -> DataflowBlock:
        for binding in block.bindings:
            node = self._node(binding.var) if isinstance(binding, VarBinding) else None
            if node is None:
                self._keep(binding)
            elif node.role == "product":
                self._product(node)
            else:
                self._carrier(node)
            if binding.var in self._missing and not isinstance(binding.var, DataflowVar):
                self._cut(binding.var)  # a result of the block
        return DataflowBlock(self.bindings)

    def _node(self, variable: Var) -> PaddingNode | None:
        node = self.block.nodes.get(variable)
        if node is None:
            return None
        changed = self.choice.reads(node) or self.choice.writes(variable)
        return node if changed or (node.role == "product" and self.choice.stores_transposed(node)) else None

    def _keep(self, binding: VarBinding) -> None:
        for value in _variables(binding.value if hasattr(binding, "value") else binding.var):
            self._plain(value)
        self.bindings.append(binding)

    # ---- the two forms of a value ------------------------------------------------------------------------------------

    def _plain(self, value: Expr) -> Expr:
        if value in self._missing:
            self._cut(value)
        return value

    def _cut(self, value: Var) -> None:
        """Bind a value whose padded form alone was written: its channels out of that."""
        self._missing.discard(value)
        self.bindings.append(VarBinding(value, self._normal(_without(self.padded[value], self.block.runs_of(value)))))

    def _padded(self, value: Expr) -> Expr:
        if not self.block.is_odd(value):
            return self._plain(value)
        if value not in self.padded:
            runs = self.block.runs_of(value)
            assert len(runs) == 1, "padding between channels is written by what joins them"
            rank = len(static_shape(value) or ())
            widths = [0] * (2 * rank - 1) + [runs[0][1]]
            (content,) = self.block.contents_of(value)
            self._write(value, op.nn.pad(self._plain(value), widths, pad_value=content))
        return self.padded[value]

    def _write(self, value: Expr, call: Call) -> None:
        call = self._normal(call)
        self.padded[value] = DataflowVar(f"{value.name}_padded", call.ty)
        self.bindings.append(VarBinding(self.padded[value], call))

    def _result(self, variable: Var, call: Call) -> None:
        """Bind the result of a node, with its padding where it has some."""
        if self.choice.writes(variable):
            self._write(variable, call)
            self._missing.add(variable)
        else:
            self.bindings.append(VarBinding(variable, self._normal(call)))

    def _normal(self, call: Call) -> Call:
        return self.builder.normalize(call)

    # ---- products ----------------------------------------------------------------------------------------------------

    def _product(self, node: PaddingNode) -> None:
        call = self.choice.call(node)
        reads, writes = self.choice.reads(node), self.choice.writes(node.variable)
        data = self._padded(node.data[0]) if reads else self._plain(node.data[0])
        rows = self.block.runs_of(node.data[0]) if reads else ()
        columns = self.block.runs_of(node.variable) if writes else ()
        is_matrix = node.operator == "matmul"
        axes = {-2: rows, -1: columns} if is_matrix else {-1: rows, 0: columns}
        weight = self._weight(call.args[1], axes)
        if is_matrix:
            if self.choice.stores_transposed(node) and isinstance(weight, Constant):
                weight = self._store_transposed(node.variable, weight)
            self._result(node.variable, op.matmul(data, weight, out_dtype=dtype_of(call)))
        else:
            self._result(node.variable, _convolution(call, data, weight, 1))

    def _weight(self, weight: Expr, axes: dict[int, Runs]) -> Expr:
        constant = self.values.constant_of(weight)
        if constant is not None:
            array = constant.value.numpy()
            for axis, runs in axes.items():
                array = with_runs(array, axis, runs)
            return _constant(array)
        widths = [0] * (2 * len(static_shape(weight) or ()))
        for axis, runs in axes.items():
            widths[2 * axis + 1 if axis >= 0 else len(widths) + 2 * axis + 1] = sum(padding for _, padding in runs)
            assert len(runs) <= 1, "the model gives joined channels to constant weights alone"
        if not any(widths):
            return self._plain(weight)
        padded = self._normal(op.nn.pad(self._plain(weight), widths))
        variable = DataflowVar("weight_padded", padded.ty)
        self.bindings.append(VarBinding(variable, padded))
        return variable

    def _store_transposed(self, variable: Var, weight: Constant) -> Var:
        """Weights whose columns are contiguous, as a view that templates read in place."""
        array = weight.value.numpy()
        axes = [*range(array.ndim - 2), array.ndim - 1, array.ndim - 2]
        call = self._normal(op.permute_dims(_constant(array.transpose(axes)), axes))
        turned = DataflowVar(f"{variable.name}_weight", call.ty)
        self.bindings.append(VarBinding(turned, call))
        return turned

    # ---- carriers ----------------------------------------------------------------------------------------------------

    def _carrier(self, node: PaddingNode) -> None:
        call = self.choice.call(node)
        data = {operand: self._padded(operand) for operand in node.data}
        if node.operator == "concat":
            made = op.concat([data[operand] for operand in node.data], axis=call.attrs.axis)
        elif node.operator == "nn.conv2d":
            made = self._depthwise(call, data)
        elif node.operator == "reshape":
            shape = [*(static_shape(node.variable) or ())[:-1], last_extent(data[node.data[0]])]
            made = op.reshape(data[node.data[0]], shape)
        else:
            made = self._by_elements(node, call, data)
        self._result(node.variable, made)

    def _depthwise(self, call: Call, data: dict[Expr, Expr]) -> Call:
        source = call.args[0]
        weight = self._weight(call.args[1], {0: self.block.runs_of(source)})
        return _convolution(call, data[source], weight, last_extent(data[source]))

    def _by_elements(self, node: PaddingNode, call: Call, data: dict[Expr, Expr]) -> Call:
        operator = self.values.operator_of(call)
        assert operator is not None, f"{node.variable.name} is a carrier without being an operator"
        name, operands = operator
        runs = self.block.runs_of(node.variable)
        arguments = []
        for position, operand in enumerate(operands):
            constant = self.values.constant_of(operand) if is_tensor(operand) else None
            if operand in data:
                arguments.append(data[operand])
            elif constant is not None and last_extent(operand) > 1:
                arguments.append(
                    _constant(with_runs(constant.value.numpy(), -1, runs, constant_content(name, position)))
                )
            else:
                arguments.append(self._plain(operand))
        if call.op.name == "relax.call_tir":  # what importers emit for an operator, in the graph's extents
            return getattr(op, name)(*arguments)
        return Call(call.op, arguments, call.attrs, call.ty_args)


def with_runs(array: Array, axis: int, runs: Runs, content: float = 0.0) -> Array:
    """``array`` with padding behind each run along ``axis``; as it is without runs.

    Worked example: channels a b c with runs (1, 3), (2, 2) become a 0 0 0 b c 0 0.
    """
    if not any(padding for _, padding in runs):
        return array
    parts, start = [], 0
    for extent, padding in runs:
        parts.append(np.take(array, range(start, start + extent), axis=axis))
        shape = list(array.shape)
        shape[axis] = padding
        parts.append(np.full(shape, content, array.dtype))
        start += extent
    return np.concatenate(parts, axis=axis)


def _without(value: Expr, runs: Runs) -> Call:
    """The channels of a padded value."""
    axis = len(static_shape(value) or ()) - 1
    if len(runs) == 1:
        return op.strided_slice(value, [axis], [0], [runs[0][0]])
    kept, start = list[int](), 0
    for extent, padding in runs:
        kept += range(start, start + extent)
        start += extent + padding
    return op.take(value, relax.const(np.asarray(kept, "int64"), "int64"), axis=axis, mode="clip")


def _variables(value: Expr) -> list[Var]:
    variables: dict[Var, None] = {}

    def visit(node: Node) -> None:
        if isinstance(node, Var) and not isinstance(node, GlobalVar):
            variables[node] = None

    relax.analysis.post_order_visit(value, visit)
    return list(variables)


def _convolution(call: Call, data: Expr, weight: Expr, groups: int) -> Call:
    attrs: Any = call.attrs
    return op.nn.conv2d(
        data,
        weight,
        strides=[int(extent) for extent in attrs.strides],
        padding=[int(extent) for extent in attrs.padding],
        dilation=[int(extent) for extent in attrs.dilation],
        groups=groups,
        data_layout=str(attrs.data_layout),
        kernel_layout=str(attrs.kernel_layout),
        out_layout=str(attrs.out_layout),
        out_dtype=dtype_of(call),
    )


def _constant(array: Array) -> Constant:
    return relax.const(np.ascontiguousarray(array), str(array.dtype))
