"""What kernels of CPUs and of GPUs that fall into rTasks have in common: distinct rKernels, and what none may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tvm_ext._tvm import IRModule, PrimFunc, copy_module, functions_of, ir, structural_equal, structural_hash
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.choice import ALTERNATIVES
from tvm_ext.records.rtask_split import RTASKS, RTaskSplit
from tvm_ext.records.serialise import to_json


@dataclass(slots=True)
class RKernels:
    """The distinct rKernels of a module, by name."""

    functions: dict[str, PrimFunc] = field(default_factory=dict)
    _by_hash: dict[int, list[str]] = field(default_factory=dict)

    def name_of(self, func: PrimFunc, wish: str) -> str:
        """The name under which ``func`` or its equal is kept; ``wish`` if it is new."""
        alike = self._by_hash.setdefault(structural_hash(func), [])
        for name in alike:
            if structural_equal(self.functions[name].without_attr("global_symbol"), func):
                return name
        assert wish not in self.functions, f"two kernels are called {wish}"
        alike.append(wish)
        self.functions[wish] = func.with_attr("global_symbol", wish)
        return wish


Split = Callable[[PrimFunc, str, RKernels], RTaskSplit]
"""From a kernel and its name to its steps, whose rKernels it adds."""


def with_splits(mod: IRModule, split: Split) -> IRModule:
    """``mod`` with what ``split`` says of each PrimFunc in the function's `RTASKS`, and with the rKernels."""
    result, kernels = copy_module(mod), RKernels()
    for gv, func in functions_of(mod).items():
        result[gv] = _with_split(func, gv.name_hint, kernels, split)
    for name, kernel in kernels.functions.items():
        result[ir.GlobalVar(name)] = kernel
    return result


def _with_split(func: PrimFunc, name: str, kernels: RKernels, split: Split) -> PrimFunc:
    """``func`` with its split in `RTASKS`, and in that what a schedule may run of its `ALTERNATIVES` instead."""
    others = list(func.attrs[ALTERNATIVES]) if func.attrs and ALTERNATIVES in func.attrs else []
    own = split(func.without_attr(ALTERNATIVES), name, kernels)
    found = [split(other, f"{name}_other{number}", kernels) for number, other in enumerate(others)]
    variants = tuple(other for other in found if may_replace(other, own))
    return func.without_attr(ALTERNATIVES).with_attr(RTASKS, to_json(replace(own, variants=variants)))


def may_replace(other: RTaskSplit, own: RTaskSplit) -> bool:
    """Whether a schedule may run the step in which ``other`` differs, and those of ``own`` beside it.

    What steps pass to each other in a workspace is laid out as the kernel likes. Where all steps but one are the same
    code, any choice is one of the two kernels, each right in itself.
    """
    if other.refusal or own.refusal or other.workspaces != own.workspaces or len(other.steps) != len(own.steps):
        return False
    pairs = list(zip(other.steps, own.steps, strict=True))
    same_data = all((a.buffers, a.reads, a.writes) == (b.buffers, b.reads, b.writes) for a, b in pairs)
    return same_data and sum(a.kernel != b.kernel for a, b in pairs) == 1


def check_parameters(func: PrimFunc) -> None:
    """Raise IllegalRewrite where a parameter of ``func`` is no tensor of known shape that has elements."""
    for param in func.params:
        shape = getattr(getattr(param, "ty", None), "shape", None)
        if shape is None:
            raise IllegalRewrite(f"parameter {param.name} is no tensor")
        if any(not hasattr(extent, "value") for extent in shape):
            raise IllegalRewrite(f"the shape of {param.name} is only known at run time")
        if any(int(extent) == 0 for extent in shape):
            raise IllegalRewrite(f"{param.name} has no elements")
        if itemsize_bytes(dtype_of(param)) < 1:
            raise IllegalRewrite(f"elements of {param.name} share bytes")
