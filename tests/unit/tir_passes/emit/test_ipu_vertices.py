"""Vertices and exchange plans for the IPU, run by an emulator with one memory a tile and compared with NumPy.

A plan that is changed must be caught: by the emulator's checks, or by wrong values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tvm import te, topi

from tests.support.ipu_emulator import Emulator, PlanError, compiled
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.exchange_plan import ExchangePlan, Superstep, TensorBox, TensorHome
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.tir_passes.emit.ipu_vertices.emit import TileCode, emit_for_ipu
from tvm_ext.tir_passes.plan.context import UnscheduledOperator

IPU = lookup("graphcore-ipu")


def small(tiles: int, kilobytes: int) -> DeviceSpec:
    """An IPU of so few and small tiles that operators take rounds, and reductions steps."""
    layers = (IPU.layers[0], replace(IPU.layers[1], capacity_bytes=kilobytes * 1024), *IPU.layers[2:])
    return replace(IPU, unit_count=tiles, layers=layers)


def code_of(device: DeviceSpec, *tensors: te.Tensor) -> TileCode:
    func = te.create_prim_func(list(tensors)).with_attr("global_symbol", "main")
    return emit_for_ipu(UnscheduledOperator(func=func, name="main", device=device, options=BuildOptions()))


def placeholder(name: str, *shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype, name)


def values_for(plan: ExchangePlan) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    homes = {home.tensor: home for home in plan.homes}
    return {name: _random(generator, homes[name]) for name in plan.inputs}


def _random(generator: np.random.Generator, home: TensorHome) -> np.ndarray:
    if home.dtype == "float32":
        return generator.standard_normal(home.shape).astype("float32")
    return generator.integers(-5, 6, home.shape).astype(home.dtype)


def windows(x: np.ndarray, size: int, stride: int, pad: int, fill: float) -> np.ndarray:
    """(n, c, h, w) as (n, c, y, x, r, s)."""
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=fill)
    found = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))
    return found[:, :, ::stride, ::stride]


def conv(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.einsum("ncyxrs,fcrs->nfyx", windows(x, 3, 2, 1, 0.0).astype("float64"), w)


def _product() -> tuple[te.Tensor, ...]:
    a, b, bias = placeholder("A", 33, 67), placeholder("B", 67, 29), placeholder("bias", 29)
    return a, b, bias, topi.nn.relu(topi.add(topi.matmul(a, b), bias))


def _batched() -> tuple[te.Tensor, ...]:
    a, b = placeholder("A", 3, 19, 23), placeholder("B", 3, 17, 23)
    return a, b, topi.nn.batch_matmul(a, b)


def _bytes() -> tuple[te.Tensor, ...]:
    a, b = placeholder("A", 21, 35, dtype="int8"), placeholder("B", 35, 13, dtype="int8")
    k = te.reduce_axis((0, 35), "k")
    return a, b, te.compute((21, 13), lambda i, j: te.sum(a[i, k].astype("int32") * b[k, j].astype("int32"), axis=k))


def _convolution() -> tuple[te.Tensor, ...]:
    x, w = placeholder("X", 1, 5, 13, 11), placeholder("W", 7, 5, 3, 3)
    return x, w, topi.nn.relu(topi.nn.conv2d_nchw(x, w, 2, 1, 1))


def _depthwise() -> tuple[te.Tensor, ...]:
    x, w = placeholder("X", 1, 5, 13, 11), placeholder("W", 5, 1, 3, 3)
    return x, w, topi.nn.depthwise_conv2d_nchw(x, w, 2, 1, 1)


def _pooling() -> tuple[te.Tensor, ...]:
    x = placeholder("X", 1, 5, 13, 11)
    return x, topi.nn.pool2d(x, [3, 3], [2, 2], [1, 1], [1, 1, 1, 1], "max")


def _softmax() -> tuple[te.Tensor, ...]:
    x = placeholder("X", 11, 37)
    return x, topi.nn.softmax(x)


def _sum() -> tuple[te.Tensor, ...]:
    x = placeholder("X", 41, 37)
    return x, topi.sum(x, axis=1)


def _largest_of_all() -> tuple[te.Tensor, ...]:
    x = placeholder("X", 41, 37)
    return x, topi.max(x)


def _elementwise() -> tuple[te.Tensor, ...]:
    x, y = placeholder("compute", 13, 37), placeholder("int", 37)  # words that C++ would not take
    return x, y, topi.tanh(topi.add(x, y))


def _transpose() -> tuple[te.Tensor, ...]:
    x = placeholder("X", 13, 37)
    return x, topi.transpose(x)


def _reshape() -> tuple[te.Tensor, ...]:
    x = placeholder("X", 11, 23)
    return x, topi.reshape(x, (23, 11))  # divisions: Roller has no rProgram


def _power() -> tuple[te.Tensor, ...]:
    x = placeholder("X", 13, 5)
    return x, topi.power(topi.abs(x), 1.5)


def _softmax_of(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


CASES: dict[str, tuple[Callable[[], tuple[te.Tensor, ...]], Callable[..., np.ndarray]]] = {
    "product": (_product, lambda a, b, bias: np.maximum(a.astype("float64") @ b + bias, 0)),
    "batched": (_batched, lambda a, b: a.astype("float64") @ b.transpose(0, 2, 1)),
    "bytes": (_bytes, lambda a, b: a.astype("int32") @ b.astype("int32")),
    "convolution": (_convolution, lambda x, w: np.maximum(conv(x, w), 0)),
    "depthwise": (_depthwise, lambda x, w: np.einsum("ncyxrs,crs->ncyx", windows(x, 3, 2, 1, 0.0), w[:, 0])),
    "pooling": (_pooling, lambda x: windows(x, 3, 2, 1, -np.inf).max((-1, -2))),
    "softmax": (_softmax, _softmax_of),
    "sum": (_sum, lambda x: x.sum(1)),
    "largest of all": (_largest_of_all, lambda x: x.max()),
    "elementwise": (_elementwise, lambda x, y: np.tanh(x + y)),
    "transpose": (_transpose, lambda x: x.T),
    "reshape": (_reshape, lambda x: x.reshape(23, 11)),
    "power": (_power, lambda x: np.abs(x) ** 1.5),
}
DEVICES = {"whole": IPU, "rounds": small(7, 256)}


def is_close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("case", "device"),
    [
        *((case, "rounds") for case in CASES),
        *((case, "whole") for case in ("product", "convolution", "softmax", "sum")),
    ],
)
def test_values(case: str, device: str, tmp_path: Path) -> None:
    make, reference = CASES[case]
    code = code_of(DEVICES[device], *make())
    plan = from_json(ExchangePlan, to_json(code.plan))
    assert plan == code.plan
    values = values_for(plan)
    found = Emulator(plan, compiled(code.vertices, plan, tmp_path), values).run()
    wanted = reference(
        *(values[name].astype("float64") if values[name].dtype == np.float32 else values[name] for name in plan.inputs)
    )
    assert is_close(found[plan.outputs[0]], wanted)


def test_reduction_in_steps_where_memory_is_short(tmp_path: Path) -> None:
    """40 rows of 2048 numbers are 8 KiB each: no tile of 12 KiB beside its blocks holds two."""
    x, w = placeholder("A", 40, 2048), placeholder("B", 2048, 24)
    code = code_of(small(64, 12), x, w, topi.nn.relu(topi.matmul(x, w)))
    plan, values = code.plan, values_for(code.plan)
    assert len(plan.supersteps) > 1
    assert 8 * 1024 < plan.peak_bytes <= 12 * 1024
    found = Emulator(plan, compiled(code.vertices, plan, tmp_path), values).run()[plan.outputs[0]]
    assert is_close(found, np.maximum(values["A"].astype("float64") @ values["B"], 0))


# --- plans that are wrong -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExchangePlan, Callable[[ExchangePlan], np.ndarray]]:
    """A plan of several supersteps, and what runs a changed one on the same values."""
    code = code_of(DEVICES["rounds"], *_product())
    library = compiled(code.vertices, code.plan, tmp_path_factory.mktemp("vertices"))
    values = values_for(code.plan)
    return code.plan, lambda plan: Emulator(plan, library, values).run()[plan.outputs[0]]


def first_step(plan: ExchangePlan, change: Callable[[Superstep], Superstep]) -> ExchangePlan:
    return replace(plan, supersteps=(change(plan.supersteps[0]), *plan.supersteps[1:]))


def without_transfer(plan: ExchangePlan) -> ExchangePlan:
    return first_step(plan, lambda step: replace(step, transfers=step.transfers[1:]))


def without_target(plan: ExchangePlan) -> ExchangePlan:
    def change(step: Superstep) -> Superstep:
        own = next(t for t in step.transfers if len(t.targets) > 1)
        fewer = replace(own, targets=own.targets[1:])
        return replace(step, transfers=tuple(fewer if t is own else t for t in step.transfers))

    return first_step(plan, change)


def other_source(plan: ExchangePlan) -> ExchangePlan:
    def change(step: Superstep) -> Superstep:
        own, *others = step.transfers
        return replace(step, transfers=(replace(own, source=(own.source + 1) % plan.tiles), *others))

    return first_step(plan, change)


def smaller_region(plan: ExchangePlan) -> ExchangePlan:
    def change(step: Superstep) -> Superstep:
        own = next(t for t in step.transfers if t.box.size[-1] > 1)
        box = replace(own.box, size=(*own.box.size[:-1], own.box.size[-1] - 1))
        return replace(step, transfers=tuple(replace(t, box=box) if t is own else t for t in step.transfers))

    return first_step(plan, change)


def other_target(plan: ExchangePlan) -> ExchangePlan:
    """Rows that another tile multiplies come to a tile besides."""

    def change(step: Superstep) -> Superstep:
        own = step.transfers[0]
        missing = next(tile for tile in range(plan.tiles) if tile not in own.targets)
        return replace(step, transfers=(replace(own, targets=(*own.targets, missing)), *step.transfers[1:]))

    return first_step(plan, change)


def other_block(plan: ExchangePlan) -> ExchangePlan:
    """Two vertices change their results' blocks."""

    def change(step: Superstep) -> Superstep:
        one, two, *others = step.runs
        return replace(step, runs=(replace(one, output=two.output), replace(two, output=one.output), *others))

    return first_step(plan, change)


