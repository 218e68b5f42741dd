"""Attention becomes one function: both products and the softmax between them, whose scores never are in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from math import inf, prod

from tvm_ext._tvm import (
    OPAQUE,
    BlockBuilder,
    Call,
    DataflowBlock,
    DataflowVar,
    Expr,
    IRModule,
    PassContext,
    RelaxFunction,
    Var,
    VarBinding,
    copy_module,
    module_pass,
    relax,
)
from tvm_ext.analysis.relax_values import dtype_of, is_graph, static_shape
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.cost.attention_time import FLOAT_BYTES, AttentionClock
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.attention import ATTENTION, Attention
from tvm_ext.records.persistent import PersistentRegion
from tvm_ext.records.precision import BEYOND_BOUND, PRECISION, NarrowedProduct, kept_in_float32, precision_record
from tvm_ext.records.serialise import to_json

from .attention.definition import attention
from .attention.recognise import FoundAttention, RefusedAttention, attentions_of
from .attention.turned_terms import TermTurner, with_turned_terms
from .narrowed_time import not_faster
from .node_names import kept_label
from .persistent_record import with_regions
from .rewriting import with_bindings


@module_pass(opt_level=0, name="tvm_ext.FuseAttention")
class FuseAttention:
    """Replace softmax(scale * Q K^T + masks) V by a call of one function, its `Attention` in ``tvm_ext.attention``.

    Transposes, reshapes and slices before the products are read through, and a transpose behind them is written
    directly; what only led there is dead code afterwards. What was considered, fused or not, is in the module's
    attribute ``tvm_ext.persistent``.

    ``device``: the CPU whose registers hold the queries; attentions of other devices stay as they are. ``precision``:
    option `precision`: other than "float32", products of float32 run in bfloat16 where ``device`` has an instruction,
    and with "auto" where that is expected to be faster. They are added to the module's `PRECISION`.
    """

    def __init__(self, device: DeviceSpec, precision: str = "float32") -> None:
        self.device, self.precision = device, precision

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        builder, narrowing = BlockBuilder(copy_module(mod)), _NarrowedAttentions(mod, self.device, self.precision)
        regions: list[PersistentRegion] = []
        for gv, func in mod.functions_items():
            if is_graph(func):
                local, values = _locals(func), GraphValues(mod, func)
                turner = TermTurner(builder=builder)
                found = [self._decided(item, values, turner, local, narrowing) for item in attentions_of(values)]
                regions += [region for region, _ in found]
                made = dict(new for _, new in found if new is not None)
                if made:
                    builder.update_func(gv, with_bindings(func, partial(_made, made)))
        return narrowing.recorded(with_regions(builder.get(), regions)) if regions else mod

    def _decided(
        self,
        item: FoundAttention | RefusedAttention,
        values: GraphValues,
        turner: TermTurner,
        local: Collection[Var],
        narrowing: _NarrowedAttentions,
    ) -> tuple[PersistentRegion, tuple[Var, list[VarBinding]] | None]:
        """What is said of an attention and, where it is fused, its result with the bindings that make it."""
        if isinstance(item, RefusedAttention):
            return _apart(item.operators, item.reason), None
        turned = with_turned_terms(item, values, AttentionClock(item.work, self.device))
        turned = narrowing.narrowed(turned)
        clock = AttentionClock(turned, self.device)
        tiles = clock.usual_tiles()
        if tiles is None:
            return _apart(item.operators, f"{self.device.name} has no SIMD registers for queries"), None
        variable = DataflowVar if item.result in local else Var
        item, turning = turner.turn(item, turned, variable)
        kernel, called = _call(item, turner.builder, variable)
        region = PersistentRegion(
            kind="attention",
            operators=item.operators,
            fused=True,
            reason=str(turned),
            kernel=kernel,
            saved_bytes=4.0 * item.work.batch * item.work.queries * item.work.keys * FLOAT_BYTES,
            fused_us=clock.kernel_seconds(tiles) * 1e6,
        )
        return region, (item.result, [*turning, *called])


class _NarrowedAttentions:
    """Which attentions' products run in bfloat16, numbered behind those of `NarrowFloats`, whose record they join."""

    def __init__(self, mod: IRModule, device: DeviceSpec, precision: str) -> None:
        self.device, self.precision = device, precision
        found = precision_record(mod)
        self.record = found if found is not None and found.instruction is not None else None
        self.kept = kept_in_float32(mod)
        self.found: list[NarrowedProduct] = []

    def narrowed(self, work: Attention) -> Attention:
        if self.record is None:
            return work
        product = NarrowedProduct(
            kind="attention",
            data=(work.batch, work.queries, work.features),
            weights=(work.batch, work.keys, work.features),
            result=(work.batch, work.queries, work.value_features),
        )
        narrow = replace(work, products="bfloat16")
        product = product.refused(self._why_not(work, narrow))
        self.found.append(product)
        return work if product.reason else narrow

    def _why_not(self, work: Attention, narrow: Attention) -> str:
        if {operand.dtype for operand in (work.query, work.key, work.value)} != {"float32"}:
            return "its operands are not float32"
        own, wide = (AttentionClock(item, self.device).expected_seconds() * 1e6 for item in (narrow, work))
        if own == inf:
            return "no instruction serves it"
        if self.record is not None and len(self.record.products) + len(self.found) in self.kept:
            return BEYOND_BOUND
        return not_faster(wide, own) if self.precision == "auto" else ""

    def recorded(self, mod: IRModule) -> IRModule:
        if self.record is None or not self.found:
            return mod
        record = replace(self.record, products=(*self.record.products, *self.found))
        return mod.with_attr(PRECISION, to_json(record))


