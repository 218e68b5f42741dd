"""Functions of one byte as tables of 256 results: SiLU, HardSwish, Sigmoid, GELU and their like of quantised tensors.

Between what dequantises bytes and what quantises the result, any chain of element-wise operators that reads one tensor
of bytes is such a function. The chain itself is evaluated when the model is built, so that each result is the chain's.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from tvm_ext._tvm import (
    Call,
    Constant,
    DataflowBlock,
    Expr,
    IRModule,
    PassContext,
    RelaxFunction,
    TeTensor,
    Var,
    VarBinding,
    expr_mutator,
    functions_of,
    module_pass,
    relax,
    te,
)
from tvm_ext.analysis.relax_values import dtype_of, operator_name, static_shape
from tvm_ext.devices.dot_instructions import has_features
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.choice import TABLE
from tvm_ext.support.arrays import Array

from .call_values import folded
from .layout.graph import ELEMENT_WISE
from .rewriting import CallRewriter

BYTES = ("uint8", "int8")
CODES = 256
"""Values of a byte."""

_LANE_OPERATIONS = 3
"""Of a look-up without permutations: an index and a byte move through registers of numbers."""

_PERMUTED_OPERATIONS = 8
"""Of a register of look-ups by permutations of the table's (`permute_tables.py`)."""


_FEW = 3
"""Operations of a cast, a zero point and a scale."""

_DEAR = {"relax.sigmoid": "sigmoid", "relax.nn.silu": "sigmoid", "relax.nn.gelu": "erf"}
_FUNCTIONS = frozenset(
    f"relax.{name}" for name in ("exp", "log", "erf", "tanh", "sin", "cos", "power", "nn.gelu_tanh", "nn.softplus")
)


@module_pass(opt_level=0, name="tvm_ext.TabulateBytes")
class TabulateBytes:
    """Rewrite chains of element-wise operators from one tensor of bytes to another as look-ups, where those are faster.

    Behind the choice of layouts: operators of blocked tensors are what they were.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.machine, permutes = Machine(device), has_features(device.target, ("avx512f",))
        self.table_operations = _PERMUTED_OPERATIONS if permutes else _LANE_OPERATIONS * device.teu_lanes

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        found, again = {}, {}
        for func in functions_of(mod, RelaxFunction).values():
            chains = _Chains(mod, func, self)
            found.update(chains.tables())
            again.update(chains.cheap())
        return relax.transform.DeadCodeElimination()(_Tables(mod, found, again).run()) if found or again else mod

    def operations(self, call: Call) -> float:
        """Vector operations of ``call`` for a register of results."""
        name = operator_name(call)
        if name in _DEAR or name in _FUNCTIONS:
            return self.machine.instructions(_DEAR.get(name, "exp"))
        return self.machine.instructions("divide") if name == "relax.divide" else 1.0


class _Chains:
    """What of a function's variables is a function of one tensor of bytes, and of which."""

    def __init__(self, mod: IRModule, func: RelaxFunction, judge: TabulateBytes) -> None:
        self.mod, self.judge = mod, judge
        self.calls: dict[Var, Call] = {}
        self.source: dict[Var, Var] = {}
        for block in getattr(func.body, "blocks", ()):
            for binding in block.bindings if isinstance(block, DataflowBlock) else ():
                if isinstance(binding, VarBinding) and isinstance(binding.value, Call):
                    self._read(binding.var, binding.value)

    def _read(self, variable: Var, call: Call) -> None:
        read = [argument for argument in call.args if isinstance(argument, Var)]
        others = [argument for argument in call.args if isinstance(argument, Constant)]
        own = {self.source.get(value, value if _is_bytes(value) else None) for value in read}
        plain = operator_name(call) in ELEMENT_WISE and all(static_shape(other) in ((), (1,)) for other in others)
        same = all(static_shape(value) == static_shape(variable) is not None for value in read)
        if plain and same and len(own) == 1 and None not in own:
            self.calls[variable], self.source[variable] = call, own.pop()

    def tables(self) -> dict[Var, tuple[Var, Array]]:
        """By the variables of bytes that look-ups shall give: what they read, and the results by code."""
        found = {}
        for variable, source in self.source.items():
            if _is_bytes(variable) and self._operations(variable, whole=True) > self.judge.table_operations:
                values = self._values(variable, source)
                found.update({} if values is None else {variable: (source, values)})
        return found

    def cheap(self) -> dict[Var, Call]:
        """What widens bytes by a few operations: each reader does so itself, and reads a quarter of the memory."""
        return {
            variable: call
            for variable, call in self.calls.items()
            if not _is_bytes(variable) and self._operations(variable, whole=False) <= _FEW
        }

    def _operations(self, variable: Var, *, whole: bool) -> float:
        """From the bytes to ``variable``: from the chain's, or from those between that are nearest to it."""
        chain: dict[Var, Call] = {}
        waiting = [variable]
        while waiting:
            item = waiting.pop()
            if item in self.calls and item not in chain and (whole or item is variable or not _is_bytes(item)):
                chain[item] = self.calls[item]
                waiting += [argument for argument in chain[item].args if isinstance(argument, Var)]
        return sum(map(self.judge.operations, chain.values()))

    def _values(self, variable: Var, source: Var) -> Array | None:
        """The chain's results for every byte, in the order of unsigned ones; None where it cannot be evaluated."""
        codes = np.arange(CODES, dtype=np.uint8).view(dtype_of(source))
        known: dict[Var, Expr] = {source: relax.const(codes)}

        def value(item: Expr) -> Expr:
            if not isinstance(item, Var):
                return item
            if item not in known:
                call = self.calls[item]
                made = Call(call.op, [value(argument) for argument in call.args], call.attrs, call.ty_args)
                made = relax.BlockBuilder().normalize(made)
                known[item] = folded(made, list(made.args), self.mod)
            return known[item]

        try:
            return np.asarray(value(variable).value.numpy())
        except IllegalRewrite:
            return None


