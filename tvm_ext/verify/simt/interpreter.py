"""Runs lowered kernels block by block on NumPy lanes, and reports what they do wrong and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from tvm_ext._tvm import Call, nodes_in
from tvm_ext.analysis.device_code import called_name, split_dtype
from tvm_ext.analysis.launches import DeviceKernel, GlobalTensor
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError
from tvm_ext.ir import device_sync
from tvm_ext.ir.launch_writes import written_parameters
from tvm_ext.support.arrays import Array

from . import bulk_copy, matrix_calls, sync_calls, warp_calls
from .compile_statement import compile_statement
from .counters import AccessCount, Counters
from .findings import Finding, Findings
from .lanes import Lanes
from .machine import Engine, Hardware, Record, Run
from .memory import GlobalMemory
from .number_types import storage_dtype
from .scope import BufferBinding, Scope
from .turns import Concurrency
from .values import NEVER_WRITTEN

LANES_AT_ONCE = 4096
"""Blocks are run together up to so many threads; more would not be faster, but take more memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimtRun:
    """What a run gave: ``outputs`` (arrays of the tensors that kernels write, workspaces too, and which elements were
    written, by name), what was found wrong, and what it cost.
    """

    outputs: Mapping[str, Array]
    written: Mapping[str, Array]
    findings: tuple[Finding, ...]
    counters: Counters

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.findings


def run(
    kernels: Sequence[DeviceKernel],
    arrays: Mapping[str, Array],
    *,
    device: DeviceSpec | str,
    blocks: Iterable[int] | None = None,
    concurrency: Concurrency | None = None,
) -> SimtRun:
    """Run ``kernels`` one after the other on copies of ``arrays``.

    * ``kernels``: from `lower`.
    * ``arrays``: the function's inputs by name, in its shapes and dtypes. Tensors left out are outputs: poison until
      written, and all of it to be written. Of a masked array, what is masked is poison and need not be written (an
      arena).
    * ``device``: whose warps, banks, sectors and limits count.
    * ``blocks``: linear numbers of the blocks to run (``x`` fastest), those that a kernel has; all blocks if None. With
      some blocks only, nothing is said about elements that nobody wrote.

    Raises InputError for a missing or wrong array, and for anything in a kernel that the interpreter does not know.
    """
    spec = lookup(device) if isinstance(device, str) else device
    hardware, findings = Hardware.of(spec), Findings()
    programs = [(kernel, *compile_kernel(kernel)) for kernel in kernels]
    granules = _granules(programs)
    memories = {tensor.name: _memory(tensor, arrays, granules) for tensor in kernels[0].tensors}
    chosen = None if blocks is None else tuple(blocks)
    records, touched = [], set()
    with np.errstate(all="ignore"):
        for program in programs:
            record = Record(program[0].name, hardware, findings, strict_alignment=not _is_opencl(program[0]))
            records.append(record)
            touched |= _run_kernel(program, memories, record, chosen, concurrency or Concurrency())
    if chosen is None:
        whole = {name for name in touched if not np.ma.isMaskedArray(arrays.get(name))}
        _check_written(kernels, memories, whole, findings)
    names = [tensor for tensor in kernels[0].tensors if tensor.name in touched]
    return SimtRun(
        outputs={
            t.name: memories[t.name].typed(storage_dtype(t.dtype))[: prod(t.shape)].reshape(t.shape) for t in names
        },
        written={t.name: memories[t.name].written().reshape(t.shape) for t in names},
        findings=findings.all(),
        counters=_counters(records, hardware),
    )


def _is_opencl(kernel: DeviceKernel) -> bool:
    """OpenCL's vload and vstore ask for the alignment of an element only (OpenCL C, "Vector Data Load and Store")."""
    target = kernel.function.attrs.get("target", None)
    return target is not None and str(target.kind.name) == "opencl"


CompiledLaunch = tuple[DeviceKernel, Scope, Run, dict[str, int]]
"""A kernel and what `compile_kernel` made of it."""


def _granules(programs: Sequence[CompiledLaunch]) -> dict[str, int]:
    """By tensor, the bytes of the smallest elements that a kernel sees in it."""
    found: dict[str, int] = {}
    for _, scope, _, slots in programs:
        for name, slot in slots.items():
            found[name] = min(found.get(name, scope.granule(slot)), scope.granule(slot))
    return found


def _memory(tensor: GlobalTensor, arrays: Mapping[str, Array], granules: Mapping[str, int]) -> GlobalMemory:
    dtype = storage_dtype(tensor.dtype)
    granule = granules.get(tensor.name, dtype.itemsize)
    given = arrays.get(tensor.name)
    count = prod(tensor.shape)
    # all bits set: NaN for floats, an odd number for integers
    poison = np.full(max(1, count) * dtype.itemsize, 0xFF, np.uint8).view(dtype)
    if given is None:
        return GlobalMemory(poison, np.full(len(poison), NEVER_WRITTEN, np.int32), granule, count)
    if tuple(given.shape) != tensor.shape or given.dtype != dtype:
        raise InputError(
            f"{tensor.name} is {given.dtype}{list(given.shape)}, the function has {tensor.dtype}{list(tensor.shape)}"
        )
    if np.ma.isMaskedArray(given):
        masked = np.ma.getmaskarray(given).reshape(-1)
        array = np.where(masked, poison, np.ma.getdata(given).reshape(-1))
        return GlobalMemory(array, np.where(masked, np.int32(NEVER_WRITTEN), np.int32(0)), granule, count)
    return GlobalMemory(np.resize(given, len(poison)), None, granule, count)


