"""Proves a GPU kernel without a GPU: runs it in the SIMT interpreter and compares its values with a reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tvm_ext.analysis.launches import DeviceKernel, GlobalTensor
from tvm_ext.devices.device_db import TargetLike, lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.support.arrays import Array

from . import simt
from .cpu_reference import CpuReference
from .simt.counters import Counters, as_rows, efficiency
from .simt.findings import Finding
from .simt.number_types import is_float, storage_dtype
from .threads_as_loops import run_threads_as_loops

if TYPE_CHECKING:
    from tvm_ext._tvm import IRModule, PrimFunc

Reference = Callable[[Mapping[str, Array]], Mapping[str, Array]]

TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""By dtype: the largest error allowed, relative to the largest value of the reference. Outputs of others: exact.

It is that of the output's dtype, or of the shortest one that it was computed in: a convolution of halves that is cast
to float32 at its end errs as halves do.
"""


HALF_MOST = 65504.0  # of float16, whose kernels overflow where a reference in float32 does not


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputError:
    """How far an output is from its reference: the largest difference over the largest value of the reference.

    Values as large as the operator's mask is set no scale, and err by their own size.
    """

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The result of `verify`: what was found, how far each output is from the reference, what the kernels cost.

    ``errors`` is empty where there was no reference, for the reason ``no_reference``.
    """

    device: str
    kernels: tuple[str, ...]
    findings: tuple[Finding, ...]
    errors: tuple[OutputError, ...]
    no_reference: str
    counters: Counters
    outputs: Mapping[str, Array]

    @property
    def ok(self) -> bool:
        """No findings, and every output that was compared is near its reference."""
        return not self.findings and all(error.ok for error in self.errors)

    def __str__(self) -> str:
        lines = [f"{', '.join(self.kernels)} on {self.device}: {'ok' if self.ok else 'NOT ok'}"]
        lines += [str(finding) for finding in self.findings]
        lines += [f"{e.name}: error {e.error:.2e} (at most {e.tolerance:.0e})" for e in self.errors]
        lines += [f"values not compared: {self.no_reference}"] if self.no_reference else []
        return "\n".join([*lines, *(f"{name}: {value}" for name, value in totals(self.counters))])

    def __rich__(self) -> RenderableType:
        return Group(*_parts(self))


def verify(
    function: PrimFunc | IRModule,
    device: DeviceSpec | str,
    *,
    inputs: Mapping[str, Array] | None = None,
    seed: int = 0,
    blocks: Iterable[int] | None = None,
    rtol: float | None = None,
    reference: Reference | None = None,
    target: TargetLike | None = None,
) -> Verification:
    """Lower ``function`` for ``device``, run it in the interpreter, and compare its outputs.

    * ``function``: a thread-bound or scheduled PrimFunc (or a module with one), of one or several launches.
    * ``device``: a name of our tables or a spec; its stock target is lowered for, unless ``target`` is given.
    * ``inputs``: arrays by parameter name; seeded random ones for those left out. Outputs are poison until written.
    * ``blocks``: linear numbers of the blocks to run; all if None.
    * ``rtol``: allowed error relative to the largest value of an output's reference; by dtypes (`TOLERANCES`) if None.
    * ``reference``: from inputs by name to expected outputs by name. If None, the function's threads run as loops on
      the CPU (`threads_as_loops`) where they have such a meaning; where not, values are not compared.
    """
    spec = lookup(device) if isinstance(device, str) else device
    kernels = simt.lower(function, spec if target is None else target)
    arrays = _inputs(kernels, inputs or {}, seed)
    result = simt.run(kernels, arrays, device=spec, blocks=blocks)
    expected, why_not = _expected(function, kernels, arrays, reference)
    return Verification(
        device=spec.name,
        kernels=tuple(kernel.name for kernel in kernels),
        findings=result.findings,
        errors=tuple(errors_of(expected, result, rtol, reference if isinstance(reference, CpuReference) else None)),
        no_reference=why_not,
        counters=result.counters,
        outputs=result.outputs,
    )


def random_array(shape: tuple[int, ...], dtype: str, generator: np.random.Generator) -> Array:
    """Normal values for floats, -4..4 for bytes, 0 and 1 (always valid as indices) for other integers."""
    kind = storage_dtype(dtype)
    if is_float(kind):
        return np.asarray(generator.standard_normal(shape).astype(np.float32)).astype(kind)
    low, high = {"int8": (-4, 5), "uint8": (0, 9)}.get(dtype, (0, 2))
    return generator.integers(low, high, shape).astype(kind)


def random_inputs_of(kernels: Sequence[DeviceKernel], seed: int = 0, *, workspaces: bool = False) -> dict[str, Array]:
    """Random arrays for what ``kernels`` read and do not write, by name; ``workspaces``: for such of these, too."""
    tensors = kernels[0].tensors if workspaces else _parameters(kernels)
    generator = np.random.default_rng(seed)
    written = simt.written_tensors(kernels)
    return {t.name: random_array(t.shape, t.dtype, generator) for t in tensors if t.name not in written}


def errors_of(
    expected: Mapping[str, Array],
    result: simt.SimtRun,
    rtol: float | None = None,
    reference: CpuReference | None = None,
) -> list[OutputError]:
    """How far the outputs of a run are from the ``expected`` ones, maybe those of ``reference``, where written."""
    types, large = (reference.types, reference.mask_value / 2) if reference is not None else ((), np.inf)
    return [_error(name, value, result, rtol, types, large) for name, value in expected.items()]


def _inputs(kernels: tuple[DeviceKernel, ...], given: Mapping[str, Array], seed: int) -> dict[str, Array]:
    tensors = {tensor.name: tensor for tensor in kernels[0].tensors}
    for name in given:
        if name not in tensors:
            raise InputError(f"there is no parameter {name!r}", f"the parameters are {', '.join(tensors)}")
    return {**random_inputs_of(kernels, seed), **given}


def _parameters(kernels: Sequence[DeviceKernel]) -> list[GlobalTensor]:
    return [tensor for tensor in kernels[0].tensors if tensor.name not in kernels[0].workspaces]


def _expected(
    function: PrimFunc, kernels: tuple[DeviceKernel, ...], arrays: Mapping[str, Array], reference: Reference | None
) -> tuple[Mapping[str, Array], str]:
    """(outputs by name, why there are none)."""
    if reference is not None:
        return reference(arrays), ""
    names = [tensor.name for tensor in _parameters(kernels)]
    leading = [name for name in names if name in arrays]
    if names[: len(leading)] != leading:
        return {}, "its outputs are not its last parameters; pass reference="
    try:
        values = run_threads_as_loops(_function_of(function), [arrays[name] for name in leading])
    except IllegalRewrite as reason:
        return {}, reason.problem
    return dict(zip(names[len(leading) :], values, strict=True)), ""


def _function_of(function: PrimFunc | IRModule) -> PrimFunc:
    if not hasattr(function, "functions"):
        return function
    (only,) = function.functions.values()
    return only


def _tolerance(dtype: str, types: Collection[str]) -> float:
    if dtype not in TOLERANCES:
        return 0.0
    return max(TOLERANCES[item] for item in (dtype, *types) if item in TOLERANCES)


def _error(
    name: str, expected: Array, result: simt.SimtRun, rtol: float | None, types: Collection[str], large: float
) -> OutputError:
    if name not in result.outputs:
        raise InputError(f"no kernel writes {name!r}", f"the outputs are {', '.join(result.outputs)}")
    got, written = result.outputs[name], result.written[name]
    tolerance = _tolerance(str(got.dtype), types) if rtol is None else rtol
    wanted = np.asarray(expected).astype(np.float64).reshape(got.shape)[written]
    found = got.astype(np.float64)[written]
    if not found.size:
        return OutputError(name=name, error=float("nan"), tolerance=tolerance)
    # equal infinities, and NaN where NaN is expected, are no difference
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    sizes = np.abs(wanted)
    if "float16" in (str(got.dtype), *types):
        same |= np.isinf(found) & (found * wanted > 0) & (sizes >= HALF_MOST * (1 - tolerance))
    finite = sizes[np.isfinite(sizes)]
    scale = float(finite[finite < large].max(initial=0.0)) or float(finite.max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):
        errors = np.where(same, 0.0, np.abs(found - wanted) / np.maximum(scale, sizes))
    worst = float(errors.max())
    return OutputError(name=name, error=float("inf") if np.isnan(worst) else worst, tolerance=tolerance)


def to_json(result: Verification) -> str:
    """Everything but the arrays."""
    counters = result.counters
    return json.dumps(
        {
            "ok": result.ok,
            "device": result.device,
            "kernels": result.kernels,
            "findings": [asdict(finding) for finding in result.findings],
            "errors": [asdict(error) for error in result.errors],
            "no_reference": result.no_reference,
            "sector_efficiency_of_loads": counters.sector_efficiency(),
            "sector_efficiency_of_stores": counters.sector_efficiency(store=True),
            "bank_conflicts": counters.bank_conflicts,
            "barriers": counters.barriers,
            "mma_count": counters.mma_count,
            "flops": counters.flops,
            "accesses": as_rows(counters),
        }
    )


STATEMENT_COLUMNS = 90  # a choice: a statement on one line of a terminal


# --- showing ------------------------------------------------------------------------------------------------------
def totals(counters: Counters) -> list[tuple[str, str]]:
    """The counters' totals in words."""
    loads, stores = counters.select(scope="global", store=False), counters.select(scope="global", store=True)
    rows = []
    for what, accesses in (("global loads", loads), ("global stores", stores)):
        moved = sum(a.sectors for a in accesses) * counters.sector_bytes
        share = efficiency(accesses, counters.sector_bytes)
        used = "" if share is None else f", {share:.1%} of them asked for"
        rows.append((what, f"{sum(a.requests for a in accesses):,} requests, {moved:,} bytes moved{used}"))
    requests = counters.total("requests", scope="shared")
    rows.append(
        ("shared memory", f"{requests:,} requests, {counters.total('wavefronts', scope='shared'):,} wavefronts")
    )
    rows.append(("bank conflicts", f"{counters.bank_conflicts:,} extra wavefronts"))
    rows.append(("barriers", f"{counters.barriers:,}"))
    rows.append(("mma", f"{counters.mma_count:,}"))
    rows.append(("floating-point operations", f"{counters.flops:,}"))
    return rows


