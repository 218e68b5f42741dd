"""Lays out the constants of a call as its kernel wants them: the compile-time half of packing (paper §3.1, storage)."""

from __future__ import annotations

import operator

from tvm_ext._tvm import CALL_TIR, Call, Constant, Expr, GlobalVar, PrimFunc, relax
from tvm_ext.records.choice import CHOICE, ConstantPack, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.support.arrays import pack
from tvm_ext.support.shared_constants import shared
from tvm_ext.support.tensors import array_over, tensor_over

from .merge_operators import retargeted
from .rewriting import CallRewriter, call_pass

PACKED = "tvm_ext.packed"
"""PrimFunc attribute of a kernel whose constants are packed; it keeps the builder from merging it with the old one."""


def called_as(name: str, kernel: PrimFunc) -> tuple[str, PrimFunc]:
    """The name and the form under which `PackConstants` leaves ``kernel``, unless the name is taken."""
    if not from_json(KernelChoice, str(kernel.attrs[CHOICE])).packs:
        return name, kernel
    return f"{name}_packed", kernel.with_attr(PACKED, True)


@call_pass("tvm_ext.PackConstants")
class PackConstants(CallRewriter):
    """Replace the constant arguments of calls whose `KernelChoice` says so; run once, after `ConstructKernels`."""

    def prepare(self) -> None:
        self.choices = {
            gv: choice
            for gv, func in self.mod.functions_items()
            if func.attrs
            and CHOICE in func.attrs
            and (choice := from_json(KernelChoice, str(func.attrs[CHOICE]))).packs
        }
        self.done: dict[tuple[Expr, ConstantPack], Expr] = {}

    def rewritten(self, call: Call) -> Expr:
        if call.op != CALL_TIR:
            return call
        choice = self.choices.get(call.args[0])
        packs = {} if choice is None else {how.param_index: how for how in choice.packs}
        arguments = [
            self._packed(argument, packs[index]) if index in packs else _shared(argument)
            for index, argument in enumerate(call.args[1].fields)
        ]
        if all(map(operator.is_, arguments, call.args[1].fields)):
            return call
        return retargeted(call, self._renamed(call.args[0]) if packs else call.args[0], arguments)

    def _renamed(self, old: GlobalVar) -> GlobalVar:
        """The kernel under a new name: its parameters changed, and a GlobalVar's type cannot."""
        if old not in self.renamed:
            func = self.builder_.get()[old].with_attr(PACKED, True)
            self.renamed[old] = self.builder_.add_func(func, f"{old.name_hint}_packed")
        return self.renamed[old]

    def _packed(self, constant: Expr, how: ConstantPack) -> Expr:
        assert isinstance(constant, Constant), "only parameters that are constants at every call are packed"
        key = (constant.value, how)
        if key not in self.done:
            self.done[key] = relax.const(shared(tensor_over(pack(array_over(constant.value), how))))
        return self.done[key]


def _shared(argument: Expr) -> Expr:
    """``argument``; a constant that another build has, too, as that build's."""
    if not isinstance(argument, Constant):
        return argument
    known = shared(argument.value)
    return argument if known.same_as(argument.value) else relax.const(known)
