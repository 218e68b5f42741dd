"""The kernels of a build in the SIMT interpreter, as code generation gets them, beside the operators they stand for.

A model's kernels are too large to be run whole. What is run is always the kernel itself, at its full shape and tiles:
all threadblocks of a small one; of a large one the first, the last and two between, whose values are compared where
they have written. `KernelCheck` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tvm_ext._tvm import (
    IRModule,
    PassContext,
    PrimFunc,
    Target,
    functions_of,
    nodes_in,
    structural_equal,
    structural_hash,
    tirx,
)
from tvm_ext.analysis.launches import ASYNC_COPY, DeviceKernel, is_merged
from tvm_ext.analysis.predicates import is_thread_bound, reads_memory
from tvm_ext.analysis.relax_values import extent_text
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError, VerificationError
from tvm_ext.ir.float_ir import is_float
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.merged import MERGED, MergedKernel
from tvm_ext.records.serialise import from_json

from . import simt
from .cpu_reference import CpuReference, cpu_reference
from .verification import OutputError, errors_of, random_inputs_of

WHOLE_THREADS = 32_768
"""Threads of a launch up to which all of its blocks are run: a few seconds of one core."""

WHOLE_FLOPS = 4e7
"""The same of its operations, where they are known."""

ROUNDING = 8
"""Times its tolerance that an error may be and still be rounding of sums that were cut: worth a second look."""

CHAIN_FLOPS = 2.5e8
"""The same of all launches of a function with several: later ones need what all blocks of the earlier ones wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCheck:
    """What the interpreter says of one function: of ``block_count`` blocks of all its launches ``blocks_run`` were run.

    ``error`` is the largest of its outputs' errors relative to their largest values, at most ``tolerance`` where all is
    well; None where values were not compared, for the reason ``not_compared``.
    """

    name: str
    device: str
    parameters: tuple[str, ...]
    launches: int
    block_count: int
    blocks_run: int
    findings: tuple[str, ...]
    error: float | None = None
    tolerance: float | None = None
    not_compared: str = ""

    @property
    def problem(self) -> str:
        """What is wrong, in one line; empty where nothing is."""
        if self.findings:
            return " ".join(self.findings[0].split())
        if self.error is not None and self.tolerance is not None and not self.error <= self.tolerance:
            return f"its values are off by {self.error:.2g} of the largest one, {self.tolerance:.0e} is allowed"
        return ""


def check_kernel(
    name: str, function: PrimFunc, operator: PrimFunc | None, device: DeviceSpec, target: Target
) -> KernelCheck:
    """Run ``function``, thread-bound, as ``target``'s code generation gets it under the current PassContext.

    ``operator`` is the same function before it was scheduled, whose values on this machine's CPU are the right ones;
    None: values are not compared. Raises InputError for what the interpreter does not know.
    """
    if is_merged(function):
        return _check_merged(name, function, device, target)
    config = {ASYNC_COPY: bool(PassContext.current().config.get(ASYNC_COPY, False))}
    kernels = simt.lower(function.with_attr("global_symbol", "main"), target, config=config)
    counts = [_blocks(kernel) for kernel in kernels]
    parts = _parts(kernels, _flops(function)) if kernels else []  # of empty tensors
    findings: list[str] = []
    errors: list[Any] = []
    why = "" if operator is not None else "there is no operator to compare with"
    reference = None if operator is None else cpu_reference(operator)
    masks = {} if reference is None else reference.masks()
    divisors = _divides_by_inputs(function if operator is None else operator)
    for launches, blocks in parts:
        arrays = random_inputs_of(launches, workspaces=len(launches) < len(kernels))
        arrays |= {name: mask for name, mask in masks.items() if name in arrays}
        if divisors:  # by 0, which the graph has checked too, ends the process of the reference
            arrays = {name: np.ones_like(a) if a.dtype.kind in "iu" else a for name, a in arrays.items()}
        result = simt.run(launches, arrays, device=device, blocks=blocks)
        if not divisors and _may_be_indices(launches, result):
            arrays = {name: np.zeros_like(a) if a.dtype.kind in "iu" else a for name, a in arrays.items()}
            result = simt.run(launches, arrays, device=device, blocks=blocks)
        findings += [str(finding) for finding in result.findings]
        if len(launches) < len(kernels):
            why = why or "its launches were run one by one, on random workspaces"
        elif reference is not None:
            errors += _errors(reference, launches, blocks, arrays, result, device)
    worst = max(errors, key=lambda error: error.error / (error.tolerance or 1e-30), default=None)
    return KernelCheck(
        name=name,
        device=device.name,
        parameters=_parameters_of(function),
        launches=len(kernels),
        block_count=sum(counts),
        blocks_run=sum(
            sum(_blocks(kernel) if blocks is None else len(_those(blocks, kernel)) for kernel in launches)
            for launches, blocks in parts
        ),
        findings=tuple(findings),
        error=None if worst is None else worst.error,
        tolerance=None if worst is None else worst.tolerance,
        not_compared=why,
    )


