"""Roller's `construct`, remembered: networks repeat their operators, and builds repeat their networks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from tvm_ext.analysis.tensor_expr import Access, FusedComputation, TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.limits import limits

from .construct import Construction, construct


def construct_once(
    expr: TensorExpr, device: DeviceSpec, *, k: int, first_epsilon: float = 0.0, tensor_core: bool = True
) -> Construction:
    """Roller's `construct`, once per process for each expression, device and options, whatever the operator is called.

    On CPUs whatever its tensors are called, too (a GPU's programs name them): a chain's judge and the kernels that are
    made afterwards name them differently. The canonical form is then of tensors without names.
    """
    nameless = _nameless(expr) if device.kind == "cpu" else replace(expr, name="")
    made = _construct_nameless(nameless, device, k, first_epsilon, tensor_core, limits().search_steps)
    digest = expr.digest
    if not made.programs or made.programs[0].expr_digest == digest:
        return made
    return replace(
        made,
        programs=_for_digest(made.programs, digest),
        rejected=tuple(replace(a, program=replace(a.program, expr_digest=digest)) for a in made.rejected),
        narrower=_for_digest(made.narrower, digest),
    )


def _for_digest(programs: Iterable[RProgram], digest: str) -> tuple[RProgram, ...]:
    return tuple(replace(program, expr_digest=digest) for program in programs)


def _nameless(expr: TensorExpr) -> TensorExpr:
    """``expr`` with its tensors and fused blocks numbered: equal for all expressions that are constructed alike."""
    numbers: dict[str, str] = {}

    def numbered(tensor: str) -> str:
        return numbers.setdefault(tensor, str(len(numbers)))

    def access(own: Access) -> Access:
        return replace(own, tensor=numbered(own.tensor))

    def fused(blocks: tuple[FusedComputation, ...]) -> tuple[FusedComputation, ...]:
        return tuple(replace(b, name="", extra_inputs=tuple(map(numbered, b.extra_inputs))) for b in blocks)

    return replace(
        expr,
        name="",
        inputs=tuple(map(access, expr.inputs)),
        output=access(expr.output),
        prologue=fused(expr.prologue),
        epilogue=fused(expr.epilogue),
    )


@functools.lru_cache(maxsize=512)
def _construct_nameless(
    expr: TensorExpr, device: DeviceSpec, k: int, first_epsilon: float, tensor_core: bool, _steps: int
) -> Construction:
    return construct(expr, device, k=k, first_epsilon=first_epsilon, tensor_core=tensor_core)
