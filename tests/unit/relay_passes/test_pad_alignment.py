"""Padding to copies of 16 bytes: what becomes wider, who writes the padding, what stays, and the record of it."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from benchmarks.networks.graph import GraphWriter, he_normal
from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import decided, graph_of, op
from tvm_ext._tvm import PrimFunc, assert_structural_equal
from tvm_ext.devices.device_db import device_for_target, lookup
from tvm_ext.pass_pipeline import operator_passes
from tvm_ext.records.padding import PADDING, PaddingRecord, ProductPadding
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.relay_passes.onnx.half import to_half
from tvm_ext.relay_passes.padding.graph import PaddableBlock
from tvm_ext.relay_passes.padding.pad_alignment import PadAlignment, with_runs
from tvm_ext.relay_passes.partition_cutlass import PartitionCutlass

WORKLOADS = Path(__file__).resolve().parents[3] / "benchmarks" / "workloads" / "bolt_ops.csv"
NHWC = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


def constant(*shape: int, value: float = 0.5) -> Any:
    return relax.const(np.full(shape, value, "float16"), "float16")


def convolution(data: Any, filters: int, channels: int, size: int = 3, **options: Any) -> Any:
    return op.nn.conv2d(data, constant(filters, size, size, channels), padding=size // 2, **(NHWC | options))


def padded(mod: tvm.IRModule, device: str = "nvidia-a100", **options: Any) -> tvm.IRModule:
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        made = PadAlignment(lookup(device), **options)(mod)
    relax.analysis.well_formed(made)
    return made


def record(mod: tvm.IRModule) -> list[ProductPadding]:
    return list(from_json(PaddingRecord, str(mod.attrs[PADDING])).products)


def shapes(mod: tvm.IRModule, operator: str) -> list[tuple[int, ...]]:
    """Of the results of all calls of an operator, in program order."""
    bindings = [item for block in mod["main"].body.blocks for item in block.bindings]
    calls = [item.value for item in bindings if getattr(item.value.op, "name", "") == f"relax.{operator}"]
    return [tuple(int(extent) for extent in call.ty.shape.values) for call in calls]


def chain(data: Sequence[int] = (8, 28, 28, 46), inner: int = 44) -> tvm.IRModule:
    """Two convolutions with a bias and a sigmoid between them."""
    (x,) = inputs_of(data, dtype="float16")
    first = op.sigmoid(op.add(convolution(x, inner, data[3]), constant(inner)))
    return module_of([x], op.nn.relu(convolution(first, 32, inner)))


# ---- who writes the padding ------------------------------------------------------------------------------------------


def test_a_chain_pads_its_input_and_nothing_between() -> None:
    after = padded(chain())
    assert shapes(after, "nn.pad") == [(8, 28, 28, 48)]
    assert shapes(after, "nn.conv2d") == [(8, 28, 28, 48), (8, 28, 28, 32)]
    assert not shapes(after, "strided_slice")
    first, second = record(after)
    assert (first.depth, first.columns, first.source) == ((46, 48), (44, 48), "kernel")
    assert (second.depth, second.columns, second.source) == ((44, 48), (32, 32), "producer")
    assert first.padded and second.padded
    assert second.padding_us == 0 < first.padding_us
    assert first.speed_up > 1 and "predicted" in first.reason


def test_what_needs_no_padding_reads_the_part_it_wants() -> None:
    (x,) = inputs_of((4, 28, 28, 64), dtype="float16")
    value = convolution(x, 44, 64)
    mod = module_of([x], op.nn.softmax(op.mean(convolution(value, 32, 44), [1, 2])), op.abs(value))
    after = padded(mod, always=True)
    assert shapes(after, "strided_slice") == [(4, 28, 28, 44)]
    assert shapes(after, "nn.conv2d") == [(4, 28, 28, 48), (4, 28, 28, 32)]


def test_joined_channels_keep_their_padding_between_them() -> None:
    (x,) = inputs_of((4, 28, 28, 64), dtype="float16")
    left, right = convolution(x, 20, 64), op.sigmoid(convolution(x, 12, 64))
    mod = module_of([x], convolution(op.concat([left, right], axis=3), 32, 32))
    after = padded(mod, always=True)
    assert shapes(after, "concat") == [(4, 28, 28, 40)]
    assert not shapes(after, "nn.pad") and not shapes(after, "take")


def test_depthwise_convolutions_and_residuals_carry_padding() -> None:
    (x,) = inputs_of((4, 28, 28, 64), dtype="float16")
    first = op.nn.relu(convolution(x, 44, 64))
    deep = op.nn.conv2d(first, constant(44, 3, 3, 1), padding=1, groups=44, **NHWC)
    mod = module_of([x], convolution(op.add(deep, first), 32, 44, size=1))
    after = padded(mod, always=True)
    assert shapes(after, "nn.conv2d") == [(4, 28, 28, 48), (4, 28, 28, 48), (4, 28, 28, 32)]
    assert not shapes(after, "nn.pad") and not shapes(after, "strided_slice")


def test_a_depthwise_convolution_gets_the_channels_that_its_template_wants() -> None:
    """GhostNet's block: 20 channels of a product, 20 more of a depthwise convolution of them, both joined."""
    (x,) = inputs_of((8, 28, 28, 64), dtype="float16")
    first = op.nn.relu(convolution(x, 20, 64, size=1))
    deep = op.nn.relu(op.nn.conv2d(first, constant(20, 3, 3, 1), padding=1, groups=20, **NHWC))
    mod = module_of([x], op.abs(op.concat([first, deep], axis=3)))
    assert "has 20 channels: the template" in decided(mod).refused[0].reason
    after = padded(mod)
    assert not decided(after).refused
    assert shapes(after, "nn.conv2d") == [(8, 28, 28, 24), (8, 28, 28, 24)]
    assert not shapes(after, "nn.pad")


