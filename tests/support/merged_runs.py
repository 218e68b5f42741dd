"""Builds graphs for small GPUs up to merged kernels, and runs these in the interpreter: blocks at once, in any order.

What a VirtualMachine would do with the graph happens here: constants, table and state are those of the calls, the state
stays from run to run, and the arena is poison before each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tvm_ext import pass_pipeline
from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    Constant,
    Expr,
    IRModule,
    PassContext,
    PrimFunc,
    Sequential,
    Target,
    relax,
    structural_hash,
)
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.rammer_runtime.legacy.use_kernels import GivenKernels
from tvm_ext.records.merged import MERGED, CompiledUse, MergedKernel
from tvm_ext.records.rammer import RAMMER, RammerRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.call_merged import CallMerged
from tvm_ext.relay_passes.schedule_wavefronts import Mode, ScheduleWavefronts
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.merge_rtasks import AskCompiler, MergeRTasks
from tvm_ext.tir_passes.split_launches import SplitLaunches
from tvm_ext.verify import simt
from tvm_ext.verify.simt import Concurrency

FITS = CompiledUse(registers=32, spill_bytes=0, shared_bytes=0)


def fits(_func: PrimFunc) -> CompiledUse | str:
    """A compiler by whose word everything is resident."""
    return FITS


def nobody(_func: PrimFunc) -> CompiledUse | str:
    """No compiler."""
    return "nobody was asked"


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedGraph:
    """A graph that calls merged kernels, for ``device``, whose row is ``target``'s but for its units."""

    mod: IRModule
    device: DeviceSpec
    target: Target

    @property
    def record(self) -> RammerRecord:
        return from_json(RammerRecord, str(self.mod.attrs[RAMMER]))

    @property
    def functions(self) -> dict[str, PrimFunc]:
        items = ((gv.name_hint, func) for gv, func in self.mod.functions_items())
        return {name: func for name, func in items if isinstance(func, PrimFunc) and MERGED in (func.attrs or {})}

    @property
    def kernels(self) -> dict[str, MergedKernel]:
        return {name: from_json(MergedKernel, str(func.attrs[MERGED])) for name, func in self.functions.items()}


def small_gpu(name: str, units: int) -> tuple[DeviceSpec, Target]:
    """The row ``name`` with so many units, which run one vEU each as far as the model goes."""
    device, target = device_for_target(name)
    return replace(device, unit_count=units, max_blocks_per_unit=1), target


def merged_graph(
    mod: IRModule,
    *,
    name: str = "nvidia-a100",
    units: int = 3,
    measure: AskCompiler = fits,
    mode: Mode = True,
    kernels: GivenKernels | None = None,
    **settings: Any,
) -> MergedGraph:
    """``mod`` as `relay.build` has it before it is lowered, for a GPU of few units.

    Its schedule, which takes most of the time, is made once in a process and pass context.
    """
    device, target = small_gpu(name, units)
    key = (structural_hash(mod), name, units, mode, str(settings), str(kernels), str(PassContext.current().config))
    with target:
        if key not in _SCHEDULED:
            _SCHEDULED[key] = _scheduled(mod, device, target, mode, settings, kernels)
        merged = Sequential([MergeRTasks(device, measure), CallMerged()])(_SCHEDULED[key])
        return MergedGraph(mod=merged, device=device, target=target)


_SCHEDULED: dict[tuple[Any, ...], IRModule] = {}


def _scheduled(
    mod: IRModule,
    device: DeviceSpec,
    target: Target,
    mode: Mode,
    settings: Mapping[str, Any],
    given: GivenKernels | None = None,
) -> IRModule:
    settings = {"enable_persistent_fusion": False, "kernel_cache": "off", **settings}
    options = BuildOptions.create(enable_rammer=mode, **settings)
    kernels = pass_pipeline.kernel_pipeline(target, device, options, kernels=given)(mod)
    return Sequential([SplitLaunches(device), ScheduleWavefronts(device, mode)])(kernels)


@dataclass(slots=True)
class Runs:
    """Runs of ``graph``'s main function, one after another; ``findings`` are those of all of them."""

    graph: MergedGraph
    states: dict[str, Array] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    lowered: dict[str, tuple[simt.DeviceKernel, ...]] = field(default_factory=dict)

    def __call__(self, values: Sequence[Array], concurrency: Concurrency | None = None) -> list[Array]:
        """What it returns for ``values``."""
        main = self.graph.mod["main"]
        known: dict[Expr, Any] = dict(zip(main.params, values, strict=True))
        for block in main.body.blocks:
            for binding in block.bindings:
                known[binding.var] = self._value(binding.value, known, concurrency)
        result = self._value(main.body.body, known, concurrency)
        return list(result) if isinstance(result, tuple) else [result]

    def _value(self, expr: Expr, known: dict[Expr, Any], how: Concurrency | None) -> Any:
        if expr in known:
            return known[expr]
        if isinstance(expr, Constant):
            return expr.value.numpy()
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(item, known, how) for item in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value, known, how)[expr.index]
        assert isinstance(expr, Call), expr
        if expr.op == CALL_TIR:
            given = [self._value(item, known, how) for item in expr.args[1].fields]
            return self._called(expr.args[0].name_hint, given, how)
        assert expr.op.name == "relax.reshape", expr
        return self._value(expr.args[0], known, how).reshape([int(size) for size in expr.args[1].values])

    def _called(self, name: str, given: Sequence[Array], how: Concurrency | None) -> Any:
        func = self.graph.functions[name]
        if name not in self.lowered:
            self.lowered[name] = simt.lower(func, self.graph.target)
        names = [tensor.name for tensor in self.lowered[name][0].tensors]
        arrays = dict(zip(names, given, strict=False))
        arrays["state"] = self.states.get(name, arrays["state"])
        if "arena" in names:
            arena = self.lowered[name][0].tensors[names.index("arena")]
            empty = np.zeros(arena.shape, arena.dtype)
            arrays["arena"] = np.ma.masked_array(empty, np.ones(arena.shape, bool))
        run = simt.run(self.lowered[name], arrays, device=self.graph.device, concurrency=how)
        self.findings += [str(item) for item in run.findings]
        self.states[name] = run.outputs.get("state", arrays["state"])
        results = [run.outputs[item] for item in names[len(given) :] if item != "arena"]
        return tuple(results) if len(results) > 1 or "arena" in names else results[0]
