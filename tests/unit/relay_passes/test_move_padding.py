"""MovePadding: which paddings the operator before stores into, which stay copies, and that the numbers stay right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx.helper import make_node
from tvm import te, topi

from tests.support.guarded_memory import build_guarded
from tests.support.small_models import onnx_model
from tests.unit.kernels import constructed, from_te, relative_error, run
from tvm_ext import relay
from tvm_ext._tvm import CALL_TIR, Call, IRModule, assert_structural_equal, relax
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import operator_pipeline, plan_build
from tvm_ext.relay_passes.move_padding import PADDED, UNPADDED, MovePadding, whole_operator
from tvm_ext.tir_passes.plan.cut_padding import cut_padding
from tvm_ext.tir_passes.plan.padded_stores import stores_padded

INSIDE = "between the borders of a padded tensor"
BLOCKED: dict[str, Any] = {"layout": "NCHWc", "enable_persistent_fusion": False}


@dataclass(frozen=True)
class Case:
    """Nodes from ``x`` to ``outputs``, and how many of their kernels store into a padded tensor."""

    nodes: tuple[onnx.NodeProto, ...]
    moved: int
    shape: tuple[Any, ...] = (1, 16, 9, 11)
    outputs: tuple[str, ...] = ("y",)

    def model(self) -> onnx.ModelProto:
        names = sorted({name for node in self.nodes for name in node.input if name.startswith(("w", "b"))})
        return onnx_model(self.nodes, {"x": list(self.shape)}, self.outputs, {name: _constant(name) for name in names})


def _constant(name: str) -> Any:
    """``w32x16x3x3a`` is weights of that shape, ``b32`` a bias."""
    shape = [int(size) for size in name[1:].rstrip("abc").split("x")]
    values = np.random.default_rng(sum(map(ord, name))).standard_normal(shape)
    return (values / np.sqrt(max(1, np.prod(shape[1:])))).astype("float32")


def conv(source: str, weight: str, result: str, **how: Any) -> onnx.NodeProto:
    filters = weight[1:].split("x", maxsplit=1)[0]
    return make_node("Conv", [source, weight, f"b{filters}"], [result], **how)


def relu(source: str, result: str) -> onnx.NodeProto:
    return make_node("Relu", [source], [result])


def pair(weight: str, *, second: str = "", **how: Any) -> tuple[onnx.NodeProto, ...]:
    """A 1x1 convolution with its ReLU, and a convolution behind it."""
    return conv("x", "w32x16x1x1", "a"), relu("a", "r"), conv("r", weight, "y", **how)


KEEP: dict[str, Any] = {"pads": [1, 1, 1, 1]}
POOL: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2]}

CASES = {
    "3x3": Case(pair("w16x32x3x3", **KEEP), 1),
    "each side otherwise, strides, dilation": Case(
        pair("w16x32x3x3", pads=[0, 2, 3, 1], strides=[2, 1], dilations=[1, 2]), 1
    ),
    "rows alone": Case(pair("w16x32x3x1", pads=[1, 0, 1, 0]), 1),
    "columns alone, behind": Case(pair("w16x32x1x3", pads=[0, 0, 0, 2]), 1),
    "groups": Case(pair("w32x16x3x3", group=2, **KEEP), 1),
    "depthwise, which leaves out what meets padding": Case(pair("w32x1x3x3", group=32, **KEEP), 0),
    "a batch": Case(pair("w16x32x3x3", **KEEP), 1, shape=(3, 16, 7, 7)),
    "one pixel, blocked by a view": Case(pair("w16x32x3x3", **KEEP), 0, shape=(1, 16, 1, 1)),
    "one row": Case(pair("w16x32x3x3", **KEEP), 1, shape=(1, 16, 1, 13)),
    "no padding": Case(pair("w16x32x3x3"), 0),
    "three in a row": Case(
        (
            conv("x", "w16x16x3x3a", "a", **KEEP),
            relu("a", "r"),
            conv("r", "w16x16x3x3b", "c", pads=[2, 2, 2, 2]),
            conv("c", "w16x16x3x3c", "y", **KEEP),
        ),
        2,
    ),
    "behind a residual and a sigmoid": Case(
        (
            conv("x", "w16x16x3x3a", "a", **KEEP),
            make_node("Add", ["a", "x"], ["s"]),
            make_node("Sigmoid", ["s"], ["g"]),
            make_node("Mul", ["s", "g"], ["r"]),
            conv("r", "w16x16x3x3b", "y", **KEEP),
        ),
        1,
    ),
    "a pool, which leaves it out, too": Case(
        (conv("x", "w32x16x1x1", "a"), make_node("MaxPool", ["a"], ["y"], **KEEP, **POOL)), 0
    ),
    "behind a depthwise convolution": Case(
        (*pair("w32x1x3x3", group=32, **KEEP), conv("y", "w16x32x3x3", "z", **KEEP)), 1, outputs=("z",)
    ),
    "behind a pool": Case(
        (
            conv("x", "w32x16x1x1", "a"),
            make_node("MaxPool", ["a"], ["p"], **POOL),
            conv("p", "w16x32x3x3", "y", **KEEP),
        ),
        1,
    ),
    "an average that counts its padding": Case(
        (
            conv("x", "w32x16x1x1", "a"),
            make_node("AveragePool", ["a"], ["p"], count_include_pad=1, **KEEP, **POOL),
            conv("p", "w16x32x3x3", "y", **KEEP),
        ),
        1,
    ),
    "read elsewhere": Case((*pair("w16x32x3x3", **KEEP), make_node("Neg", ["r"], ["z"])), 0, outputs=("y", "z")),
    "an output": Case(pair("w16x32x3x3", **KEEP), 0, outputs=("y", "r")),
    "two readers": Case(
        (
            *pair("w16x32x3x3", **KEEP)[:2],
            conv("r", "w16x32x3x3a", "p", **KEEP),
            conv("r", "w16x32x3x3b", "q", **KEEP),
            make_node("Add", ["p", "q"], ["y"]),
        ),
        0,
    ),
    "the first input": Case((conv("x", "w16x16x3x3a", "y", **KEEP),), 0),
    "in one dimension": Case(
        (make_node("Conv", ["x", "w32x16x1"], ["a"]), make_node("Conv", ["a", "w16x32x3"], ["y"], pads=[1, 1])),
        0,
        shape=(2, 16, 21),
    ),
    "in three dimensions": Case(
        (
            make_node("Conv", ["x", "w32x16x1x1x1"], ["a"]),
            make_node("Conv", ["a", "w16x32x3x3x3"], ["y"], pads=[1] * 6),
        ),
        0,
        shape=(1, 16, 3, 4, 5),
    ),
}


def _expected(model: onnx.ModelProto, x: Any) -> Sequence[Any]:
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": x}))


def check(case: Case, x_shape: tuple[int, ...], *, guarded: bool = True, **options: Any) -> Any:
    """Build and run; the library's report."""
    model = case.model()
    mod, params = relay.frontend.from_onnx(model)
    build = build_guarded if guarded else relay.build
    library = build(mod, "llvm", params=params, **{**BLOCKED, **options})
    module = relay.GraphModule(library["default"](tvm.cpu()))
    for seed in (0, 1):
        x = np.random.default_rng(seed).standard_normal(x_shape).astype("float32")
        module.run(x=x)
        for index, wanted in enumerate(_expected(model, x)):
            assert relative_error(module.get_output(index).numpy(), wanted) < 1e-5
    return library.report


