"""GPU kernels for everything without data reuse: element-wise, transposition, reductions, softmax, normalisation,
pooling.

The computations that share rows become one launch, a row read once where it fits the registers of its threads
(`gpu_rows.kernel`); computations without a reduction become one launch each (`gpu_rows.points`). Rows that are few and
long are divided among blocks and cost a second launch: `gpu_rows.plan.plan_rows` says when that pays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, TensorLoad, Var, tirx
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, reads, replace_reads, substitute
from tvm_ext.analysis.predicates import is_in
from tvm_ext.analysis.tensor_expr import AxisKind
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import accumulator_dtype, allocate, index, load
from tvm_ext.ir.simt_ir import SimtKernel

from ...expressions.reciprocals import with_reciprocals
from .combine import shared_bytes
from .form import RowForm, position_of
from .kernel import emit_row_kernel
from .lanes import widened
from .plan import RowPlan, plan_rows, register_estimate
from .points import emit_points
from .read import plain_computation, read_form

Computations = tuple[Computation, ...]


def emit_simt_rows(
    computations: Sequence[Computation], device: DeviceSpec, kept: Sequence[Buffer], params: Sequence[Buffer]
) -> SimtKernel:
    """GPU kernels that run ``computations`` in order, as few launches as their data flow allows.

    * ``computations``: what `plan_kernels` puts into one row group: sums over rows, what is computed from them,
      injective computations.
    * ``device``: a GPU (kind ``"cuda"``, ``"rocm"`` or ``"opencl"``); the same code serves all three.
    * ``kept``: buffers that others read, outputs among them: written to memory. The others live in registers, unless a
      computation needs them in another order: then they are written as well, and the caller allocates them (scope
      ``"global"``).
    * ``params``: the function's parameters, which are addressed as runs of memory.

    Raises IllegalRewrite where a computation is not a reduction of whole rows or an injective computation over static
    shapes, with the reason.
    """
    emitter = _Launches(device=device, params=tuple(params))
    launches = emitter.of_group(tuple(map(plain_computation, computations)), tuple(kept))
    largest = max(launches, key=lambda kernel: kernel.blocks * kernel.threads)
    return SimtKernel(
        statements=tuple(statement for kernel in launches for statement in kernel.statements),
        threads=largest.threads,
        blocks=largest.blocks,
        shared_bytes=max(kernel.shared_bytes for kernel in launches),
        register_count=max(kernel.register_count for kernel in launches),
        notes=tuple(note for kernel in launches for note in kernel.notes),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Launches:
    """Divides computations into launches; ``kept`` are always the buffers that others than these read."""

    device: DeviceSpec
    params: tuple[Buffer, ...]

    def of_group(self, computations: Computations, kept: tuple[Buffer, ...]) -> list[SimtKernel]:
        """The launches of ``computations``: of the longest beginning that has a common form, then of the rest."""
        for count in range(len(computations), 0, -1):
            head, tail = computations[:count], computations[count:]
            needed = [s.target for s in head if is_in(s.target, kept) or any(reads(t.value, s.target) for t in tail)]
            try:
                launches = self._of_form(head, tuple(needed) or (head[-1].target,))
            except IllegalRewrite:
                if count == 1:
                    raise
                continue
            return launches + (self.of_group(tail, kept) if tail else [])
        raise IllegalRewrite("there are no computations to emit")

    def _of_form(self, computations: Computations, kept: tuple[Buffer, ...]) -> list[SimtKernel]:
        if not any(computation.is_reduction for computation in computations):
            injective = [s for s in _inline_all(computations) if is_in(s.target, kept)]
            return [emit_points(self._form((item,), (item.target,)), self.device) for item in injective]
        form = self._form(computations, kept)
        plan = plan_rows(form, self.device, may_split=True)
        if plan.splits == 1:
            return [self._rows(form, plan)]
        if len(form.computations) > 1:
            return self._split(computations, kept)
        return self._in_parts(computations, form, plan, kept)

    def _form(self, computations: Computations, kept: tuple[Buffer, ...]) -> RowForm:
        """In float32 where it is half precision, divisions by a row's number as products."""
        form = read_form(computations, kept, self.params)
        wide = [dataclasses.replace(computation, value=widened(computation.value)) for computation in form.computations]
        return dataclasses.replace(form, computations=tuple(with_reciprocals(wide) if form.row else wide))

    def _split(self, computations: Computations, kept: tuple[Buffer, ...]) -> list[SimtKernel]:
        """Computations of few, long rows: what is computed for each element is computed where it is read, one reduction
        at a time.

        Worked example, softmax of one row of 4 Mi: the maximum in parts, the sum of exp(x - maximum) in parts, and a
        launch that reads x again for exp(x - maximum) * (1 / sum).
        """
        first, *rest = _compute_elements_where_read(computations, kept)
        needed = (first.target,)
        if first.is_reduction:
            form = self._form((first,), needed)
            plan = plan_rows(form, self.device, may_split=True)
            if plan.splits > 1:
                return self._in_parts((first, *rest), form, plan, kept)
        launches = self._of_form((first,), needed)
        return launches + (self.of_group(tuple(rest), kept) if rest else [])

    def _rows(self, form: RowForm, plan: RowPlan) -> SimtKernel:
        if not plan.held:  # what is computed for each element is computed again in the next pass
            computed = _compute_where_read(
                form.computations, lambda earlier, _: form.along_row(earlier), _with_own_value
            )
            left = tuple(s for s in computed if not form.along_row(s) or is_in(s.target, form.kept))
            form = dataclasses.replace(form, computations=left)
        return self._launch(form, plan, None)

    def _launch(self, form: RowForm, plan: RowPlan, partial: Buffer | None) -> SimtKernel:
        """The launch of ``form``; with ``partial`` it leaves its partial results there."""
        names = " + ".join(computation.name for computation in form.computations)
        launch = emit_row_kernel(form, plan, partial=partial)
        return SimtKernel(
            statements=(launch,) if partial is None else (allocate(partial), launch),
            threads=plan.threads,
            blocks=plan.blocks,
            shared_bytes=shared_bytes(form, plan, self.device),
            register_count=register_estimate(form, plan),
            notes=(f"{names}: {plan.describe()}",),
        )

    def _in_parts(
        self, computations: Computations, form: RowForm, plan: RowPlan, kept: tuple[Buffer, ...]
    ) -> list[SimtKernel]:
        """The reduction ``computations[0]``, of ``form``, in two launches, always alike: parts of the rows, then their
        combination.

        The other computations follow the combination, in its launch where they can.
        """
        first, *rest = computations
        dtype = accumulator_dtype(dtype_of(first.target))
        shape = [index(plan.splits), index(form.row_count)]
        partial = tirx.decl_buffer(shape, dtype, f"{first.target.name}_parts")
        combined = _combined(first, partial, plan.splits)
        return [self._launch(form, plan, partial), *self.of_group((combined, *rest), kept)]


