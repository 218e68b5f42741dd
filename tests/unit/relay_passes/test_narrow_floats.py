"""Options `precision` and `precision_bound`: which products run in bfloat16, and how far results are off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.dot_rows import FEATURES, row_of
from tvm_ext import relay
from tvm_ext.analysis.relax_values import dtype_of, operator_name
from tvm_ext.devices.dot_instructions import dot_instruction
from tvm_ext.errors import OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.records.attention import ATTENTION, Attention
from tvm_ext.records.precision import KEPT, PRECISION, PrecisionRecord, precision_record
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.relay_passes.fuse_attention import FuseAttention
from tvm_ext.relay_passes.narrow_floats import NarrowFloats, narrow_floats
from tvm_ext.support.roundoff import relative_error

PRODUCT = 2.0**-7
"""The error of a product of rounded operands, by norm: each is off by up to 2**-9, and the sums are float32."""

EMULATED = "bfloat16-emulated"


def constant(*shape: int, seed: int = 0) -> Any:
    return relax.const(np.random.default_rng(seed).standard_normal(shape).astype("float32"))


def module(shape: tuple[int, ...], body: Any) -> tvm.IRModule:
    """The module of ``body(builder, x)`` for an input of ``shape``."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(body(builder, x))
        builder.emit_func_output(result)
    return builder.get()


def dense(builder: Any, x: Any) -> Any:
    first = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(x, constant(64, 96)))))
    moved = builder.emit(relax.op.reshape(first, (2, 16, 96)))
    second = builder.emit(relax.op.matmul(moved, constant(96, 64, seed=1)))
    third = builder.emit(relax.op.matmul(moved, constant(96, 64, seed=2)))
    return relax.op.add(second, third)


def image(builder: Any, x: Any) -> Any:
    """An image's convolution, a grouped and a depthwise one, and one of a filter a channel of one output."""
    made = builder.emit(relax.op.nn.conv2d(x, constant(32, 3, 3, 3), padding=1))
    made = builder.emit(relax.op.nn.relu(made))
    made = builder.emit(relax.op.nn.conv2d(made, constant(32, 1, 3, 3, seed=1), padding=1, groups=32))
    made = builder.emit(relax.op.nn.conv2d(made, constant(64, 32, 1, 1, seed=2)))
    made = builder.emit(relax.op.nn.conv2d(made, constant(64, 32, 3, 3, seed=3), strides=2, groups=2))
    pooled = builder.emit(relax.op.mean(made, axis=[2, 3], keepdims=True))
    return relax.op.nn.conv2d(pooled, constant(10, 64, 1, 1, seed=4))


def narrowed(mod: tvm.IRModule, device: Any) -> tvm.IRModule:
    row = dot_instruction(device, "bfloat16", "bfloat16", "float32")
    return NarrowFloats(device, row, lambda *_: "")(mod)


def products(mod: tvm.IRModule) -> list[tuple[str, str]]:
    """The types of data and result of each product, in order."""
    found: list[tuple[str, str]] = []

    def visit(node: Any) -> None:
        if operator_name(node) in ("relax.matmul", "relax.nn.conv2d"):
            found.append((dtype_of(node.args[0]), dtype_of(node)))

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


def casts(mod: tvm.IRModule) -> int:
    return sum("R.astype" in line for line in mod.script().splitlines())


def built(mod: tvm.IRModule, **settings: Any) -> tuple[relay.Library, Any]:
    library = relay.build(mod, "llvm", kernel_cache="off", **settings)
    shape = tuple(int(size) for size in library.inputs[0].shape or ())
    x = np.random.default_rng(5).standard_normal(shape).astype("float32")
    running = relay.GraphModule(library["default"](tvm.cpu()))
    running.run(x=x)
    return library, running.get_output(0).numpy()


@pytest.mark.parametrize("row", sorted(FEATURES))
def test_products_read_bfloat16_and_add_up_float32(row: str) -> None:
    found = narrowed(module((32, 64), dense), row_of(row))
    assert products(found) == [("bfloat16", "float32")] * 3
    # One rounding of the input, one of what two products read, ahead of the view, where it joins the first product.
    assert casts(found) == 2


def test_depthwise_convolutions_and_single_outputs_stay_float32() -> None:
    found = narrowed(module((1, 3, 18, 18), image), row_of("cpu-epyc-zen5"))
    assert [data for data, _ in products(found)] == ["bfloat16", "float32", "bfloat16", "bfloat16", "float32"]


def test_odd_reductions_and_products_of_two_tensors_stay_float32() -> None:
    def body(builder: Any, x: Any) -> Any:
        first = builder.emit(relax.op.matmul(x, constant(7, 6)))
        return relax.op.matmul(first, builder.emit(relax.op.permute_dims(first)))

    mod = module((5, 7), body)
    assert {data for data, _ in products(narrowed(mod, row_of("cpu-epyc-zen5")))} == {"float32"}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("body", "shape"), [(dense, (32, 64)), (image, (1, 3, 18, 18))])
def test_results_are_within_the_rounding_of_operands(body: Any, shape: tuple[int, ...]) -> None:
    _, expected = built(module(shape, body))
    library, found = built(module(shape, body), precision=EMULATED)
    assert 0 < relative_error(found, expected) < 2 * PRODUCT
    record = library.report.precision
    assert record is not None and record.error is None
    assert any(not product.reason for product in record.products)
    assert "bfloat16 by" in str(library.report)