def test_weights_known_at_run_time_have_no_zeros_between_channels() -> None:
    """Joined channels are cut out of their padding for them, and padded again behind."""
    x, w = inputs_of((4, 28, 28, 64), (32, 3, 3, 32), dtype="float16")
    joined = op.concat([convolution(x, 20, 64), convolution(x, 12, 64)], axis=3)
    mod = module_of([x, w], op.nn.conv2d(joined, w, **NHWC))
    after = padded(mod, always=True)
    assert shapes(after, "nn.conv2d")[-1] == (4, 26, 26, 32)
    assert not shapes(after, "nn.pad")


def test_regions_of_other_passes_are_left_alone() -> None:
    cut = PartitionCutlass(lookup("nvidia-a100"))(module_of(*_product(46)))
    assert len(decided(module_of(*_product(46))).taken) == 1
    assert not record(padded(cut, always=True))


def _product(depth: int) -> tuple[list[Any], Any]:
    (x,) = inputs_of((4096, depth), dtype="float16")
    return [x], op.matmul(x, constant(depth, 512))


@pytest.mark.parametrize(
    "function",
    [op.log, lambda x: op.divide(constant(1), x), lambda x: op.multiply(op.exp(x), constant(1, value=6e4))],
    ids=["log", "reciprocal", "large"],
)
def test_no_infinity_gets_into_the_padding(function: Any) -> None:
    """Zero weights times an infinite number is NaN: such an operator has no padding, and its result gets zeros."""
    (x,) = inputs_of((4, 28, 28, 64), dtype="float16")
    value = function(convolution(x, 44, 64))
    after = padded(module_of([x], convolution(value, 32, 44)), always=True)
    assert shapes(after, "nn.pad") == [(4, 28, 28, 48)]
    block = PaddableBlock(after["main"].body.blocks[0], _values(after))
    assert all(abs(number) < 1e5 for value in block.content for number in block.contents_of(value))


def _values(mod: tvm.IRModule) -> Any:
    from tvm_ext.byoc_cutlass.graph_values import GraphValues

    return GraphValues(mod, mod["main"])


def test_weights_with_odd_columns_are_stored_transposed() -> None:
    (x,) = inputs_of((64, 512), dtype="float16")
    after = padded(module_of([x], op.nn.softmax(op.matmul(x, constant(512, 1001)))))
    assert shapes(after, "permute_dims") == [(512, 1001)]
    (region,) = decided(after).taken
    assert [operand.order for operand in region.problem.operands] == ["row", "column"]
    assert {operand.alignment for operand in region.problem.operands} == {8}


def test_rows_of_odd_length_between_two_values() -> None:
    """Probabilities of 197 tokens times values: both operands get padding, and the product is taken."""
    probabilities, values = inputs_of((96, 197, 197), (96, 197, 64), dtype="float16")
    mod = module_of([probabilities, values], op.matmul(probabilities, values))
    assert "is read 1 element(s) at a time" in decided(mod).refused[0].reason
    after = padded(mod, always=True)
    assert shapes(after, "nn.pad") == [(96, 197, 200), (96, 200, 64)]
    assert not decided(after).refused


# ---- by the model ----------------------------------------------------------------------------------------------------