def _apart(operators: tuple[str, ...], reason: str) -> PersistentRegion:
    return PersistentRegion(kind="attention", operators=operators, fused=False, reason=reason)


def _locals(func: RelaxFunction) -> set[Var]:
    """What is bound in blocks whose variables may be their own."""
    blocks = [block for block in func.body.blocks if isinstance(block, DataflowBlock)]
    return {binding.var for block in blocks for binding in block.bindings}


def _call(item: FoundAttention, builder: BlockBuilder, variable: type[Var]) -> tuple[str, list[VarBinding]]:
    """The name of the function that computes ``item``, and the bindings that call it and end in its result.

    ``variable`` is the class of the variables between, which depends on the block that they are in.
    """
    bindings = [_flat(source, variable) for source in item.sources]
    output = item.work.output
    call = builder.call_te(
        lambda *tensors: attention(*tensors, work=item.work),
        *(binding.var for binding in bindings),
        primfunc_name_hint="attention",
        primfunc_attrs={"op_pattern": OPAQUE, ATTENTION: to_json(item.work)},
    )
    made = builder.normalize(call)  # with its type, which the next pass would else write into this module
    result = variable(kept_label(item.result, "attention"), relax.TensorType((output.size,), output.dtype))
    shaped = _reshape(result, static_shape(item.result) or ())
    return made.args[0].name_hint, [*bindings, VarBinding(result, made), VarBinding(item.result, shaped)]


def _flat(source: Expr, variable: type[Var]) -> VarBinding:
    """``source`` as a vector, which is a view of it."""
    value = _reshape(source, (prod(static_shape(source) or ()),))
    return VarBinding(variable("flat", value.ty), value)


def _reshape(source: Expr, shape: tuple[int, ...]) -> Call:
    """With its type, which it would otherwise have only once the whole module is normalised."""
    call = relax.op.reshape(source, shape)
    return Call(call.op, call.args, call.attrs, ret_ty=relax.TensorType(shape, dtype_of(source)))


def _made(made: Mapping[Var, list[VarBinding]], binding: VarBinding) -> list[VarBinding]:
    return made.get(binding.var, [binding])
