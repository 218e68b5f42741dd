"""CheckValues: what is only known at run time neither crashes nor answers wrongly without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from tvm import relax

from tests.support.guarded_memory import build_guarded
from tests.support.small_models import onnx_model
from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext._tvm import assert_structural_equal
from tvm_ext.errors import DivisionByZeroError, IndexRangeError, TvmExtError
from tvm_ext.relay_passes.check_values import CheckValues

TABLE = np.arange(15, dtype="float32").reshape(5, 3)
ROWS = -TABLE[:2] - 1
op = relax.op


def module(build: Callable[..., Any], *inputs: np.ndarray[Any, Any]) -> tvm.IRModule:
    """``main`` with a parameter x0, x1, ... like each of ``inputs``."""
    params = [relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype))) for i, a in enumerate(inputs)]
    return module_of(params, build(*params))


def array(values: Any, dtype: str = "int64") -> np.ndarray[Any, Any]:
    return np.array(values, dtype)


def first(values: np.ndarray[Any, Any]) -> Any:
    return relax.const(values, str(values.dtype))


# Operator, its other inputs, indices that ONNX allows, the result for them, indices with one just outside.
CASES: dict[str, tuple[Callable[..., Any], list[Any], Any, Any, list[Any]]] = {
    "Gather": (
        lambda x, i: op.take(x, i, axis=0), [TABLE], [0, -1, 4, -5], TABLE[[0, -1, 4, -5]],
        [[0, 5, 0, 0], [0, 0, 0, -6]],
    ),
    "GatherElements": (
        lambda x, i: op.gather_elements(x, i, axis=1), [TABLE], [[0, -1]], [[0, 2]], [[[0, 3]], [[-4, 0]]],
    ),
    "GatherND": (
        lambda x, i: op.gather_nd(x, i), [TABLE], [[0, 0], [-1, -3]], [0, 12], [[[5, 0], [0, 0]], [[0, 0], [0, -4]]],
    ),
    "ScatterElements": (
        lambda x, u, i: op.scatter_elements(x, i, u, axis=0),
        [TABLE, ROWS[:, :1]], [[-1], [0]], np.vstack([[[-4.0, 1, 2]], TABLE[1:4], [[-1.0, 13, 14]]]),
        [[[5], [0]], [[0], [-6]]],
    ),
    "ScatterND": (
        lambda x, u, i: op.scatter_nd(x, i, u),
        [TABLE, ROWS], [[-1], [0]], np.vstack([ROWS[1:], TABLE[1:4], ROWS[:1]]), [[[5], [1]], [[1], [-6]]],
    ),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("bounds", ["error", "wrap"])
@pytest.mark.parametrize("name", CASES)
def test_indices(name: str, bounds: str) -> None:
    """Allowed ones are right both ways; one outside is an error that names the operator, or is taken modulo."""
    build, others, good, expected, bad = CASES[name]
    inputs = [*others, array(good)]
    library = relay.build(module(build, *inputs), "llvm", bounds=bounds)
    run = relay.GraphModule(library)
    run.run(**{f"x{i}": value for i, value in enumerate(inputs)})
    np.testing.assert_array_equal(run.get_output(0).numpy(), expected)
    for indices in bad:
        values = {f"x{len(others)}": array(indices)}
        if bounds == "wrap":
            run.run(**values)
            continue
        with pytest.raises(IndexRangeError, match=rf"{name} on x0 \(5x3 float32\) by x{len(others)}.*is outside \["):
            run.run(**values)
    run.run(**{f"x{len(others)}": array(good)})  # an error leaves the module as it was
    np.testing.assert_array_equal(run.get_output(0).numpy(), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("wild", [2**40, -(2**40), 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("name", ["Gather", "GatherND", "ScatterND"])
def test_wild_indices_never_leave_a_buffer(name: str, wild: int) -> None:
    build, others, good, _, _ = CASES[name]
    indices = array(good)
    indices.ravel()[0] = wild
    inputs = [*others, indices]
    library = build_guarded(module(build, *inputs), bounds="wrap")
    library.vm()["main"](*[tvm.runtime.tensor(value) for value in inputs])


@pytest.mark.parametrize("name", CASES)
def test_constant_indices_are_looked_at_by_the_build(name: str) -> None:
    build, others, good, expected, bad = CASES[name]
    library = relay.build(module(lambda *x: build(*x, first(array(good))), *others), "llvm")
    result = library.vm()["main"](*[tvm.runtime.tensor(value) for value in others]).numpy()
    np.testing.assert_array_equal(result, expected)
    assert "check" not in library.report.path_counts()
    with pytest.raises(IndexRangeError, match=f"{name} on x0"):
        relay.build(module(lambda *x: build(*x, first(array(bad[0]))), *others), "llvm")


def test_indices_of_few_bits_reach_long_axes() -> None:
    long = np.arange(300, dtype="float32")
    build = lambda x, i: op.take(x, i, axis=0)  # noqa: E731
    indices = array([-1, 127, -128], "int8")
    result = relay.build(module(build, long, indices), "llvm").vm()["main"](long, indices).numpy()
    np.testing.assert_array_equal(result, [299, 127, 172])


def test_an_exported_library_raises_too(tmp_path: Path) -> None:
    build, others, good, _, bad = CASES["Gather"]
    relay.build(module(build, *others, array(good)), "llvm").export_library(tmp_path / "m.so")
    run = relay.GraphModule(relay.load(tmp_path / "m.so"))
    with pytest.raises(IndexRangeError, match="Gather"):
        run.run(x0=TABLE, x1=array(bad[0]))
    plain = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "m.so")), tvm.cpu())
    with pytest.raises(IndexRangeError, match="Gather"):
        plain["main"](tvm.runtime.tensor(TABLE), tvm.runtime.tensor(array(bad[0])))


def test_an_axis_of_nothing_has_no_indices() -> None:
    with pytest.raises(IndexRangeError, match="no index is inside an axis of extent 0"):
        relay.build(module(lambda x, i: op.take(x, i, axis=0), TABLE[:0], array([0])), "llvm")


def test_modes_that_say_what_becomes_of_an_index_stay(immutable_modules: None) -> None:
    for mode in ("clip", "wrap"):
        before = module(lambda x, i, mode=mode: op.take(x, i, axis=0, mode=mode), TABLE, array([0]))
        assert_structural_equal(CheckValues("error")(before), before)


def test_extents_and_indices_of_run_time_are_checked() -> None:
    """An index beyond the rows of this run is an error."""
    rows, count = tvm.tirx.Var("rows", "int64"), tvm.tirx.Var("count", "int64")
    x, i = relax.Var("x0", relax.TensorType([rows, 3], "float32")), relax.Var("x1", relax.TensorType([count], "int64"))
    checked = tvm.compile(CheckValues("error")(module_of([x, i], op.take(x, i, axis=0))), "llvm")
    machine = tvm.relax.VirtualMachine(checked, tvm.cpu())
    run = lambda data, indices: machine["main"](data, array(indices)).numpy()  # noqa: E731
    np.testing.assert_array_equal(run(TABLE, [0, -5, 4]), TABLE[[0, 0, 4]])
    for data, indices in ((TABLE, [0, 5]), (TABLE[:2], [-3]), (TABLE[:0], [0])):
        with pytest.raises(IndexRangeError, match=r"Gather on x0 \(rowsx3 float32\) by x1 .*: an index is outside"):
            run(data, indices)


def test_gpus_wrap() -> None:
    kernels = relay.build(module(CASES["Gather"][0], TABLE, array([0])), "nvidia-a100").report
    assert "check" not in kernels.path_counts()


# --- division -----------------------------------------------------------------------------------------------------
DIVISIONS = {"Div": op.divide, "Mod": op.mod, "floor_mod": op.floor_mod}


def expected_of(name: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In Python's integers, wrapped to the type."""
    results = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        results.append(quotient if name == "Div" else x - quotient * y if name == "Mod" else x % y)
    return np.array(results, object).astype("O") % 2 ** (8 * a.itemsize)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