def table_3() -> list[tuple[str, tvm.IRModule]]:
    with WORKLOADS.open(encoding="utf-8") as file:
        rows = [row["shape"] for row in csv.DictReader(file) if row["table"] == "T3"]
    found = []
    for shape in rows:
        n, h, w, channels, filters = (
            int(re.search(rf"\b{key}=(\d+)", shape)[1]) for key in ("N", "H", "W", "IC", "OC")
        )  # type: ignore[index]
        (r, s), (top, left) = (map(int, re.search(rf"{key}=(\d+)[x,](\d+)", shape).groups()) for key in "kp")  # type: ignore[union-attr]
        (x,) = inputs_of((n, h, w, channels), dtype="float16")
        weight = constant(filters, r, s, channels)
        found.append((shape, module_of([x], op.nn.conv2d(x, weight, padding=[top, left] * 2, **NHWC))))
    return found


@pytest.mark.parametrize("device", ["nvidia-t4", "nvidia-a100"])
def test_table_3(device: str) -> None:
    """Every row is padded, and the product that CUTLASS gets is read 16 bytes at a time."""
    rows = table_3()
    assert len(rows) == 6
    for shape, mod in rows:
        after = padded(mod, device)
        (verdict,) = record(after)
        assert verdict.padded and verdict.source == "kernel", shape
        share = verdict.padding_us / (verdict.padded_us + verdict.padding_us)  # Table 3's cost
        assert 1.3 < verdict.speed_up < 2.2 and 0.01 < share < 0.3, shape
        (region,) = decided(after, device).taken
        assert {operand.alignment for operand in region.problem.operands} == {8}, shape


def test_what_does_not_pay_stays() -> None:
    (x,) = inputs_of((1, 4, 4, 46), dtype="float16")
    mod = module_of([x], convolution(x, 32, 46, size=1))
    (verdict,) = record(padded(mod))
    assert not verdict.padded and "padding costs" in verdict.reason
    assert verdict.depth == (46, 48)
    assert shapes(padded(mod, always=True), "nn.pad") == [(1, 4, 4, 48)]


@pytest.mark.parametrize(
    ("mod", "device"),
    [(chain((8, 28, 28, 64), 48), "nvidia-a100"), (chain(), "amd-mi50"), (chain(), "cpu-epyc-zen5")],
    ids=["aligned", "no matrix units", "CPU"],
)
def test_what_stays_as_it_is(mod: tvm.IRModule, device: str) -> None:
    after = padded(mod, device, always=True)
    assert not record(after)
    assert_structural_equal(after.without_attr(PADDING), mod)


# ---- the first layer -------------------------------------------------------------------------------------------------


def first_layers() -> tvm.IRModule:
    graph = GraphWriter("first")
    value = graph.input("x", (8, 3, 64, 64))
    for name, shape in (("a", (44, 3, 3, 3)), ("b", (32, 44, 3, 3)), ("c", (32, 32, 3, 3)), ("d", (24, 32, 3, 3))):
        weight = graph.constant(name, he_normal(0, name, shape, fan_in=shape[1] * 9))
        value = graph.op("Relu", graph.op("Conv", value, weight, kernel_shape=[3, 3], pads=[1] * 4))
    graph.output(value, (8, 24, 64, 64))
    return graph_of(to_half(graph.model()), "nvidia-a100")


def test_an_nchw_network_is_transposed_and_padded_by_one_kernel() -> None:
    """Three channels in NCHW become eight in NHWC in one kernel, and at the end is one transposition.

    Templates read through the first and store through the second, so that neither is left where they are taken.
    """
    after = padded(first_layers())
    assert not decided(after).refused
    windows = [region.problem.window for region in decided(after).taken]
    assert [bool(window and window.planes_of) for window in windows] == [True, False, False, False]
    assert [bool(window and window.stores_planes) for window in windows] == [False, False, False, True]
    kernels = _kernels(after)
    assert sum("transpose" in name and "pad" in name for name in kernels) == 1, kernels
    assert sum("transpose" in name for name in kernels) == 2, kernels
    assert not any("slice" in name for name in kernels), kernels


def _kernels(mod: tvm.IRModule) -> list[str]:
    """Names of the fused operators, which say what is in them."""
    _, target = device_for_target("llvm")
    with target:
        fused = tvm.transform.Sequential(operator_passes(target))(mod)
    return [gv.name_hint for gv, func in fused.functions_items() if isinstance(func, PrimFunc)]


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_runs() -> None:
    array = np.asarray([[1, 2, 3]])
    assert with_runs(array, 1, ((1, 3), (2, 2))).tolist() == [[1, 0, 0, 0, 2, 3, 0, 0]]
    assert with_runs(array, 0, ((1, 1),), 7).tolist() == [[1, 2, 3], [7, 7, 7]]
    assert with_runs(array, 1, ()) is array


def test_the_record_is_read_back() -> None:
    found = from_json(PaddingRecord, str(padded(chain()).attrs[PADDING]))
    assert from_json(PaddingRecord, to_json(found)) == found
    assert (found.device, found.alignment_bytes) == ("nvidia-a100", 16)
