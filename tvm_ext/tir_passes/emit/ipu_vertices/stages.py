"""An operator as stages: computations that a class of vertices each runs, with what a box of points reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import Buffer, Expr, structural_equal
from tvm_ext.analysis.computation_exprs import access_of, tensor_expr_of
from tvm_ext.analysis.computation_rewrites import inline
from tvm_ext.analysis.computations import Computation, OperatorBody, dtype_of, replace_reads, static_shape, substitute
from tvm_ext.analysis.tensor_expr import Access, TensorExpr
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.exchange_plan import TensorBox

from ...plan.plan_gpu_kernels import plan_for_gpu
from ...plan.plan_kernels import RowGroup, TileGroup

PointBox = Mapping[str, tuple[int, int]]
"""For each axis (first point, number of points)."""

NO_WORD = r"\W"

RESERVED = re.compile(
    r"\d.*|.*_(begin|size)\d*|compute|asm|auto|bool|break|case|catch|char|class|const|continue|default|delete|do|double|else|enum|"
    r"explicit|export|extern|false|float|for|friend|goto|if|inline|int|long|mutable|namespace|new|operator|private|"
    r"protected|public|register|return|short|signed|sizeof|static|struct|switch|template|this|throw|true|try|typedef|"
    r"typename|union|unsigned|using|virtual|void|volatile|while"
)
"""Tensors that C++ or a vertex' own members would not let be called so get a ``t_`` before their names."""

VERTEX_TYPES = {
    "float32": "float",
    "int32": "int",
    "uint32": "unsigned int",
    "int16": "short",
    "uint16": "unsigned short",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "bool",
}
"""Element types that a vertex' vectors have here, as C++ writes them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VertexStage:
    """A computation and what is done with its result: ``finish`` of the accumulator, None where nothing is.

    ``reads``: for each tensor that is read its name, buffer and accesses; from number ``late`` on only once the sum is
    complete.
    """

    name: str
    computation: Computation
    finish: Computation | None
    expr: TensorExpr
    target: str
    reads: tuple[tuple[str, Buffer, tuple[Access, ...]], ...]
    late: int

    @property
    def output(self) -> Buffer:
        return self.computation.target if self.finish is None else self.finish.target

    def finished(self, value: Expr) -> Expr:
        """What is stored where the computation comes to ``value``, over the computation's axes."""
        if self.finish is None:
            return value
        own = self.computation
        over_own = substitute(self.finish.value, list(zip(self.finish.spatial, own.spatial, strict=True)))
        return replace_reads(over_own, own.target, lambda _: value)

    def regions(self, box: PointBox) -> list[TensorBox]:
        """What ``box`` reads of each tensor; of late ones nothing before the sum is complete."""
        complete = all(sum(box[axis.name]) >= axis.extent for axis in self.expr.reduction)
        return [
            _region(name, accesses, box, needed=complete or number < self.late)
            for number, (name, _, accesses) in enumerate(self.reads)
        ]


def _region(name: str, accesses: Sequence[Access], box: PointBox, *, needed: bool) -> TensorBox:
    """The smallest box of the tensor with all that is read; conditions of padding keep reads inside of the tensor."""
    begins, sizes = [], []
    for dimension, extent in enumerate(accesses[0].shape):
        spans = [_span(access, dimension, box) for access in accesses]
        first = max(0, min(low for low, _ in spans))
        last = min(extent, max(high for _, high in spans))
        begins.append(min(first, extent))
        sizes.append(max(0, last - first) if needed else 0)
    if sizes and not all(sizes):
        begins, sizes = [0] * len(sizes), [0] * len(sizes)
    return TensorBox(tensor=name, begin=tuple(begins), size=tuple(sizes))


def _span(access: Access, dimension: int, box: PointBox) -> tuple[int, int]:
    """Positions [low, high) that ``box`` reads along ``dimension``: all where the index is not affine."""
    index = access.indices[dimension]
    if index is None:
        return 0, access.shape[dimension]
    low = high = index.constant
    for axis, coefficient in index.terms:
        begin, size = box[axis]
        ends = (coefficient * begin, coefficient * (begin + size - 1))
        low, high = low + min(ends), high + max(ends)
    return low, high + 1


