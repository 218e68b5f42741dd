"""What functions of a graph are known as operators by what they compute."""

from __future__ import annotations

from typing import Any

import pytest

from tvm_ext._tvm import relax, te, topi
from tvm_ext.byoc_cutlass.graph_values import GraphValues


def called(function: Any, *shapes: tuple[int, ...], dtypes: tuple[str, str] = ("float32", "float32")) -> Any:
    """What `GraphValues` says of a call of ``function`` on two tensors."""
    operands = [
        relax.Var(name, relax.TensorType(shape, dtype)) for name, shape, dtype in zip("ab", shapes, dtypes, strict=True)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", operands):
        with builder.dataflow():
            result = builder.emit_output(builder.call_te(function, *operands))
        builder.emit_func_output(result)
    mod = builder.get()
    values = GraphValues(mod, mod["main"])
    (call,) = [bound for bound in values.bindings.values() if isinstance(bound, relax.Call)]
    return values.operator_of(call)


@pytest.mark.parametrize("shapes", [((4, 8), (4, 8)), ((2, 4, 8), (8,)), ((4, 1), (1, 8))])
def test_a_function_that_computes_a_maximum_is_one(shapes: Any) -> None:
    name, operands = called(topi.maximum, *shapes)
    assert name == "maximum" and len(operands) == 2


def blocked(a: Any, b: Any) -> Any:
    """Reads blocked channels and filters, as convolutions do: no element-wise operator has such operands."""
    return te.compute((1, 2, 13, 13, 16), lambda n, c, y, x, i: a[n, c, y, x, i] * b[c, 16 * 0 + i, 0, 0])


def test_operands_that_no_elementwise_operator_could_have_are_none() -> None:
    assert called(blocked, (1, 2, 13, 13, 16), (10, 512, 1, 1)) is None
    assert called(lambda a, b: te.compute((4,), lambda i: a[i] + b[i].astype("float32")), (4,), (4,),
                  dtypes=("float32", "float16")) is None  # fmt: skip
