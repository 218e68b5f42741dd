"""The steps of a recurrent layer, which the graph calls one by one, become one loop where no schedule is to run them.

A call takes the VirtualMachine about as long as a small cell, and a build looks at each of a thousand. Worked example:
``s = split(p, 3); a = cell(s[0], h0, r); b = cell(s[1], a, r); c = cell(s[2], b, r); y = concat(a, b, c)`` becomes
``y, c = steps(p, h0, r)``, with views of ``p`` and ``y``. What else reads ``a`` or ``b`` reads a slice of ``y``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import (
    BlockBuilder,
    Call,
    DataflowBlock,
    DataflowVar,
    Expr,
    GlobalVar,
    IRModule,
    PassContext,
    RelaxFunction,
    Var,
    VarBinding,
    copy_module,
    module_pass,
    relax,
    tirx,
)
from tvm_ext.analysis.relax_values import is_graph, operator_name
from tvm_ext.records.recurrent import CELL, RecurrentCell
from tvm_ext.records.serialise import from_json

from .node_names import kept_label
from .recurrent.cell_function import is_cell
from .recurrent.loop import call_of_steps
from .rewriting import with_blocks
from .rtask_regions import users_of, variables_of

_OF_EVERY_STEP = ("inputs", "active")
_STATES = ("hidden", "cell")


@module_pass(opt_level=0, name="tvm_ext.RollSteps")
class RollSteps:
    """Call a loop (`recurrent/loop.py`) for all the steps of a direction that `recurrent/unroll.py` wrote out.

    To be run first, while what a step takes is a part of one product. Steps stay calls where one is missing, or where
    somebody reads a cell state in between.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        cells = {
            gv: from_json(RecurrentCell, str(func.attrs[CELL])) for gv, func in mod.functions_items() if is_cell(func)
        }
        if not cells:
            return mod
        builder = BlockBuilder(copy_module(mod))
        for gv, func in mod.functions_items():
            rolled = _rolled(builder, func, cells) if is_graph(func) and gv not in cells else None
            if rolled is not None:
                builder.update_func(gv, builder.normalize(rolled))
        return builder.get()


def _rolled(
    builder: BlockBuilder, func: RelaxFunction, cells: Mapping[GlobalVar, RecurrentCell]
) -> RelaxFunction | None:
    """``func`` with loops; None where it has no steps that could be one."""
    users = users_of(binding for block in func.body.blocks for binding in block.bindings)
    results = set(variables_of(func.body.body))
    blocks, count = [], 0
    for block in func.body.blocks:
        runs = _runs(block, cells, users, results) if isinstance(block, DataflowBlock) else []
        count += len(runs)
        blocks.append(_LoopedBlock(builder, block, runs, users, results).written() if runs else block)
    if not count:
        return None
    return with_blocks(func, blocks)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _StepRun:
    """Calls of one cell, each of which takes the states of the one before.

    * ``calls``: the bindings in the order in which they run.
    * ``wholes``: by place of an operand of `_OF_EVERY_STEP`, what the steps' parts are split from.
    * ``states``: by result and call, the variables that stand for it.
    * ``is_reverse``: whether the first call takes the last part.
    """

    cell: RecurrentCell
    calls: tuple[VarBinding, ...]
    wholes: Mapping[int, Expr]
    states: tuple[tuple[tuple[Var, ...], ...], ...]
    is_reverse: bool

    def time(self, call: int) -> int:
        return len(self.calls) - 1 - call if self.is_reverse else call

    def hidden_at(self, time: int) -> tuple[Var, ...]:
        return self.states[0][self.time(time)]


# --- what can be a loop ----------------------------------------------------------------------------------------------
def _runs(
    block: DataflowBlock,
    cells: Mapping[GlobalVar, RecurrentCell],
    users: Mapping[Var, Sequence[VarBinding]],
    results: set[Var],
) -> list[_StepRun]:
    values = {binding.var: binding.value for binding in block.bindings}
    chains: dict[Expr, list[VarBinding]] = {}  # by the variable of their last call
    for binding in block.bindings:
        call = binding.value
        if not isinstance(call, Call) or not isinstance(call.op, GlobalVar) or call.op not in cells:
            continue
        cell = cells[call.op]
        before, _ = _part(call.args[_place(cell, "hidden")], values)
        follows = before in chains and _follows(chains[before][-1], call, cell, values)
        chains[binding.var] = [*(chains.pop(before) if follows else []), binding]
    found = [_run(chain, cells[chain[0].value.op], values, users) for chain in chains.values() if len(chain) > 1]
    return [run for run in found if run is not None and _is_closed(run, users, results)]


