"""BoundGathers: no index reads outside its tensor."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from tvm_ext import relay
from tvm_ext._tvm import assert_structural_equal
from tvm_ext.relay_passes.bound_gathers import BoundGathers


def gather(mode: str) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    table = relax.Var("table", relax.TensorType((5, 3), "float32"))
    indices = relax.Var("indices", relax.TensorType((4,), "int64"))
    with builder.function("main", [table, indices]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.take(table, indices, axis=0, mode=mode))
        builder.emit_func_output(result)
    return builder.get()


def test_fast_becomes_wrap(immutable_modules):
    assert_structural_equal(BoundGathers()(gather("fast")), gather("wrap"))


def test_other_modes_stay(immutable_modules):
    assert_structural_equal(BoundGathers()(gather("clip")), gather("clip"))


def test_a_wild_index_neither_crashes_nor_warns(rng, capfd):
    library = relay.build(gather("fast"), "llvm")
    table = rng.standard_normal((5, 3)).astype("f4")
    indices = np.array([0, -1, 2**40, -(2**40)])
    result = library.vm(tvm.cpu())["main"](table, indices).numpy()
    np.testing.assert_array_equal(result, table[indices % 5])
    assert "segfault" not in capfd.readouterr().err.lower()
