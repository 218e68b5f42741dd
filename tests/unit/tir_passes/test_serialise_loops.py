"""Parallel loops become serial; everything else stays as it is."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import tirx as T  # noqa: N812 - the name that TVMScript is written with

from tvm_ext._tvm import assert_structural_equal
from tvm_ext.tir_passes.serialise_loops import SerialiseLoops


@T.prim_func(s_tir=True)
def parallel(a: T.Buffer((8, 8, 16), "float32"), b: T.Buffer((8, 8, 16), "float32")):
    T.func_attr({"global_symbol": "main"})
    for i in T.parallel(8):
        for j in T.serial(8):
            for v in T.vectorized(16):
                b[i, j, v] = a[i, j, v]
    for i in T.parallel(8):
        for j in T.parallel(8):
            b[i, j, 0] = a[i, j, 1]


@T.prim_func(s_tir=True)
def serial(a: T.Buffer((8, 8, 16), "float32"), b: T.Buffer((8, 8, 16), "float32")):
    T.func_attr({"global_symbol": "main"})
    for i in T.serial(8):
        for j in T.serial(8):
            for v in T.vectorized(16):
                b[i, j, v] = a[i, j, v]
    for i in T.serial(8):
        for j in T.serial(8):
            b[i, j, 0] = a[i, j, 1]


@pytest.mark.usefixtures("immutable_modules")
@pytest.mark.parametrize("before", [parallel, serial], ids=["parallel", "nothing to do"])
def test_parallel_loops_become_serial(before: tvm.tirx.PrimFunc) -> None:
    after = SerialiseLoops()(tvm.IRModule({"main": before}))
    assert_structural_equal(after, tvm.IRModule({"main": serial}))
