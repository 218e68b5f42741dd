"""A recurrent layer of as many steps as its input has, at run time or known before: one function that loops over them.

Relax has no loops. The step is the function that `FuseCells` makes of a cell elsewhere; the loop over it is TensorIR
(`ir/step_loop.py`), called like any operator, and construction replaces its inside by the cell's kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext._tvm import CALL_TIR, OPAQUE, BlockBuilder, Call, Expr, IRModule, PrimFunc, Var, nodes_in, relax
from tvm_ext.ir.step_loop import step_loop
from tvm_ext.records.recurrent import RecurrentCell
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.records.step_loop import STEP, STEP_LOOP, StepLoop

from ..legalize_floats import legalize_operators
from ..merge_operators import fused_function
from .cell_function import cell_function
from .unroll import DirectionOperands


@dataclass(frozen=True, kw_only=True, slots=True)
class Looped:
    """One direction's results: the hidden states of all steps (steps, batch, hidden), and those after the last step."""

    hidden: Expr
    states: tuple[Expr, ...]


def looped(
    builder: BlockBuilder,
    cell: RecurrentCell,
    x: Expr,
    operands: DirectionOperands,
    *,
    is_reverse: bool = False,
    active: Expr | None = None,
) -> Looped:
    """One direction of a layer over ``x`` (steps, batch, features), emitted into ``builder``.

    ``active``: (steps, batch, 1) of bool where ``cell.is_masked``, as `active_steps` gives it.
    """
    products = builder.emit(relax.op.matmul(x, operands.weight))
    if operands.bias is not None:
        products = builder.emit(relax.op.add(products, operands.bias))
    masks = [] if active is None else [active]
    arguments = [products, *operands.states, *operands.recurrent, *masks]
    results = builder.emit(call_of_steps(builder, cell, arguments, steps=x.ty.shape[0], is_reverse=is_reverse))
    hidden, *states = (builder.emit(relax.TupleGetItem(results, place)) for place in range(len(cell.results) + 1))
    return Looped(hidden=hidden, states=tuple(states))


def call_of_steps(
    builder: BlockBuilder,
    cell: RecurrentCell,
    arguments: Sequence[Expr],
    *,
    steps: int | Expr,
    is_reverse: bool = False,
) -> Call:
    """A call of the loop of ``cell``, whose function is added to ``builder``: the hidden states of all steps (steps,
    batch, hidden), then the states after the last one.

    ``arguments`` are the cell's operands; those that each step has its own of begin with an axis of ``steps``.
    """
    plan = _plan(cell, is_reverse, steps if isinstance(steps, int) else None)
    name = f"{cell.kind}_steps_reversed" if is_reverse else f"{cell.kind}_steps"
    function = builder.add_func(_function(cell, plan), name)
    state = relax.TensorType(cell.results[0].shape, cell.dtype)
    everything = relax.TensorType([steps, *cell.results[0].shape], cell.dtype)
    return relax.call_tir(function, relax.Tuple(arguments), [everything, *[state] * len(cell.results)])


def _plan(cell: RecurrentCell, is_reverse: bool, steps: int | None) -> StepLoop:
    names = [operand.name for operand in cell.operands]
    return StepLoop(
        input_count=len(names),
        sliced=tuple(names.index(name) for name in ("inputs", "active") if name in names),
        carried=tuple((names.index(result.name), position) for position, result in enumerate(cell.results)),
        collected=(0,),
        is_reverse=is_reverse,
        steps=steps,
    )


def _function(cell: RecurrentCell, plan: StepLoop) -> PrimFunc:
    """The loop as it is before construction: right by itself, and slow."""
    module = legalize_operators()(IRModule({"cell": cell_function(cell)}))
    step = fused_function(module, module["cell"])
    return step_loop(step, plan).with_attrs({STEP_LOOP: to_json(plan), STEP: step, "op_pattern": OPAQUE})


def active_steps(builder: BlockBuilder, lengths: Expr, x: Expr) -> Expr:
    """(steps, batch, 1) of bool: whether a step of ``x`` lies within the sequence, whose lengths are (batch,)."""
    steps, batch = x.ty.shape[0], int(x.ty.shape[1])
    places = builder.emit(relax.op.arange(0, steps, 1, "int32"))
    column = builder.emit(relax.op.reshape(places, (steps, 1, 1)))
    row = builder.emit(relax.op.reshape(lengths, (1, batch, 1)))
    return builder.emit(relax.op.less(column, row))


def open_steps(mod: IRModule) -> frozenset[str]:
    """The names of the dimensions that say how many steps the recurrent layers of ``mod`` have."""
    names: set[str] = set()
    for call in nodes_in(mod, Call):
        callee = mod[call.args[0]] if call.op == CALL_TIR else None
        if callee is not None and callee.attrs and STEP_LOOP in callee.attrs:
            plan = from_json(StepLoop, str(callee.attrs[STEP_LOOP]))
            steps = call.args[1].fields[plan.sliced[0]].ty.shape[0]
            names.update(str(variable.name) for variable in nodes_in(steps, Var))
    return frozenset(names)