@pytest.mark.parametrize("name", DIVISIONS)
def test_division(name: str, dtype: str) -> None:
    signed = dtype.startswith("int")
    low = int(np.iinfo(dtype).min)
    a, b = array([low, 7, 100, 5], dtype), array([-1, 2, -7, -2] if signed else [1, 2, 7, 2], dtype)
    machine = relay.build(module(DIVISIONS[name], a, b), "llvm").vm()["main"]
    result = machine(tvm.runtime.tensor(a), tvm.runtime.tensor(b)).numpy()
    np.testing.assert_array_equal(result.astype("O") % 2 ** (8 * a.itemsize), expected_of(name, a, b))
    b[2] = 0
    with pytest.raises(DivisionByZeroError, match=r"(Div|Mod) of x0 .* by x1 .*: a divisor is 0"):
        machine(tvm.runtime.tensor(a), tvm.runtime.tensor(b))


@pytest.mark.parametrize("name", DIVISIONS)
def test_division_at_ones_own_risk(name: str) -> None:
    a, b = array([-(2**31), 7, 100, 5], "int32"), array([-1, 0, -7, 0], "int32")
    machine = relay.build(module(DIVISIONS[name], a, b), "llvm", bounds="wrap").vm()["main"]
    result = machine(tvm.runtime.tensor(a), tvm.runtime.tensor(b)).numpy()
    assert result[1] == result[3] == 0


def test_constant_divisors() -> None:
    x = array([-(2**31), 7], "int32")
    plain = module(lambda x: op.divide(x, first(array([3, 2], "int32"))), x)
    assert_structural_equal(CheckValues("error")(plain), plain)
    ones = relay.build(module(lambda x: op.divide(x, first(array([-1, 2], "int32"))), x), "llvm")
    np.testing.assert_array_equal(ones.vm()["main"](tvm.runtime.tensor(x)).numpy(), [-(2**31), 3])
    with pytest.raises(DivisionByZeroError, match="Div of x0"):
        relay.build(module(lambda x: op.divide(x, first(array([3, 0], "int32"))), x), "llvm")


