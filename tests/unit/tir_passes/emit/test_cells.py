"""Recurrent cells on a CPU: their numbers, how they are divided and packed, what goes another way, the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from tests.support.guard_workspaces import guard_workspaces
from tests.support.guarded_memory import call_guarded
from tests.support.recurrent_cells import CellCase, gru_after, gru_before, lstm, random_cell, rnn
from tests.unit.kernels import constructed, relative_error
from tvm_ext._tvm import AllocBuffer, BufferStore, For, ForKind, relax, structural_walk
from tvm_ext.cost.cell_time import CellClock
from tvm_ext.devices import device_db
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.cell import CellTiles, CellWork
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.recurrent import ACTIVATIONS, GateActivation, RecurrentCell
from tvm_ext.relay_passes.merge_operators import fused_function
from tvm_ext.relay_passes.recurrent.cell_function import cell_function
from tvm_ext.support.arrays import pack
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.verify import simt

WIDE, NARROW = device_db.lookup("cpu-cascade-lake"), device_db.lookup("cpu-cascade-lake-avx2")
ROUNDING = 2e-6


def kernel_of(case: CellCase, device: DeviceSpec = WIDE) -> tuple[Any, KernelChoice]:
    return constructed(case.function(), constants=case.weights, device=device)


def results(case: CellCase, kernel: Any, choice: KernelChoice) -> list[np.ndarray[Any, Any]]:
    """The kernel's outputs, computed in guarded memory that holds NaN before."""
    arrays = case.inputs()
    for how in choice.packs:
        arrays[how.param_index] = pack(arrays[how.param_index], how)
    library = tvm.compile(kernel.with_attr("global_symbol", "main"), target=device_db.device_for_target("llvm")[1])
    shapes = [tuple(int(size) for size in param.ty.shape) for param in list(kernel.params)[len(arrays) :]]
    outputs = [tvm.runtime.tensor(np.full(shape, np.nan, case.dtype)) for shape in shapes]
    inputs = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays]
    call_guarded("main", library["main"], [*inputs, *outputs], list(range(len(inputs), len(inputs) + len(outputs))))
    return [output.numpy() for output in outputs]


def check(case: CellCase, device: DeviceSpec = WIDE) -> KernelChoice:
    kernel, choice = kernel_of(case, device)
    expected = case.expected(case.inputs())
    found = results(case, kernel, choice)
    assert len(found) == len(expected)
    for own, right in zip(found, expected, strict=True):
        assert relative_error(own, right) <= ROUNDING
    return choice


# --- numbers -------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("case", "device"),
    [
        (lstm(37, 3, holes=True), WIDE.name),
        (lstm(20, 1, clip=0.5), NARROW.name),
        (gru_after(37, 16), NARROW.name),
        (gru_before(19, 2), WIDE.name),
    ],
    ids=str,
)
def test_recurrent_cells(case: CellCase, device: str) -> None:
    choice = check(case, device_db.lookup(device))
    assert "a cell of" in choice.reason
    assert sorted(how.param_index for how in choice.packs) == list(case.weights)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("seed", [2, 8, 24])
def test_random_cells(seed: int) -> None:
    assert "a cell of" in check(random_cell(seed), NARROW if seed % 4 else WIDE).reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_more_random_cells(seed: int) -> None:
    check(random_cell(seed), WIDE if seed % 2 else NARROW)


def test_workspaces_are_kept() -> None:
    """The same with guards between all buffers of a kernel: each tile has its own, and so has what passes by memory."""
    case = gru_before(9, 2)
    kernel, choice = kernel_of(case, NARROW)
    for own, right in zip(results(case, guard_workspaces(kernel), choice), case.expected(case.inputs()), strict=True):
        assert relative_error(own, right) <= ROUNDING


def test_half_precision_is_summed_in_float32() -> None:
    case = lstm(19, 2, dtype="float16")
    kernel, choice = kernel_of(case)
    assert "a cell of" in choice.reason
    for own, right in zip(results(case, kernel, choice), case.expected(case.inputs()), strict=True):
        assert relative_error(own, right) <= 2e-3


# --- form ----------------------------------------------------------------------------------------------------------
def found_in(kernel: Any, kind: Any) -> list[Any]:
    found: list[Any] = []
    structural_walk(kernel.body, (kind, found.append), order="pre")
    return found


