"""FusePersistent: chains whose factors are no constants, or not the first of a product, compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.small_modules import inputs_of, module_of
from tests.unit.chain_modules import ChainModule, check
from tvm_ext import relay
from tvm_ext._tvm import relax


def hidden(x: Any, weights: Any) -> Any:
    return relax.op.nn.relu(relax.op.matmul(x, weights))


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "weights of the run": (
        lambda x, w, v: relax.op.matmul(hidden(x, w), v),
        lambda x, w, v: np.maximum(x @ w, 0) @ v,
        ((70, 20), (20, 30), (30, 17)),
    ),
    "transposed weights of the run": (
        lambda x, w, v: relax.op.matmul(hidden(x, relax.op.permute_dims(w)), relax.op.permute_dims(v)),
        lambda x, w, v: np.maximum(x @ w.T, 0) @ v.T,
        ((70, 20), (30, 20), (17, 30)),
    ),
    "the second factor": (
        lambda x, w, v: relax.op.matmul(v, hidden(x, w)),
        lambda x, w, v: v @ np.maximum(x @ w, 0),
        ((70, 20), (20, 30), (17, 70)),
    ),
    "batches of both": (
        lambda x, w, v: relax.op.matmul(hidden(x, w), v),
        lambda x, w, v: np.maximum(x @ w, 0) @ v,
        ((3, 31, 20), (3, 20, 30), (3, 30, 17)),
    ),
    "the input as a residual": (
        lambda x, w, v: relax.op.add(relax.op.matmul(hidden(x, w), v), x),
        lambda x, w, v: np.maximum(x @ w, 0) @ v + x,
        ((70, 20), (20, 30), (30, 20)),
    ),
    "a vector at the end": (
        lambda x, w, v: relax.op.matmul(hidden(x, w), v),
        lambda x, w, v: np.maximum(x @ w, 0) @ v,
        ((70, 20), (20, 30), (30,)),
    ),
}


@pytest.mark.parametrize(
    "form", ["weights of the run", *(pytest.param(form, marks=pytest.mark.slow) for form in [*FORMS][1:])]
)
def test_factors_of_any_form_are_right(form: str) -> None:
    write, reference, shapes = FORMS[form]
    inputs = inputs_of(*shapes)
    mod = module_of(inputs, write(*inputs))
    check(ChainModule(mod=mod, inputs=shapes, reference=reference), fused=2)


@pytest.mark.parametrize("length", [100, 101])
def test_a_padded_window_reads_no_row_beyond_a_product(length: int) -> None:
    """Windows that do not overlap, the last of which meets padding: a panel had computed a row that is not there."""
    x, w, v = inputs_of((2, 15, 7), (2, 7, length), (24, 15, 3))
    mod = module_of((x, w, v), relax.op.nn.conv1d(relax.op.matmul(x, w), v, strides=3, padding=[0, 2]))
    values = [np.random.default_rng(0).standard_normal(shape) for shape in ((2, 15, 7), (2, 7, length), (24, 15, 3))]
    padded = np.pad(values[0] @ values[1], [(0, 0), (0, 0), (0, 2)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=2)[:, :, ::3]
    module = relay.GraphModule(relay.build(mod, "cpu-sse2", enable_persistent_fusion=True)["default"]())
    for index, value in enumerate(values):
        module.set_input(index, value.astype("float32"))
    module.run()
    expected = np.einsum("nclt,fct->nfl", windows, values[2])
    np.testing.assert_allclose(module.get_output(0).numpy(), expected, rtol=0, atol=1e-4)
