"""Padding moves from the operator that reads a tensor to the one that writes it.

A convolution pads what it reads: a kernel of its own would copy the tensor once more. Where nothing else reads it, the
operator before can store into the padded tensor:

    a = relu(conv1x1(x)); b = conv3x3(pad(a))       becomes       a = pad(relu(conv1x1(x))); b = conv3x3(a)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tvm_ext._tvm import (
    ALREADY_SCHEDULED,
    CALL_TIR,
    BlockBuilder,
    Call,
    DataflowBlock,
    DataflowVar,
    GlobalVar,
    IRModule,
    Node,
    PassContext,
    PrimFunc,
    RelaxFunction,
    Type,
    Var,
    VarBinding,
    copy_module,
    module_pass,
    relax,
)
from tvm_ext.analysis.relax_values import is_graph, static_shape
from tvm_ext.records.attention import ATTENTION
from tvm_ext.records.persistent import CHAIN
from tvm_ext.records.recurrent import CELL

from .chain_links import readers_of
from .merge_operators import merge_calls, retargeted
from .rewriting import with_blocks

OTHERWISE_MADE = (ALREADY_SCHEDULED, ATTENTION, CELL, CHAIN)
"""Attributes of functions whose kernels are not made of their computations one by one."""

PADDED, UNPADDED = "_padded", "_unpadded"
"""Behind the name of an operator that stores into a padded tensor, and of one that reads it."""


def whole_operator(name: str) -> str:
    """The operator that ``name``, of one whose paddings were moved, was before."""
    return re.sub(rf"(({PADDED}|{UNPADDED})(_?[0-9]+)?)+$", "", name)


class CutOperator(Protocol):
    """An operator without the padding of one input: ``pad`` makes a tensor of ``shape``, which ``rest`` reads."""

    @property
    def pad(self) -> PrimFunc: ...
    @property
    def rest(self) -> PrimFunc: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


@module_pass(opt_level=0, name="tvm_ext.MovePadding")
class MovePadding:
    """Let the operator that writes a tensor store it with the border that its only reader wants.

    ``cut``: an operator without the padding of the parameter at a position; None where it makes no copy for one.
    ``stores_padded``: whether the kernel of an operator that ends with a padding stores into it, without a copy of its
    own.
    """

    def __init__(
        self, cut: Callable[[PrimFunc, int], CutOperator | None], stores_padded: Callable[[PrimFunc], bool]
    ) -> None:
        self.cut, self.stores_padded = cut, stores_padded

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        moves = _Moves(mod, self)
        for gv, func in mod.functions_items():
            if is_graph(func):
                moved = moves.function(func)
                if moved is not None:
                    moves.builder.update_func(gv, moves.builder.normalize(moved))
        if not moves.count:
            return copy_module(mod)
        return relax.transform.DeadCodeElimination()(moves.builder.get())


class _Moves:
    """The functions that paddings were moved between, each made once: layers repeat."""

    def __init__(self, mod: IRModule, rules: MovePadding) -> None:
        self.builder, self.rules = BlockBuilder(copy_module(mod)), rules
        self.functions = {gv: func for gv, func in mod.functions_items() if _is_plain(func)}
        self.cuts: dict[tuple[GlobalVar, int], _Halves | None] = {}
        self.joined: dict[tuple[object, ...], _Joined | None] = {}
        self.count = 0

    def function(self, func: RelaxFunction) -> RelaxFunction | None:
        """``func`` with every padding moved that can be; None where there is none."""
        read, before = readers_of(func), self.count
        blocks = [self._block(block, read) if isinstance(block, DataflowBlock) else block for block in func.body.blocks]
        if self.count == before:
            return None
        return with_blocks(func, blocks)

    def _block(self, block: DataflowBlock, read: Counter[Var]) -> DataflowBlock:
        bindings = list(block.bindings)
        places: dict[Var, int] = {}
        for place, binding in enumerate(bindings):
            if self._is_operator(binding):
                for position in range(len(binding.value.args[1].fields)):
                    self._move(bindings, place, position, places, read)
                places[binding.var] = place
        return DataflowBlock(bindings)

    def _is_operator(self, binding: VarBinding) -> bool:
        """Whether it is a call of one of our functions with one result of known extents."""
        value = binding.value
        if not isinstance(value, Call) or value.op != CALL_TIR or len(value.args) != 2:
            return False
        return value.args[0] in self.functions and static_shape(binding.var) is not None

    def _move(
        self, bindings: list[VarBinding], place: int, position: int, places: dict[Var, int], read: Counter[Var]
    ) -> None:
        """Let the operator that writes operand ``position`` of binding ``place`` pad it, if it can."""
        reader = bindings[place]
        operands = list(reader.value.args[1].fields)
        operand = operands[position]
        if not isinstance(operand, Var) or operand not in places or read[operand] != 1:
            return
        halves = self._cut(reader.value.args[0], position)
        writer = None if halves is None else self._padded(bindings[places[operand]], halves)
        if halves is None or writer is None:
            return
        bindings[places[operand]] = writer
        operands[position] = writer.var
        bindings[place] = VarBinding(reader.var, retargeted(reader.value, halves.rest, operands))
        self.count += 1

    def _cut(self, callee: GlobalVar, position: int) -> _Halves | None:
        key = (callee, position)
        if key not in self.cuts:
            cut = self.rules.cut(self.functions[callee], position)
            self.cuts[key] = None if cut is None else self._halves(cut, callee)
        return self.cuts[key]

    def _halves(self, cut: CutOperator, callee: GlobalVar) -> _Halves:
        kind = relax.TensorType(cut.shape, cut.dtype)
        return _Halves(
            pad=self._add(cut.pad, "padding"), rest=self._add(cut.rest, f"{callee.name_hint}{UNPADDED}"), kind=kind
        )

    def _add(self, func: PrimFunc, name: str) -> GlobalVar:
        gv = self.builder.add_func(func, name)
        self.functions[gv] = func
        return gv

    def _padded(self, writer: VarBinding, halves: _Halves) -> VarBinding | None:
        """``writer`` that stores into the padded tensor; None where its kernel would copy its result there."""
        operands = list(writer.value.args[1].fields)
        key = (writer.value.args[0], halves.pad, tuple(operands.index(operand) for operand in operands))
        if key not in self.joined:
            self.joined[key] = self._join(writer, halves)
        joined = self.joined[key]
        if joined is None:
            return None
        call = relax.call_tir(joined.func, [operands[number] for number in joined.operands], halves.kind)
        return VarBinding(DataflowVar(writer.var.name, halves.kind), call)

    def _join(self, writer: VarBinding, halves: _Halves) -> _Joined | None:
        callee, operands = writer.value.args[0], list(writer.value.args[1].fields)
        call = relax.call_tir(halves.pad, [writer.var], halves.kind)
        own = IRModule({gv: self.functions[gv] for gv in (callee, halves.pad)})
        func, arguments = merge_calls(own, [writer, VarBinding(DataflowVar("padded", halves.kind), call)])
        if not self.rules.stores_padded(func):
            return None
        gv = self._add(func, f"{callee.name_hint}{PADDED}")
        return _Joined(func=gv, operands=tuple(operands.index(argument) for argument in arguments))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Halves:
    """The functions of a padding, whose result is of type ``kind``, and of what reads it."""

    pad: GlobalVar
    rest: GlobalVar
    kind: Type


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Joined:
    """An operator that stores into a padded tensor; which of the operator's operands it takes."""

    func: GlobalVar
    operands: tuple[int, ...]


def _is_plain(func: Node) -> bool:
    return isinstance(func, PrimFunc) and not (func.attrs and any(name in func.attrs for name in OTHERWISE_MADE))