def test_what_rounds_joins_what_is_before_it() -> None:
    library, _ = built(module((32, 64), dense), precision=EMULATED)
    names = [operator.name for operator in library.report.operators]
    assert sum(name.startswith("cast") for name in names) == 1  # of the input


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("bound", [6e-3, 1.0, 0.0])
def test_the_measured_error_stays_within_the_bound(bound: float) -> None:
    def body(builder: Any, x: Any) -> Any:
        for seed in range(4):
            x = builder.emit(relax.op.tanh(builder.emit(relax.op.matmul(x, constant(64, 64, seed=seed)))))
        return x

    library, _ = built(module((16, 64), body), precision=EMULATED, precision_bound=bound)
    record = library.report.precision
    assert record is not None and record.error is not None and record.error <= bound
    kept = [product for product in record.products if "bound" in product.reason]
    assert bool(kept) == (bound < 1) and (len(kept) < 4) == (bound > 0)


def test_auto_takes_what_the_model_expects_to_be_faster() -> None:
    """On a CPU with the instruction large products; nothing on one where two multiply-adds stand for it."""
    from tvm_ext.pass_pipeline import narrowing_passes

    def types(row: str) -> set[str]:
        device = row_of(row)
        target = tvm.target.Target({key: list(v) if isinstance(v, tuple) else v for key, v in device.target})
        options = BuildOptions(precision="auto", precision_bound=1.0, database="off")
        passes = narrowing_passes(target, device, options)
        with target:
            found = tvm.transform.Sequential(passes)(
                module((256, 512), lambda _, x: relax.op.matmul(x, constant(512, 512)))
            )
        return {data for data, _ in products(found)}

    assert types("cpu-epyc-zen5") == {"bfloat16"}
    assert types("cpu-cascade-lake") == {"float32"}


def self_attention(builder: Any, x: Any) -> Any:
    turned = builder.emit(relax.op.permute_dims(x, [0, 2, 1]))
    scores = builder.emit(relax.op.nn.softmax(builder.emit(relax.op.matmul(x, turned))))
    return relax.op.matmul(scores, x)


@pytest.mark.parametrize(
    ("row", "precision", "kept", "why"),
    [
        ("cpu-epyc-zen5", "bfloat16", (), ""),
        ("cpu-epyc-zen5", "auto", (), ""),
        ("cpu-cascade-lake", "auto", (), "us are expected"),
        ("cpu-cascade-lake", EMULATED, (), ""),
        ("cpu-epyc-zen5", "bfloat16", (0,), "bound"),
    ],
)
def test_attentions_are_products_too(row: str, precision: Any, kept: tuple[int, ...], why: str) -> None:
    device = row_of(row)
    options = BuildOptions(precision=precision, precision_bound=1.0)
    passes = [*narrow_floats(device, options, lambda _: None), FuseAttention(device, precision)]
    mod = module((4, 128, 64), self_attention).with_attr(KEPT, list(kept))
    found = tvm.transform.Sequential(passes)(mod)
    record = precision_record(found)
    assert record is not None
    (product,) = record.products
    assert product.kind == "attention" and (why in product.reason if why else not product.reason)
    (work,) = (func.attrs[ATTENTION] for _, func in found.functions_items() if ATTENTION in (func.attrs or {}))
    assert from_json(Attention, str(work)).products == ("float32" if why else "bfloat16")


def test_a_record_of_kept_weights_narrows_no_attention() -> None:
    record = PrecisionRecord(products=())
    mod = module((4, 128, 64), self_attention).with_attr(PRECISION, to_json(record))
    found = FuseAttention(row_of("cpu-epyc-zen5"), "float32")(mod)
    assert precision_record(found) == record
    (work,) = (func.attrs[ATTENTION] for _, func in found.functions_items() if ATTENTION in (func.attrs or {}))
    assert from_json(Attention, str(work)).products == "float32"


def test_the_error_of_attentions_counts() -> None:
    library, _ = built(module((2, 40, 32), self_attention), precision=EMULATED, precision_bound=1e-9)
    record = library.report.precision
    assert record is not None and record.error == 0
    assert all(product.reason for product in record.products)


def test_a_cpu_without_the_instruction_is_an_error_that_says_what_it_has() -> None:
    options = BuildOptions(precision="bfloat16")
    with pytest.raises(OptionError, match="no instruction for it: of dot products it has vpmaddwd") as caught:
        narrow_floats(row_of("cpu-cascade-lake"), options, lambda _: None)
    assert "'auto'" in caught.value.remedy and EMULATED in caught.value.remedy
    assert len(narrow_floats(row_of("cpu-epyc-zen5"), options, lambda _: None)) == 1


def test_other_errors_of_the_option() -> None:
    with pytest.raises(OptionError, match="error that precision 'auto' may make"):
        BuildOptions(precision="auto")
    with pytest.raises(OptionError, match="'precision_bound' is nan"):
        BuildOptions(precision="bfloat16", precision_bound=float("nan"))
    with pytest.raises(OptionError, match="'precision'"):
        BuildOptions.create(precision="half")
    with pytest.raises(OptionError, match="no quantised products"):
        built(module((32, 64), dense), precision="int8")
    with pytest.raises(OptionError, match="kernels that Roller constructs"):
        built(module((32, 64), dense), precision=EMULATED, enable_roller=False)
    with pytest.raises(OptionError, match="kernels that Roller constructs"):
        relay.build(module((32, 64), dense), "nvidia-a100", precision="bfloat16")
