"""A stage's class of vertices in C++, in the shape of Poplar's codelets; stock TVM's C code generator prints the loops.

A vertex computes a box of points from regions that lie row by row in its input vectors. Where box and regions lie in
their tensors, and how large they are, its fields say; those that all vertices share are constants of the text. Points
go in register tiles, Roller's rTile in L0: full ones unrolled, the last ones of an axis with a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from tvm_ext._tvm import (
    Buffer,
    Call,
    Expr,
    IRModule,
    PrimFunc,
    Stmt,
    TensorLoad,
    Var,
    call_pure_extern,
    ir,
    structural_map,
    tirx,
    tvm,
)
from tvm_ext.analysis.computation_exprs import axis_names
from tvm_ext.analysis.computations import dtype_of, replace_loads, substitute
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    SERIAL,
    UNROLLED,
    accumulate,
    allocate,
    bind,
    cast_to,
    if_all,
    index,
    load,
    nest,
    new_buffer,
    rename_apart,
    sequence,
    store,
    tile_count,
)

from ...expressions.cut_expressions import name_of
from ...expressions.exact_floats import keep_floats
from .stages import VERTEX_TYPES, PointBox, VertexStage

HEADER = "#include <math.h>\n#include <stdbool.h>\n#include <stdint.h>\n#include <poplar/Vertex.hpp>\n"

CODELET = """
// {comment}
{body}
class {name} : public poplar::Vertex {{
public:
{members}
  bool compute() {{
    {name}_body({arguments});
    return true;
  }}
}};
"""


def field_names(stage: VertexStage) -> tuple[str, ...]:
    """Of all whole numbers that a vertex depends on, in the order of `field_values`."""
    axes = [f"{axis}_{what}" for axis in axis_names(stage.computation) for what in ("begin", "size")]
    regions = [
        f"{name}_{what}{dimension}"
        for name, _, accesses in stage.reads
        for dimension in range(len(accesses[0].shape))
        for what in ("begin", "size")
    ]
    return (*axes, *regions)


def field_values(stage: VertexStage, box: PointBox) -> tuple[int, ...]:
    """The fields of the vertex that computes ``box``."""
    axes = [number for axis in axis_names(stage.computation) for number in box[axis]]
    regions = [n for region in stage.regions(box) for pair in zip(region.begin, region.size, strict=True) for n in pair]
    return (*axes, *regions)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Text:
    """What the loops of one class are made of: ``fields`` are variables, or constants where all vertices agree."""

    stage: VertexStage
    fields: Mapping[str, Expr]
    registers: Mapping[str, int]
    flat: Mapping[str, Buffer]  # of each tensor, as one dimension

    def size(self, axis: str) -> Expr:
        return self.fields[f"{axis}_size"]

    def names(self, kind: str) -> list[str]:
        pairs = zip(axis_names(self.stage.computation), self.stage.computation.kinds, strict=True)
        return [name for name, own in pairs if own == kind]

    def from_vector(self, read: TensorLoad) -> Expr:
        """What ``read`` loads from a whole tensor, from the vector that has the region."""
        name = next(name for name, buffer, _ in self.stage.reads if buffer.same_as(read.source))
        place: Expr = index(0)
        for dimension, position in enumerate(read.indices):
            inside = cast_to(position, INDEX_DTYPE) - self.fields[f"{name}_begin{dimension}"]
            place = place * self.fields[f"{name}_size{dimension}"] + inside
        return load(self.flat[name], [place])

    def at(self, value: Expr, spatial: Sequence[Expr], reduction: Sequence[Expr]) -> Expr:
        """``value`` at the point whose offsets in the box are given."""
        own, names = self.stage.computation, [*self.names("spatial"), *self.names("reduce")]
        pairs = zip(names, (*spatial, *reduction), strict=False)
        spots = [self.fields[f"{axis}_begin"] + offset for axis, offset in pairs]
        return replace_loads(substitute(value, bind((*own.spatial, *own.reduction), spots)), self.from_vector)

    def result(self, spatial: Sequence[Expr]) -> list[Expr]:
        """Where the output of a point lies in its vector: the box of all spatial axes, row by row."""
        place: Expr = index(0)
        for axis, offset in zip(self.names("spatial"), spatial, strict=True):
            place = place * self.size(axis) + offset
        return [place]

    def body(self) -> Stmt:
        """Loops over register tiles; those that the box cuts ask for each point whether it is inside."""
        axes = self.names("spatial")
        steps = [self.registers[axis] for axis in axes] if self.stage.computation.is_reduction else [1] * len(axes)
        counts = [tile_count(self.size(axis), step) for axis, step in zip(axes, steps, strict=True)]

        def tile(numbers: Sequence[Expr]) -> Stmt:
            starts = [number * index(step) for number, step in zip(numbers, steps, strict=True)]
            full = [
                start + index(step) <= self.size(axis)
                for start, step, axis in zip(starts, steps, axes, strict=True)
                if step > 1
            ]
            whole = self.register_tile(starts, steps, cut=False)
            return if_all(full, whole, self.register_tile(starts, steps, cut=True)) if full else whole

        return nest(counts, SERIAL, [f"{axis}_tile" for axis in axes], tile)

    def register_tile(self, starts: Sequence[Expr], steps: Sequence[int], *, cut: bool) -> Stmt:
        """The points from ``starts`` on: accumulators that begin anew or go on, the reduction, and what is stored."""
        own, axes = self.stage.computation, self.names("spatial")

        def walk(body: Callable[[Sequence[Expr], Sequence[Expr]], Stmt]) -> Stmt:
            def point(offsets: Sequence[Expr]) -> Stmt:
                places = [start + offset for start, offset in zip(starts, offsets, strict=True)]
                inside = [place < self.size(axis) for place, axis in zip(places, axes, strict=True)] if cut else []
                return if_all(inside, body(offsets or [index(0)], places))

            return nest(steps, UNROLLED, [f"{axis}_lane" for axis in axes], point)

        output = self.flat[self.stage.target]
        if not own.is_reduction:
            value = self.stage.finished(own.value)
            return walk(lambda _, places: store(output, self.at(value, places, ()), self.result(places)))
        sums = new_buffer(steps or [1], dtype_of(own.target), "sums", "local")
        names, nowhere = self.names("reduce"), [index(0)] * len(own.reduction)
        begins, sizes = [self.fields[f"{name}_begin"] for name in names], [self.size(name) for name in names]
        extents = [index(own.extent(variable)) for variable in own.reduction]
        first = reduce(tirx.And, [begin == zero for begin, zero in zip(begins, nowhere, strict=True)])
        last = [begin + size == extent for begin, size, extent in zip(begins, sizes, extents, strict=True)]

        def start(at: Sequence[Expr], places: Sequence[Expr]) -> Stmt:
            initial = self.at(own.init, places, nowhere)
            return store(sums, tirx.if_then_else(first, initial, load(output, self.result(places))), at)

        def step(reduction: Sequence[Expr]) -> Stmt:
            return walk(lambda at, places: accumulate(sums, at, self.at(own.value, places, reduction), own.combiner))

        def end(at: Sequence[Expr], places: Sequence[Expr]) -> Stmt:
            total, marked = load(sums, at), Var("total", dtype_of(own.target))
            finished = substitute(self.at(self.stage.finished(marked), places, nowhere), [(marked, total)])
            kept, place = store(output, finished, self.result(places)), self.result(places)
            return kept if self.stage.finish is None else if_all(last, kept, store(output, total, place))

        return sequence(allocate(sums), walk(start), nest(sizes, SERIAL, names, step), walk(end))


def vertex_text(
    stage: VertexStage, registers: Mapping[str, int], fields: Mapping[str, int | None], comment: str
) -> str:
    """The class of ``stage``. ``fields``: what `field_names` has, None where vertices differ.

    Raises IllegalRewrite where stock TVM's C code generator has no text for an expression.
    """
    own = {name: Var(name, INDEX_DTYPE) if value is None else index(value) for name, value in fields.items()}
    tensors = [(name, buffer) for name, buffer, _ in stage.reads] + [(stage.target, stage.output)]
    flat = {name: tirx.decl_buffer([index(2**31 - 1)], dtype_of(buffer), name) for name, buffer in tensors}
    body = keep_floats(_Text(stage=stage, fields=own, registers=registers, flat=flat).body(), by_product=True)
    vectors = [Var(f"{name}_data", ir.PointerType(ir.PrimType(dtype_of(flat[name])))) for name, _ in tensors]
    declared = [tirx.DeclBuffer(flat[name], data=v) for (name, _), v in zip(tensors, vectors, strict=True)]
    numbers = [variable for name, variable in own.items() if fields[name] is None]
    function = tirx.PrimFunc([*vectors, *numbers], sequence(*declared, body))
    types = [VERTEX_TYPES[dtype_of(buffer)] for _, buffer in tensors]
    members = [f"  poplar::Input<poplar::Vector<{t}>> {n};" for (n, _), t in zip(tensors[:-1], types[:-1], strict=True)]
    members.append(f"  poplar::InOut<poplar::Vector<{types[-1]}>> {stage.target};")
    members += [f"  int {variable.name};" for variable in numbers]
    arguments = [f"const_cast<{t} *>(&{name}[0])" for (name, _), t in zip(tensors, types, strict=True)]
    return CODELET.format(
        comment=comment,
        name=stage.name,
        body=_printed(function, f"{stage.name}_body"),
        members="\n".join(members),
        arguments=", ".join([*arguments, *(variable.name for variable in numbers)]),
    )


def _of_math_h(call: Call) -> Expr:
    """``call`` by its name in C where stock TVM has no rule: absolute values, which hidden constants are, too."""
    function = {"tirx.fabs": "fabsf", "tirx.exp2": "exp2f"}.get(name_of(call))
    return call if function is None else call_pure_extern(call.ty, function, *call.args)


def _printed(function: PrimFunc, name: str) -> str:
    """``function`` as stock TVM prints it for C, without the headers of its runtime."""
    target = tvm.target.Target({"kind": "c"})
    passes = tirx.transform
    lowered = [passes.FlattenBuffer(), passes.ForceNarrowIndexToInt32(), passes.UnrollLoop(), passes.StmtSimplify()]
    attributes = {"global_symbol": name, "target": target, "s_tir": True, "tirx.noalias": True}
    mod = IRModule({name: rename_apart(function).with_attrs(attributes)})
    try:
        made = tvm.transform.Sequential([*lowered, passes.LowerIntrin()])(mod)[name]
        mod = IRModule({name: made.with_body(structural_map(made.body, (Call, _of_math_h)))})
        text = str(tvm.get_global_func("target.build.c")(mod, target).inspect_source())
    except tvm.error.InternalError as error:
        raise IllegalRewrite(f"stock TVM writes no C for it: {str(error).strip().splitlines()[-1]}") from error
    return "static " + text[text.rindex(f"TVM_DLL void {name}(") :].removeprefix("TVM_DLL ").rstrip()