def _place(cell: RecurrentCell, name: str) -> int:
    return next(position for position, operand in enumerate(cell.operands) if operand.name == name)


def _part(value: Expr, values: Mapping[Var, Expr]) -> tuple[Expr, int]:
    """The variable of a tuple and a place in it; of what is no field of one, itself and 0."""
    bound = values.get(value) if isinstance(value, Var) else None
    return (bound.tuple_value, int(bound.index)) if isinstance(bound, relax.TupleGetItem) else (value, 0)


def _follows(before: VarBinding, call: Call, cell: RecurrentCell, values: Mapping[Var, Expr]) -> bool:
    """Whether ``call`` is the step behind ``before``: it takes the states that this gave, parts of the same wholes, and
    the same operands beside.
    """
    if not call.op.same_as(before.value.op):
        return False
    for operand, own, other in zip(cell.operands, call.args, before.value.args, strict=True):
        if operand.name in _STATES:
            source, index = _part(own, values)
            if not source.same_as(before.var) or index != _STATES.index(operand.name):
                return False
        elif operand.name in _OF_EVERY_STEP:
            if not _part(own, values)[0].same_as(_part(other, values)[0]):
                return False
        elif not own.same_as(other):
            return False
    return True


def _run(
    chain: Sequence[VarBinding],
    cell: RecurrentCell,
    values: Mapping[Var, Expr],
    users: Mapping[Var, Sequence[VarBinding]],
) -> _StepRun | None:
    """``chain`` as a run; None where it does not go through all parts of a whole, from one end to the other."""
    wholes, reverse = {}, set()
    up = list(range(len(chain)))
    for name in _OF_EVERY_STEP:
        if name not in (operand.name for operand in cell.operands):
            continue
        place = _place(cell, name)
        parts = [_part(binding.value.args[place], values) for binding in chain]
        split, numbers = values.get(parts[0][0]), [number for _, number in parts]
        same = all(source.same_as(parts[0][0]) for source, _ in parts)
        if split is None or not same or not _is_split(split, len(chain)) or numbers not in (up, up[::-1]):
            return None
        wholes[place] = split.args[0]
        reverse.add(numbers != up)
    if len(reverse) != 1:
        return None
    states = tuple(tuple(_states(binding.var, k, cell, users) for binding in chain) for k in range(len(cell.results)))
    return _StepRun(cell=cell, calls=tuple(chain), wholes=wholes, states=states, is_reverse=reverse == {True})


def _is_split(value: Expr, count: int) -> bool:
    """Whether ``value`` is a split along the first axis into ``count`` parts."""
    if operator_name(value) != "relax.split" or int(value.attrs.axis) != 0:
        return False
    how = value.attrs.indices_or_sections
    return isinstance(how, int | tirx.IntImm) and int(how) == count


def _states(call: Var, result: int, cell: RecurrentCell, users: Mapping[Var, Sequence[VarBinding]]) -> tuple[Var, ...]:
    """The variables that stand for a result of ``call``."""
    if len(cell.results) == 1:
        return (call,)
    fields = [binding for binding in users.get(call, ()) if isinstance(binding.value, relax.TupleGetItem)]
    return tuple(binding.var for binding in fields if int(binding.value.index) == result)


def _is_closed(run: _StepRun, users: Mapping[Var, Sequence[VarBinding]], results: set[Var]) -> bool:
    """Whether nobody reads what a loop does not give: states but the hidden one between steps, results together."""
    own = {binding.var for binding in run.calls}
    fields = {var for state in run.states for step in state for var in step}
    if len(run.cell.results) > 1 and any(
        call in results or any(binding.var not in fields for binding in users.get(call, ())) for call in own
    ):
        return False
    inner = [var for state in run.states[1:] for step in state[:-1] for var in step]
    return not any(var in results or any(binding.var not in own for binding in users.get(var, ())) for var in inner)


