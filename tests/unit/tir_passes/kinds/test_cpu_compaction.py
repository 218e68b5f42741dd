"""NonZero and Unique: against NumPy's, of every type and rank, without a call of Python when they run."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.helper import make_node, np_dtype_to_tensor_dtype
from tvm import relax

from tests.support.small_models import onnx_model
from tests.support.small_modules import module_of
from tvm_ext import relay


def check(x: np.ndarray) -> None:
    element_type = np_dtype_to_tensor_dtype(x.dtype)
    proto = onnx_model([make_node("NonZero", ["x"], ["y"])], {"x": x.shape}, element_type=element_type, output_type=7)
    mod, params = relay.frontend.from_onnx(proto)
    library = relay.build(mod, "llvm", params=params)
    assert [item.name for item in library.report.operators] == ["nonzero", "nonzero_coordinates"]
    assert library.report.operators[0].choice.reason == "positions without branches"
    module = relay.GraphModule(library)
    for values in (x, np.zeros_like(x), np.ones_like(x)):
        module.run(x=values)
        found = module.get_output(0).numpy()
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, np.stack(np.nonzero(values)))


@pytest.mark.parametrize("shape", [(1,), (40,), (3, 1, 7), (2, 3, 4, 5), (16, 1000)])
def test_ranks(shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(len(shape))
    check(np.where(draw.random(shape) < 0.4, draw.standard_normal(shape), 0).astype("float32"))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float64"])
def test_types(dtype: str) -> None:
    check((np.random.default_rng(1).integers(0, 3, (5, 9)) % 2).astype(dtype))


def test_nan_is_not_zero_and_minus_zero_is() -> None:
    check(np.array([[np.nan, -0.0, 0.0], [np.inf, 1e-45, -1e-45]], "float32"))


def unique(x: np.ndarray, results: int) -> list[str]:
    """Compares all results with NumPy's, and tells the kernels."""
    param = relax.Var("x", relax.TensorType(x.shape, str(x.dtype)))
    call = relax.op.unique(param, True, *(results > number for number in (1, 2, 3)))
    library = relay.build(module_of([param], call), "llvm", enable_rammer=False)
    module = relay.GraphModule(library)
    module.run(x=x)
    wanted = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
    for number in range(results):
        found = module.get_output(number).numpy()
        np.testing.assert_array_equal(found, wanted[number].reshape(-1))
        assert found.dtype == wanted[number].dtype
    return [f"{item.name}: {item.choice.reason}" for item in library.report.operators]


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("results", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "x",
    [
        np.array([3.5], "float32"),
        np.array([np.nan, 1, -0.0, 0.0, np.nan, -np.inf, np.inf], "float32"),
        np.random.default_rng(0).integers(-(2**62), 2**62, 3000),
        np.random.default_rng(1).integers(0, 9, (4, 5, 6)).astype("int32"),
        np.random.default_rng(2).integers(-128, 127, 500).astype("int8"),
        np.random.default_rng(3).standard_normal(300).round(1),
        np.array([True, False, True]),
    ],
)
def test_unique(x: np.ndarray, results: int) -> None:
    assert unique(x, results)[0] == "unique: a sort by bytes"