def elements(buffer: Any) -> int:
    return int(np.prod([int(size) for size in buffer.ty.shape]))


@pytest.mark.parametrize("case", [lstm(256, 1), lstm(256, 16), gru_after(128, 1)], ids=str)
def test_no_sum_goes_to_memory(case: CellCase) -> None:
    """Outside of the function's results there are registers, and of several rows one tile of each gate."""
    kernel, choice = kernel_of(case)
    assert choice.program is not None
    rows, units = choice.program.tile("L0").shape
    own = [item.buffer for item in found_in(kernel, AllocBuffer)]
    assert own
    assert max(map(elements, own)) <= rows * units
    parameters = list(kernel.params)
    kept = [*own, *parameters[len(case.shapes) :]]
    assert all(any(item.buffer.same_as(buffer) for buffer in kept) for item in found_in(kernel, BufferStore))


def test_weights_are_packed_in_the_order_of_use() -> None:
    case = lstm(37, 1)
    _, choice = kernel_of(case)
    assert choice.program is not None
    (how,) = choice.packs
    weights = case.inputs()[3]
    packed = pack(weights, how)
    vectors = choice.program.tile("L0").shape[1] // 16
    assert packed.shape == (-(-37 // (16 * vectors)), 37, 4, vectors, 16)  # task, state, gate, register, unit
    for unit, k, gate in [(0, 0, 0), (31, 5, 2), (36, 36, 3)]:
        task, within = divmod(unit, 16 * vectors)
        assert packed[task, k, gate, within // 16, within % 16] == weights[gate * 37 + unit, k]


def test_a_second_product_makes_a_second_step() -> None:
    case = gru_before(64, 1)
    kernel, choice = kernel_of(case)
    loops = [item for item in found_in(kernel, For) if item.loop_var.name == "task"]
    assert [int(item.extent) for item in loops] == [2, 2]
    assert choice.reason.count("a cell of") == 2
    between = [item.buffer for item in found_in(kernel, AllocBuffer) if elements(item.buffer) == 64]
    assert len(between) == 3  # the update gate, its share of the old state, and the state after its reset
    assert choice.expected_s is not None
    assert choice.program is not None
    assert choice.expected_s > choice.program.prediction.time_s


def test_small_cells_do_not_fork_and_large_ones_do() -> None:
    def kinds(units: int) -> set[Any]:
        kernel, _ = kernel_of(gru_after(units, 1))
        return {item.kind for item in found_in(kernel, For) if item.loop_var.name == "task"}

    assert kinds(32) == {ForKind.SERIAL}
    assert kinds(512) == {ForKind.PARALLEL}


SIGMOID, TANH, SOFTSIGN = (GateActivation(name=name) for name in ("Sigmoid", "Tanh", "Softsign"))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("lstm", {"input_forget": True, "is_masked": True}),
        ("lstm", {"has_peepholes": True, "clip": 0.5}),
        ("gru", {"is_masked": True}),
        ("gru", {"linear_before_reset": True, "clip": 1.0}),
    ],
)
def test_the_cells_of_an_import_are_taken(kind: Any, settings: Any) -> None:
    activations = (SIGMOID, TANH, SOFTSIGN)[: ACTIVATIONS[kind]]
    cell = RecurrentCell(kind=kind, batch_size=2, hidden_size=20, dtype="float32", activations=activations, **settings)
    builder = relax.BlockBuilder()
    builder.add_func(cell_function(cell), "cell")
    mod = relax.transform.LegalizeOps()(builder.get())
    weights = tuple(i for i, item in enumerate(cell.operands) if item.name.startswith("recurrent"))
    _, choice = constructed(fused_function(mod, mod["cell"]), constants=weights, device=WIDE)
    assert choice.reason.startswith("a cell of 2 x 20 units")
    assert choice.reason.count("a cell of") == len(choice.packs)


# --- what goes another way -----------------------------------------------------------------------------------------
def test_one_gate_is_a_product_with_an_epilogue() -> None:
    choice = check(rnn(19, 2))
    assert "a cell" not in choice.reason
    assert "fused" in choice.reason
    assert choice.packs


def test_weights_known_at_run_time_go_the_general_way() -> None:
    case = replace(lstm(19, 2), weights=())
    choice = check(case)
    assert "no kernel of a cell: " in choice.reason
    assert "no constant that it alone reads" in choice.reason
    assert choice.path == "rtile"


def test_a_device_without_vectors_goes_the_general_way() -> None:
    scalar = replace(NARROW, register_bytes=4)
    _, choice = kernel_of(lstm(19, 2), scalar)
    assert "no SIMD registers for the units" in choice.reason


def test_gates_that_nobody_reads_are_passed_over() -> None:
    choice = check(random_cell(17))  # which reads the gates 0, 1 and 3 of four
    assert "at 3 gates" in choice.reason
    assert (choice.packs[0].extents[-3], choice.packs[0].extents[-1]) == (4, 16)


@pytest.mark.parametrize("case", [lstm(20, 2), gru_before(16, 1)], ids=str)
def test_gpus_have_kernels_of_cells(case: CellCase) -> None:
    device = "nvidia-v100"
    func = case.function()
    kernel = construct_kernel(func, "main", device_db.lookup(device), BuildOptions())
    names = [param.name for param in func.params]
    inputs = dict(zip(names, case.inputs(), strict=False))
    report = simt.run(simt.lower(kernel, device), inputs, device=device)
    assert report.ok, [str(finding) for finding in report.findings][:3]
    for name, right in zip(names[len(inputs) :], case.expected(case.inputs()), strict=True):
        assert relative_error(report.outputs[name], right) <= ROUNDING


# --- the model -----------------------------------------------------------------------------------------------------
def work(rows: int, units: int, gates: int = 4) -> CellWork:
    return CellWork(rows=rows, units=units, products=((gates, units, 4.0),), operations=100.0)


@given(
    rows=st.integers(1, 40), units=st.integers(1, 700), gates=st.integers(1, 8), device=st.sampled_from([WIDE, NARROW])
)
def test_tiles_fit_registers_and_cover_the_cell(rows: int, units: int, gates: int, device: DeviceSpec) -> None:
    tiles = CellClock(work(rows, units, gates), device).usual_tiles()
    assert tiles is not None
    assert gates * tiles.vectors * tiles.rows < device.register_limit
    assert tiles.rows <= rows
    assert tiles.lanes * (tiles.vectors - 1) < units


def test_rows_are_cut_only_where_that_is_faster() -> None:
    """The weights of a register of 256 units (64 KiB) do not fit L1: six rows share what four would wait for."""
    chosen = [CellClock(work(16, units), WIDE).usual_tiles() for units in (100, 256)]
    assert [tiles and tiles.rows for tiles in chosen] == [4, 6]


def test_the_time_is_no_less_than_its_floors() -> None:
    for rows, units in [(1, 128), (1, 256), (4, 256), (16, 512), (1, 1024)]:
        item = work(rows, units)
        tiles = CellClock(item, WIDE).usual_tiles()
        assert tiles is not None
        prediction = CellClock(item, WIDE).predict(tiles)
        assert WIDE.clock_ghz is not None
        peak = 2 * 16 * 2 * WIDE.clock_ghz * 1e9 * WIDE.unit_count
        assert prediction.busy_s >= item.flops / peak
        assert prediction.time_s > prediction.busy_s


def test_weights_beyond_a_cache_come_from_the_next() -> None:
    """An LSTM of 256 units has 0.5 MiB of weights on each of two cores, 512 units 2 MiB; L2 has 1 MiB."""

    def source(units: int, device: DeviceSpec) -> str:
        return CellClock(work(1, units), device).predict(CellTiles(lanes=16, vectors=1, rows=1)).layers[0].layer

    assert [source(units, WIDE) for units in (256, 512)] == ["L2", "L3"]
    tiles = CellTiles(lanes=16, vectors=2, rows=1)
    alone, together = (CellClock(work(1, 256), WIDE).predict(tiles, units) for units in (1, 2))
    assert alone.busy_s > 3 * together.busy_s, "one core's L2 does not hold all weights"
    assert source(256, with_unit_count(WIDE, 1)) == "L3"
    assert work(1, 256).flops == 2 * 4 * 256 * 256
