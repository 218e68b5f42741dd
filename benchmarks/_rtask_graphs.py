"""A built model's kernels for a GPU as a graph of rTasks, with the times that the models of `tvm_ext.cost` predict.

A kernel's threadblocks are its rTasks, and what its emitter planned is what one of them needs; its predicted time, less
the launch, is shared out among them (`tvm_ext.cost.gpu_rtasks`).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from tvm_ext import relay
from tvm_ext._tvm import CALL_TIR, IRModule, PrimFunc, relax, structural_walk, tirx, tvm
from tvm_ext.cost.bandwidths import bandwidth
from tvm_ext.cost.gpu_rtasks import gpu_rkernel
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import GLOBAL
from tvm_ext.exclusive import EXCLUSIVE
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import BuildPlan, plan_build
from tvm_ext.recorder import choice_of
from tvm_ext.records.choice import GpuPlan, KernelChoice
from tvm_ext.records.rtasks import Need, RKernel, ROperator, RTaskGraph

FALLBACK_REGISTERS = 32
"""Of a thread of a kernel that stock TVM scheduled: assumed."""
SHORTEST_S = 1.5e-6
"""Of a kernel without a prediction: assumed, reads of memory and their use."""


def graph_of(model: onnx.ModelProto, device: str) -> RTaskGraph:
    """The rTasks of ``model``, built for ``device`` as far as its kernels."""
    options = BuildOptions.create(device=device)
    mod, _ = relay.frontend.from_onnx(model)
    plan = plan_build("cuda", options)
    with EXCLUSIVE, plan.target:
        kernels = plan.construct(mod)
    return read_graph(kernels, plan)


def read_graph(kernels: IRModule, plan: BuildPlan) -> RTaskGraph:
    """The calls of ``kernels``' main function in their order; a kernel of several launches is as many operators."""
    known: dict[str, tuple[RKernel, ...]] = {}
    producers: dict[object, tuple[int, ...]] = {}
    operators: list[ROperator] = []
    for block in kernels["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            before = tuple(sorted({item for var in _variables(value) for item in producers.get(var, ())}))
            if isinstance(value, tvm.ir.Call) and value.op.same_as(CALL_TIR):
                name = str(value.args[0].name_hint)
                if name not in known:
                    known[name] = _launches(name, kernels[value.args[0]], plan)
                for kernel in known[name]:
                    number = len(operators)
                    operators.append(ROperator(name=f"{name} {number}", kernels=(kernel,), predecessors=before))
                    before = (number,)
            producers[binding.var] = before
    return RTaskGraph(operators=tuple(operators))


def _variables(value: object) -> Iterator[object]:
    found: list[object] = []

    def visit(node: object) -> None:
        if isinstance(node, relax.Var):
            found.append(node)

    relax.analysis.post_order_visit(value, visit)
    return iter(found)


def _launches(name: str, function: PrimFunc, plan: BuildPlan) -> tuple[RKernel, ...]:
    choice = choice_of(name, function, plan, plan.options)
    plans = choice.gpu or (_stock_plan(function),)
    total_s = _time_s(choice, function, plan.device) / len(plans)
    return tuple(
        _rkernel(name if len(plans) == 1 else f"{name}.{index}", item, total_s, plan.device)
        for index, item in enumerate(plans)
    )


def _rkernel(name: str, plan: GpuPlan, time_s: float, device: DeviceSpec) -> RKernel:
    need = Need(threads=plan.threads, registers=plan.register_count, shared_bytes=plan.shared_bytes)
    return gpu_rkernel(name, need, plan.blocks, time_s, device)


def _time_s(choice: KernelChoice, function: PrimFunc, device: DeviceSpec) -> float:
    """The predicted time without the launch; of stock TVM's kernels, that of moving their tensors once."""
    launch_s = (device.launch_overhead_us or 0.0) * 1e-6
    if choice.expected_s is not None:
        return max(choice.expected_s - launch_s, SHORTEST_S)
    if choice.program is not None:
        return max(choice.program.prediction.time_s - launch_s, SHORTEST_S)
    moved = sum(_bytes(buffer) for buffer in function.buffer_map.values())
    return max(moved / bandwidth(device, GLOBAL), SHORTEST_S)


def _bytes(buffer: object) -> int:
    size = tvm.DataType(str(buffer.ty.dtype)).itemsize
    for extent in buffer.ty.shape:
        size *= int(extent)
    return size


def _stock_plan(function: PrimFunc) -> GpuPlan:
    """The blocks and threads that a kernel of stock TVM's is launched with."""
    extents: dict[str, int] = {}

    def visit(node: object) -> None:
        if node.attr_key == "thread_extent":
            extents[str(node.node.thread_tag)] = int(node.value)

    structural_walk(function.body, [(tirx.AttrStmt, visit)], order="pre")
    blocks = threads = 1
    for tag, extent in extents.items():
        blocks *= extent if tag.startswith("blockIdx") else 1
        threads *= extent if tag.startswith("threadIdx") else 1
    return GpuPlan(launches=1, blocks=blocks, threads=threads, shared_bytes=0, register_count=FALLBACK_REGISTERS)
