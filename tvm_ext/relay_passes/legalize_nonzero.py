"""NonZero on CPUs: one function writes positions and counts them, another one divides them into coordinates.

Stock TVM calls NumPy, in Python, when a library runs.
"""

from __future__ import annotations

from math import prod

from tvm_ext._tvm import (
    BlockBuilder,
    Call,
    Expr,
    IRModule,
    PassContext,
    TeTensor,
    Var,
    expr_mutator,
    module_pass,
    relax,
    te,
    tirx,
)
from tvm_ext.analysis.relax_values import operator_name, static_shape
from tvm_ext.ir.build_ir import INDEX_DTYPE, split_index
from tvm_ext.ir.compaction import compact
from tvm_ext.records.selection import COMPACTION

from .rewriting import CallRewriter


@module_pass(opt_level=0, name="tvm_ext.LegalizeNonZero")
class LegalizeNonZero:
    """Coordinates (rank, n) int64 of what is not zero, row-major, in tensors of known shapes; CPUs only."""

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return _NonZeros(mod).run()


@expr_mutator
class _NonZeros(CallRewriter):
    def rewritten(self, call: Call) -> Expr:
        shape = static_shape(call.args[0]) if operator_name(call) == "relax.nonzero" else None
        return _coordinates(self.builder_, call.args[0], shape) if shape and prod(shape) else call


def _coordinates(builder: BlockBuilder, data: Expr, shape: tuple[int, ...]) -> Expr:
    made = builder.call_te(
        lambda x: te.extern(
            [(prod(shape),), (1,)],
            [x],
            lambda ins, outs: compact(ins[0], *outs),
            dtype=[INDEX_DTYPE, INDEX_DTYPE],
            name="compaction",
        ),
        data,
        primfunc_name_hint="nonzero",
    )
    builder.update_func(made.args[0], builder.get()[made.args[0]].with_attr(COMPACTION, True))
    both = builder.emit(made)
    positions, count = (builder.emit(relax.TupleGetItem(both, number)) for number in range(2))
    size = Var("nonzeros", INDEX_DTYPE)
    builder.match_cast(builder.emit(relax.op.tensor_to_shape(count)), relax.ShapeType([size]))

    def divided(positions: TeTensor) -> TeTensor:
        def coordinate(axis: Expr, number: Expr) -> Expr:
            *others, last = split_index(positions[number], shape)
            for place, value in reversed(list(enumerate(others))):
                last = tirx.Select(axis.equal(place), value, last)
            return last

        return te.compute((len(shape), size), coordinate, name="coordinates")

    return builder.call_te(divided, positions, primfunc_name_hint="nonzero_coordinates")
