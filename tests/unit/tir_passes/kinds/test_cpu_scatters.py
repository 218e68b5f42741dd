"""Scatters: every form against NumPy's, on one core and divided among several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay

op = relax.op
UFUNCS = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


def built(call: Any, *arrays: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
    """What ``call`` of parameters like ``arrays`` computes of them, and how its kernel is described."""
    params = [relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype))) for i, a in enumerate(arrays)]
    library = relay.build(module_of(params, call(*params)), "llvm", enable_rammer=False)
    module = relay.GraphModule(library)
    module.run(**{f"x{i}": array for i, array in enumerate(arrays)})
    (kernel,) = [item for item in library.report.operators if "scatter" in item.name]
    return module.get_output(0).numpy(), kernel.choice.reason


def scattered(data: Any, at: tuple[Any, ...], updates: Any, reduction: str) -> Any:
    result = data.copy()
    if reduction == "update":
        for number in np.ndindex(at[0].shape):  # in their order: the last one stays
            result[tuple(index[number] for index in at)] = updates[number]
    else:
        UFUNCS[reduction].at(result, at, updates)
    return result


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    return (rng.standard_normal(shape) * 4).astype(dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("reduction", ["update", *UFUNCS])
@pytest.mark.parametrize(
    ("shape", "length", "count"),
    [((7, 5), 1, (9,)), ((7, 5), 2, (3, 4)), ((3, 4, 2, 19), 2, (11,)), ((6, 1), 1, (8,)), ((5, 600, 64), 1, (40,))],
)
def test_tuples_name_slices(reduction: str, shape: tuple[int, ...], length: int, count: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    data, updates = draw(rng, "float32", *shape), draw(rng, "float32", *count, *shape[length:])
    indices = np.stack([rng.integers(-size, size, count) for size in shape[:length]], -1)
    found, how = built(lambda x, i, u: op.scatter_nd(x, i, u, reduction), data, indices, updates)
    at = tuple(indices[..., k] % shape[k] for k in range(length))
    np.testing.assert_allclose(found, scattered(data, at, updates, reduction), rtol=1e-6)
    assert how.startswith("a scatter of")
    assert ("blocks" in how) == (len(shape) == 3)  # the others are too small to be divided


@pytest.mark.sampled
@pytest.mark.parametrize("reduction", ["update", "add", "max"])
@pytest.mark.parametrize(
    ("shape", "axis", "count"), [((7, 5), 0, 9), ((7, 5), 1, 3), ((4, 6, 3), -2, 8), ((200, 640), 0, 300)]
)
def test_each_update_has_an_index(reduction: str, shape: tuple[int, ...], axis: int, count: int) -> None:
    rng = np.random.default_rng(len(shape))
    axis %= len(shape)
    extents = (*shape[:axis], count, *shape[axis + 1 :])
    data, updates = draw(rng, "float32", *shape), draw(rng, "float32", *extents)
    indices = rng.integers(-shape[axis], shape[axis], extents)
    found, how = built(lambda x, i, u: op.scatter_elements(x, i, u, axis, reduction), data, indices, updates)
    at = list(np.indices(extents))
    at[axis] = indices % shape[axis]
    np.testing.assert_allclose(found, scattered(data, tuple(at), updates, reduction), rtol=1e-6)
    assert ("blocks" in how) == (shape[0] == 200)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "bfloat16", "float64"])
def test_types(dtype: str) -> None:
    rng = np.random.default_rng(3)
    kept = "float32" if dtype == "bfloat16" else dtype
    data, updates = draw(rng, kept, 9, 35), draw(rng, kept, 4, 35)
    indices = np.array([[3], [-1], [0], [3]])

    def call(x: Any, i: Any, u: Any) -> Any:
        made = op.scatter_nd(op.astype(x, dtype), i, op.astype(u, dtype), "update")
        return op.astype(made, kept)

    found, _ = built(call, data, indices, updates)
    expected = scattered(data, (indices[:, 0] % 9,), updates, "update")
    np.testing.assert_allclose(found, expected, rtol=0 if dtype != "bfloat16" else 4e-3)


def test_updates_of_a_part_of_the_other_axes() -> None:
    data, updates = np.arange(15, dtype="float32").reshape(5, 3), np.array([[-7.0], [-8]], "float32")
    found, _ = built(lambda x, i, u: op.scatter_elements(x, i, u, 0), data, np.array([[4], [0]]), updates)
    data[4, 0], data[0, 0] = -7, -8
    np.testing.assert_array_equal(found, data)