def over_memory(plan: ExchangePlan) -> ExchangePlan:
    return replace(plan, tile_bytes=plan.peak_bytes - 1)


def shifted_region(plan: ExchangePlan) -> ExchangePlan:
    """A vertex receives, and takes for its own, the columns beside those that it should have: wrong values alone."""

    def change(step: Superstep) -> Superstep:
        position, moved = next(
            (p, box) for p, box in enumerate(step.runs[0].inputs) if box.tensor == "bias" and box.elements > 1
        )
        home = next(home for home in plan.homes if home.tensor == "bias")
        begin = (moved.begin[0] + 1,) if sum((*moved.begin, *moved.size)) < home.shape[0] else (moved.begin[0] - 1,)
        box = TensorBox(tensor="bias", begin=begin, size=moved.size)
        run = step.runs[0]
        inputs = (*run.inputs[:position], box, *run.inputs[position + 1 :])
        pieces = [(source, part) for source, part in home.parts(box, plan.tiles)]
        kept = [
            replace(t, targets=tuple(x for x in t.targets if t.box.tensor != "bias" or x != run.tile))
            for t in step.transfers
        ]
        added = [replace(kept[0], box=part, source=source, targets=(run.tile,)) for source, part in pieces]
        return replace(step, transfers=(*kept, *added), runs=(replace(run, inputs=inputs), *step.runs[1:]))

    return first_step(plan, change)


