"""A kind of kernels that joins from outside: the sum along the diagonal of a matrix (docs/add-a-kernel.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_ext._tvm import TensorLoad
from tvm_ext.analysis.computations import Computation, dtype_of, substitute
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import (
    SERIAL,
    RegisterArray,
    accumulate,
    allocate,
    index,
    load,
    loop,
    new_buffer,
    sequence,
    store_point,
)
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.serialise import to_json
from tvm_ext.tir_passes.kinds.cpu_rows import RowPart
from tvm_ext.tir_passes.kinds.kernel_kind import Candidates, KernelKind, KernelPart
from tvm_ext.tir_passes.plan.context import KernelContext
from tvm_ext.tir_passes.plan.form import Form
from tvm_ext.tir_passes.plan.plan_kernels import RowGroup
from tvm_ext.tir_passes.plan.plan_windows import CpuGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagonalTiles:
    """How many partial sums do not wait for each other."""

    partial: int

    @property
    def configuration(self) -> str:
        return to_json(self)


class DiagonalSums(KernelKind):
    name = "a sum along a diagonal"

    def of_group(self, group: CpuGroup, context: KernelContext) -> DiagonalPart | None:
        """Recognise: one computation, which adds what it loads at [k, k]."""
        if not isinstance(group, RowGroup) or len(group.computations) != 1:
            return None
        (computation,) = group.computations
        value = computation.value
        if computation.combiner != "sum" or len(computation.reduction) != 1 or not isinstance(value, TensorLoad):
            return None
        (k,) = computation.reduction
        is_diagonal = len(value.indices) == 2 and all(item.same_as(k) for item in value.indices)
        return DiagonalPart(computation=computation, context=context) if is_diagonal else None


@dataclass(frozen=True, kw_only=True, eq=False)
class DiagonalPart(KernelPart[DiagonalTiles]):
    tiles = DiagonalTiles
    computation: Computation
    context: KernelContext

    def candidates(self) -> Candidates[DiagonalTiles]:
        """Candidates and their time: additions wait for each other, 4 cycles on 2 partial sums are 2 for each."""
        length = self._length
        seconds = [(partial, length * max(1.0, 4 / partial) * 1e-9) for partial in (8, 4, 2, 1) if partial <= length]
        return Candidates(found=[(DiagonalTiles(partial=item), time) for item, time in seconds], depth=length)

    def key(self) -> MeasuredWorkload:
        rows = RowPart(rows=RowGroup(computations=(self.computation,)), context=self.context)
        return replace(rows.key(), kind="diagonal")

    def forms(self, chosen: DiagonalTiles | None = None) -> list[Form]:
        """Emit and describe: ``partial`` sums in registers, then the sum of these."""
        computation, tiles = self.computation, chosen or self.candidates().found[0][0]
        if tiles not in [item for item, _ in self.candidates().found]:
            raise IllegalRewrite(f"a diagonal of {self._length} elements has no {tiles}")
        count, (k,) = tiles.partial, computation.reduction
        whole, rest = divmod(self._length, count)
        registers = [index(place) for place in range(count)]
        buffer = new_buffer([count], dtype_of(computation.target), "sums", "local")
        sums = RegisterArray(buffer, lambda body: sequence(*map(body, registers)))

        def element(at: object) -> object:
            return substitute(computation.value, [(k, at)])

        steps = loop(whole, SERIAL, "step", lambda s: sums.accumulate(lambda place: element(s * index(count) + place)))
        tail = [accumulate(buffer, [place], element(index(whole * count) + place)) for place in registers[:rest]]
        total = sum((load(buffer, [place]) for place in registers[1:]), load(buffer, registers[:1]))
        done = store_point(computation, [(v, index(0)) for v in computation.spatial], total)
        begin = sums.fill(lambda _: computation.init)
        statements = (sequence(allocate(buffer), begin, steps, *tail, done),)
        note = f"{computation.name} along its diagonal, {tiles}"
        return [Form(path="rows", statements=statements, program=None, notes=(note,))]

    @property
    def _length(self) -> int:
        return self.computation.extent(self.computation.reduction[0])
