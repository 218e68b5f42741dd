"""A built model's kernels for a GPU as a graph of rTasks, with the times that the models of `tvm_ext.cost` predict.

A kernel's threadblocks are its rTasks, and what its emitter planned is what one of them needs; its predicted time, less
the launch, is shared out among them (`tvm_ext.cost.gpu_rtasks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tvm_ext._tvm import CALL_TIR, IRModule, PrimFunc, Sequential, relax, structural_walk, tirx, tvm
from tvm_ext.cost.gpu_rtasks import gpu_rkernel, shortest_s, unplanned_registers
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import GLOBAL
from tvm_ext.exclusive import EXCLUSIVE
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import BuildPlan, plan_build, rammer_passes
from tvm_ext.recorder import choice_of
from tvm_ext.records.choice import ALTERNATIVES, GpuPlan, KernelChoice
from tvm_ext.records.rammer import RAMMER, RammerRecord, RegionRecord
from tvm_ext.records.rtasks import Need, RKernel, ROperator, RTaskGraph
from tvm_ext.records.serialise import from_json
from tvm_ext.support.files import write_atomically


def graph_of(mod: IRModule, device: str) -> RTaskGraph:
    """The rTasks of ``mod``, built for ``device``, a GPU, as far as its kernels: the constructed one comes first."""
    target = "cuda" if lookup(device).kind == "cuda" else device
    plan = plan_build(target, BuildOptions.create(device=device, enable_rammer=True))
    with EXCLUSIVE, plan.target:
        kernels = plan.construct(mod)
    return read_graph(kernels, plan)


def kept_graph(name: str, device: str, folder: str, make: Callable[[], IRModule]) -> RTaskGraph:
    """The graph of network ``name``, which ``make`` makes, from ``folder`` if it is there; "": kept nowhere."""
    path = Path(folder) / f"{name}@{device}.json"
    if folder and path.is_file():
        return RTaskGraph.from_json(path.read_text(encoding="utf-8"))
    graph = graph_of(make(), device)
    if folder:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, graph.to_json().encode())
    return graph


def scheduled_on_cpu(mod: IRModule, device: str) -> RegionRecord:
    """The largest schedule of a build of ``mod`` for ``device``, a CPU, as far as its schedules."""
    options = BuildOptions.create(device=device, enable_rammer=True, kernel_cache="off")
    plan = plan_build("llvm", options)
    with EXCLUSIVE, plan.target:
        made = Sequential(rammer_passes(plan.device, plan.options))(plan.construct(mod))
    record = from_json(RammerRecord, str(made.attrs[RAMMER]))
    return max(record.scheduled, key=lambda region: len(region.operators))


def read_graph(kernels: IRModule, plan: BuildPlan) -> RTaskGraph:
    """The calls of ``kernels``' main function in their order; a kernel of several launches is as many operators."""
    known: dict[str, tuple[tuple[RKernel, ...], ...]] = {}
    producers: dict[object, tuple[int, ...]] = {}
    operators: list[ROperator] = []
    for block in kernels["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            before = tuple(sorted({item for var in _variables(value) for item in producers.get(var, ())}))
            if isinstance(value, tvm.ir.Call) and value.op.same_as(CALL_TIR):
                name = str(value.args[0].name_hint)
                if name not in known:
                    known[name] = _choices(name, kernels[value.args[0]], plan)
                for choice in known[name]:
                    number = len(operators)
                    operators.append(ROperator(name=f"{name} {number}", kernels=choice, predecessors=before))
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


def _choices(name: str, function: PrimFunc, plan: BuildPlan) -> tuple[tuple[RKernel, ...], ...]:
    """The kernels of each launch; another kernel of as many launches may differ in one of them."""
    own = _launches(name, function, plan)
    found = [[kernel] for kernel in own]
    for number, other in enumerate(function.attrs.get(ALTERNATIVES, ())):
        launches = _launches(f"{name} other {number}", other, plan)
        main = max(range(len(launches)), key=lambda place: launches[place].work_s)
        if len(launches) == len(own):
            found[main].append(launches[main])
    return tuple(map(tuple, found))


def constructed_alone(graph: RTaskGraph) -> RTaskGraph:
    """``graph`` with the first kernel of each operator alone."""
    return chosen_alone(graph, dict.fromkeys(range(len(graph.operators)), 0))


def chosen_alone(graph: RTaskGraph, chosen: Mapping[int, int]) -> RTaskGraph:
    """``graph`` with one kernel for each operator."""
    operators = (
        replace(operator, kernels=(operator.kernels[chosen[place]],)) for place, operator in enumerate(graph.operators)
    )
    return RTaskGraph(operators=tuple(operators))


def _launches(name: str, function: PrimFunc, plan: BuildPlan) -> tuple[RKernel, ...]:
    choice = choice_of(name, function, plan, plan.options)
    plans = choice.gpu or (_stock_plan(function, plan.device),)
    total_s, busy_s = (item / len(plans) for item in _times_s(choice, function, plan.device))
    return tuple(
        _rkernel(name if len(plans) == 1 else f"{name}.{index}", item, (total_s, busy_s), plan.device)
        for index, item in enumerate(plans)
    )


def _rkernel(name: str, plan: GpuPlan, times_s: tuple[float, float], device: DeviceSpec) -> RKernel:
    need = Need(threads=plan.threads, registers=plan.register_count, shared_bytes=plan.shared_bytes)
    return gpu_rkernel(name, need, plan.blocks, times_s[0], device, times_s[1])


def _times_s(choice: KernelChoice, function: PrimFunc, device: DeviceSpec) -> tuple[float, float]:
    """The predicted time without the launch, and that of the busiest resource.

    Of stock TVM's kernels both are that of moving their tensors once.
    """
    launch_s = (device.launch_overhead_us or 0.0) * 1e-6
    moving_s = sum(_bytes(buffer) for buffer in function.params) / Machine(device).rate(GLOBAL)
    busy_s = moving_s if choice.program is None else choice.program.work_s() / device.unit_count
    if choice.expected_s is not None:
        return max(choice.expected_s - launch_s, shortest_s(device)), busy_s
    if choice.program is not None:
        return max(choice.program.prediction.time_s - launch_s, shortest_s(device)), busy_s
    return max(moving_s, shortest_s(device)), busy_s


def _bytes(buffer: object) -> int:
    size = tvm.DataType(str(buffer.ty.dtype)).itemsize
    for extent in buffer.ty.shape:
        size *= int(extent)
    return size


def _stock_plan(function: PrimFunc, device: DeviceSpec) -> GpuPlan:
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
    registers = unplanned_registers(device)
    return GpuPlan(launches=1, blocks=blocks, threads=threads, shared_bytes=0, register_count=registers)