def without_last_step(plan: ExchangePlan) -> ExchangePlan:
    return replace(plan, supersteps=plan.supersteps[:-1])


def wrong_field(plan: ExchangePlan) -> ExchangePlan:
    """A vertex believes that its columns begin elsewhere."""

    def change(step: Superstep) -> Superstep:
        run, names = step.runs[0], plan.vertices[0].fields
        place = names.index("bias_begin0")
        fields = (*run.fields[:place], run.fields[place] - 1, *run.fields[place + 1 :])
        return replace(step, runs=(replace(run, fields=fields), *step.runs[1:]))

    return first_step(plan, change)


REFUSED = [without_transfer, without_target, other_source, smaller_region, other_target, other_block, over_memory]
WRONG = [shifted_region, without_last_step, wrong_field]


def test_plan_is_right_and_as_full_as_it_says(product: tuple) -> None:
    plan, run = product
    assert np.isfinite(run(plan)).all()
    run(replace(plan, tile_bytes=plan.peak_bytes))


@pytest.mark.parametrize("mutant", REFUSED)
def test_emulator_refuses(mutant: Callable[[ExchangePlan], ExchangePlan], product: tuple) -> None:
    plan, run = product
    with pytest.raises(PlanError):
        run(mutant(plan))


@pytest.mark.parametrize("mutant", WRONG)
def test_values_show(mutant: Callable[[ExchangePlan], ExchangePlan], product: tuple) -> None:
    plan, run = product
    assert not is_close(run(mutant(plan)), run(plan))


# --- what is predicted, and refused ---------------------------------------------------------------------------------
def test_times_are_those_of_the_row() -> None:
    """One superstep: 500 ns of synchronisation; no tile can receive its share faster than the exchange brings it."""
    plan = code_of(IPU, *_product()).plan
    assert len(plan.supersteps) == 1
    assert plan.times.synchronise_s == pytest.approx(500e-9)
    received: dict[int, int] = {}
    for transfer in plan.supersteps[0].transfers:
        for target in transfer.targets:
            received[target] = received.get(target, 0) + transfer.box.elements * 4 * (target != transfer.source)
    assert plan.exchanged_bytes == sum(received.values())
    assert plan.times.exchange_s >= max(received.values()) / (7680e9 / 1216)
    assert any("arXiv:1912.03413" in source for source in plan.times.sources)


def test_blocks_are_spread_evenly() -> None:
    a, b = placeholder("A", 512, 512), placeholder("B", 512, 512)
    plan = code_of(IPU, a, b, topi.matmul(a, b)).plan
    assert plan.peak_bytes < 256 * 1024
    for home in plan.homes:
        blocks = np.prod(home.grid)
        assert blocks >= 512, home


@pytest.mark.parametrize(
    ("dtype", "rows", "why"),
    [("float64", 4, "float64: vertices have float32"), ("float32", 40_000_000, "MiB of 304 MiB")],
)
def test_refusals_name_the_reason(dtype: str, rows: int, why: str) -> None:
    x = placeholder("X", rows, dtype=dtype)
    with pytest.raises(IllegalRewrite, match=why):
        code_of(IPU, x, topi.negative(x))


def test_gather_of_a_table_beyond_a_tile_is_refused() -> None:
    table, index = placeholder("table", 30000, 64), placeholder("index", 8, dtype="int32")
    with pytest.raises(IllegalRewrite, match="KiB of a tile at once"):
        code_of(IPU, table, index, topi.take(table, index, axis=0, mode="clip"))
