"""Pads channels, K and N to copies of 16 bytes where the model says that it pays (Bolt §3.2.3)."""

from __future__ import annotations

from dataclasses import replace

from tvm_ext._tvm import (
    BlockBuilder,
    DataflowBlock,
    IRModule,
    PassContext,
    RelaxFunction,
    Sequential,
    copy_module,
    module_pass,
    relax,
)
from tvm_ext.analysis.relax_values import is_graph, shapes_of
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.padding import PADDING, PaddingRecord, PaddingSource, ProductPadding
from tvm_ext.records.serialise import to_json

from ..rewriting import with_blocks
from .choice import PaddingChoice
from .graph import PaddableBlock, PaddingNode
from .rewrite import PaddingWriter


@module_pass(opt_level=0, name="tvm_ext.PadAlignment")
class PadAlignment:
    """Pad the operands of products on matrix units so that both can be copied 16 bytes at a time.

    Weights are padded here and now, activations by the product that writes them, or by a kernel before the first
    one; what needs the values without padding reads a part of them. Behind the layout's passes, in front of
    `PartitionCutlass`. What was decided is the module's attribute ``tvm_ext.padding``, a `PaddingRecord`.

    Products of halves, bfloat16, int8 and 8-bit floats: convolutions in NHWC without groups, and matrix products.

    Parameters
    ----------
    device
        The GPU; products of a type that it has no matrix units for stay as they are.
    always
        Pad whatever the model says.
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