def moved(report: Any) -> int:
    return sum(INSIDE in operator.choice.reason for operator in report.operators)


EVERY_DAY = ("each side otherwise, strides, dilation", "behind a pool")
"""What is computed by every run of the tests; the others where marked slow."""


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_paddings_are_stored_into_where_nothing_else_reads_the_tensor(name: str) -> None:
    mod = operators(CASES[name])
    names = [call.args[0].name_hint for block in mod["main"].body.blocks for call in _calls(block)]
    assert sum(PADDED in name for name in names) == sum(UNPADDED in name for name in names) == CASES[name].moved


def _calls(block: Any) -> list[Any]:
    return [item.value for item in block.bindings if isinstance(item.value, Call) and item.value.op == CALL_TIR]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "name", [item if item in EVERY_DAY else pytest.param(item, marks=pytest.mark.slow) for item in CASES]
)
def test_what_is_stored_between_borders_is_right(name: str) -> None:
    assert moved(check(CASES[name], CASES[name].shape)) == CASES[name].moved


@pytest.mark.parametrize(
    "options",
    [{"enable_rammer": True}, pytest.param({"num_threads": 1, "layout": "NCHW"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_other_builds_are_right(options: dict[str, Any]) -> None:
    report = check(CASES["three in a row"], (1, 16, 9, 11), guarded=False, **options)
    assert moved(report) == (0 if "layout" in options else 2)


# --- the pass --------------------------------------------------------------------------------------------------------
def operators(case: Case, **options: Any) -> IRModule:
    """The module of one unscheduled function for each operator, for a CPU that was written down."""
    mod, params = relay.frontend.from_onnx(case.model())
    settings = {**BLOCKED, "device": "cpu-cascade-lake", **options}
    plan = plan_build("llvm", BuildOptions(**settings))
    with plan.target, tvm.transform.PassContext(config={"testing.immutable_module": True}):
        return operator_pipeline(plan.target, plan.device, plan.options)(relay.prepare(mod, params))


def test_layers_that_repeat_share_their_functions() -> None:
    weights = [f"w16x16x3x3{letter}" for letter in "abcabc"]
    nodes = tuple(conv("x" if i == 0 else f"t{i}", w, f"t{i + 1}", **KEEP) for i, w in enumerate(weights[:5]))
    mod = operators(Case((*nodes, conv("t5", weights[5], "y", **KEEP)), 5, shape=(1, 16, 8, 8)))
    names = [gv.name_hint for gv, func in mod.functions_items() if not isinstance(func, relax.Function)]
    # The first reads and the last writes NCHW; the four between are one function.
    assert sum(name.startswith("fused_conv2d") for name in names) == 3


@pytest.mark.parametrize("name", ["conv_padded", "conv_unpadded", "conv_unpadded_1_padded2", "conv"])
def test_a_moved_operator_is_known_by_what_it_was(name: str) -> None:
    assert whole_operator(name) == "conv"


def test_a_module_without_such_paddings_stays() -> None:
    mod = operators(CASES["read elsewhere"])
    assert_structural_equal(MovePadding(cut_padding, stores_padded)(mod), mod)


def test_what_its_kernel_would_copy_stays_with_its_reader() -> None:
    """No kernel stores into a padding here: everything stays, and nothing is left behind."""
    mod, params = relay.frontend.from_onnx(CASES["3x3"].model())
    plan = plan_build("llvm", BuildOptions(**{**BLOCKED, "device": "cpu-cascade-lake", "enable_roller": True}))
    with plan.target:
        own = operator_pipeline(plan.target, plan.device, plan.options)
        passes = [item for item in own.passes if not item.info.name.endswith("MovePadding")]
        before = tvm.transform.Sequential(passes)(relay.prepare(mod, params))
    assert_structural_equal(MovePadding(cut_padding, lambda _: False)(before), before)
    assert len(MovePadding(cut_padding, stores_padded)(before).functions) == len(before.functions)


# --- kernels ---------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("before", "after", "inside", "dtype", "value"),
    [
        ((2, 0), (1, 0), True, "float32", -np.inf),
        ((0, 0), (3, 0), True, "float64", 2.5),
        ((1, 0), (0, 0), True, "int32", 7),
        ((0, 1), (0, 2), False, "float32", 0.0),
    ],
)
def test_a_product_is_stored_between_borders(
    before: tuple[int, int], after: tuple[int, int], inside: bool, dtype: str, value: float
) -> None:
    """13 x 37 elements, through an epilogue that reads another tensor: rows may be padded, columns not."""
    shapes = ((13, 9), (9, 37), (13, 37))
    x, w, b = (te.placeholder(shape, dtype, name) for shape, name in zip(shapes, "xwb", strict=True))
    added = topi.nn.relu(topi.add(topi.nn.matmul(x, w), b))
    func = from_te(x, w, b, topi.nn.pad(added, list(before), list(after), tvm.tirx.const(value, dtype)))
    kernel, choice = constructed(func, device=lookup("cpu-cascade-lake-avx2"))
    assert (INSIDE in choice.reason) == inside
    arrays = [np.random.default_rng(0).integers(-3, 4, shape).astype(dtype) for shape in shapes]
    wide = np.maximum(arrays[0].astype("float64") @ arrays[1] + arrays[2], 0)
    expected = np.pad(wide, list(zip(before, after, strict=True)), constant_values=value)
    np.testing.assert_array_equal(run(kernel, choice, arrays, expected.shape, dtype), expected.astype(dtype))
