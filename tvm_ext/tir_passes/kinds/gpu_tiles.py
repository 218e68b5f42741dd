"""Reductions with data reuse on a GPU, in tiles through shared memory: matrix units before vector units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.gemm_form import supports_mma
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import GPU_TILES, tile_workload
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.limits import check_time

from ..emit.mma_tiles.emit import emit_mma_tile
from ..emit.simt_tiles.emit import emit_simt_tile
from ..plan.alternatives import Pick, best_programs
from ..plan.anchors import Anchor, construct_for_vector_units, construct_gpu_anchor, gpu_anchor
from ..plan.context import KernelContext
from ..plan.form import Form, first_and_count, fused_note, gpu_form
from ..plan.gpu_limits import nothing_fits
from ..plan.plan_kernels import TileGroup
from ..roller.construct import tile_of_vector, vector_program
from ..roller.construct_mma import construct_mma, matrix_program, tile_of_matrix
from .kernel_kind import NO_CHOICE, Candidates, Group, KernelKind, KernelPart


class GpuTiles(KernelKind):
    name = "tiles"
    on_gpus = True

    def of_group(self, group: Group, context: KernelContext) -> GpuTilePart | None:
        return GpuTilePart(group=group, context=context) if isinstance(group, TileGroup) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuTilePart(KernelPart[GpuTile]):
    """An anchor with its prologue and its epilogue."""

    tiles = GpuTile
    group: TileGroup
    context: KernelContext

    @property
    def anchor(self) -> Anchor:
        context = self.context
        return construct_gpu_anchor(self.group, context.operator, context.device, context.options)

    def forms(self, chosen: GpuTile | None = None) -> list[Form]:
        if chosen is None:
            return next(self.ways())
        expr, device = self.read[1], self.context.device
        reason = supports_mma(expr, device) if chosen.matrix else None
        if reason is not None:
            raise IllegalRewrite(reason)
        make = matrix_program if chosen.matrix else vector_program
        program, emit = make(chosen, expr, device), emit_mma_tile if chosen.matrix else emit_simt_tile
        label = "matrix units" if chosen.matrix else "vector units"
        kernel = self._emitter(emit)(program)
        return [replace(self._form(kernel, program, label, ()), tile=chosen, pinned=True)]

    @cached_property
    def read(self) -> tuple[Computation, TensorExpr]:
        """The anchor in canonical form."""
        return gpu_anchor(self.group, self.context.operator)

    @cached_property
    def _key(self) -> MeasuredWorkload:
        return tile_workload(self.read[1], self.context.device, GPU_TILES)

    def key(self) -> MeasuredWorkload:
        return self._key

    def candidates(self) -> Candidates[GpuTile]:
        expr, anchor = self.read[1], self.anchor
        programs = anchor.construction.programs
        if not programs:
            raise IllegalRewrite(NO_CHOICE)
        on_matrix = supports_mma(expr, self.context.device) is None
        found = [
            (tile_of_matrix(item, expr) if on_matrix else tile_of_vector(item), item.prediction.time_s)
            for item in programs
        ]
        return Candidates(found=found, depth=prod(axis.extent for axis in expr.reduction), expr=expr)

    def ways(self, pick: Pick = best_programs) -> Iterator[list[Form]]:
        refusals: list[str] = []
        accepted = 0
        for emit, program, label in self._attempts(refusals, pick):
            check_time()
            try:
                kernel = emit(program)
            except IllegalRewrite as refusal:
                refusals.append(f"{label}, tile {program.tile('L1')}: {refusal}")
                continue
            accepted += 1
            yield [self._form(kernel, program, label, refusals)]
        if not accepted:
            raise IllegalRewrite(f"no kernel for {self.group.anchor.name}: " + "; ".join(first_and_count(refusals)))

    def _attempts(
        self, refusals: list[str], pick: Pick
    ) -> Iterator[tuple[Callable[[RProgram], SimtKernel], RProgram, str]]:
        """(emitter of an rProgram, rProgram, the units that it uses), in the order to try them.

        What keeps the matrix units out is added to ``refusals``, but only where the device has them for the type.
        """
        device, options, expr = self.context.device, self.context.options, self.read[1]
        why_not = supports_mma(expr, device)
        if why_not is None:
            for program in pick(construct_mma(expr, device, k=options.candidates)):
                yield self._emitter(emit_mma_tile), program, "matrix units"
        elif device.peak_gflops_of(f"{expr.inputs[0].dtype}_tensor") is not None:
            refusals.append(f"matrix units: {why_not}")
        construction = construct_for_vector_units(expr, device, options)
        if not construction.programs:
            raise self._nothing_fits(expr)
        label = "vector units" + "".join(f" ({note})" for note in construction.notes)
        for program in pick(construction):
            yield self._emitter(emit_simt_tile), program, label

    def _emitter(self, emit: Callable[..., SimtKernel]) -> Callable[[RProgram], SimtKernel]:
        (computation, expr), group, context = self.read, self.group, self.context
        fused, params = (group.prologue, group.epilogue), context.operator.params
        return lambda program: emit(computation, expr, *fused, program, context.device, params)

    def _form(self, kernel: SimtKernel, program: RProgram, label: str, refusals: Sequence[str]) -> Form:
        on_matrix = label == "matrix units"
        tile = tile_of_matrix(program, self.read[1]) if on_matrix else tile_of_vector(program)
        made = gpu_form("rtile", kernel, program, self._notes(program, kernel, label, refusals))
        return replace(made, tile=tile, workload=self._key.key)

    def _nothing_fits(self, expr: TensorExpr) -> Exception:
        error = nothing_fits(expr.name, tuple(axis.extent for axis in expr.axes), self.context.device)
        return IllegalRewrite(error.problem) if self.context.options.enable_roller == "auto" else error

    def _notes(self, program: RProgram, kernel: SimtKernel, label: str, refusals: Sequence[str]) -> list[str]:
        group = self.group
        how = f"{group.anchor.name} on {label} in tiles {program.tile('L1')}"
        names = ", ".join(computation.name for computation in group.prologue)
        computed = f", {names} computed on the way to shared memory" if names else ""
        return [how + computed + fused_note(group.epilogue), *kernel.notes, *first_and_count(refusals)]
