"""Weights of 16-bit values stay 16 bits where few rows meet them; the results are those of float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, te

from tests.support.dot_rows import row_of
from tests.unit.kernels import constructed, relative_error, run
from tvm_ext import relay
from tvm_ext._tvm import Constant
from tvm_ext.analysis.relax_values import dtype_of
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import narrowing_passes
from tvm_ext.records.precision import precision_record
from tvm_ext.relay_passes.keep_halves import product

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def weights(kind: str, k: int, n: int) -> Any:
    values = np.random.default_rng(k).standard_normal((k, n)).astype("float32")
    return values.astype(TYPES[kind]).astype("float32") if kind in TYPES else values


def module(rows: tuple[int, ...], values: Any) -> tvm.IRModule:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((*rows, values.shape[0]), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(relax.op.matmul(x, relax.const(values)))
            result = builder.emit_output(relax.op.nn.relu(made))
        builder.emit_func_output(result)
    return builder.get()


def narrowed(mod: tvm.IRModule, row: str, **settings: Any) -> tvm.IRModule:
    """``mod`` behind the passes for ``row``."""
    device = row_of(row)
    target = tvm.target.Target({key: list(v) if isinstance(v, tuple) else v for key, v in device.target})
    with target:
        return tvm.transform.Sequential(narrowing_passes(target, device, BuildOptions(database="off", **settings)))(mod)


def kept(mod: tvm.IRModule, row: str, **settings: Any) -> str:
    """The type of the weights behind the passes for ``row``."""
    found = narrowed(mod, row, **settings)
    types: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, Constant):
            types.append(dtype_of(node))

    relax.analysis.post_order_visit(found["main"], visit)
    (only,) = types
    return only


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_weights_keep_the_type_that_holds_them_exactly(kind: str) -> None:
    assert kept(module((1, 1), weights(kind, 512, 1024)), "cpu-epyc-zen5") == kind


def test_many_rows_and_small_weights_stay_float32() -> None:
    assert kept(module((64,), weights("bfloat16", 512, 1024)), "cpu-epyc-zen5") == "float32"
    assert kept(module((1,), weights("bfloat16", 64, 64)), "cpu-epyc-zen5") == "float32"


def test_values_that_float16_rounds_or_exceeds_stay_float32() -> None:
    values = weights("float16", 512, 1024)
    for number in (1e5 + 1 / 128, np.nan, 2.0**-26):
        values[3, 5] = number
        assert kept(module((1,), values), "cpu-epyc-zen5") == "float32"


def test_auto_rounds_no_data_where_weights_are_exact() -> None:
    settings: dict[str, Any] = {"precision": "auto", "precision_bound": 1.0}
    assert kept(module((1,), weights("float16", 512, 1024)), "cpu-epyc-zen5", **settings) == "float16"


@pytest.mark.sampled
@pytest.mark.parametrize("row", ["cpu-epyc-zen5", "cpu-cascade-lake-avx2"])
@pytest.mark.parametrize("kind", sorted(TYPES))
@pytest.mark.parametrize("shape", [(1, 300, 130), (3, 77, 33), (4, 64, 7)])
def test_kernels_widen_what_they_read(row: str, kind: str, shape: tuple[int, int, int]) -> None:
    rows, k, n = shape
    function = te.create_prim_func(
        [x := te.placeholder((rows, k), name="x"), w := te.placeholder((k, n), kind, name="w"), product(x, w)]
    )
    kernel, choice = constructed(function, constants=(1,), device=row_of(row))
    assert choice.path == "rtile"
    values = np.random.default_rng(n).standard_normal((rows, k)).astype("float32")
    own = weights(kind, k, n).astype(TYPES[kind])
    found = run(kernel, choice, [values, own], (rows, n), "float32")
    assert relative_error(found, values.astype("float64") @ own.astype("float64")) < 2e-6


def test_a_build_is_right_and_one_kernel() -> None:
    values = weights("float16", 512, 1024)
    library = relay.build(module((1, 2), values), "llvm", kernel_cache="off")
    x = np.random.default_rng(1).standard_normal((1, 2, 512)).astype("float32")
    running = relay.GraphModule(library["default"](tvm.cpu()))
    running.run(x=x)
    right = np.maximum(x.astype("float64") @ values.astype("float64"), 0)
    assert relative_error(running.get_output(0).numpy(), right) < 2e-6
    assert len(library.report.operators) == 1


def test_the_record_has_kept_weights_beside_rounded_products() -> None:
    values = weights("float16", 512, 1024)
    odd = np.random.default_rng(0).standard_normal((1024, 64)).astype("float32")
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((1, 512), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(relax.op.matmul(x, relax.const(values)))
            result = builder.emit_output(relax.op.matmul(made, relax.const(odd)))
        builder.emit_func_output(result)
    instructions, found = [], []
    for precision in ("float32", "bfloat16"):
        record = precision_record(narrowed(builder.get(), "cpu-epyc-zen5", precision=precision))
        assert record is not None
        instructions.append(record.instruction)
        found.append([(own.weights, own.exact, own.is_rounded) for own in record.products])
    kept = ((512, 1024), "float16", False)
    assert instructions == [None, "vdpbf16ps"]
    assert found == [[kept], [kept, ((1024, 64), "", True)]]
    assert record.lines()[0].startswith("bfloat16 by vdpbf16ps: 1 of 1 products")
    assert record.lines()[-1] == "matmul 1x512 by 512x1024, weights stay float16"
