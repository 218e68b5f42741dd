"""What Roller constructs for a group of computations: for the anchor of a tile group, for the largest computation of
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computations import Computation, OperatorBody
from tvm_ext.analysis.gemm_form import supports_mma
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.rprogram import RProgram

from ..roller.construct import Construction
from ..roller.construct_mma import construct_mma
from ..roller.construct_once import construct_once
from .canonical import canonical_computation
from .context import KernelContext
from .dot_form import by_groups
from .plan_kernels import RowGroup, TileGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Anchor:
    """A tile group's anchor in canonical form, as computation and as expression, and what Roller constructs for it."""

    computation: Computation
    expr: TensorExpr
    construction: Construction

    @property
    def programs(self) -> list[RProgram]:
        """Those with vectors along a spatial axis, as CPU emitters need it, best predicted first."""
        spatial = [axis.name for axis in self.expr.spatial]
        return [program for program in self.construction.programs if program.vector_axis in spatial]


def construct_anchor(group: TileGroup, context: KernelContext) -> Anchor:
    """The group's anchor on a CPU."""
    computation, expr = canonical_anchor(group, context.operator, context.constants, context.device)
    options = context.options
    made = construct_once(expr, context.device, k=options.candidates, first_epsilon=options.epsilon)
    return Anchor(computation=computation, expr=expr, construction=made)


def canonical_anchor(
    group: TileGroup, operator: OperatorBody, constants: Sequence[Buffer], device: DeviceSpec
) -> tuple[Computation, TensorExpr]:
    """The group's anchor in canonical form for the CPU ``device``, as computation and as expression."""
    packable = packable_constants(operator, constants)
    anchor = by_groups(group.anchor, packable, device)
    return canonical_computation(
        anchor, operator.name, constants=packable, epilogue=group.epilogue, params=operator.params
    )


def packable_constants(operator: OperatorBody, constants: Sequence[Buffer]) -> list[Buffer]:
    """Of ``constants``, those that one load alone reads: a kernel may have them in another layout."""
    readers = [load.source for computation in operator.computations for load in computation.loads()]
    return [constant for constant in constants if sum(constant.same_as(source) for source in readers) == 1]


def construct_gpu_anchor(group: TileGroup, operator: OperatorBody, device: DeviceSpec, options: BuildOptions) -> Anchor:
    """The group's anchor on a GPU: for matrix units where they serve it."""
    computation, expr = gpu_anchor(group, operator)
    if supports_mma(expr, device) is None:
        construction = construct_mma(expr, device, k=options.candidates)
    else:
        construction = construct_for_vector_units(expr, device, options)
    return Anchor(computation=computation, expr=expr, construction=construction)


def gpu_anchor(group: TileGroup, operator: OperatorBody) -> tuple[Computation, TensorExpr]:
    return canonical_computation(
        group.anchor, operator.name, prologue=group.prologue, epilogue=group.epilogue, params=operator.params
    )


def construct_for_vector_units(expr: TensorExpr, device: DeviceSpec, options: BuildOptions) -> Construction:
    return construct_once(expr, device, k=options.candidates, first_epsilon=options.epsilon, tensor_core=False)


def row_program(group: RowGroup, operator: OperatorBody, device: DeviceSpec) -> RProgram | None:
    """The rProgram of the group's largest computation: what the model expects of it (the rows decide the loops)."""
    largest = max(group.computations, key=lambda computation: computation.point_count)
    _, expr = canonical_computation(largest, operator.name)
    return next(iter(construct_once(expr, device, k=1).programs), None)


def kept_buffers(group: RowGroup, operator: OperatorBody) -> list[Buffer]:
    """Buffers of the group that others read later, and outputs."""
    outside = [s for s in operator.computations if not any(s.target.same_as(own.target) for own in group.computations)]
    return [
        computation.target
        for computation in group.computations
        if operator.is_output(computation.target)
        or any(load.source.same_as(computation.target) for s in outside for load in s.loads())
    ]
