"""Attention as one kernel: functions of `FuseAttention`, whose attribute says what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import Buffer, Stmt
from tvm_ext.analysis.tile_workload import ATTENTION as ATTENTION_KIND
from tvm_ext.analysis.tile_workload import tile_machine
from tvm_ext.cost.attention_time import AttentionClock
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import PARALLEL, outer_kind
from tvm_ext.records.attention import ATTENTION, Attention, AttentionTiles
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.rprogram import Prediction, RProgram, RTile
from tvm_ext.records.serialise import to_json
from tvm_ext.support.arithmetic import ceil_div

from ..emit.cpu_attention.blocks import AttentionFunctions
from ..emit.cpu_attention.emit import emit_attention
from ..expressions.vector_math import exp_below_one
from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from .kernel_kind import Candidates, KernelKind, KernelPart


class CpuAttention(KernelKind):
    name = "attention"

    def of_function(self, operator: UnscheduledOperator) -> AttentionPart | None:
        work = operator.attribute(ATTENTION, Attention)
        return None if work is None else AttentionPart(work=work, context=operator.parameters_only())


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPart(KernelPart[AttentionTiles]):
    """An attention as one kernel; its context has parameters alone, for ``work`` says what is computed."""

    tiles = AttentionTiles
    work: Attention
    context: KernelContext

    def forms(self, chosen: AttentionTiles | None = None) -> list[Form]:
        params, clock = self.context.operator.params, AttentionClock(self.work, self.context.device)
        statement, program, note = attention_kernel(clock, params, chosen)
        return [Form(path="rtile", statements=(statement,), program=program, notes=(note,))]

    def key(self) -> MeasuredWorkload:
        dtype = ",".join(operand.dtype for operand in self.work.operands)
        machine = tile_machine(self.context.device, ATTENTION_KIND)
        return replace(machine, structure=to_json(self.work), dtype=dtype)

    def candidates(self) -> Candidates[AttentionTiles]:
        found = AttentionClock(self.work, self.context.device).candidates()
        return Candidates(found=found, depth=self.work.keys + self.work.features)

    def describe(self, choice: KernelChoice, forms: Sequence[Form]) -> KernelChoice:
        return replace(choice, flops=self.work.flops)


def attention_kernel(
    clock: AttentionClock, params: Sequence[Buffer], chosen: AttentionTiles | None = None
) -> tuple[Stmt, RProgram, str]:
    """The statement of the kernel, its tiles as an rProgram over queries and keys, and a note in words.

    Raises IllegalRewrite for ``chosen`` tiles that it cannot have; None are construction's own.
    """
    work, device = clock.work, clock.device
    if chosen is not None:
        clock.check(chosen)
    tiles = chosen or clock.usual_tiles()
    if tiles is None:
        raise IllegalRewrite(f"attention of {work}: {device.name} has no SIMD registers for queries")
    seconds = clock.kernel_seconds(tiles)
    tasks = work.batch * ceil_div(work.queries, tiles.query_block)
    units = min(device.unit_count, tasks) if outer_kind(seconds, device) == PARALLEL else 1
    functions = AttentionFunctions(exp=lambda x: exp_below_one(x, device), dot=clock.dot)
    statement = emit_attention(work, tiles, params, units, functions)
    return statement, _program(clock, tiles, seconds, units), f"attention of {work} in {tiles}"


def _program(clock: AttentionClock, tiles: AttentionTiles, seconds: float, units: int) -> RProgram:
    def tile(queries: int, keys: int) -> RTile:
        return RTile(axes=("query", "key"), shape=(queries, keys))

    tasks = clock.work.batch * ceil_div(clock.work.queries, tiles.query_block)
    time_s = seconds + clock.machine.launch_s
    return RProgram(
        device=clock.device.name,
        expr_digest="",
        tiles=(("L0", tile(tiles.query_block, tiles.key_rows)), ("L1", tile(tiles.query_block, tiles.key_block))),
        vector_axis="query",
        unit_count=units,
        partition_count=tasks,
        epsilon=0.0,
        shrunk=False,
        prediction=Prediction(time_s=time_s, compute_s=seconds, layers=(), bound="compute"),
    )