@pytest.mark.parametrize("bounds", ["error", "wrap"])
def test_slices_in_steps_of_nothing(bounds: str) -> None:
    """The number of elements is divided by the step: by 0 that ended the process."""
    x, begin, end = TABLE, array([0] * TABLE.ndim), array(TABLE.shape)
    library = relay.build(module(op.dynamic_strided_slice, x, begin, end, begin + 1), "llvm", bounds=bounds)
    run = lambda steps: library.vm()["main"](*map(tvm.runtime.tensor, (x, begin, end, steps))).numpy()  # noqa: E731
    np.testing.assert_array_equal(run(begin + 2), x[tuple(slice(None, None, 2) for _ in x.shape)])
    if bounds == "wrap":
        np.testing.assert_array_equal(run(begin), x)
    else:
        with pytest.raises(DivisionByZeroError, match="Slice of x0"):
            run(begin)


@pytest.mark.parametrize(("name", "expected"), [("left_shift", [2, 0, 0]), ("right_shift", [0, 0, 0])])
def test_shifts_by_the_width_or_more(name: str, expected: list[int]) -> None:
    x, by = array([1, 1, 255], "uint8"), array([1, 8, 200], "uint8")
    machine = relay.build(module(getattr(op, name), x, by), "llvm").vm()["main"]
    np.testing.assert_array_equal(machine(tvm.runtime.tensor(x), tvm.runtime.tensor(by)).numpy(), expected)


def test_floats_are_divided_as_ever(immutable_modules: None) -> None:
    before = module(op.divide, TABLE, TABLE)
    assert_structural_equal(CheckValues("error")(before), before)
    assert issubclass(DivisionByZeroError, TvmExtError)


@pytest.mark.parametrize("name", ["Gather", "GatherElements", "GatherND"])
def test_an_index_of_a_model_counts_from_the_end_once(name: str) -> None:
    """The importer adds the extent to negative indices: of 5 rows -6 becomes -1, which is no row either."""
    indices = {"Gather": (2,), "GatherElements": (2, 3), "GatherND": (2, 1)}[name]
    proto = onnx_model([helper.make_node(name, ["x", "i"], ["y"])], {"x": (5, 3)})
    proto.graph.input.append(helper.make_tensor_value_info("i", onnx.TensorProto.INT64, indices))
    mod, params = relay.frontend.from_onnx(proto)
    library = relay.build(mod, "llvm", params=params)
    assert library.report.operators[0].name.startswith("check"), "the importer's choice is left out"
    run = relay.GraphModule(library)
    x = np.arange(15, dtype="float32").reshape(5, 3)
    run.run(x=x, i=np.full(indices, -5))
    np.testing.assert_array_equal(np.unique(run.get_output(0).numpy()), [0, 1, 2])
    with pytest.raises(IndexRangeError, match=rf"{name} on x .*is outside \[-5, 4\]"):
        run.run(x=x, i=np.full(indices, -6))


@pytest.mark.parametrize(("extent", "axis", "checks"), [(5, 1, 0), (4, -1, 0), (6, 1, 1), (5, 0, 0), (5, None, 1)])
def test_the_place_of_an_extremum_is_inside(extent: int, axis: int | None, checks: int) -> None:
    """Of 2 x 5 scores the largest of a row is among 5 words, and so is the larger of a column; of all 10 it may not."""
    scores = np.random.default_rng(0).standard_normal((2, extent)).astype("float32")
    mod = module(
        lambda x: op.take(first(TABLE), op.squeeze(op.argmax(x, axis=axis, keepdims=True)), axis=0, mode="fast"), scores
    )
    made = CheckValues("error")(relax.transform.Normalize()(mod))
    assert sum(gv.name_hint.startswith("check") for gv in made.get_global_vars()) == checks
    run = relay.build(mod, "llvm", kernel_cache="off").vm()["main"]
    if not checks:
        np.testing.assert_array_equal(run(scores).numpy(), TABLE[scores.argmax(axis=axis)])


def test_roi_align_looks_at_no_image_that_is_not_there() -> None:
    node = helper.make_node("RoiAlign", ["x", "boxes", "images"], ["y"], output_height=2, output_width=2)
    proto = onnx_model([node], {"x": (2, 1, 4, 4), "boxes": (2, 4), "images": (2,)}, ("y",), opset=22)
    proto.graph.input[2].type.tensor_type.elem_type = onnx.TensorProto.INT64
    mod, params = relay.frontend.from_onnx(proto)
    module = relay.GraphModule(relay.build(mod, "llvm", params=params))
    inputs = {"x": np.arange(32, dtype="float32").reshape(2, 1, 4, 4), "boxes": np.float32([[0, 0, 3, 3]] * 2)}
    module.run(**inputs, images=array([0, 1]))
    first_image, second_image = module.get_output(0).numpy()
    np.testing.assert_allclose(second_image - first_image, 16, rtol=1e-5)
    with pytest.raises(IndexRangeError, match=r"by images \(2 int64\): an index is outside"):
        module.run(**inputs, images=array([0, 2_000_000]))