# --- how it is written -----------------------------------------------------------------------------------------------
class _LoopedBlock:
    """Writes ``block`` with a loop in the place of each run's first call."""

    def __init__(
        self,
        builder: BlockBuilder,
        block: DataflowBlock,
        runs: Sequence[_StepRun],
        users: Mapping[Var, Sequence[VarBinding]],
        results: set[Var],
    ) -> None:
        self.builder, self.block, self.users, self.results = builder, block, users, results
        self.begins = {var: run for run in runs for var in run.hidden_at(0)}
        self.rows: dict[Var, Var] = {}  # by a run's first call: the hidden states of all its steps, one below the other
        self.new: dict[Var, list[VarBinding]] = {}
        loops = [self._loop(run) for run in runs]
        self.joined = {b.var: made for b in block.bindings if (made := self._joined(b.value)) is not None}
        for run, loop in zip(runs, loops, strict=True):
            self._states(run, loop)

    def written(self) -> DataflowBlock:
        bindings: list[VarBinding] = []
        for binding in self.block.bindings:
            if binding.var in self.joined:
                bindings.append(VarBinding(binding.var, self.joined[binding.var]))
            else:
                bindings += self.new.get(binding.var, [binding])
        return DataflowBlock(bindings)

    def _bound(self, name: str, value: Expr, bindings: list[VarBinding]) -> Var:
        value = self.builder.normalize(value)
        bindings.append(VarBinding(DataflowVar(name, value.ty), value))
        return bindings[-1].var

    def _loop(self, run: _StepRun) -> tuple[Var, Var]:
        """The loop's result and, of that, the hidden states of all steps; every call of ``run`` goes."""
        steps, first = len(run.calls), run.calls[0]
        self.new |= {binding.var: [] for binding in run.calls}
        bindings = self.new[first.var]
        arguments = list(first.value.args)
        for place, whole in run.wholes.items():
            operand = run.cell.operands[place]
            arguments[place] = self._bound(operand.name, relax.op.reshape(whole, (steps, *operand.shape)), bindings)
        call = call_of_steps(self.builder, run.cell, arguments, steps=steps, is_reverse=run.is_reverse)
        result = self._bound(kept_label(first.var, "steps"), call, bindings)
        hidden = self._bound("hidden", relax.TupleGetItem(result, 0), bindings)
        batch, *units = run.cell.results[0].shape
        self.rows[first.var] = self._bound("rows", relax.op.reshape(hidden, (steps * batch, *units)), bindings)
        return result, hidden

    def _joined(self, value: Expr) -> Expr | None:
        """A concatenation of hidden states with all of a run's as one; None where ``value`` has none of them."""
        if operator_name(value) != "relax.concat" or int(value.attrs.axis or 0) != 0:
            return None
        fields = list(value.args[0].fields) if isinstance(value.args[0], relax.Tuple) else []
        merged = list(self._merged(fields))
        if len(merged) == len(fields):
            return None
        return merged[0] if len(merged) == 1 else relax.op.concat(merged, axis=0)

    def _merged(self, fields: Sequence[Expr]) -> Iterator[Expr]:
        place = 0
        while place < len(fields):
            run = self.begins.get(fields[place])
            steps = 0 if run is None else len(run.calls)
            here = fields[place : place + steps]
            if run is not None and len(here) == steps and all(v in run.hidden_at(t) for t, v in enumerate(here)):
                yield self.rows[run.calls[0].var]
                place += steps
            else:
                yield fields[place]
                place += 1

    def _states(self, run: _StepRun, loop: tuple[Var, Var]) -> None:
        """What the calls' results were is what the loop gives, as far as somebody reads it."""
        result, hidden = loop
        last = len(run.calls) - 1
        for number, state in enumerate(run.states):
            for call, variables in enumerate(state):
                for variable in variables:
                    bindings = self.new.setdefault(variable, [])
                    if call == last:
                        bindings.append(VarBinding(variable, relax.TupleGetItem(result, 1 + number)))
                    elif number == 0 and self._is_read(variable, run):
                        time = run.time(call)
                        part = self._bound("part", relax.op.strided_slice(hidden, [0], [time], [time + 1]), bindings)
                        bindings.append(VarBinding(variable, relax.op.reshape(part, run.cell.results[0].shape)))

    def _is_read(self, hidden: Var, run: _StepRun) -> bool:
        """Whether anybody but the next step and what joins all of them reads a hidden state."""
        own = {binding.var for binding in run.calls}
        return hidden in self.results or any(
            user.var not in own and (user.var not in self.joined or hidden in variables_of(self.joined[user.var]))
            for user in self.users.get(hidden, ())
        )