def compile_kernel(kernel: DeviceKernel) -> tuple[Scope, Run, dict[str, int]]:
    """(scope, closure, slot of each parameter's memory by the tensor's name)."""
    scope = Scope(kernel.name)
    warp_calls.install(scope)
    bulk_copy.install(scope)
    matrix_calls.install(scope)
    sync_calls.install(scope)
    slots: dict[str, int] = {}
    for parameter, name in zip(kernel.function.params, kernel.arguments, strict=False):
        slot = slots.setdefault(name, len(slots))
        scope.memories = max(scope.memories, slot + 1)
        base, lanes = split_dtype(str(parameter.ty.element_type.dtype))
        scope.note_granule(slot, storage_dtype(base).itemsize, is_allocation=False)
        scope.bind_buffer(
            parameter, BufferBinding(slot=slot, name=name, dtype=storage_dtype(base), lanes=lanes, scope="global")
        )
    return scope, compile_statement(scope, kernel.function.body), slots


def _run_kernel(
    program: CompiledLaunch,
    memories: Mapping[str, GlobalMemory],
    record: Record,
    chosen: tuple[int, ...] | None,
    concurrency: Concurrency,
) -> set[str]:
    kernel, scope, body, slots = program
    stored, synchronised = written_parameters(kernel), _is_synchronised(kernel)
    for name in slots:
        memories[name].watch(written=name in stored, synchronised=synchronised)
    _check_limits(kernel, scope, record)
    count = prod(size for tag, size in kernel.extents.items() if tag.startswith("blockIdx"))
    blocks = [b for b in (range(count) if chosen is None else chosen) if b < count]
    threads = prod(size for tag, size in kernel.extents.items() if tag.startswith("threadIdx"))

    def machine(batch: Sequence[int]) -> Engine:
        made = Engine(record, Lanes(kernel.extents, batch, record.hardware.warp_lanes), scope.variables, scope.memories)
        for name, slot in slots.items():
            made.memory[slot] = memories[name]
        return made

    def run(made: Engine) -> None:
        body(made)
        for finish in made.at_end:
            finish(made)

    if synchronised:
        sync_calls.SyncLaunch(blocks, concurrency).run(lambda block: machine([block]), run)
        return stored
    together = max(1, LANES_AT_ONCE // max(threads, record.hardware.warp_lanes))
    for start in range(0, len(blocks), together):
        run(machine(blocks[start : start + together]))
    return stored


def _is_synchronised(kernel: DeviceKernel) -> bool:
    """Whether its blocks wait for each other."""
    return any(called_name(call) in device_sync.ALL for call in nodes_in(kernel.function.body, Call))


def _check_limits(kernel: DeviceKernel, scope: Scope, record: Record) -> None:
    hardware = record.hardware
    threads = prod(size for tag, size in kernel.extents.items() if tag.startswith("threadIdx"))
    problems = []
    if hardware.max_threads is not None and threads > hardware.max_threads:
        problems.append(f"{threads} threads a block, {hardware.name} has at most {hardware.max_threads}")
    if hardware.shared_bytes is not None and scope.shared_bytes > hardware.shared_bytes:
        problems.append(
            f"{scope.shared_bytes} bytes of shared memory a block, {hardware.name} has {hardware.shared_bytes}"
        )
    for problem in problems:
        finding = Finding(kind="device limit", kernel=kernel.name, detail=problem)
        record.findings.add((kernel.name, problem), 1, partial(_same, finding))


def _same(finding: Finding) -> Finding:
    return finding


def _check_written(
    kernels: Sequence[DeviceKernel], memories: Mapping[str, GlobalMemory], touched: set[str], findings: Findings
) -> None:
    """Every element of an output must have been written by the end."""
    for tensor in kernels[0].tensors:
        if tensor.name not in touched or tensor.name in kernels[0].workspaces:
            continue
        missing = np.flatnonzero(~memories[tensor.name].written())
        if len(missing):
            finding = Finding(
                kind="unwritten output",
                kernel=kernels[-1].name,
                buffer=tensor.name,
                element=int(missing[0]),
                detail="no thread of any kernel writes it",
            )
            findings.add(("unwritten", tensor.name), len(missing), partial(_same, finding))


def _counters(records: Sequence[Record], hardware: Hardware) -> Counters:
    accesses: list[AccessCount] = []
    for record in records:
        for (number, _), count in record.counts.items():
            count.statement = record.sites[number].text()
            accesses.append(count)
    return Counters(
        accesses=tuple(accesses),
        sector_bytes=hardware.sector_bytes,
        barriers=sum(r.barriers for r in records),
        mma_count=sum(r.mma_count for r in records),
        flops=sum(r.flops for r in records),
    )