def _may_be_indices(launches: Sequence[DeviceKernel], result: simt.SimtRun) -> bool:
    """Whether a random 1 may have led beyond an axis of one place: the graph has checked what kernels index by."""
    has_one = any(1 in tensor.shape for tensor in launches[0].tensors)
    return has_one and any(item.kind == "out of bounds" for item in result.findings)


def _divides_by_inputs(function: PrimFunc) -> bool:
    """Whether integers that are read from memory divide: strides of a slice, an operand of Div or Mod."""
    divisions = nodes_in(function.body, (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod))
    return any(reads_memory(node.b) and not is_float(node) for node in divisions)


def _errors(
    reference: CpuReference,
    launches: Any,
    blocks: Any,
    arrays: Mapping[str, Any],
    result: simt.SimtRun,
    device: DeviceSpec,
) -> list[OutputError]:
    """How far ``result`` is from what ``reference`` makes of ``arrays``.

    The largest value, which errors are measured by, says nothing of sums that are cut behind them. Worked example:
    sums of 7392 products come to 300 and err by 2.4e-4, and a clip with random bounds leaves 1.2 of them. What is off
    by little is run once more on inputs an eighth as large, where rounding is a 64th and the bounds are what they were.
    """
    found = errors_of(reference(arrays), result, reference=reference)
    if all(item.ok for item in found) or not all(item.error <= ROUNDING * item.tolerance for item in found):
        return found
    masks = reference.masks()
    smaller = {name: array if name in masks else _smaller(array) for name, array in arrays.items()}
    again = simt.run(launches, smaller, device=device, blocks=blocks)
    return errors_of(reference(smaller), again, reference=reference)


def _smaller(array: Any) -> Any:
    """An eighth of a tensor of floats, which is exact; one number may be a bound."""
    scaled = array.dtype.kind == "f" and array.size > 1
    return array * array.dtype.type(0.125) if scaled else array


def _check_merged(name: str, function: PrimFunc, device: DeviceSpec, target: Target) -> KernelCheck:
    """A schedule's kernel, on its own table and state, and an arena of poison; of a large one, nothing is run."""
    record = from_json(MergedKernel, str(function.attrs[MERGED]))
    kernels = simt.lower(function, target)
    count = sum(map(_blocks, kernels))
    fits = sum(_blocks(kernel) * _threads(kernel) for kernel in kernels) <= WHOLE_THREADS
    findings: tuple[str, ...] = ()
    if fits:
        arrays = random_inputs_of(kernels)
        arrays |= {"table": np.array(record.table, np.int32), "state": np.array(record.state, np.int32)}
        for tensor in kernels[0].tensors:
            if tensor.name == "arena":
                empty = np.zeros(tensor.shape, tensor.dtype)
                arrays[tensor.name] = np.ma.masked_array(empty, np.ones(tensor.shape, bool))
        findings = tuple(str(finding) for finding in simt.run(kernels, arrays, device=device).findings)
    return KernelCheck(
        name=name,
        device=device.name,
        parameters=_parameters_of(function),
        launches=len(kernels),
        block_count=count,
        blocks_run=count if fits else 0,
        findings=findings,
        not_compared="a schedule of many operators"
        if fits
        else f"its {count} blocks, which wait for each other, are many",
    )


def _parameters_of(function: PrimFunc) -> tuple[str, ...]:
    return tuple(f"{p.name}: {p.ty.dtype}[{', '.join(map(extent_text, p.ty.shape))}]" for p in function.params)


