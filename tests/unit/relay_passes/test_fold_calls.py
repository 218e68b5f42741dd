"""Calls on constants are computed at build, by NumPy, to what stock TVM's kernels compute; within limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.quick_target import UNOPTIMISED
from tests.support.small_modules import module_of
from tvm_ext._tvm import Constant
from tvm_ext.relay_passes.fold_calls import FoldCalls
from tvm_ext.relay_passes.legalize_floats import legalize_operators
from tvm_ext.support.limits import limited

op = relax.op
Array = np.ndarray[Any, Any]


def constant(array: Array) -> Any:
    return relax.const(np.asarray(array), str(np.asarray(array).dtype))


def module(make: Callable[..., Any], *arrays: Array) -> tvm.IRModule:
    return module_of([], make(*map(constant, arrays)))


def values_in(mod: tvm.IRModule) -> list[Array]:
    """The constants that the result of ``mod`` consists of; empty where it still calls something."""
    values = {binding.var: binding.value for block in mod["main"].body.blocks for binding in block.bindings}
    result = mod["main"].body.body
    while result in values:
        result = values[result]
    fields = list(result.fields) if isinstance(result, relax.Tuple) else [result]
    fields = [values.get(field, field) for field in fields]
    return [field.value.numpy() for field in fields] if all(isinstance(field, Constant) for field in fields) else []


def folded(make: Callable[..., Any], *arrays: Array) -> list[Array]:
    return values_in(FoldCalls()(module(make, *arrays)))


def run_by_stock(cases: Mapping[str, Callable[..., Any]], array: Array) -> dict[str, list[Array]]:
    """What stock TVM's kernels compute, all of them built as one module."""
    x = relax.Var("x", relax.TensorType(array.shape, str(array.dtype)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        results = relax.Tuple([builder.emit(make(x)) for make in cases.values()])
        builder.emit_func_output(builder.emit(results))
    built = tvm.compile(legalize_operators()(builder.get()), UNOPTIMISED)
    values = relax.VirtualMachine(built, tvm.cpu())["main"](tvm.runtime.tensor(array))
    lists = [[value] if hasattr(value, "numpy") else list(value) for value in values]
    return {name: [item.numpy() for item in items] for name, items in zip(cases, lists, strict=True)}


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.startswith(("int", "uint")):
        limit = np.iinfo(dtype)
        return rng.integers(limit.min, limit.max, shape, dtype=dtype, endpoint=True)
    return rng.normal(0, 3, shape).astype(dtype)


FLOATS: dict[str, Callable[..., Any]] = {
    "add": lambda x: op.add(x, op.multiply(x, x)),
    "divide": lambda x: op.divide(x, op.add(op.abs(x), constant(np.asarray(1, str(x.ty.dtype))))),
    "functions": lambda x: op.add(op.sin(x), op.add(op.tanh(x), op.sigmoid(x))),
    "exp log": lambda x: op.log(op.add(op.exp(x), constant(np.asarray(1, str(x.ty.dtype))))),
    "erf": op.erf,
    "round halves": lambda x: op.round(op.multiply(op.floor(x), constant(np.asarray(0.5, str(x.ty.dtype))))),
    "floor ceil trunc sign": lambda x: op.add(op.add(op.floor(x), op.ceil(x)), op.sign(x)),
    "sqrt of negative": op.sqrt,
    "isnan": lambda x: op.isnan(op.sqrt(x)),
    "max": lambda x: op.maximum(x, op.negative(x)),
    "clip": lambda x: op.clip(x, -1, 1),
    "to integer": lambda x: op.astype(op.floor(x), "int32"),
    "softmax": lambda x: op.nn.softmax(x, axis=-1),
    "mean": lambda x: op.mean(x, axis=[0, 2]),
    "variance": lambda x: op.variance(x, axis=[1], keepdims=True),
    "prod": lambda x: op.prod(x, axis=[-1]),
    "max over all": op.max,
    "argmax": lambda x: op.argmax(x, axis=1),
    "self product": lambda x: op.matmul(x, op.permute_dims(x, [0, 2, 1])),
}

ANY: dict[str, Callable[..., Any]] = {
    "add": lambda x: op.add(x, x),
    "multiply": lambda x: op.multiply(x, op.subtract(x, op.flip(x, 0))),
    "compare": lambda x: op.where(op.less(x, op.flip(x, 1)), x, op.negative(x)),
    "minimum": lambda x: op.minimum(x, op.flip(x, 2)),
    "sum": lambda x: op.sum(x, axis=[1]),
    "cast": lambda x: op.astype(op.astype(x, "int8"), "int64"),
    "narrow": lambda x: op.astype(x, "float16"),
}

MOVES: dict[str, Callable[..., Any]] = {
    "transpose": lambda x: op.permute_dims(x, [2, 0, 1]),
    "reshape": lambda x: op.reshape(x, (10, 12)),
    "expand": lambda x: op.expand_dims(x, [0, 2]),
    "slice": lambda x: op.strided_slice(x, [0, 2], [3, 1], [0, 5], [-1, 2]),
    "split": lambda x: op.split(x, 2, axis=1),
    "unequal split": lambda x: op.split(x, [1, 3], axis=2),
    "one part of a split": lambda x: op.split(x, 2, axis=1)[1],
    "concat": lambda x: op.concat([x, op.flip(x, 0), x], axis=2),
    "stack": lambda x: op.stack([x, x], axis=1),
    "tile": lambda x: op.tile(x, (1, 2, 1)),
    "repeat": lambda x: op.repeat(x, 3, 1),
    "pad": lambda x: op.nn.pad(x, (0, 0, 1, 2, 0, 1)),
    "broadcast": lambda x: op.broadcast_to(op.sum(x, axis=[0], keepdims=True), (4, 6, 5)),
    "tril": lambda x: op.tril(x, -1),
    "take": lambda x: op.take(x, constant(np.array([[1, 3], [0, 2]])), axis=0, mode="fast"),
    "take modulo": lambda x: op.take(x, constant(np.array([-1, 9])), axis=2, mode="wrap"),
    "take clipped": lambda x: op.take(x, constant(np.array([-1, 9])), axis=1, mode="clip"),
    "gather": lambda x: op.gather_elements(x, constant(np.array([[[0, 1], [3, 2]]])), axis=0),
    "gather tuples": lambda x: op.gather_nd(x, constant(np.array([[0, 1], [3, 2]]))),
    "scatter": lambda x: op.scatter_elements(
        x, constant(np.tile(np.array([[[2]], [[-4]]]), (1, 6, 5))), op.strided_slice(x, [0], [1], [3]), axis=0),
    "scatter tuples": lambda x: op.scatter_nd(x, constant(np.array([[0], [3]])), op.strided_slice(x, [0], [1], [3])),
    "one_hot": lambda x: op.one_hot(
        constant(np.array([1, 0])), relax.prim_value(1), relax.prim_value(0), 4),
}  # fmt: skip


def assert_same(cases: Mapping[str, Callable[..., Any]], array: Array, tolerance: float = 0.0) -> None:
    for name, theirs in run_by_stock(cases, array).items():
        ours = folded(cases[name], array)
        assert [(item.dtype, item.shape) for item in ours] == [(item.dtype, item.shape) for item in theirs], name
        for actual, expected in zip(ours, theirs, strict=True):
            if actual.dtype.kind == "f":
                np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=name)
            else:
                np.testing.assert_array_equal(actual, expected, err_msg=name)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_floats_are_those_of_stock_kernels(rng: np.random.Generator, dtype: str) -> None:
    tolerance = {"float16": 2e-3, "float32": 2e-6}[dtype]
    assert_same(FLOATS, draw(rng, dtype, 4, 5, 6), tolerance)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
def test_integers_wrap_as_in_stock_kernels(rng: np.random.Generator, dtype: str) -> None:
    cases = {name: make for name, make in ANY.items() if not (name == "compare" and dtype == "uint8")}
    assert_same(cases, draw(rng, dtype, 4, 5, 6), 1e-3)


def test_elements_move_as_in_stock_kernels(rng: np.random.Generator) -> None:
    assert_same(MOVES, draw(rng, "float32", 4, 6, 5))


def test_windows_and_products_are_those_of_stock_kernels(rng: np.random.Generator) -> None:
    weight = constant(draw(rng, "float32", 6, 4, 3, 3))
    grouped = constant(draw(rng, "float32", 4, 1, 3, 3))
    other = constant(draw(rng, "float32", 2, 9, 7))
    cases: dict[str, Callable[..., Any]] = {
        "convolution": lambda x: op.nn.conv2d(x, weight, strides=2, padding=1),
        "grouped": lambda x: op.nn.conv2d(x, grouped, groups=4, dilation=2),
        "maximum pool": lambda x: op.nn.max_pool2d(x, (3, 3), padding=1),
        "mean pool": lambda x: op.nn.avg_pool2d(x, (2, 2)),
        "batched product": lambda x: op.matmul(op.reshape(x, (2, 4, 8, 9)), op.expand_dims(other, 1)),
    }
    assert_same(cases, draw(rng, "float32", 2, 4, 8, 9), 1e-4)


def test_a_maximum_passes_nan_on_as_our_kernels_do() -> None:
    (result,) = folded(lambda x: op.maximum(x, op.multiply(x, x)), np.array([2, np.nan, -3], "f4"))
    np.testing.assert_array_equal(result, np.array([4, np.nan, 9], "f4"))


def test_integer_products_are_exact(rng: np.random.Generator) -> None:
    a, b = draw(rng, "int8", 30, 200), draw(rng, "int8", 200, 40)
    (result,) = folded(lambda x, y: op.matmul(x, y, out_dtype="int32"), a, b)
    np.testing.assert_array_equal(result, a.astype("i4") @ b.astype("i4"))
    wide = draw(rng, "int64", 20, 30)  # whose products wrap around: no float holds them
    (result,) = folded(op.matmul, wide, wide.T.copy())
    np.testing.assert_array_equal(result, wide @ wide.T)


def test_scatters_combine(rng: np.random.Generator) -> None:
    data, updates = draw(rng, "int32", 5), draw(rng, "int32", 4)
    indices = np.array([0, -1, 0, 2])
    for reduction, function in {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}.items():
        expected = data.copy()
        function.at(expected, indices, updates)
        (actual,) = folded(
            lambda x, i, u, how=reduction: op.scatter_elements(x, i, u, reduction=how), data, indices, updates
        )
        np.testing.assert_array_equal(actual, expected)
    (last,) = folded(op.scatter_elements, data, indices, updates)
    assert list(last[[0, 4, 2]]) == list(updates[[2, 1, 3]])


def test_running_sums(rng: np.random.Generator) -> None:
    values = rng.integers(-9, 9, (3, 4))
    (result,) = folded(lambda x: op.cumsum(x, axis=1), values)
    np.testing.assert_array_equal(result, values.cumsum(1))


def test_shapes_of_variables_are_known() -> None:
    x = relax.Var("x", relax.TensorType((2, 7), "float32"))
    shape = op.shape_to_tensor(op.shape_of(x))
    (value,) = values_in(FoldCalls()(module_of([x], op.take(shape, constant(np.array([1])), axis=0, mode="fast"))))
    assert value.dtype == np.int64
    assert list(value) == [7]


REFUSED: dict[str, tuple[Callable[..., Any], Array]] = {
    "an index outside": (lambda x: op.take(x, constant(np.array([4])), axis=0, mode="fast"), np.zeros((4, 2), "f4")),
    "a division by 0": (lambda x: op.floor_divide(x, constant(np.array([0, 1]))), np.ones(2, "i8")),
    "a number that no integer is": (lambda x: op.astype(x, "int32"), np.array([np.nan, 1e30], "f4")),
    "an unknown type": (lambda x: op.add(op.astype(x, "bfloat16"), op.astype(x, "bfloat16")), np.ones(3, "f4")),
    "sorting": (lambda x: op.sort(x), np.ones(3, "f4")),
    "what several calls compute": (
        lambda x: op.vision.all_class_non_max_suppression(
            x,
            constant(np.ones((1, 1, 3), "f4")),
            *map(constant, (np.array(2), np.array(0.5, "f4"), np.array(0.1, "f4"))),
        ),
        np.ones((1, 3, 4), "f4"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_value_stays_a_call(name: str) -> None:
    make, array = REFUSED[name]
    assert folded(make, array) == []


def test_nothing_is_blown_up() -> None:
    one = np.ones((), "f4")
    assert folded(lambda x: op.broadcast_to(x, (1000, 1000)), one) == []
    assert folded(lambda x: op.broadcast_to(x, (10, 10)), one) != []
    row = np.ones((1, 1000), "f4")
    assert folded(lambda x: op.broadcast_to(x, (1000, 1000)), row) == []
    weight = np.ones((1000, 1000), "f4")  # as large as what it is made of
    assert folded(lambda x: op.permute_dims(x, [1, 0]), weight) != []


LIMITED: dict[str, tuple[dict[str, int], Callable[..., Any], Array]] = {
    "elements": ({"folded_elements": 50}, lambda x: op.tile(x, (3,)), np.ones(20, "f4")),
    "points": ({"folded_points": 50}, lambda x: op.max(op.subtract(op.expand_dims(x, 1), x)), np.ones(20, "f4")),
    "products": ({"folded_products": 50, "folded_points": 50}, lambda x: op.matmul(x, x), np.ones((20, 20), "f4")),
    "calls": ({"folded_calls_of_python": 5}, op.erf, np.ones(20, "f4")),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITED)
def test_beyond_a_limit_a_call_stays_a_call(name: str) -> None:
    values, make, array = LIMITED[name]
    assert folded(make, array) != []
    with limited(**values):
        assert folded(make, array) == []


def test_a_large_product_of_constants_takes_no_time(rng: np.random.Generator) -> None:
    """2000^3 steps: half a minute by the kernel that stock TVM compiles for it, too long for this test by far."""
    a = draw(rng, "float32", 2000, 2000)
    (result,) = folded(op.matmul, a, a)
    np.testing.assert_allclose(result, a @ a, rtol=1e-3, atol=1e-2)


def test_it_does_not_write_to_its_input(rng: np.random.Generator, immutable_modules: None) -> None:
    mod = module(lambda x: op.multiply(op.add(x, x), x), draw(rng, "float32", 3))
    before = mod.script(show_meta=True)
    assert values_in(FoldCalls()(mod))
    assert mod.script(show_meta=True) == before


def test_functions_that_are_scheduled_are_left_alone(rng: np.random.Generator) -> None:
    mod = legalize_operators()(module(op.exp, draw(rng, "float32", 3)))
    assert values_in(FoldCalls()(mod))
    for variable, func in mod.functions_items():
        if isinstance(func, tvm.tirx.PrimFunc):
            mod[variable] = func.with_attr("tirx.is_scheduled", True)
    assert values_in(FoldCalls()(mod)) == []
