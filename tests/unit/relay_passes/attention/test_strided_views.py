"""Views against NumPy: the operators that they look through, applied to the numbers of the places themselves."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from tests.support.small_modules import inputs_of, module_of
from tvm_ext._tvm import relax
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.relay_passes.attention.strided_views import StridedView, broadcast, reshaped, views_of, whole

op = relax.op


def places(view: StridedView) -> Any:
    """For each element of the view, which element of its source it is."""
    found = np.full(1, view.offset)
    for digits in view.axes:
        for extent, stride in digits:
            found = (found[:, None] + np.arange(extent) * stride).ravel()
    return found.reshape(view.shape)


def furthest(build: Any, shape: tuple[int, ...], *, scaled: bool = False) -> StridedView:
    """The view of ``build(x)`` that goes back furthest; the function reads the result once more, as a graph does."""
    inputs = inputs_of(shape)
    module = module_of(inputs, op.exp(build(inputs[0])))
    values = GraphValues(module, module["main"])
    value = list(values.bindings.values())[-1].args[0]
    return next(views_of(value, values, scaled=scaled))


CASES: dict[str, tuple[Any, Any]] = {
    "heads": (
        lambda x: op.permute_dims(op.reshape(x, (2, 6, 3, 4)), [0, 2, 1, 3]),
        lambda a: a.reshape(2, 6, 3, 4).transpose(0, 2, 1, 3),
    ),
    "reversed axes": (lambda x: op.permute_dims(x), lambda a: a.transpose()),
    "one of three": (lambda x: op.split(x, 3, axis=2)[1], lambda a: a[:, :, 4:8]),
    "uneven parts": (lambda x: op.split(x, [1, 5], axis=2)[2], lambda a: a[:, :, 5:]),
    "parts then heads": (
        lambda x: op.reshape(op.split(x, [4], axis=2)[1], (2, 6, 2, 4)),
        lambda a: a[:, :, 4:].reshape(2, 6, 2, 4),
    ),
    "a slice": (lambda x: op.strided_slice(x, [1, 2], [1, 2], [6, 11], [2, 3]), lambda a: a[:, 1:6:2, 2:11:3]),
    "one place": (lambda x: op.take(x, relax.const(-1, "int64"), axis=1), lambda a: a[:, -1]),
    "every head twice": (lambda x: op.take(x, relax.const(np.arange(6).repeat(2)), axis=1), lambda a: a.repeat(2, 1)),
    "heads repeated by broadcasting": (
        lambda x: op.reshape(op.broadcast_to(op.expand_dims(x, [2]), (2, 6, 2, 12)), (2, 12, 12)),
        lambda a: a.repeat(2, 1),
    ),
    "axes of one": (lambda x: op.squeeze(op.expand_dims(x, [0, 3])), lambda a: a),
}


@pytest.mark.parametrize("name", CASES)
def test_a_view_reads_what_the_operators_would_copy(name: str) -> None:
    build, wanted = CASES[name]
    view = furthest(build, (2, 6, 12))
    assert str(view.source.name) == "x0", "not looked through"
    assert np.array_equal(places(view), wanted(np.arange(144).reshape(2, 6, 12)))


@pytest.mark.parametrize("seed", range(60))
def test_reshapes_and_permutations_at_random(seed: int) -> None:
    """Each view that is found is right, and one always is: the tensor that the last step made."""
    rng = np.random.default_rng(seed)
    array, shape = np.arange(144).reshape(2, 6, 12), (2, 6, 12)
    view = whole(inputs_of(shape)[0])
    for _ in range(5):
        if view is None:
            break
        if rng.random() < 0.5:
            factors = rng.permutation([2, 2, 2, 2, 3, 3]).tolist()
            cuts = sorted(rng.choice(range(1, 6), 2, replace=False))
            wanted = tuple(prod(factors[a:b]) for a, b in zip([0, *cuts], [*cuts, 6], strict=True))
            array, view = array.reshape(wanted), reshaped(view, wanted)
        else:
            order = tuple(int(axis) for axis in rng.permutation(array.ndim))
            array = array.transpose(order)
            view = StridedView(source=view.source, axes=tuple(view.axes[axis] for axis in order))
        assert view is None or np.array_equal(places(view), array)


def test_a_number_is_looked_through_where_it_may_be_scaled_by() -> None:
    build = lambda x: op.permute_dims(op.divide(op.multiply(x, relax.const(3.0)), relax.const(4.0)), [1, 0])  # noqa: E731
    view = furthest(build, (5, 7), scaled=True)
    assert str(view.source.name) == "x0" and view.scale == 0.75
    assert str(furthest(build, (5, 7)).source.name) != "x0"


@pytest.mark.parametrize("number", [0.0, np.inf, np.nan])
def test_no_number_that_is_no_scale_is_looked_through(number: float) -> None:
    build = lambda x: op.multiply(x, relax.const(number, "float32"))  # noqa: E731
    assert str(furthest(build, (5, 7), scaled=True).source.name) != "x0"


def test_what_would_need_two_strides_is_read_where_it_is() -> None:
    """Columns of a transposed matrix in one row have no stride; the copy has."""
    view = whole(inputs_of((4, 6))[0])
    assert view is not None
    turned = StridedView(source=view.source, axes=view.axes[::-1])
    flat = reshaped(turned, (24,))
    assert flat is not None and len(flat.axes[0]) == 2
    assert broadcast(turned, (6, 5)) is None
    repeated = broadcast(turned, (2, 6, 4))
    assert repeated is not None and repeated.axes[0] == ((2, 0),)
