"""Bank conflicts are counted as the hardware serves them; padding, phases and copies are chosen against them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tir_passes.emit.simt_operators import V100, anchor_of, conv2d, depthwise, matmul, with_tiles
from tvm_ext.records.rprogram import RProgram
from tvm_ext.tir_passes.emit.simt_tiles.banks import read_pattern, turns, write_patterns
from tvm_ext.tir_passes.emit.simt_tiles.box import CopyShape
from tvm_ext.tir_passes.emit.simt_tiles.operands import Operand, plan_operands
from tvm_ext.tir_passes.emit.simt_tiles.tiling import SimtTiling, deepened, digits, reduction_split, tile_threads
from tvm_ext.tir_passes.roller.construct import construct
from tvm_ext.tir_passes.roller.rtile import bank_padding

SHARED = V100.layer("L1")
LANES = np.arange(32)


@pytest.mark.parametrize(
    ("addresses", "itemsize", "width", "beyond"),
    [
        (LANES, 4, 1, 0),
        (LANES * 0, 4, 1, 0),  # one word for all lanes
        (LANES * 2, 4, 1, 1),
        (LANES * 32, 4, 1, 31),
        (LANES * 33, 4, 1, 0),
        (LANES * 4, 4, 4, 0),  # 16 bytes a lane: 8 lanes at a time
        (LANES * 8, 4, 4, 4),  # each of the four groups of 8 lanes finds half of the banks
        (LANES, 2, 1, 0),  # two lanes share a word
        (LANES, 8, 1, 0),
    ],
)
def test_turns_are_those_of_32_banks_of_4_bytes(addresses, itemsize, width, beyond):
    assert int(turns(addresses[None, :], itemsize, width, SHARED)[0]) == beyond


@settings(deadline=None)
@given(row=st.integers(1, 200), seed=st.integers(0, 1000))
def test_turns_agree_with_counting_word_by_word(row, seed):
    addresses = np.random.default_rng(seed).integers(0, 50, 32) * row
    per_bank = [len({int(a) for a in addresses if a % 32 == bank}) for bank in range(32)]
    assert int(turns(addresses[None, :], 4, 1, SHARED)[0]) == max(per_bank) - 1


def _tiling(program: RProgram, operator: object) -> SimtTiling:
    anchor = anchor_of(operator)
    tiling = tile_threads(anchor.computation, anchor.expr, program, V100)
    assert reduction_split(tiling, V100) == (1, None)
    return deepened(tiling, anchor.expr, V100)


def _planned(func: object, upper: dict[str, int], lower: dict[str, int]) -> tuple[SimtTiling, tuple[Operand, ...]]:
    """The operands of ``func`` on vector units in tiles of these sizes (`with_tiles`)."""
    anchor = anchor_of(func)
    program = construct(anchor.expr, V100, k=1, tensor_core=False).programs[0]
    return plan_operands(_tiling(with_tiles(program, upper, lower), func), anchor.prologue, V100)


def test_lanes_down_a_column_get_the_papers_padding():
    """32 lanes that each read one element of 32 rows of 64 floats: Figure 5(b) adds L*ceil(n/L) = 1 element."""
    func = matmul(32768, 64, 64, transpose_b=True).func
    tiling, operands = _planned(func, {"i": 1, "j": 1}, {"i": 4, "j": 32, "k": 32})
    stored = operands[1].box
    assert stored is not None
    assert stored.order == (1, 0)  # j, along which the lanes read, comes last
    assert stored.strides[1] % 32 == bank_padding(32, 1, 32, 1) == 1
    assert tiling.thread_count == 128


def test_a_transposed_copy_is_padded_by_a_vector_and_copied_in_patches():
    """A[i, k] stored as [k][i + 4]: rows start on 16 bytes, and lanes write to 32 different banks."""
    func = matmul(32768, 512, 64).func
    _, operands = _planned(func, {"i": 8, "j": 8}, {"i": 128, "j": 64, "k": 16})
    box, shape = operands[0].box, operands[0].shape
    assert box is not None
    assert shape is not None
    assert (box.strides, box.width) == ((1, 132), 4)
    assert (shape.width, shape.patch) == (4, 2)  # two vectors of a row are 32 bytes, a sector


def test_what_is_read_in_vectors_across_its_rows_is_copied_in_patches_of_elements():
    """W[f, c, r, s] in steps of 8 c and 3 s, stored with 4 filters side by side: 8 of a step by 4 filters a warp."""
    func = conv2d(128, 512, (16, 16), 512, (3, 3), 2).func
    sizes = {"nn": 32, "ff": 64, "yy": 1, "xx": 7, "rc": 8, "ry": 1, "rx": 3}
    tiling, operands = _planned(func, {"nn": 8, "ff": 8, "yy": 1, "xx": 1}, sizes)
    box, shape = operands[1].box, operands[1].shape
    assert box is not None
    assert shape is not None
    assert (box.width, shape.width, shape.patch) == (4, 1, 8)
    patterns = [read_pattern(box.box, tiling, box.width), *write_patterns(box, shape, tiling.thread_count)]
    assert [float(pattern.conflicts([box], 4, SHARED)[0]) for pattern in patterns] == [0.0, 0.0]


def test_padding_grows_a_tile_by_half_at_most():
    """Lanes 11 to a row of 15 would want rows 43 elements apart, three times the memory."""
    operator = depthwise(128, 672, (11, 11), 5, 1, 2)
    sizes = {"b": 64, "c": 1, "i": 4, "j": 11, "di": 5, "dj": 5}
    tiling, operands = _planned(operator.func, {"b": 8, "c": 1, "i": 1, "j": 1}, sizes)
    box = operands[0].box
    assert box is not None
    plain = int(np.prod(box.box.shape(tiling.tile)))
    assert plain == 64 * 8 * 15
    assert box.elements <= 1.5 * plain + 16 * 32


def test_a_strided_window_is_stored_by_phase():
    func = conv2d(256, 8, (33, 33), 32, (3, 3), 2).func
    sizes = {"nn": 1, "ff": 16, "yy": 4, "xx": 16, "rc": 8, "ry": 3, "rx": 3}
    _, operands = _planned(func, {"nn": 1, "ff": 2, "yy": 1, "xx": 1}, sizes)
    box, shape = operands[0].box, operands[0].shape
    assert box is not None
    assert shape is not None
    assert box.phases == (1, 1, 1, 2)
    assert shape.phase == 2
    row = [int(box.address([0, 0, 0, column])) for column in range(5)]
    assert row == [0, box.phase_strides[3], 1, box.phase_strides[3] + 1, 2]


def test_long_rows_of_a_strided_window_are_copied_as_they_lie_in_memory():
    """Sorted by phase, 32 lanes would ask for the eight sectors of 64 columns, and 32 others for the same once more."""
    func = conv2d(128, 3, (230, 230), 64, (7, 7), 2).func
    sizes = {"nn": 1, "ff": 16, "yy": 2, "xx": 56, "rc": 3, "ry": 7, "rx": 7}
    tiling, operands = _planned(func, {"nn": 1, "ff": 4, "yy": 1, "xx": 7}, sizes)
    box, shape = operands[0].box, operands[0].shape
    assert box is not None and shape is not None
    assert box.phases == (1, 1, 1, 2)
    assert [int(column) for column in shape.offsets(LANES, 0)[3]] == list(range(32))
    patterns = [read_pattern(box.box, tiling, box.width), *write_patterns(box, shape, tiling.thread_count)]
    assert not any(float(pattern.conflicts([box], 4, SHARED)[0]) for pattern in patterns)
    assert box.elements < 1.25 * int(np.prod(box.box.shape(tiling.tile)))


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    run=st.integers(1, 4),
    patch=st.integers(1, 8),
    phase=st.integers(1, 3),
    idle=st.integers(0, 9),
)
def test_every_element_is_copied_once(sizes, run, patch, phase, idle):
    run = min(run, len(sizes)) if phase == 1 else 1
    columns = int(np.prod(sizes[len(sizes) - run :]))
    units = phase * -(-columns // phase)
    patch = min(patch, units) if phase == 1 else units
    row_units = -(-units // patch) * patch + (idle if phase > 1 else 0)  # a row sorted by phase is one patch
    patch = row_units if phase > 1 else patch
    shape = CopyShape(sizes=tuple(sizes), run=run, width=1, patch=patch, row_units=row_units, phase=phase)
    seen = [tuple(shape.offsets(unit, 0)) for unit in range(shape.units) if shape.used(unit)]
    assert sorted(seen) == sorted(np.ndindex(*sizes))


@settings(deadline=None)
@given(value=st.integers(0, 10**6), extents=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_digits_are_row_major(value, extents):
    value %= int(np.prod(extents))
    assert tuple(digits(value, extents)) == tuple(int(i) for i in np.unravel_index(value, extents))