def _compute_elements_where_read(computations: Computations, kept: Sequence[Buffer]) -> list[Computation]:
    """The computations with those _inlined that have a value for each element, and are neither reductions nor kept."""
    length = max(computation.point_count for computation in computations)

    def is_replaced(earlier: Computation, _reader: Computation) -> bool:
        return not earlier.is_reduction and earlier.point_count == length and _may_inline(earlier)

    done = _compute_where_read(computations, is_replaced, _inlined)
    return [
        computation
        for position, computation in enumerate(done)
        if computation.is_reduction
        or is_in(computation.target, kept)
        or any(reads(other.value, computation.target) for other in done[position + 1 :])
    ]


def _inline_all(computations: Computations) -> list[Computation]:
    """The injective computations, computing what they read of the others."""

    def is_replaced(earlier: Computation, reader: Computation) -> bool:
        if not _may_inline(earlier):
            raise IllegalRewrite(f"computation {reader.name} reads {earlier.target.name}, which is written in parts")
        return True

    return _compute_where_read(computations, is_replaced, _inlined)


def _combined(computation: Computation, partial: Buffer, splits: int) -> Computation:
    """``computation`` as the combination of ``partial`` over its first axis."""
    axes = [(v, computation.extent(v)) for v in computation.spatial]
    dtype = dtype_of(computation.variables[0])
    spatial: AxisKind = "spatial"
    part = Var("part", computation.variables[0].ty)
    row: Expr = tirx.IntImm(dtype, 0)
    for variable, extent in axes:
        row = row * tirx.IntImm(dtype, extent) + variable
    return dataclasses.replace(
        computation,
        name=f"{computation.name}_parts",
        variables=(*(v for v, _ in axes), part),
        extents=(*(e for _, e in axes), splits),
        kinds=(*(spatial for _ in axes), "reduce"),
        value=load(partial, [part, row]),
    )


# --- values computed again where they are read, which is cheaper than to keep them ------------------------------------
def _compute_where_read(
    computations: Sequence[Computation],
    is_replaced: Callable[[Computation, Computation], bool],
    inline: Callable[[Computation, Computation], Computation],
) -> list[Computation]:
    """The computations with those before ``inline``d, of what they read, which ``is_replaced(earlier, reader)``."""
    done: list[Computation] = []
    for computation in computations:
        for earlier in done:
            if reads(computation.value, earlier.target) and is_replaced(earlier, computation):
                computation = inline(earlier, computation)
        done.append(computation)
    return done


def _with_own_value(producer: Computation, consumer: Computation) -> Computation:
    """``consumer`` computing what it read of ``producer``, of a form whose computations read their own elements."""
    value = replace_reads(consumer.value, producer.target, lambda _: producer.value)
    return dataclasses.replace(consumer, value=value)


def _may_inline(computation: Computation) -> bool:
    """Whether every axis of a plain computation is one index of its target: it can be computed where it is read."""
    written = [p for item in computation.indices if (p := position_of(computation, item)) is not None]
    rest = [item for item in computation.indices if position_of(computation, item) is None]
    return (
        not computation.is_reduction
        and sorted(written) == list(range(len(computation.variables)))
        and not any(mentions(item, *computation.variables) for item in rest)
    )


def _inlined(producer: Computation, consumer: Computation) -> Computation:
    """``consumer`` computing what it read of ``producer``, which `_may_inline`."""

    def compute(item: TensorLoad) -> Expr:
        pairs = zip(producer.indices, item.indices, strict=True)
        return substitute(producer.value, [(v, x) for v, x in pairs if position_of(producer, v) is not None])

    return dataclasses.replace(consumer, value=replace_reads(consumer.value, producer.target, compute))
