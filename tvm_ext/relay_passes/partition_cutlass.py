"""Products with their epilogues become composite functions for CUTLASS; what is refused stays, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm_ext._tvm import (
    CALL_TIR,
    BlockBuilder,
    Call,
    DataflowVar,
    Expr,
    IRModule,
    PassContext,
    RelaxFunction,
    Var,
    VarBinding,
    copy_module,
    ir,
    module_pass,
    relax,
)
from tvm_ext.analysis.relax_values import dtype_of, is_graph, is_tensor
from tvm_ext.byoc_cutlass.attention import attention_region
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.byoc_cutlass.layout_changes import TO_NHWC, PlanesSource
from tvm_ext.byoc_cutlass.patterns import Region, regions_of
from tvm_ext.byoc_cutlass.support import attention_left, norms_left
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.records.partition import PARTITION, CutlassPartition, CutlassRefusal
from tvm_ext.records.serialise import to_json

from .attention.recognise import FoundAttention, RefusedAttention, attentions_of
from .composites import call_of_composite, new_composite
from .rewriting import with_calls


@module_pass(opt_level=0, name="tvm_ext.PartitionCutlass")
class PartitionCutlass:
    """Cut out of every function the products that CUTLASS's templates serve on ``device``, each with its epilogue.

    A region becomes a function of its own with attributes as stock FuseOpsByPattern leaves them: ``Codegen`` outside,
    ``Composite`` with the pattern's name on the one inside, and its record (`records/partition.py`). Numbers are
    inside, tensors are parameters, constants too. What was taken and what was refused is in the module's attribute
    ``tvm_ext.partition``.
    `InlineComposites` is the way back.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        builder = BlockBuilder(copy_module(mod))
        taken, refused, others = [], [], []
        for gv, func in mod.functions_items():
            if not is_graph(func):
                continue
            values = GraphValues(mod, func)
            attentions, left = _attentions(values, self.device)
            regions = regions_of(values, self.device, attentions)
            taken += [region.record for region in (*attentions, *regions.taken)]
            refused += regions.refused
            others += [*norms_left(values), *left]
            if attentions or regions.taken:
                builder.update_func(gv, _cut(func, regions.taken, attentions, values, builder))
        record = CutlassPartition(
            device=self.device.name, taken=tuple(taken), refused=tuple(refused), others=tuple(others)
        )
        # The graph may have been the only one to call what importers emit as PrimFuncs.
        cleaned = relax.transform.DeadCodeElimination()(builder.get()) if taken else builder.get()
        return cleaned.with_attr(PARTITION, to_json(record))


def _attentions(values: GraphValues, device: DeviceSpec) -> tuple[list[Region], list[CutlassRefusal]]:
    """Each attention that a template serves, and of the others why their products and their softmax stay apart."""
    taken: list[Region] = []
    left = []
    for found in attentions_of(values):
        if isinstance(found, RefusedAttention):
            left.append(attention_left("", ", ".join(found.operators), found.reason))
            continue
        operands = tuple(dict.fromkeys(found.sources))
        places = tuple(operands.index(source) for source in found.sources)
        try:
            record = attention_region(found.work, found.result.name, places, device)
        except (IllegalRewrite, TargetError) as refusal:
            left.append(attention_left(found.result.name, str(found.work), refusal.problem))
            continue
        taken.append(Region(record=record, members=_between(found, values), operands=operands))
    return taken, left


def _between(found: FoundAttention, values: GraphValues) -> tuple[Var, ...]:
    """What leads from the sources of an attention to its result, in program order."""
    members, front = set(), [found.result]
    while front:
        value = front.pop()
        if value in values.bindings and value not in found.sources and value not in members:
            members.add(value)
            operator = values.operator_of(values.bindings[value])
            front += [operand for operand in (operator[1] if operator else ()) if isinstance(operand, Var)]
    return tuple(value for value in values.bindings if value in members)


def _cut(
    func: RelaxFunction,
    regions: Sequence[Region],
    attentions: Sequence[Region],
    values: GraphValues,
    builder: BlockBuilder,
) -> RelaxFunction:
    """``func`` with a call in the place of each region's result, behind everything that the region reads.

    What leads to an attention may be used elsewhere, too: it is dead code where it is not.
    """
    calls = {region.result: _call(region, values, builder) for region in (*attentions, *regions)}
    return with_calls(func, calls, {member for region in regions for member in region.members[:-1]})


def _call(region: Region, values: GraphValues, builder: BlockBuilder) -> Call:
    """The call of the region's function, which is added to the module."""

    def steps(new: dict[Expr, Expr]) -> list[VarBinding]:
        bindings = [] if region.source is None else _read_planes(region.source, region, new, values, builder)
        for member in region.members[len(region.source.skipped) if region.source is not None else 0 :]:
            new[member] = (Var if member == region.result else DataflowVar)(member.name, member.ty)
            bindings.append(VarBinding(new[member], _move(member, new, values)))
        return bindings

    inner = new_composite(region.record, region.operands, steps)
    return call_of_composite(inner, region.operands, region.record.pattern, builder)


def _read_planes(
    source: PlanesSource, region: Region, new: dict[Expr, Expr], values: GraphValues, builder: BlockBuilder
) -> list[VarBinding]:
    """What a kernel does itself that reads planes: the operators that make of them what the convolution is given."""
    call = values.bindings[region.members[len(source.skipped)]]
    steps: list[VarBinding] = []

    def step(value: Expr, name: str) -> Expr:
        value = builder.normalize(value)
        steps.append(VarBinding(DataflowVar(name, value.ty), value))
        return steps[-1].var

    pixels, dtype = new[source.planes], dtype_of(call.args[0])
    if dtype_of(source.planes) != dtype:
        pixels = step(relax.op.astype(pixels, dtype), "rounded")
    filters = step(relax.op.strided_slice(new[source.weight], [3], [0], [source.columns]), "filters")
    new[call.args[0]] = step(relax.op.permute_dims(pixels, TO_NHWC), "pixels")
    new[call.args[1]] = step(relax.op.permute_dims(filters, TO_NHWC), "filters_ohwi")
    return steps


def _move(member: Var, new: Mapping[Expr, Expr], values: GraphValues) -> Call:
    """The member's operator on the region's own values; numbers that were bound outside are written out."""
    call = values.bindings[member]
    operator = values.operator_of(call)
    assert operator is not None, f"{member.name} joined a region without being an operator"
    name, operands = operator
    arguments = [
        values.constant_of(operand) if is_tensor(operand) and operand not in new else new.get(operand, operand)
        for operand in operands
    ]
    op = ir.Op.get(f"relax.{name}") if call.op == CALL_TIR else call.op
    return Call(op, arguments, None if call.op == CALL_TIR else call.attrs, ret_ty=member.ty)
