"""Reductions with data reuse on a GPU, in tiles through shared memory: matrix units before vector units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tvm_ext.analysis.gemm_form import supports_mma
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.limits import check_time

from ..emit.mma_tiles.emit import emit_mma_tile
from ..emit.simt_tiles.emit import emit_simt_tile
from ..plan.alternatives import Pick, best_programs
from ..plan.anchors import Anchor, construct_for_vector_units, construct_gpu_anchor, gpu_anchor
from ..plan.context import KernelContext
from ..plan.form import Form, first_and_count, fused_note, gpu_form
from ..plan.gpu_limits import nothing_fits
from ..plan.plan_kernels import TileGroup
from ..roller.construct_mma import construct_mma
from .kernel_kind import Group, KernelKind, KernelPart


class GpuTiles(KernelKind):
    name = "tiles"
    on_gpus = True

    def of_group(self, group: Group, context: KernelContext) -> GpuTilePart | None:
        return GpuTilePart(group=group, context=context) if isinstance(group, TileGroup) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuTilePart(KernelPart[None]):
    """An anchor with its prologue and its epilogue."""

    group: TileGroup
    context: KernelContext

    @property
    def anchor(self) -> Anchor:
        context = self.context
        return construct_gpu_anchor(self.group, context.operator, context.device, context.options)

    def forms(self, chosen: None = None) -> list[Form]:
        return next(self.ways())

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
            yield [gpu_form("rtile", kernel, program, self._notes(program, kernel, label, refusals))]
        if not accepted:
            raise IllegalRewrite(f"no kernel for {self.group.anchor.name}: " + "; ".join(first_and_count(refusals)))

    def _attempts(
        self, refusals: list[str], pick: Pick
    ) -> Iterator[tuple[Callable[[RProgram], SimtKernel], RProgram, str]]:
        """(emitter of an rProgram, rProgram, the units that it uses), in the order to try them.

        What keeps the matrix units out is added to ``refusals``, but only where the device has them for the type.
        """
        group, device, options = self.group, self.context.device, self.context.options
        params = self.context.operator.params
        computation, expr = gpu_anchor(group, self.context.operator)

        def emitter(emit: Callable[..., SimtKernel]) -> Callable[[RProgram], SimtKernel]:
            return lambda program: emit(computation, expr, group.prologue, group.epilogue, program, device, params)

        why_not = supports_mma(expr, device)
        if why_not is None:
            for program in pick(construct_mma(expr, device, k=options.candidates)):
                yield emitter(emit_mma_tile), program, "matrix units"
        elif device.peak_gflops_of(f"{expr.inputs[0].dtype}_tensor") is not None:
            refusals.append(f"matrix units: {why_not}")
        construction = construct_for_vector_units(expr, device, options)
        if not construction.programs:
            raise self._nothing_fits(expr)
        label = "vector units" + "".join(f" ({note})" for note in construction.notes)
        for program in pick(construction):
            yield emitter(emit_simt_tile), program, label

    def _nothing_fits(self, expr: TensorExpr) -> Exception:
        error = nothing_fits(expr.name, tuple(axis.extent for axis in expr.axes), self.context.device)
        return IllegalRewrite(error.problem) if self.context.options.enable_roller == "auto" else error

    def _notes(self, program: RProgram, kernel: SimtKernel, label: str, refusals: Sequence[str]) -> list[str]:
        group = self.group
        how = f"{group.anchor.name} on {label} in tiles {program.tile('L1')}"
        names = ", ".join(computation.name for computation in group.prologue)
        computed = f", {names} computed on the way to shared memory" if names else ""
        return [how + computed + fused_note(group.epilogue), *kernel.notes, *first_and_count(refusals)]
