"""A yardstick for our ranking of CUTLASS's templates: the vendor's, the PyPI package ``nvidia-matmul-heuristics``.

It needs no GPU. It knows threadblock tiles, warps, clusters and splits of CUTLASS's templates, but not our stages and
epilogues, so that what it says is matched with proposals by their tiles of the result.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from tvm_ext.devices.capabilities import BULK_COPIES_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError, TargetError, UnsupportedEnvironmentError
from tvm_ext.records.partition import CutlassProblem

PACKAGE = "nvidia-matmul-heuristics"
MODULE = "nvMatmulHeuristics"

GPUS = {"nvidia-a100": "A100_SXM_80GB", "nvidia-h100": "H100_SXM", "nvidia-h200": "H200_SXM"}
"""Our device tables' names and the package's."""

_PRECISIONS = {
    ("float16", "float16"): "HSH",
    ("float16", "float32"): "HSS",
    ("bfloat16", "bfloat16"): "TST",
    ("bfloat16", "float32"): "TSS",
    ("tfloat32", "float32"): "SSS",
}
"""Operands and result, both multiplied in float32, by the package's letters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VendorChoice:
    """A configuration by the vendor's heuristics: shapes in elements, its predicted time in microseconds."""

    threadblock: tuple[int, int, int]
    warp: tuple[int, int, int]
    cluster: tuple[int, int]
    stages: int
    split_k: int
    time_us: float

    @property
    def tile(self) -> tuple[int, int]:
        """Of the result, by one threadblock."""
        return self.threadblock[:2]


def is_installed() -> bool:
    return importlib.util.find_spec(MODULE) is not None


def vendor_choices(problem: CutlassProblem, device: DeviceSpec, *, count: int = 16) -> tuple[VendorChoice, ...]:
    """The vendor's ``count`` best configurations for ``problem``, best first.

    Raises UnsupportedEnvironmentError where the package is not installed, TargetError for devices that it does not
    know by name and InputError for types that it has no letters for.
    """
    precision = _PRECISIONS.get((problem.arithmetic, problem.dtypes[2]))
    if precision is None:
        known = ", ".join(f"{a} to {out}" for a, out in _PRECISIONS)
        message = f"{PACKAGE} is not asked about products of {problem.arithmetic} to {problem.dtypes[2]}."
        raise InputError(message, f"ask about {known}")
    asked, interface, backend = _session(device.name, has(device, BULK_COPIES_SINCE))
    layout = asked.NvMatmulHeuristicsMatmulLayout[f"{''.join(map(_letter, problem.orders))}_ROW_MAJOR"]
    sizes = (problem.rows, problem.columns, problem.depth)
    described = interface.makeNvMatmulHeuristicsProblem(*sizes, layout, problem.batch)
    return tuple(_choice(found) for found in interface.getEx(described, count, backend, precision=precision))


def _letter(order: str) -> str:
    """The package's words are of matrices row by row: "T" is one that is stored column by column."""
    return "N" if order == "row" else "T"


@functools.cache
def _session(device: str, has_bulk_copies: bool):  # type: ignore[no-untyped-def]  # the package has no types
    gpu = GPUS.get(device)
    if gpu is None:
        raise TargetError(f"{PACKAGE} does not know {device}.", f"ask it about {', '.join(GPUS)}")
    asked = _module()
    target = asked.NvMatmulHeuristicsTarget["CUTLASS3" if has_bulk_copies else "CUTLASS"]
    interface = asked.NvMatmulHeuristicsInterfaceEx(
        backend=target,
        flags=asked.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=asked.NvMatmulHeuristicsNvidiaGpu[gpu],
    )
    return asked, interface, interface.createBackend(target)


def _module() -> ModuleType:
    if not is_installed():
        message = f"the Python package {PACKAGE} is not installed."
        raise UnsupportedEnvironmentError(message, "install it with `pip install 'tvm-ext[heuristics]'`")
    return importlib.import_module(MODULE)


def _choice(found) -> VendorChoice:  # type: ignore[no-untyped-def]
    kernel = found["kernel"]
    return VendorChoice(
        threadblock=(kernel.cta_tile_m, kernel.cta_tile_n, kernel.cta_tile_k),
        warp=(kernel.warp_tile_m, kernel.warp_tile_n, kernel.warp_tile_k),
        cluster=(kernel.cluster_m, kernel.cluster_n),
        stages=kernel.stages,
        split_k=kernel.split_k,
        time_us=found["runtime"] * 1e6,
    )