def _is_bytes(value: Expr) -> bool:
    return static_shape(value) is not None and dtype_of(value) in BYTES


@expr_mutator
class _Tables(CallRewriter):
    def prepare(self, found: Mapping[Var, tuple[Var, Array]], again: Mapping[Var, Call]) -> None:
        self.found, self.again = found, again

    def visit_call_(self, call: Call) -> Expr:
        if operator_name(call) == "relax.mean" and call.args[0] in self.again:
            # Of one computation, which takes what is before it into its kernel; of two none does.
            total = relax.op.sum(call.args[0], call.attrs.axis, bool(call.attrs.keepdims))
            count = prod(static_shape(call.args[0]) or ()) // prod(static_shape(call) or (1,))
            return relax.op.divide(self.builder_.emit(self.visit_call_(total)), relax.const(float(count), "float32"))
        fields = [self._anew(argument) for argument in call.args]
        return self.visit_expr_post_order(Call(call.op, fields, call.attrs, call.ty_args))

    def _anew(self, value: Expr) -> Expr:
        """``value`` computed by its reader, where that is cheap."""
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._anew(field) for field in value.fields])
        call = self.again.get(value) if isinstance(value, Var) else None
        return value if call is None else self.builder_.emit(self.visit_call_(call))

    def visit_var_binding_(self, binding: VarBinding) -> None:
        known = self.found.get(binding.var)
        if known is None:
            super().visit_var_binding_(binding)
            return
        source, values = known
        how = {"primfunc_name_hint": "table", "primfunc_attrs": {TABLE: True}}
        call = self.builder_.call_te(looked_up, self.visit_expr(source), relax.const(values), **how)
        super().visit_var_binding_(VarBinding(binding.var, call))


def looked_up(codes: TeTensor, table: TeTensor) -> TeTensor:
    """The element of ``table``, (256,), that each of ``codes``, bytes, says; signed ones as their bits do."""

    def element(*at: Expr) -> Expr:
        return table[codes(*at).astype("uint8").astype("int32")]

    return te.compute(codes.shape, element, name="table")