def _parts(result: Verification) -> Iterable[RenderableType]:
    state = "[green]ok[/]" if result.ok else "[red]not ok[/]"
    yield Text.from_markup(f"[bold]{', '.join(result.kernels)}[/] on {result.device}: {state}")
    for finding in result.findings:
        yield Text(str(finding), style="red")
    for error in result.errors:
        yield Text(
            f"{error.name}: error {error.error:.2e}, at most {error.tolerance:.0e}", style="" if error.ok else "red"
        )
    if result.no_reference:
        yield Text(f"values not compared: {result.no_reference}", style="yellow")
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in totals(result.counters):
        table.add_row(*row)
    yield table
    yield _access_table(result.counters)


def _access_table(counters: Counters) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in ("access", "buffer"):
        table.add_column(header, no_wrap=True)
    for header in ("bytes each", "requests", "sector use", "conflicts"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("statement", no_wrap=True, overflow="ellipsis", max_width=STATEMENT_COLUMNS)
    for access in counters.accesses:
        share = efficiency((access,), counters.sector_bytes)
        table.add_row(
            f"{access.scope} {'store' if access.store else 'load'}", access.buffer, str(access.width_bytes),
            f"{access.requests:,}", "" if share is None else f"{share:.0%}",
            f"{access.conflicts:,}" if access.scope == "shared" else "", Text(access.statement),
        )  # fmt: skip
    return table
