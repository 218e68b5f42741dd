"""The tiles that a CPU kernel can have, and the model of many of them against the model of one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tvm_ext.analysis.tensor_expr import Access, Axis, LinearIndex, TensorExpr
from tvm_ext.autotune.cost_model import TileCostModel
from tvm_ext.autotune.cpu_space import CpuTileSpace, loops_of
from tvm_ext.autotune.search import Annealed, SpaceSearch
from tvm_ext.cost.cpu_columns import predict_cpu_tiles
from tvm_ext.cost.cpu_tiles import program_of
from tvm_ext.cost.load_ports import PORTS_OVERLAP, PortTimes
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.cost.register_tiles import overlapped
from tvm_ext.devices import device_db
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.measurement import Trial
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import CpuTile

WIDE = device_db.lookup("cpu-avx512")
CORE = with_unit_count(WIDE, 1)
NARROW = with_unit_count(device_db.lookup("cpu-avx2"), 1)


def access(tensor: str, shape: tuple[int, ...], *indices: tuple[str, ...], constant: bool = False) -> Access:
    terms = tuple(LinearIndex(terms=tuple((axis, 1) for axis in axes)) for axes in indices)
    return Access(tensor=tensor, shape=shape, dtype="float32", itemsize_bytes=4, indices=terms, is_constant=constant)


def product(m: int, k: int, n: int) -> TensorExpr:
    extents = (("i", m), ("j", n), ("k", k))
    return TensorExpr(
        name="product",
        axes=tuple(Axis(name=a, extent=e, kind="reduce" if a == "k" else "spatial") for a, e in extents),
        inputs=(access("A", (m, k), ("i",), ("k",)), access("B", (k, n), ("k",), ("j",), constant=True)),
        output=access("C", (m, n), ("i",), ("j",)),
        combiner="sum",
        flops_per_point=2.0,
    )


def convolution(filters: int, size: int, channels: int, taps: int) -> TensorExpr:
    spatial = (("f", filters), ("y", size), ("x", size))
    reduction = (("c", channels), ("r", taps), ("q", taps))
    image = (channels, size + taps - 1, size + taps - 1)
    return TensorExpr(
        name="convolution",
        axes=(
            *(Axis(name=a, extent=e, kind="spatial") for a, e in spatial),
            *(Axis(name=a, extent=e, kind="reduce") for a, e in reduction),
        ),
        inputs=(
            access("in", image, ("c",), ("y", "r"), ("x", "q")),
            access("w", (filters, channels, taps, taps), ("f",), ("c",), ("r",), ("q",), constant=True),
        ),
        output=access("out", (filters, size, size), ("f",), ("y",), ("x",)),
        combiner="sum",
        flops_per_point=2.0,
    )


def with_port_times(program: RProgram, expr: TensorExpr, device: DeviceSpec) -> float:
    """What a search predicts of one program: construction's loads of the caches, beside the ports' own times."""
    model = PerfModel(expr, device, program.vector_axis)
    shapes = [tile.shape for _, tile in program.tiles]
    order = [model.names.index(name) for name in program.order] or model.loop_order(shapes[0])
    ports, balance = PortTimes(model), model.task_balance(shapes, order)
    again = model.layer_s(1, ports.evicted_bytes(shapes[0]))
    first, *rest = (cost.time_s for cost in program.prediction.layers[1:])
    times = [ports.arithmetic_s(shapes[0]) / balance, (ports.issue_s(shapes[0]) + again) / balance + first, *rest]
    return overlapped(times, PORTS_OVERLAP) + (device.launch_overhead_us or 0.0) * 1e-6


SMALL = CpuTileSpace(product(40, 64, 80), CORE)
EXPRESSIONS = {"product": product(128, 768, 768), "odd": product(50, 33, 70), "convolution": convolution(32, 9, 8, 3)}


@pytest.mark.sampled
@pytest.mark.parametrize("device", [CORE, NARROW, WIDE], ids=["one core", "AVX2", "all cores"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_model_of_many_is_that_of_one(name: str, device: device_db.DeviceSpec) -> None:
    expr = EXPRESSIONS[name]
    space = CpuTileSpace(expr, device)
    for place in range(0, len(space), max(1, len(space) // 40)):
        program = program_of(space[place], expr, device)
        assert space.predictions.compute_s[place] == pytest.approx(program.prediction.compute_s, rel=1e-9)
        assert space.predictions.tasks[place] == program.partition_count
        layers = [cost.time_s for cost in program.prediction.layers[1:]]
        assert space.predictions.layer_s[place] == pytest.approx(layers, rel=1e-9)
        assert space.predictions.time_s[place] == pytest.approx(with_port_times(program, expr, device), rel=1e-9)


def test_typical_operators_have_enough_candidates() -> None:
    for expr in (product(128, 768, 768), product(256, 256, 512), convolution(64, 28, 64, 3)):
        assert 1500 <= len(CpuTileSpace(expr, CORE)) <= 15_000


def test_many_cores_have_tasks_for_each() -> None:
    """Where all of an operator fits one core's L2, too: blocks as large as that would leave most cores idle."""
    expr, many = product(128, 64, 512), with_unit_count(WIDE, 64)
    space = CpuTileSpace(expr, many)
    tasks, register = space.predictions.tasks, space.tiles.register
    single = -(-128 // register[:, 0]) * -(-512 // register[:, 1])
    assert ((tasks >= 64) & (tasks < single)).sum() > len(space) / 20


def test_places_and_texts() -> None:
    assert len({SMALL[place] for place in range(len(SMALL))}) == len(SMALL)
    for place in range(0, len(SMALL), 7):
        tile = SMALL[place]
        assert SMALL.index(tile.configuration) == place
        assert from_json(CpuTile, tile.configuration) == tile
    wrong = replace(SMALL[0], register=(41, 16))
    assert [SMALL.index(text) for text in ("", "{}", "[1]", wrong.configuration)] == [None] * 4


def test_tiles_given_from_outside_come_first() -> None:
    mine = CpuTile(vector=1, register=(5, 16), inner=(2, 1), outer=(4, 1), order=(0, 1))
    space = CpuTileSpace(product(40, 64, 80), CORE, [mine, mine])
    assert space[0] == mine
    assert space.index(mine.configuration) == 0
    assert len(space) in (len(SMALL), len(SMALL) + 1)


def test_equal_loops_are_one_candidate_on_one_core() -> None:
    """26 x 10 register tiles, columns outermost: tasks of one column and blocks within them change nothing."""
    expr = product(130, 8, 160)
    plain = CpuTile(vector=1, register=(5, 16), inner=(1, 1), outer=(1, 1), order=(1, 0))
    blocked = replace(plain, inner=(3, 1), outer=(9, 1))
    assert loops_of(plain, expr) == loops_of(blocked, expr) == ((1, 1), (0, 1))
    assert loops_of(replace(blocked, outer=(9, 2)), expr) == ((1, 2), (0, 9), (1, 1), (0, 1))
    space = CpuTileSpace(expr, CORE, [plain])
    assert space.index(blocked.configuration) == 0
    assert CpuTileSpace(expr, WIDE, [plain]).index(blocked.configuration) != 0


def test_neighbours_keep_the_register_tile_or_the_loops() -> None:
    start = np.arange(len(SMALL)).repeat(3)
    moved = SMALL.neighbours(start, np.random.default_rng(3))
    assert np.array_equal(moved, SMALL.neighbours(start, np.random.default_rng(3)))
    assert len(np.unique(moved)) > len(SMALL) / 2
    for one, other in zip(start[::50], moved[::50], strict=True):
        a, b = SMALL[int(one)], SMALL[int(other)]
        same_loops = (a.inner, a.outer, a.order) == (b.inner, b.outer, b.order)
        assert (a.vector, a.register) == (b.vector, b.register) or same_loops


def test_searches_move_in_it() -> None:
    """Times of another machine than the predicted ones: registers past 24 cost a fifth more."""
    times = SMALL.predictions.time_s * np.where(SMALL.predictions.registers > 24, 1.2, 1.0)
    search = SpaceSearch(SMALL, Annealed(TileCostModel(SMALL)), seed=1)
    for _ in range(6):
        asked = search.ask(5)
        places = [SMALL.index(tile.configuration) for tile in asked]
        assert None not in places
        search.tell(
            Trial(configuration=tile.configuration, outcome="ok", times_us=(1e6 * float(times[place or 0]),))
            for tile, place in zip(asked, places, strict=True)
        )
    assert len(search.known) == 30
    assert search.best is not None
    assert 1e6 * times.min() / search.best[1] > 0.97


def test_features_hold_no_time() -> None:
    slower = replace(CORE, layers=tuple(replace(item, bandwidth_gb_per_s=1.0) for item in CORE.layers))
    assert np.isfinite(SMALL.features).all()
    again = predict_cpu_tiles(SMALL.expr, slower, SMALL.tiles)
    assert not np.allclose(again.time_s, SMALL.predictions.time_s)
    assert np.array_equal(CpuTileSpace(SMALL.expr, slower).features, SMALL.features)


def test_what_has_no_register_tile_is_refused() -> None:
    with pytest.raises(IllegalRewrite, match="no register tile"):
        CpuTileSpace(product(4, 4, 4), replace(CORE, register_limit=1))
