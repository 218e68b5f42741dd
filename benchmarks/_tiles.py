"""Builds and times any rProgram of an operator: the bench of `model_quality.py` and `ablation.py`.

A kernel is the operator's anchor alone (its matmul or convolution, without the copy that pads its input), on one
thread. It is timed by the thread's processor time, the fastest of many runs, kernels taking turns: what else runs on
the machine then costs the least.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm

from benchmarks.networks.graph import GraphWriter, he_normal
from benchmarks.networks.roller_models import read_models
from tvm_ext import relay
from tvm_ext._tvm import PrimFunc, tirx
from tvm_ext.analysis.computation_exprs import tensor_expr_of
from tvm_ext.analysis.computation_rewrites import drop_unit_axes, split_divided_axes
from tvm_ext.analysis.computations import Computation, OperatorBody, dtype_of, read_operator, static_shape
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import sequence
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import graph_passes, operator_passes
from tvm_ext.records.choice import CONSTANT_PARAMS, ConstantPack
from tvm_ext.records.rprogram import RProgram
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants
from tvm_ext.support.arrays import pack
from tvm_ext.tir_passes.emit.cpu_tiles.emit import emit_tile_kernel
from tvm_ext.tir_passes.plan.anchors import construct_anchor
from tvm_ext.tir_passes.plan.context import KernelContext
from tvm_ext.tir_passes.plan.plan_kernels import TileGroup, plan, simplify
from tvm_ext.tir_passes.roller.canonical import canonicalise
from tvm_ext.tir_passes.roller.construct import Construction, construct

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "roller_ops.csv"
MATMULS = {
    "matmul 512": (512, 512, 512),
    "M2 of batch 128": (128, 2048, 1000),
    "BERT 16 tokens, projection": (16, 768, 768),
    "BERT 128 tokens, projection": (128, 768, 768),
    "BERT 128 tokens, up": (128, 768, 3072),
    "BERT 128 tokens, down": (128, 3072, 768),
    "matmul 64, 256, 256": (64, 256, 256),
    "matmul 128, 128, 512": (128, 128, 512),
}
"""(M, K, N) with a constant right side."""

MINIMUM_SAMPLE_S = 0.0005  # faster kernels run several times per sample
CLOSE = 3.0  # a kernel this many times slower than the best after two rounds is not timed again

Array = npt.NDArray[Any]
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One operator's anchor, ready to be emitted under any rProgram, with arrays for its buffers."""

    name: str
    computation: Computation
    expr: TensorExpr
    construction: Construction
    operator: OperatorBody
    device: DeviceSpec
    target: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A program and its kernel's fastest run in seconds."""

    program: RProgram
    time_s: float


def single_core() -> tuple[DeviceSpec, Any]:
    """This machine's CPU as measured, with one unit, and the target to build for."""
    device, target = device_for_target("llvm")
    return with_unit_count(device, 1), target


def matmul_model(name: str, m: int, k: int, n: int) -> Any:
    """An ONNX model of one MatMul with a constant right side."""
    graph = GraphWriter(name)
    graph.op("MatMul", graph.input("x", (m, k)), graph.constant("w", he_normal(0, "w", (k, n), fan_in=k)), name="y")
    graph.output("y", (m, n))
    return graph.model()


