"""Kernels that ask for the weights they use next: for which lines, and which kernels do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.kernels import constructed, legalised, relative_error, run
from tvm_ext._tvm import Analyzer, Call, TensorLoad, Var, ir, relax, structural_map, structural_walk, tirx
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.choice import KernelChoice

WIDE, NARROW = device_db.lookup("cpu-cascade-lake"), device_db.lookup("cpu-cascade-lake-avx2")
LINE = 16  # elements of float32


def dense(
    rows: int, depth: int, columns: int, *, are_weights_known: bool = True, device: DeviceSpec = WIDE
) -> tuple[Any, KernelChoice]:
    func = legalised(lambda x, w: relax.op.matmul(x, w), (rows, depth), (depth, columns))
    return constructed(func, constants=(1,) if are_weights_known else (), device=device)


def questions(kernel: Any) -> list[TensorLoad]:
    """The elements whose lines ``kernel`` asks for, each as the load that names it."""
    found: list[TensorLoad] = []

    def visit(call: Call) -> None:
        if isinstance(call.op, ir.Op) and call.op.name == "tirx.address_of":
            found.append(call.args[0])

    structural_walk(kernel.body, (Call, visit), order="pre")
    return found


def value_of(expr: Any, values: dict[str, int]) -> int:
    known = structural_map(expr, (Var, lambda variable: tirx.IntImm("int64", values[variable.name])))
    return int(Analyzer().simplify(known))


@pytest.mark.parametrize("device", [WIDE, NARROW], ids=lambda device: device.name)
@pytest.mark.parametrize(("rows", "columns"), [(100, 512), (97, 500)])
def test_all_lines_of_the_next_panel_are_asked_for(rows: int, columns: int, device: DeviceSpec) -> None:
    """Over the tiles of rows of one panel and the steps of their reductions; behind the last one, for that itself."""
    kernel, choice = dense(rows, 256, columns, device=device)
    panels, depth, width = choice.packs[0].extents
    asked = questions(kernel)
    assert asked
    panel, zero, element = asked[0].indices
    assert isinstance(zero, tirx.IntImm) and int(zero) == 0
    lines: dict[int, set[int]] = {}
    for values in places(loops(kernel), {}):
        at = value_of(panel, values)
        first, second = (value_of(element, {**values, "v_k": k}) for k in (0, 1))
        assert 0 < second - first <= LINE
        lines.setdefault(at, set()).update((first + k * (second - first)) // LINE for k in range(depth))
    assert set(lines) == set(range(1, panels))
    assert all(found >= set(range(depth * width // LINE)) for found in lines.values())


def loops(kernel: Any) -> list[tuple[str, Any]]:
    """Names and extents of the loops around the first question but for the reduction's, outermost first."""
    found: dict[str, Any] = {}

    def visit(item: Any) -> None:
        if questions(item) and item.loop_var.name != "v_k":
            found.setdefault(str(item.loop_var.name), item.extent)

    structural_walk(kernel.body, (tirx.For, visit), order="pre")
    return list(found.items())


def places(axes: list[tuple[str, Any]], values: dict[str, int]) -> Iterator[dict[str, int]]:
    """The values of all loop variables, one after the other."""
    if not axes:
        yield values
        return
    (name, extent), *inner = axes
    for number in range(value_of(extent, values)):
        yield from places(inner, {**values, name: number})


def test_what_is_asked_for_changes_no_number() -> None:
    """In guarded memory: questions behind the end of the weights read nothing."""
    kernel, choice = dense(100, 256, 500, device=device_db.device_for_target("llvm")[0])
    assert questions(kernel)
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(np.float32) for shape in ((100, 256), (256, 500)))
    assert relative_error(run(kernel, choice, [x, w], (100, 500), "float32"), x.astype("f8") @ w.astype("f8")) < 1e-6


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"rows": 2, "depth": 256, "columns": 512}, "each step would ask for several lines"),
        ({"rows": 100, "depth": 32, "columns": 48}, "the weights stay in the first cache"),
        ({"rows": 20000, "depth": 256, "columns": 256}, "weights hardly count beside so many rows"),
        ({"rows": 100, "depth": 256, "columns": 512, "are_weights_known": False}, "they are no constant"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_kernels_that_do_not_ask(case: dict[str, Any], why: str) -> None:
    assert not questions(dense(**case)[0]), why
