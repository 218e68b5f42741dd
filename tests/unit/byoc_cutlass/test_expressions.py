"""Epilogues as expressions: evaluated on arrays, they are what the composite function computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from scipy.special import erf  # type: ignore[import-untyped]
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import decided, number, op
from tests.unit.byoc_cutlass.test_cutlass_epilogues import SPELLINGS, behind_a_product, leaf
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.epilogues import MOST_CHARACTERS, EpilogueGrowth
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.records.partition import CutlassRegion

Array = np.ndarray[Any, Any]


def only(mod: tvm.IRModule) -> CutlassRegion:
    (region,) = decided(mod).taken
    return region


@pytest.mark.parametrize(
    ("step", "expression"),
    [
        (lambda x: op.add(x, leaf(16)), "(accum + operand2)"),
        (lambda x: op.subtract(leaf(24, 1), x), "(operand2 - accum)"),
        (lambda x: op.divide(x, number(-8)), "(accum / -8.0)"),
        (lambda x: op.clip(x, -1, 6), "minimum(maximum(accum, -1.0), 6.0)"),
        (lambda x: op.clip(x, -math.inf, 6), "minimum(accum, 6.0)"),
        (lambda x: op.nn.leakyrelu(x, 0.25), "(maximum(accum, 0.0) + 0.25 * minimum(accum, 0.0))"),
        (lambda x: op.add(op.astype(x, "float32"), leaf(16, dtype="float32")), "(accum + operand2)"),
        (lambda x: op.astype(op.nn.relu(op.astype(x, "float32")), "float16"), "relu(accum)"),
        (lambda x: op.exp(op.astype(op.astype(x, "float32"), "float16")), "exp(cast(accum, 'float16'))"),
        (lambda x: op.multiply(x, x), "(accum * accum)"),
    ],
)
def test_operators_are_written_as_they_are(step: Callable[[Any], Any], expression: str) -> None:
    region = only(behind_a_product(step))
    assert region.expression == expression
    assert Epilogue.of(region).expression == expression


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_activation_is_one_function(spelling: str) -> None:
    name, step = SPELLINGS[spelling]
    wanted = "(accum * tanh(softplus(accum)))" if name == "mish" else f"{name}(accum)"
    assert only(behind_a_product(step)).expression == wanted


def test_operands_are_named_by_the_parameters_that_they_are() -> None:
    """A product by itself that is added its own operand, both read through a transpose."""
    (x,) = inputs_of((32, 32), dtype="float16")
    region = only(module_of([x], op.add(op.matmul(x, op.permute_dims(x)), x)))
    assert (region.factors, region.expression) == ((0, 0), "(accum + operand0)")
    assert [(item.name, item.role) for item in region.operands] == [("operand0", "matrix")]
    assert region.problem.operands[1].order == "column"


@pytest.mark.parametrize(
    ("extents", "role", "distance"),
    [
        ((1, 16), "row", 0), ((5, 1, 16), "row", 16), ((5, 24, 1), "column", 24), ((24, 16), "matrix", 0),
        ((5, 24, 16), "matrix", 24 * 16), ((1, 1, 1), "scalar", 0),
    ],
)  # fmt: skip
def test_operands_of_a_batch_have_a_distance(extents: tuple[int, ...], role: str, distance: int) -> None:
    x, y = inputs_of((5, 24, 8), (5, 8, 16), dtype="float16")
    z = relax.Var("z", relax.TensorType(extents, "float16"))
    region = only(module_of([x, y, z], op.add(op.matmul(x, y), z)))
    (operand,) = region.operands
    assert (operand.role, operand.batch_stride) == (role, distance)


def test_a_chain_of_squares_ends_where_its_expression_is_too_long() -> None:
    mod = behind_a_product(*[lambda x: op.multiply(x, x)] * 30)
    values = GraphValues(mod, mod["main"])
    anchor = next(iter(values.bindings))
    cuts = EpilogueGrowth(anchor, values.bindings[anchor].args, values, {}, batched=False).cuts
    assert 4 < len(cuts) < 12
    assert all(len(cut.expression) <= MOST_CHARACTERS for cut in cuts)


def test_what_templates_have_no_tensors_of_stays_outside() -> None:
    region = only(behind_a_product(lambda x: op.add(x, op.astype(leaf(16, dtype="float64"), "float16"))))
    assert region.expression in ("accum", "(accum + operand2)")
    wide = behind_a_product(lambda x: op.astype(x, "float64"), lambda x: op.add(x, leaf(16, dtype="float64")))
    assert only(wide).expression == "accum"


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "cast": lambda x, dtype: x.astype(dtype),
}


def test_an_expression_is_what_the_region_computes() -> None:
    """On float64, with every kind of operand: what was fused, written out and evaluated by Python."""
    rng = np.random.default_rng(1)
    row, column, whole = (rng.standard_normal(size).astype("float16") for size in ((16,), (24, 1), (24, 16)))
    region = only(
        behind_a_product(
            lambda x: op.multiply(x, tvm.relax.const(row)),
            lambda x: op.subtract(tvm.relax.const(whole), x),
            lambda x: op.nn.gelu(x),
            lambda x: op.maximum(x, tvm.relax.const(column)),
        )
    )
    product = rng.standard_normal((24, 16))
    names = {"accum": product, "operand2": row, "operand3": whole, "operand4": column} | _FUNCTIONS
    found = eval(region.expression, {"__builtins__": {}}, names)  # noqa: S307 - what we wrote ourselves
    x = whole.astype("float64") - product * row
    assert np.allclose(found, np.maximum(0.5 * x * (1 + erf(x / math.sqrt(2))), column))
