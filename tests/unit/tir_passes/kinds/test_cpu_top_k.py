"""The first k of an axis: against a stable sort, with ties, NaN, zeros of both signs and every type that has keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.ir.radix_sort import SORTED


def top_k(x: np.ndarray[Any, Any], k: int, axis: int = -1, largest: bool = True) -> tuple[Any, Any, str]:
    """Values, positions, and how the kernel is described."""
    param = relax.Var("x", relax.TensorType(x.shape, str(x.dtype)))
    call = relax.op.topk(param, k, axis, "both", largest, "int64")
    library = relay.build(module_of([param], call), "llvm", enable_rammer=False)
    module = relay.GraphModule(library)
    module.run(x=x)
    (kernel,) = library.report.operators
    return module.get_output(0).numpy(), module.get_output(1).numpy(), kernel.choice.reason


def expected(x: np.ndarray[Any, Any], k: int, axis: int = -1, largest: bool = True) -> Any:
    """Positions by a stable sort; NaN is greater than all numbers."""
    wide = np.where(np.isnan(x), np.inf, x.astype("float64")) if x.dtype.kind == "f" else x.astype("float64")
    beyond = np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
    keys = (-wide, ~beyond) if largest else (wide, beyond)
    return np.take(np.lexsort(keys, axis=axis), np.arange(k), axis=axis)


def check(x: np.ndarray[Any, Any], k: int, axis: int = -1, largest: bool = True) -> str:
    values, positions, how = top_k(x, k, axis, largest)
    wanted = expected(x, k, axis, largest)
    np.testing.assert_array_equal(positions, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, axis))
    return how


@pytest.mark.sampled
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("shape", "k", "axis"),
    [((40,), 1, 0), ((3, 5), 5, 1), ((2, 300), 17, 1), ((50, 7), 9, 0), ((2, 33, 4), 2, 1), ((64, 4000), 100, 1)],
)
def test_shapes(shape: tuple[int, ...], k: int, axis: int, largest: bool) -> None:
    x = np.random.default_rng(k).standard_normal(shape).astype("float32")
    how = check(x, k, axis, largest)
    assert how == f"the first {k} of {shape[axis]} in a heap, {x.size // shape[axis]} rows"


@pytest.mark.sampled
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("shape", "k", "axis"), [((1500,), 1500, 0), ((2, 3000), 900, 1), ((4000, 3), 1700, 0)])
def test_many_are_sorted_by_bytes(shape: tuple[int, ...], k: int, axis: int, largest: bool) -> None:
    x = np.random.default_rng(k).standard_normal(shape).astype("float32").round(1)
    how = check(x, k, axis, largest)
    assert how == f"the first {k} of {shape[axis]} sorted by bytes, {x.size // shape[axis]} rows"


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", sorted(SORTED - {"bool"}))
def test_types_with_ties(dtype: str) -> None:
    draw = np.random.default_rng(1)
    low = 0 if dtype.startswith("u") else -9
    check(draw.integers(low, 9, (4, 90)).astype(dtype), 40)
    if np.dtype(dtype).kind != "f":
        limits = np.iinfo(dtype)
        check(np.array([limits.min, 0, limits.max, 1, limits.max], dtype), 5)
        check(np.array([limits.min, 0, limits.max, 1, limits.min], dtype), 3, largest=False)


def test_nan_and_zeros_of_both_signs() -> None:
    draw = np.random.default_rng(2)
    choices = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45], "float32")
    x = draw.choice(choices, (3, 200))
    for k in (1, 60, 200):
        check(x, k)
        check(x, k, largest=False)