def tensor_names(operator: OperatorBody) -> list[tuple[Buffer, str]]:
    """A name for each tensor, which C++ takes, by which the plan and the vertices call it."""
    names: list[tuple[Buffer, str]] = []
    buffers = [*operator.params]
    buffers += [c.target for c in operator.computations if not any(c.target.same_as(own) for own in buffers)]
    for buffer in buffers:
        if dtype_of(buffer) not in VERTEX_TYPES:
            raise IllegalRewrite(f"tensor {buffer.name} is {dtype_of(buffer)}: vertices have {', '.join(VERTEX_TYPES)}")
        plain = re.sub(NO_WORD, "_", buffer.name)
        plain = f"t_{plain}" if RESERVED.fullmatch(plain) else plain
        names.append((buffer, plain if plain not in [n for _, n in names] else f"{plain}_{len(names)}"))
    return names


def name_of(buffer: Buffer, names: Sequence[tuple[Buffer, str]]) -> str:
    return next(name for own, name in names if own.same_as(buffer))


def stages_of(operator: OperatorBody) -> list[VertexStage]:
    """The stages of a simplified operator in order; raises IllegalRewrite for what no vertex computes."""
    names = tensor_names(operator)
    pairs = [pair for group in plan_for_gpu(operator) for pair in _pairs(group)]
    return [_stage(operator, number, *pair, names) for number, pair in enumerate(pairs)]


def _pairs(group: TileGroup | RowGroup) -> list[tuple[Computation, Computation | None]]:
    """(computation, what finishes its results): paddings are computed where they are read."""
    if isinstance(group, RowGroup):
        return [(computation, None) for computation in group.computations]
    anchor = group.anchor
    for producer in reversed(group.prologue):
        anchor = inline(producer, anchor)
    if len(group.epilogue) == 1 and _finishes(group.epilogue[0], anchor):
        return [(anchor, group.epilogue[0])]
    return [(anchor, None), *((computation, None) for computation in group.epilogue)]


def _finishes(epilogue: Computation, anchor: Computation) -> bool:
    """Whether ``epilogue`` replaces each result by a value of its own type that depends on it alone of all results."""
    if not (epilogue.writes_at_its_own_axes() and anchor.writes_at_its_own_axes() and not epilogue.is_reduction):
        return False
    own = [load.indices for load in epilogue.loads() if load.source.same_as(anchor.target)]
    if any(source.same_as(other) for source in epilogue.sources() for other in anchor.sources()):
        return False  # its input would be in two buffers of the tile
    return (
        dtype_of(epilogue.target) == dtype_of(anchor.target)
        and static_shape(epilogue.target) == static_shape(anchor.target)
        and all(structural_equal(a, b) for at in own for a, b in zip(at, epilogue.spatial, strict=True))
    )


def _stage(
    operator: OperatorBody,
    number: int,
    computation: Computation,
    finish: Computation | None,
    names: Sequence[tuple[Buffer, str]],
) -> VertexStage:
    if not computation.writes_at_its_own_axes():
        raise IllegalRewrite(f"{computation.name} writes across its axes, where no tile keeps a block of its own")
    reads = _reads(computation, computation, names)
    stage = VertexStage(
        name=f"{re.sub(NO_WORD, '_', operator.name)}_{number}",
        computation=computation,
        finish=finish,
        expr=tensor_expr_of(computation, name=operator.name),
        target=name_of(computation.target if finish is None else finish.target, names),
        reads=reads,
        late=len(reads),
    )
    if finish is None or computation.init is None:
        return stage
    behind = replace(computation, value=stage.finished(computation.init), combiner=None, init=None)
    return replace(stage, reads=(*reads, *_reads(behind, computation, names)))


def _reads(
    computation: Computation, axes_of: Computation, names: Sequence[tuple[Buffer, str]]
) -> tuple[tuple[str, Buffer, tuple[Access, ...]], ...]:
    """For each tensor in ``computation.value`` its accesses, over the axes of ``axes_of``."""
    found = []
    for source in computation.sources():
        loads = [load for load in computation.loads() if load.source.same_as(source)]
        accesses = tuple(access_of(source, load.indices, axes_of) for load in loads)
        found.append((name_of(source, names), source, accesses))
    return tuple(found)


def block_of(accesses: Sequence[Access], sizes: Mapping[str, int]) -> list[int]:
    """The part of a tensor by which tiles of ``sizes`` move on: of a window its steps, without what overlaps."""
    block = []
    for dimension, extent in enumerate(accesses[0].shape):
        indices = [access.indices[dimension] for access in accesses]
        steps = [1] + [abs(c) * sizes[axis] for i in indices if i is not None for axis, c in i.terms]
        block.append(extent if any(i is None for i in indices) else min(extent, max(steps)))
    return block
