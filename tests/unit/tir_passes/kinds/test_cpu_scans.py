"""Running sums and products: against NumPy's in float64, of axes that are the last one and others, in parts and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build


def scan(x: np.ndarray[Any, Any], axis: int, product: bool = False, exclusive: bool = False) -> tuple[Any, str]:
    param = relax.Var("x", relax.TensorType(x.shape, str(x.dtype)))
    operator = relax.op.cumprod if product else relax.op.cumsum
    library = relay.build(module_of([param], operator(param, axis, None, exclusive)), "llvm", enable_rammer=False)
    module = relay.GraphModule(library)
    module.run(x=x)
    (kernel,) = library.report.operators
    return module.get_output(0).numpy(), kernel.choice.reason


def expected(x: np.ndarray[Any, Any], axis: int, product: bool, exclusive: bool) -> Any:
    way, nothing = (np.multiply, 1) if product else (np.add, 0)
    sums = way.accumulate(x.astype("float64"), axis=axis)
    if not exclusive:
        return sums
    first = np.full_like(np.take(sums, [0], axis), nothing)
    return np.concatenate([first, np.delete(sums, -1, axis)], axis)


@pytest.mark.sampled
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis", "how"),
    [
        ((1,), 0, "rows in 1 parts"),
        ((3, 200), 1, "rows in 1 parts"),
        ((2, 3729), 1, "rows in 8 parts"),
        ((4, 256, 1), 1, "rows in 1 parts"),
        ((1, 1000), -1, "rows in 8 parts"),
        ((61, 3), 0, "columns by 3"),
        ((3, 17, 101), 1, "columns by 32"),
        ((9, 4, 5, 7), 1, "columns by 7"),
        ((2, 9, 150, 1), 1, "columns by 32"),
        ((3, 2100), 0, "columns by 32"),
    ],
)
def test_shapes(shape: tuple[int, ...], axis: int, how: str, exclusive: bool) -> None:
    x = np.random.default_rng(len(shape)).uniform(-1, 2, shape).astype("float32")
    found, reason = scan(x, axis, exclusive=exclusive)
    np.testing.assert_allclose(found, expected(x, axis, False, exclusive), rtol=1e-5, atol=1e-4)
    assert reason == how or ("columns" in how and reason.startswith("columns"))  # as many as registers hold


@pytest.mark.parametrize("shape", [(5, 400), (400, 5)])
def test_products_and_integers(shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(3)
    x = draw.uniform(0.99, 1.01, shape).astype("float32")
    for axis in (0, 1):
        np.testing.assert_allclose(scan(x, axis, product=True)[0], expected(x, axis, True, False), rtol=1e-4)
        whole = draw.integers(-(2**40), 2**40, shape)
        np.testing.assert_array_equal(scan(whole, axis)[0], np.cumsum(whole, axis))


@pytest.mark.parametrize(("shape", "forks"), [((2257, 128), False), ((2, 2257, 40), True), ((500, 1200), True)])
def test_cores_do_not_write_side_by_side_in_half_a_page(shape: tuple[int, ...], forks: bool) -> None:
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    options = BuildOptions(device="cpu-epyc-zen5", database="off", num_threads=2)
    plan = plan_build("cpu-epyc-zen5", options)
    with plan.target:
        text = plan.construct(module_of([x], relax.op.cumsum(x, len(shape) - 2))).script()
    assert ("T.parallel" in text) == forks
