"""FusePersistent: chains whose factors are no constants, or not the first of a product, compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.small_modules import inputs_of, module_of
from tests.unit.chain_modules import ChainModule, check
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