def models(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(name, ONNX model) of each of ``names``: keys of `MATMULS`, and rows of the workload at batch 1."""
    for name in names:
        if name in MATMULS:
            yield name, matmul_model(name, *MATMULS[name])
    for row in read_models(WORKLOAD, batch=1, ids=frozenset(names) - MATMULS.keys()):
        yield row.id, row.model


def prepare(
    name: str, model: Any, device: DeviceSpec, target: Any, candidates: int, *, fuse: bool = True, repack: bool = True
) -> Case:
    """Import ``model`` (an ONNX model of one operator) and construct for its anchor; ValueError where it has none.

    Without ``fuse`` its axes stay as they are (Figure 17); without ``repack`` constants stay as they lie.
    """
    module, params = relay.frontend.from_onnx(model)
    if params:
        module = tvm.relax.transform.BindParams("main", params)(module)
    with target:
        module = tvm.transform.Sequential([*graph_passes(), *operator_passes(target), AnnotateConstants()])(module)
    for _, func in module.functions_items():
        if not isinstance(func, PrimFunc):
            continue
        operator = simplify(read_operator(func, name))
        indices = func.attrs[CONSTANT_PARAMS] if func.attrs and CONSTANT_PARAMS in func.attrs else []
        constants = [operator.params[int(i)] for i in indices] if repack else []
        for group in plan(operator):
            if isinstance(group, TileGroup):
                if fuse:
                    options = BuildOptions(candidates=candidates)
                    context = KernelContext(operator=operator, constants=constants, device=device, options=options)
                    anchor = construct_anchor(group, context)
                    computation, expr, construction = anchor.computation, anchor.expr, anchor.construction
                else:
                    computation, expr = _unfused(group.anchor, constants)
                    construction = construct(expr, device, k=candidates)
                return Case(
                    name=name,
                    computation=computation,
                    expr=expr,
                    construction=construction,
                    operator=operator,
                    device=device,
                    target=target,
                )
    raise ValueError(f"{name} has no operator in register tiles")


def _unfused(anchor: Computation, constants: Sequence[Any]) -> tuple[Computation, TensorExpr]:
    """The anchor and its expression without axes of extent 1, the others as they were written."""
    computation = split_divided_axes(drop_unit_axes(anchor))
    return computation, canonicalise(
        tensor_expr_of(computation, name=computation.name, constants=constants), fuse=False
    ).expr


def _kernel(case: Case, program: RProgram) -> tuple[Any, dict[int, ConstantPack]]:
    """The program's PrimFunc over the anchor's inputs and output, and how to pack which of them."""
    buffers = [load.source for load in case.computation.loads()] + [case.computation.target]
    emitted = emit_tile_kernel(case.computation, case.expr, (), program, case.device, case.operator.params)
    packs = {}
    for packed, how in emitted.packs:
        original = case.operator.params[how.param_index]
        position = next(i for i, buffer in enumerate(buffers) if buffer.same_as(original))
        buffers[position] = packed
        packs[position] = how
    return tirx.PrimFunc(buffers, sequence(*emitted.statements)).with_attrs(
        {"s_tir": True, "tirx.noalias": True}
    ), packs


class Bench:
    """The kernels of several programs of one case, built together, with their arrguments in place."""

    def __init__(self, case: Case, programs: Sequence[RProgram], seed: int = 0) -> None:
        self.case, self.programs = case, list(programs)
        made = [_kernel(case, program) for program in self.programs]
        functions = {f"k{i}": func.with_attr("global_symbol", f"k{i}") for i, (func, _) in enumerate(made)}
        self._library = tvm.compile(tvm.IRModule(functions), target=case.target)
        rng = np.random.default_rng(seed)
        self.inputs: list[Array] = [
            rng.standard_normal(static_shape(load.source)).astype(dtype_of(load.source))
            for load in case.computation.loads()
        ]
        self._output = tvm.runtime.tensor(
            np.zeros(static_shape(case.computation.target), dtype_of(case.computation.target))
        )
        plain = [tvm.runtime.tensor(array) for array in self.inputs]
        packed: dict[tuple[int, ConstantPack], Any] = {}
        self.runs: list[Callable[[], object]] = []
        for i, (_, packs) in enumerate(made):
            arguments = list(plain)
            for position, how in packs.items():
                if (position, how) not in packed:
                    packed[position, how] = tvm.runtime.tensor(pack(self.inputs[position], how))
                arguments[position] = packed[position, how]
            self.runs.append(_bound(self._library.mod[f"k{i}"], (*arguments, self._output)))

    def output(self, index: int) -> Array:
        """The result of program ``index``, into a buffer poisoned with NaN."""
        self._output.copyfrom(np.full(self._output.shape, np.nan, str(self._output.dtype)))
        self.runs[index]()
        return np.asarray(self._output.numpy())

    def time(self, rounds: int, clock: Clock = time.thread_time) -> list[Timed]:
        """Each program's fastest run by ``clock``; after two rounds only those within `CLOSE` of the best go on."""
        best = [math.inf] * len(self.runs)
        repeats = [1] * len(self.runs)
        for number in range(rounds):
            limit = CLOSE * min(best)
            for i, run in enumerate(self.runs):
                if best[i] > limit and number > 1:
                    continue
                if number == 0:
                    run()
                    repeats[i] = max(1, math.ceil(MINIMUM_SAMPLE_S / max(_seconds(run, 1, clock), 1e-7)))
                best[i] = min(best[i], _seconds(run, repeats[i], clock))
        return [Timed(program=p, time_s=t) for p, t in zip(self.programs, best, strict=True)]


def _bound(function: Any, arguments: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: function(*arguments)


def _seconds(run: Callable[[], object], repeats: int, clock: Clock) -> float:
    start = clock()
    for _ in range(repeats):
        run()
    return (clock() - start) / repeats
