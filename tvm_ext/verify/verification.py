"""Proves a GPU kernel without a GPU: runs it in the SIMT interpreter and compares its values with a reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import tvm
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tvm.script import from_source

from tvm_ext._tvm import IF_THEN_ELSE, BufferStore, Call, Expr, TensorLoad, nodes_in, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.analysis.launches import DeviceKernel, GlobalTensor
from tvm_ext.devices.device_db import TargetLike, device_for_target, lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.expressions.exact_floats import keep_floats_outside_reductions, pass_nan_on

from . import simt
from .simt.counters import Counters, as_rows, efficiency
from .simt.findings import Finding
from .simt.number_types import is_float, storage_dtype
from .threads_as_loops import run_threads_as_loops

if TYPE_CHECKING:
    from tvm_ext._tvm import IRModule, PrimFunc

HALF_TYPES = ("bfloat16", "float16")
TEXT_ATTRIBUTES = ("global_symbol", "s_tir", "tirx.noalias")
Reference = Callable[[Mapping[str, Array]], Mapping[str, Array]]

TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""By dtype: the largest error allowed, relative to the largest value of the reference. Outputs of others: exact.

It is that of the output's dtype, or of the shortest one that it was computed in: a convolution of halves that is cast
to float32 at its end errs as halves do.
"""


MASKING = 4096.0  # a choice: constants of models' arithmetic are below, those that stand for -infinity above

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


@dataclass(frozen=True, slots=True)
class CpuReference:
    """A reference for `verify`: an operator that is not scheduled, run on this machine's CPU."""

    operator: PrimFunc

    def __call__(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        _, target = device_for_target("llvm")
        wide = _without_halves(self.operator)
        wide = wide.with_body(pass_nan_on(keep_floats_outside_reductions(wide.body)))
        library = tvm.compile(wide.with_attr("global_symbol", "main"), target=target)
        tensors = []
        for name, param in zip(self._names, wide.params, strict=True):
            shape, dtype = tuple(int(size) for size in param.ty.shape), storage_dtype(str(param.ty.dtype))
            value = arrays[name].astype(dtype) if name in arrays else np.zeros(shape, dtype)
            tensors.append(tvm.runtime.tensor(value))
        library(*tensors)
        return {name: tensor.numpy() for name, tensor in zip(self._names, tensors, strict=True) if name not in arrays}

    @property
    def _names(self) -> list[str]:
        names: list[str] = []
        for param in self.operator.params:
            names.append(simt.own_name(str(param.name), names))
        return names

    @property
    def types(self) -> frozenset[str]:
        """The dtypes that the operator rounds to: of its arithmetic and casts, not of what it only reads or moves."""
        found = nodes_in(self.operator.body, (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Cast, Call))
        return frozenset({dtype_of(node) for node in found if not _is_choice(node)} & TOLERANCES.keys())

    @property
    def mask_value(self) -> float:
        """The least of the operator's large constants, by which models mask (-10000, -65504); infinite without any."""
        return min(map(_mask_value, nodes_in(self.operator.body, tirx.FloatImm)), default=np.inf)

    def masks(self) -> dict[str, Array]:
        """Zeros and ones for the tensors that large constants multiply: ``(1 - mask) * -65504``, by name.

        Normal values would overflow, or leave nothing of what is masked.
        """
        products = nodes_in(self.operator.body, tirx.Mul)
        large = [node for node in products if any(_mask_value(factor) < np.inf for factor in (node.a, node.b))]
        read = {load.source for node in large for load in nodes_in(node, TensorLoad)}
        for made in reversed(nodes_in(self.operator.body, BufferStore)):
            if made.buffer in read:
                read |= {load.source for load in nodes_in(made.value, TensorLoad)}
        generator = np.random.default_rng(0)
        return {
            name: generator.integers(0, 2, tuple(map(int, param.ty.shape))).astype(storage_dtype(str(param.ty.dtype)))
            for name, param in zip(self._names, self.operator.params, strict=True)
            if param in read
        }


def _mask_value(expr: Expr) -> float:
    """The size of a large constant, infinite for any other expression."""
    size = abs(float(expr.value)) if isinstance(expr, tirx.FloatImm) else np.inf
    return size if size >= MASKING else np.inf


def _is_choice(node: Expr) -> bool:
    return isinstance(node, Call) and bool(node.op.same_as(IF_THEN_ELSE))


def cpu_reference(function: PrimFunc) -> CpuReference:
    """A reference for `verify`: ``function``, an operator that is not scheduled, run on this machine's CPU.

    Its parameters are matched with the kernel's by their names. Halves are computed and summed in float32, and floats
    are no reals here either: stock TVM's ``max(sqrt(x), c)`` is c where the root is NaN.
    """
    return CpuReference(function)


def _without_halves(function: PrimFunc) -> PrimFunc:
    """``function`` with float32 in place of float16 and bfloat16, by way of its text.

    A sum of 3072 products rounded to a half after every step is off by a percent, more than a wrong kernel may be.
    """
    for key in dict(function.attrs or {}):
        if key not in TEXT_ATTRIBUTES:  # some do not print as text that can be read again
            function = function.without_attr(key)
    text = str(function)
    if not any(name in text for name in HALF_TYPES):
        return function
    for name in HALF_TYPES:
        text = text.replace(name, "float32")
    return from_source(text)


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
    generator = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for tensor in _parameters(kernels):
        if tensor.name in given:
            made[tensor.name] = given[tensor.name]
        elif tensor.name not in simt.written_tensors(kernels):
            made[tensor.name] = random_array(tensor.shape, tensor.dtype, generator)
    return made


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
    return max(TOLERANCES[item] for item in (dtype, *types))


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
        moved, share = (
            sum(a.sectors for a in accesses) * counters.sector_bytes,
            efficiency(accesses, counters.sector_bytes),
        )
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
