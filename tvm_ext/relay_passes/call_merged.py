"""Calls of schedules on GPUs become calls of the kernels that run them, with their tables.

Behind `MergeRTasks`. A kernel's constants are one tensor, its table and its state are two more; the arena is an output
that nobody reads, so that the graph's memory planning finds it a place. The state is a constant that the kernel
changes: it lies in device memory from the load of the library on, each VirtualMachine with its own, and nothing has to
be written between runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_ext._tvm import (
    Call,
    Expr,
    GlobalVar,
    IRModule,
    PassContext,
    RelaxFunction,
    VarBinding,
    copy_module,
    module_pass,
    relax,
)
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.launches import is_merged
from tvm_ext.records.merged import MERGED, MergedKernel
from tvm_ext.records.serialise import from_json
from tvm_ext.support.arrays import Array

from .rewriting import with_bindings

_DPS = "relax.call_dps_packed"


@module_pass(opt_level=0, name="tvm_ext.CallMerged")
class CallMerged:
    """Let the graph call merged kernels by ``call_tir`` instead of schedules by their names."""

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        kernels: dict[str, tuple[GlobalVar, MergedKernel]] = {}
        result, builder = copy_module(mod), relax.BlockBuilder()
        for gv, func in mod.functions_items():
            if is_merged(func):
                del result[gv]
                typed = builder.add_func(func, gv.name_hint)  # a call needs to know what it takes
                kernels[gv.name_hint] = (typed, from_json(MergedKernel, str(func.attrs[MERGED])))
                result[typed] = func
        for gv, func in mod.functions_items():
            if isinstance(func, RelaxFunction) and isinstance(func.body, relax.SeqExpr):
                result[gv] = _Caller(kernels, func).rewritten()
        return result


class _Caller:
    """One Relax function, whose calls are rewritten."""

    def __init__(self, kernels: dict[str, tuple[GlobalVar, MergedKernel]], func: RelaxFunction) -> None:
        self.kernels, self.func = kernels, func
        self.builder = relax.BlockBuilder()

    def rewritten(self) -> RelaxFunction:
        return with_bindings(self.func, self._bindings)

    def _bindings(self, binding: VarBinding) -> list[VarBinding]:
        found = self._kernel(binding)
        return [binding] if found is None else self._calls(binding, *found)

    def _kernel(self, binding: VarBinding) -> tuple[GlobalVar, MergedKernel] | None:
        value = getattr(binding, "value", None)
        if not isinstance(value, Call) or getattr(value.op, "name", "") != _DPS:
            return None
        return self.kernels.get(str(getattr(value.args[0], "global_symbol", "")))

    def _calls(self, binding: VarBinding, gv: GlobalVar, kernel: MergedKernel) -> list[VarBinding]:
        """The call of ``kernel``, and ``binding``'s variable as what it was: a tensor, or a tuple of them."""
        given, kind = list(binding.value.args[1].fields), binding.value.ty_args[0]
        constant = dict(kernel.weights)
        arguments: list[Expr] = [item for position, item in enumerate(given) if position not in constant]
        if constant:
            arguments.append(relax.const(weights_of(kernel, given)))
        arguments += [relax.const(np.array(words, np.int32)) for words in (kernel.table, kernel.state)]
        results = list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]
        if not kernel.arena_bytes:
            return [relax.VarBinding(binding.var, self._call(gv, arguments, results))]
        size = kernel.arena_bytes // int(itemsize_bytes(kernel.arena_dtype))
        call = self._call(gv, arguments, [*results, relax.TensorType([size], kernel.arena_dtype)])
        every = relax.DataflowVar(f"{kernel.symbol}_every", call.ty)
        fields = [self.builder.normalize(relax.TupleGetItem(every, place)) for place in range(len(results))]
        if not isinstance(kind, relax.TupleType):
            return [relax.VarBinding(every, call), relax.VarBinding(binding.var, fields[0])]
        names = [relax.DataflowVar(f"{kernel.symbol}_{position}", field.ty) for position, field in enumerate(fields)]
        whole = self.builder.normalize(relax.Tuple(names))
        return [
            relax.VarBinding(every, call),
            *map(relax.VarBinding, names, fields),
            relax.VarBinding(binding.var, whole),
        ]

    def _call(self, gv: GlobalVar, arguments: Sequence[Expr], results: Sequence[Expr]) -> Call:
        kinds = list(results) if len(results) > 1 else results[0]
        return self.builder.normalize(relax.call_tir(gv, relax.Tuple(list(arguments)), kinds))


def weights_of(kernel: MergedKernel, given: Sequence[Expr]) -> Array:
    """The constants among ``given`` as one tensor."""
    whole = np.zeros(kernel.weight_bytes, np.uint8)
    for place, begin in kernel.weights:
        data = np.ascontiguousarray(given[place].value.numpy()).view(np.uint8).reshape(-1)
        whole[begin : begin + data.size] = data
    return whole.view(kernel.weight_dtype)
