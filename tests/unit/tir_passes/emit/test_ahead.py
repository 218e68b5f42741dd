"""Kernels that ask for the weights they use next: for which lines, and which kernels do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.kernels import constructed, from_te, legalised, relative_error, run
from tvm_ext._tvm import Analyzer, Call, TensorLoad, Var, ir, relax, structural_map, structural_walk, te, tirx
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


# --- the next tile of rows, and what the epilogue reads ---------------------------------------------------------------
def blocked(size: int, taps: int, stride: int, *, residual: bool = False, channels: int = 4) -> Any:
    """A convolution between blocks of 16 channels, from padded images to ``size`` x ``size`` of 32 filters."""
    extent = (size - 1) * stride + taps
    x = te.placeholder((channels, extent, extent, 16), name="x")
    w = te.placeholder((2, channels, taps, taps, 16, 16), name="w")
    c, i, j, d = (te.reduce_axis((0, n), name) for n, name in ((channels, "c"), (taps, "i"), (taps, "j"), (16, "d")))
    y = te.compute(
        (2, size, size, 16),
        lambda o, h, v, f: te.sum(x[c, h * stride + i, v * stride + j, d] * w[o, c, i, j, d, f], axis=[c, i, j, d]),
        name="y",
    )
    if not residual:
        return from_te(x, w, y)
    r = te.placeholder((2, size, size, 16), name="r")
    return from_te(x, w, r, te.compute(y.shape, lambda *at: y(*at) + r(*at), name="z"))


def offsets_of(statement: Any) -> set[int]:
    """Bytes behind the named element of the lines that are asked for, whatever the step."""
    found: set[int] = set()

    def visit(call: Call) -> None:
        if isinstance(call.op, ir.Op) and call.op.name == "tirx.call_llvm_intrin":
            address = call.args[1]
            moved = isinstance(address, Call) and address.op.name == "tirx.handle_add_byte_offset"
            found.add(int(address.args[1]) if moved else 0)

    structural_walk(statement, (Call, visit), order="pre")
    return found


@pytest.mark.parametrize(("taps", "stride"), [(1, 1), (1, 2), (5, 1), (3, 2)])
def test_each_line_of_the_next_tile_is_asked_for(taps: int, stride: int) -> None:
    """Each tap asks for all pixels of a tile, at their places."""
    kernel, choice = constructed(blocked(26, taps, stride), constants=(1,), device=WIDE)
    assert choice.program is not None
    sizes, row = choice.program.tile("L0").sizes, ((26 - 1) * stride + taps) * 64
    if "y*x" in sizes or "h*v" in sizes:
        expected = {64 * pixel for pixel in range(sizes.get("h*v", 0))}
    else:
        expected = {stride * (h * row + 64 * v) for h in range(sizes.get("h", 1)) for v in range(sizes.get("v", 1))}
    assert offsets_of(kernel.body) >= expected


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("taps", "stride"), [(1, 1), (1, 2), (5, 1), (3, 2)])
def test_questions_about_the_next_tile_change_no_number(
    taps: int, stride: int, residual: bool, rng: np.random.Generator
) -> None:
    func, device = blocked(26, taps, stride, residual=residual), device_db.device_for_target("llvm")[0]
    kernel, choice = constructed(func, constants=(1,), device=device)
    asked = {question.source.name for question in questions(kernel)}
    assert asked >= ({"x", "r"} if residual else {"x"})
    inputs = [rng.standard_normal([int(n) for n in p.shape]).astype("f4") for p in func.params[:-1]]
    x, w, *rest = (array.astype("f8") for array in inputs)
    windows = np.lib.stride_tricks.sliding_window_view(x, (taps, taps), axis=(1, 2))[:, ::stride, ::stride]
    expected = np.einsum("chvdij,ocijdf->ohvf", windows, w, optimize=True) + sum(rest)
    assert relative_error(run(kernel, choice, inputs, (2, 26, 26, 16), "float32"), expected) < 1e-6


def test_what_the_first_cache_holds_is_not_asked_for() -> None:
    kernel, _ = constructed(blocked(8, 3, 1, channels=2), constants=(1,), device=WIDE)
    assert not questions(kernel)
