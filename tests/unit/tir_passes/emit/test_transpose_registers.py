"""Registers are transposed as NumPy transposes, and without an element passing through memory one by one."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from tvm_ext._tvm import tirx
from tvm_ext.ir.build_ir import new_buffer, sequence
from tvm_ext.ir.transpose_registers import transpose_registers


def _function(rows: list[int], first: int, width: int, offset: int, dtype: str) -> tvm.IRModule:
    source = new_buffer((16, 40), dtype, "source")
    target = new_buffer((512,), dtype, "target")
    body = sequence(*transpose_registers(source, rows, first, width, target, offset))
    func = tirx.PrimFunc([source, target], body).with_attrs({"global_symbol": "main", "s_tir": True})
    return tvm.IRModule({"main": func})


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rows", [[3], [1, 0], [0, 1, 2, 2], [5, 4, 7, 6, 3, 2, 1, 0], list(range(16))])
def test_lanes_become_contiguous(rows: list[int], width: int, dtype: str) -> None:
    first, offset = 2, 16
    built = tvm.compile(_function(rows, first, width, offset, dtype), "llvm")
    source = (np.arange(16 * 40) % 120).reshape(16, 40).astype(dtype)
    target = tvm.runtime.tensor(np.full(512, 77, dtype))
    built["main"](tvm.runtime.tensor(source), target)
    expected = np.full(512, 77, dtype)
    expected[offset : offset + width * len(rows)] = source[rows, first : first + width].T.ravel()
    np.testing.assert_array_equal(target.numpy(), expected)


def test_takes_a_shuffle_per_register_and_round() -> None:
    script = _function(list(range(16)), 0, 16, 0, "float32")["main"].script()
    assert script.count("Shuffle(") == 16 * 4