def check_module(
    module: IRModule,
    operators: IRModule,
    device: DeviceSpec,
    target: Target,
    *,
    progress: Callable[[str], None] | None = None,
) -> tuple[KernelCheck, ...]:
    """`check_kernel` for every distinct PrimFunc of ``module``, a build's as it is lowered; operators by their names.

    Kernels that stock TVM brings scheduled, or writes in threads, have no operator.
    """
    checked: list[KernelCheck] = []
    for name, function in distinct_kernels(module).items():
        if progress is not None:
            progress(f"interpreting {name}")
        operator = _operator(operators, name, function)
        try:
            checked.append(check_kernel(name, function, operator, device, target))
        except InputError as error:
            raise VerificationError(
                f"{name}: the interpreter cannot run its kernels for {device.name}: {error.problem}",
                "build without verify=True",
            ) from error
    return tuple(checked)


def refuse_wrong(checks: Sequence[KernelCheck]) -> None:
    """Raise VerificationError for the first kernel that is not right."""
    wrong = [check for check in checks if check.problem]
    if not wrong:
        return
    first = wrong[0]
    more = f" ({len(wrong) - 1} more kernels are wrong)" if len(wrong) > 1 else ""
    raise VerificationError(
        f"{first.name}({', '.join(first.parameters)}): its kernel for {first.device} is wrong: {first.problem}{more}",
        "enable_pipelining=False or enable_roller=False builds another kernel; please report this one (`tvm-ext verify "
        f"MODEL --operator {first.name} --device {first.device}` prints all of it)",
    )


def distinct_kernels(module: IRModule) -> dict[str, PrimFunc]:
    """The PrimFuncs of ``module`` by name, of those that are alike the first."""
    found: dict[str, PrimFunc] = {}
    seen: dict[int, list[PrimFunc]] = {}
    for variable, function in functions_of(module).items():
        bare = function.with_attrs({CHOICE: "", "global_symbol": ""})
        alike = seen.setdefault(structural_hash(bare), [])
        if not any(structural_equal(bare, other) for other in alike):
            alike.append(bare)
            found[str(variable.name_hint)] = function
    return found


def _operator(operators: IRModule, name: str, function: PrimFunc) -> PrimFunc | None:
    """The unscheduled function of that name and those parameters; None for one that stock TVM wrote for a GPU."""
    known = {str(v.name_hint): f for v, f in operators.functions_items() if isinstance(f, PrimFunc)}
    found = known.get(name)
    if found is None or "tirx.is_scheduled" in (found.attrs or {}) or is_thread_bound(found):
        return None
    assert [str(p.name) for p in found.params] == [str(p.name) for p in function.params], name
    return found


def _flops(function: PrimFunc) -> float:
    """Operations of the whole function, as its choice has them; 0 where it has none."""
    choice = (function.attrs or {}).get(CHOICE)
    return from_json(KernelChoice, str(choice)).flops if choice else 0.0


def _parts(kernels: Sequence[DeviceKernel], flops: float) -> list[tuple[Sequence[DeviceKernel], list[int] | None]]:
    """What is run together, and which blocks of it (all: None)."""
    threads = sum(_blocks(kernel) * _threads(kernel) for kernel in kernels)
    most = CHAIN_FLOPS if len(kernels) > 1 else WHOLE_FLOPS
    if flops <= most and threads <= WHOLE_THREADS * len(kernels):
        return [(kernels, None)]
    return [((kernel,), _sampled(_blocks(kernel))) for kernel in kernels]


def _sampled(count: int) -> list[int]:
    """The first and the last of ``count`` blocks, where edges are, and two between."""
    return sorted({0, count // 3, 2 * count // 3, count - 1})


def _those(blocks: Sequence[int], kernel: DeviceKernel) -> list[int]:
    return [block for block in blocks if block < _blocks(kernel)]


def _blocks(kernel: DeviceKernel) -> int:
    return _launched(kernel.extents, "blockIdx")


def _threads(kernel: DeviceKernel) -> int:
    return _launched(kernel.extents, "threadIdx")


def _launched(extents: Mapping[str, int], kind: str) -> int:
    return prod(size for tag, size in extents.items() if tag.startswith(kind))
