"""Every refusal of a product says which operator, which shape or type, which limit, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import convolution, decided, op, product
from tvm_ext._tvm import tirx
from tvm_ext.records.partition import CutlassPartition, CutlassProblem, ImplicitWindow, MatrixLayout
from tvm_ext.records.serialise import from_json, to_json

N = tirx.Var("n", "int64")


def conv1d() -> tvm.IRModule:
    inputs = inputs_of((1, 14, 32), (64, 3, 32), dtype="float16")
    return module_of(inputs, op.nn.conv1d(*inputs, data_layout="NWC", kernel_layout="OWI"))


def mixed() -> tvm.IRModule:
    """Relax has no such matrix product, but lets such a convolution through."""
    (x,), w = inputs_of((1, 14, 14, 32), dtype="float16"), relax.Var("w", relax.TensorType((64, 3, 3, 32), "float32"))
    return module_of([x, w], op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI", out_dtype="float32"))


REFUSALS: dict[str, tuple[Callable[[], tvm.IRModule], str, str, str]] = {
    "V100": (
        product,
        "nvidia-v100",
        "nvidia-v100 has compute capability 7.0: there are no templates below 7.5",
        "kernels",
    ),
    "CPU": (product, "cpu-epyc-zen5", "cpu-epyc-zen5 is a cpu device: CUTLASS is for CUDA", "kernels of this package"),
    "conv1d": (conv1d, "nvidia-a100", "nn.conv1d of (1, 14, 32) float16 and (64, 3, 32) float16", "nn.conv2d"),
    "dynamic": (
        lambda: product((N, 32)),
        "nvidia-a100",
        "relax.matmul: an extent of (n, 32) float16 is known only at run time",
        "fixed shapes",
    ),
    "empty": (lambda: product((0, 32)), "nvidia-a100", "relax.matmul: (0, 32) float16 has no elements", ""),
    "huge": (
        lambda: product((2**16, 2**15), (2**15, 64)),
        "nvidia-a100",
        "(65536, 32768) float16 has 2147483648 elements, and kernels count to 2147483647",
        "split the batch",
    ),
    "two types": (mixed, "nvidia-a100", "relax.nn.conv2d of float16 and float32: templates want one type", "cast"),
    "float64": (lambda: product(dtype="float64"), "nvidia-a100", "relax.matmul of float64: templates take", "cast"),
    "bfloat16 on a T4": (
        lambda: product(dtype="bfloat16"),
        "nvidia-t4",
        "relax.matmul of bfloat16 needs compute capability 8.0, and nvidia-t4 has 7.5",
        "use float16",
    ),
    "int8 stored as int8": (
        lambda: product(dtype="int8"),
        "nvidia-a100",
        "relax.matmul of int8 with a result of int8: templates store int32",
        "cast the result",
    ),
    "alignment of A": (
        lambda: product((64, 33), (33, 48)),
        "nvidia-a100",
        "operand A, (64, 33) float16, is read 1 element(s) at a time, and the smallest copy is of 2",
        "a multiple of 8",
    ),
    "alignment of B": (
        lambda: product((64, 32), (32, 49)),
        "nvidia-a100",
        "operand B, (32, 49) float16, is read 1 element(s) at a time, and the smallest copy is of 2",
        "a multiple of 8",
    ),
    "alignment of int8": (
        lambda: product((64, 34), (34, 48), "int8", out_dtype="int32"),
        "nvidia-a100",
        "operand A, (64, 34) int8, is read 2 element(s) at a time, and the smallest copy is of 4",
        "a multiple of 16",
    ),
    "first layer of bfloat16": (
        lambda: convolution((1, 224, 224, 3), (64, 7, 7, 3), "bfloat16"),
        "nvidia-a100",
        "nn.conv2d: operand A, (1, 224, 224, 3) bfloat16, is read 1 element(s) at a time",
        "a multiple of 8",
    ),
    "depthwise of 12 channels": (
        lambda: convolution((1, 14, 14, 12), (12, 3, 3, 1), groups=12),
        "nvidia-a100",
        "has 12 channels: the template for depthwise convolutions copies 8 at a time",
        "a multiple of 8",
    ),
    "vector": (
        lambda: product((32,)),
        "nvidia-a100",
        "templates want two matrices, and (32) float16 is a vector",
        "one row",
    ),
    "repeated batch": (
        lambda: product((4, 1, 64, 32), (1, 6, 32, 48)),
        "nvidia-a100",
        "relax.matmul of (4, 1, 64, 32) float16 and (1, 6, 32, 48) float16: a batch is repeated along some of its axes",
        "expand",
    ),
    "NCHW": (
        lambda: convolution((1, 32, 14, 14), (64, 32, 3, 3), data_layout="NCHW", kernel_layout="OIHW"),
        "nvidia-a100",
        "in layouts NCHW, OIHW, NCHW: templates take NHWC, OHWI, NHWC",
        'layout="NHWC"',
    ),
    "depthwise in float32": (
        lambda: convolution((1, 14, 14, 32), (32, 3, 3, 1), "float32", groups=32),
        "nvidia-a100",
        "is depthwise in float32: the template for it takes float16",
        "float16",
    ),
    "groups of bfloat16": (
        lambda: convolution((1, 14, 14, 64), (64, 3, 3, 32), "bfloat16", groups=2),
        "nvidia-a100",
        "has 2 groups of bfloat16: the template for groups takes float16",
        "float16",
    ),
    "groups of 24": (
        lambda: convolution((1, 14, 14, 64), (48, 3, 3, 32), groups=2),
        "nvidia-a100",
        "has 24 filters in each of 2 groups: templates want a multiple or a divisor of 32",
        "32 filters",
    ),
    "cropping": (
        lambda: convolution(padding=(-1, 0, 0, 0)),
        "nvidia-a100",
        "is padded by [-1, 0, 0, 0]: templates do not crop",
        "slice",
    ),
    "8-bit floats": (
        lambda: convolution(dtype="float8_e4m3fn", out_dtype="float16"),
        "nvidia-h200",
        "templates for 8-bit floats are matrix products alone",
        "float16",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_why_and_what_to_do(case: str) -> None:
    make, device, reason, remedy = REFUSALS[case]
    record = decided(make(), device)
    assert not record.taken
    (refusal,) = record.refused
    assert reason in refusal.reason
    assert remedy in refusal.remedy
    assert bool(remedy) == bool(refusal.remedy)
    assert refusal.operator in ("relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d")


def test_products_in_branches_are_refused_not_forgotten() -> None:
    builder = relax.BlockBuilder()
    x, w = inputs_of((64, 32), (32, 32), dtype="float16")
    condition = relax.Var("c", relax.TensorType((), "bool"))
    arms = [
        relax.SeqExpr([relax.BindingBlock([relax.VarBinding(v, call)])], v) for v, call in map(_arm, (x, x), (w, w))
    ]
    with builder.function("main", [condition, x, w]):
        builder.emit_func_output(builder.emit(relax.If(condition, *arms)))
    record = decided(builder.get())
    assert len(record.refused) == 2
    assert "is in a branch or inner function" in record.refused[0].reason


def _arm(x: Any, w: Any) -> tuple[Any, Any]:
    call = relax.BlockBuilder().normalize(op.matmul(x, w))
    return relax.Var("arm", call.ty), call


def problem(mod: tvm.IRModule, device: str = "nvidia-a100") -> CutlassProblem:
    record = decided(mod, device)
    assert not record.refused
    return record.taken[0].problem


@pytest.mark.parametrize(
    ("mod", "device"),
    [
        (product(dtype="float32"), "nvidia-t4"),
        (product(dtype="bfloat16"), "nvidia-a100"),
        (product(dtype="int8", out_dtype="int32"), "nvidia-t4"),
        (product(dtype="float8_e4m3fn", out_dtype="float16"), "nvidia-h200"),
        (product((64, 33), (33, 49), "float32"), "nvidia-a100"),
        (product((64, 34), (34, 10)), "nvidia-a100"),
        (convolution(strides=(2, 2), padding=(1, 1, 1, 1)), "nvidia-a100"),
        (convolution(dilation=(2, 2)), "nvidia-h200"),
        (convolution((1, 224, 224, 3), (64, 7, 7, 3)), "nvidia-a100"),
    ],
)
def test_what_templates_serve_is_taken(mod: tvm.IRModule, device: str) -> None:
    assert problem(mod, device).batch == 1


def test_weights_for_a_batch_are_one_product() -> None:
    found = problem(product((2, 8, 64, 32)))
    assert (found.anchor, found.batch, found.rows, found.columns, found.depth) == ("matmul", 1, 1024, 48, 32)


@pytest.mark.parametrize(
    ("first", "second", "strides"),
    [
        ((6, 64, 32), (6, 32, 48), (2048, 1536)),
        ((64, 32), (6, 32, 48), (0, 1536)),
        ((2, 3, 64, 32), (2, 3, 32, 48), (2048, 1536)),
        ((1, 6, 64, 32), (6, 32, 48), (2048, 1536)),
    ],
)
def test_batches_have_one_distance(first: Any, second: Any, strides: tuple[int, int]) -> None:
    found = problem(product(first, second))
    assert (found.anchor, found.batch, found.rows) == ("batched_matmul", 6, 64)
    assert tuple(operand.batch_stride for operand in found.operands) == strides


def transposed(first: Any, second: Any, axes: tuple[Any, Any]) -> tvm.IRModule:
    inputs = inputs_of(first, second, dtype="float16")
    operands = [x if order is None else op.permute_dims(x, order) for x, order in zip(inputs, axes, strict=True)]
    return module_of(inputs, op.matmul(*operands))


@pytest.mark.parametrize("order_a", ["row", "column"])
@pytest.mark.parametrize("order_b", ["row", "column"])
def test_transposed_operands_are_read_in_place(order_a: str, order_b: str) -> None:
    shapes = {"row": (64, 32), "column": (32, 64)}, {"row": (32, 48), "column": (48, 32)}
    axes = tuple(None if order == "row" else (1, 0) for order in (order_a, order_b))
    found = problem(transposed(shapes[0][order_a], shapes[1][order_b], axes))
    assert [operand.order for operand in found.operands] == [order_a, order_b]
    assert [operand.leading_dimension for operand in found.operands] == [shapes[0][order_a][1], shapes[1][order_b][1]]


def test_the_heads_of_attention_are_a_batch_in_place() -> None:
    found = problem(transposed((1, 128, 12, 64), (1, 128, 12, 64), ((0, 2, 1, 3), (0, 2, 3, 1))))
    queries = MatrixLayout(order="row", leading_dimension=768, batch_stride=64, alignment=8)
    keys = MatrixLayout(order="column", leading_dimension=768, batch_stride=64, alignment=8)
    assert (found.batch, found.rows, found.columns, found.depth) == (12, 128, 128, 64)
    assert found.operands == (queries, keys)


def test_heads_of_several_sequences_have_two_distances_and_are_copied() -> None:
    found = problem(transposed((2, 128, 12, 64), (2, 128, 12, 64), ((0, 2, 1, 3), (0, 2, 3, 1))))
    assert [(operand.order, operand.leading_dimension) for operand in found.operands] == [("row", 64), ("row", 128)]


def test_a_convolution_is_an_implicit_product() -> None:
    found = problem(convolution((2, 15, 15, 32), (64, 3, 5, 32), strides=(2, 2), padding=(1, 2, 1, 2), dilation=(1, 2)))
    window = ImplicitWindow(
        input_extents=(2, 15, 15, 32),
        filter_extents=(3, 5),
        output_extents=(8, 6),
        padding=(1, 2),
        strides=(2, 2),
        dilation=(1, 2),
        groups=1,
    )
    assert found.window == window
    assert (found.anchor, found.rows, found.columns, found.depth) == ("conv2d", 96, 64, 480)


@pytest.mark.parametrize(
    ("weight", "groups", "anchor"), [((64, 3, 3, 32), 2, "conv2d_grouped"), ((64, 3, 3, 1), 64, "conv2d_depthwise")]
)
def test_convolutions_in_groups(weight: Any, groups: int, anchor: str) -> None:
    assert problem(convolution((1, 14, 14, 64), weight, groups=groups)).anchor == anchor


def test_the_record_is_read_back_and_printed() -> None:
    mod = module_of([], relax.const(0.0, "float32"))
    assert decided(mod) == CutlassPartition(device="nvidia-a100", taken=(), refused=())
    record = decided(convolution())
    assert from_json(CutlassPartition, to_json(record)) == record
    assert "gv: conv2d, ended as gv is the function's result" in str(record)
