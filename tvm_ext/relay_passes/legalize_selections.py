"""NonZero, Unique and NonMaxSuppression on CPUs: one function selects and counts, others write as many as there are.

For the first two stock TVM calls NumPy, in Python, when a library runs; behind the third it has five small functions.
"""

from __future__ import annotations

from math import prod

from tvm_ext._tvm import BlockBuilder, Call, Constant, Expr, TeTensor, Var, relax, te, tirx, topi
from tvm_ext.analysis.relax_values import operator_name, static_shape
from tvm_ext.ir.build_ir import INDEX_DTYPE, split_index
from tvm_ext.ir.compaction import compact
from tvm_ext.ir.radix_sort import SORTED, unique
from tvm_ext.records.selection import COMPACTION, SUPPRESSION, UNIQUE

from .rewriting import CallRewriter, call_pass


@call_pass("tvm_ext.LegalizeSelections")
class LegalizeSelections(CallRewriter):
    """Selections from tensors of known shapes as two functions, the first of them marked; CPUs only."""

    def rewritten(self, call: Call) -> Expr:
        name = operator_name(call)
        if name == "relax.nonzero":
            shape = static_shape(call.args[0])
            return _coordinates(self.builder_, call.args[0], shape) if shape and prod(shape) else call
        if name == "relax.vision.all_class_non_max_suppression" and call.attrs.output_format == "onnx":
            limit, shapes = call.args[2], [static_shape(item) for item in call.args]
            return _boxes(self.builder_, call) if isinstance(limit, Constant) and None not in shapes else call
        if name == "relax.unique":
            return _unique(self.builder_, call) if _is_flat(call) else call
        return call


def _boxes(builder: BlockBuilder, call: Call) -> Expr:
    boxes, scores, limit, *thresholds = call.args
    made = builder.call_te(
        topi.vision.all_class_non_max_suppression,
        *(boxes, scores, int(limit.value.numpy().reshape(-1)[0]), *thresholds, "onnx"),
        primfunc_name_hint="all_class_non_max_suppression",
    )
    (rows,), count, size = _counted(builder, made, SUPPRESSION)

    def first(rows: TeTensor) -> TeTensor:
        return te.compute((size, rows.shape[1]), lambda row, field: rows[row, field], name="selected")

    return relax.Tuple([builder.emit(builder.call_te(first, rows, primfunc_name_hint="selected_boxes")), count])


def _counted(builder: BlockBuilder, made: Call, attribute: str) -> tuple[list[Expr], Expr, Var]:
    """What a function, marked with ``attribute``, selects, how many that are, and this number as an extent."""
    builder.update_func(made.args[0], builder.get()[made.args[0]].with_attr(attribute, True))
    results = builder.emit(made)
    *selected, count = (builder.emit(relax.TupleGetItem(results, k)) for k in range(len(results.ty.fields)))
    size = Var("selected", INDEX_DTYPE)
    builder.match_cast(builder.emit(relax.op.tensor_to_shape(count)), relax.ShapeType([size]))
    return selected, count, size


def _is_flat(call: Call) -> bool:
    """Whether it asks for what is unique among all elements, ascending: not among rows, which would be compared."""
    x, is_sorted = call.args[:2]
    shape = static_shape(x)
    known = shape is not None and prod(shape) > 0 and str(x.ty.dtype) in SORTED
    return known and bool(int(is_sorted.value)) and (len(call.args) < 6 or (shape is not None and len(shape) == 1))


def _unique(builder: BlockBuilder, call: Call) -> Expr:
    x, wanted = call.args[0], [bool(int(flag.value)) for flag in call.args[2:5]]
    shape, dtype = static_shape(x), str(x.ty.dtype)
    assert shape is not None
    elements = prod(shape)
    made = builder.call_te(
        lambda x: te.extern(
            [(elements + 1,), (elements,), (elements + 1,), (1,)],
            [x],
            lambda ins, outs: unique(ins[0], *outs),
            dtype=[INDEX_DTYPE] * 4,
            name="unique",
        ),
        x,
        primfunc_name_hint="unique",
    )
    (firsts, inverse, counts), _, size = _counted(builder, made, UNIQUE)

    def value(x: TeTensor, firsts: TeTensor) -> TeTensor:
        return te.compute((size,), lambda number: x(*split_index(firsts[number], shape)), name=f"unique_{dtype}")

    def first(rows: TeTensor) -> TeTensor:
        return te.compute((size,), lambda number: rows[number], name="filled")

    values = builder.emit(builder.call_te(value, x, firsts, primfunc_name_hint="unique_values"))
    others = [
        *([builder.emit(builder.call_te(first, firsts, primfunc_name_hint="filled"))] if wanted[0] else []),
        *([inverse] if wanted[1] else []),
        *([builder.emit(builder.call_te(first, counts, primfunc_name_hint="filled"))] if wanted[2] else []),
    ]
    return relax.Tuple([values, *others]) if others else values


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
    (positions,), _, size = _counted(builder, made, COMPACTION)

    def divided(positions: TeTensor) -> TeTensor:
        def coordinate(axis: Expr, number: Expr) -> Expr:
            *others, last = split_index(positions[number], shape)
            for place, value in reversed(list(enumerate(others))):
                last = tirx.Select(axis.equal(place), value, last)
            return last

        return te.compute((len(shape), size), coordinate, name="coordinates")

    return builder.call_te(divided, positions, primfunc_name_hint="nonzero_coordinates")
