"""The references of the random operators, against definitions written out element by element and known identities."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.support.random_operators import reference
from tests.support.random_operators.check import scaled_error, tolerance
from tests.support.random_operators.record import CaseInput, OperatorCase


def _case(operator: str, *shapes: tuple[int, ...], layouts: tuple[str, ...] = (), **attributes: Any) -> OperatorCase:
    return OperatorCase(
        seed=0,
        index=0,
        kind="",
        operator=operator,
        inputs=tuple(CaseInput(shape=shape, dtype="float32") for shape in shapes),
        attributes=tuple((name, tuple(value)) for name, value in attributes.items()),
        layouts=layouts,
        arity=len(shapes),
    )


def _evaluate(case: OperatorCase, *inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return reference.evaluate(case, list(inputs))[0]


@pytest.mark.parametrize(
    ("groups", "stride", "dilation", "padding"), [(1, 1, 1, (0, 0)), (2, 2, 2, (1, 2)), (4, 3, 1, (2, 0))]
)
def test_convolution_is_its_definition(
    groups: int, stride: int, dilation: int, padding: tuple[int, int], rng: np.random.Generator
) -> None:
    x, w = rng.standard_normal((2, 4, 9)), rng.standard_normal((8, 4 // groups, 3))
    case = _case(
        "nn.conv1d", x.shape, w.shape, layouts=("NCW", "OIW"), strides=[stride], dilation=[dilation], padding=padding,
        groups=[groups],
    )  # fmt: skip
    result = _evaluate(case, x, w)
    assert result.shape == (2, 8, (9 + sum(padding) - 2 * dilation - 1) // stride + 1)
    for n, o, p in itertools.product(*map(range, result.shape)):
        total = 0.0
        for i, k in itertools.product(range(4 // groups), range(3)):
            at = p * stride + k * dilation - padding[0]
            total += x[n, o // (8 // groups) * (4 // groups) + i, at] * w[o, i, k] if 0 <= at < 9 else 0.0
        assert result[n, o, p] == pytest.approx(total, abs=1e-12)


def test_layouts_only_move_axes(rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((1, 3, 5, 6)), rng.standard_normal((4, 3, 2, 3))
    attributes: dict[str, Any] = {"strides": [1, 2], "dilation": [1, 1], "padding": [1, 0, 0, 1], "groups": [1]}
    expected = _evaluate(_case("nn.conv2d", x.shape, w.shape, layouts=("NCHW", "OIHW"), **attributes), x, w)
    for weights, order in (("HWIO", (2, 3, 1, 0)), ("OHWI", (0, 2, 3, 1))):
        moved, kernel = x.transpose(0, 2, 3, 1), w.transpose(order)
        case = _case("nn.conv2d", moved.shape, kernel.shape, layouts=("NHWC", weights), **attributes)
        np.testing.assert_allclose(_evaluate(case, moved, kernel), expected.transpose(0, 2, 3, 1), rtol=1e-12)


@pytest.mark.parametrize(("groups", "stride", "padding"), [(1, 1, (0, 0)), (1, 2, (1, 0)), (2, 3, (1, 2))])
def test_transposed_convolution_is_the_adjoint(
    groups: int, stride: int, padding: tuple[int, int], rng: np.random.Generator
) -> None:
    """<conv(x, w), y> = <x, conv_transpose(y, w)> with the same weights, read as (I, O / groups, k)."""
    length = 11
    x, w = rng.standard_normal((2, 4, length)), rng.standard_normal((6, 4 // groups, 3))
    forward = _case(
        "nn.conv1d", x.shape, w.shape, layouts=("NCW", "OIW"), strides=[stride], dilation=[1], padding=padding,
        groups=[groups],
    )  # fmt: skip
    y = rng.standard_normal(_evaluate(forward, x, w).shape)
    lost = (length + sum(padding) - 3) % stride  # elements at the end that no window reaches
    backward = _case(
        "nn.conv1d_transpose", y.shape, w.shape, layouts=("NCW", "IOW"), strides=[stride], padding=padding,
        output_padding=[lost], groups=[groups],
    )  # fmt: skip
    back = _evaluate(backward, y, w)
    assert back.shape == x.shape
    assert np.vdot(_evaluate(forward, x, w), y) == pytest.approx(np.vdot(x, back))


def _pool(operator: str, size: int, **attributes: Any) -> OperatorCase:
    defaults: dict[str, Any] = {"pool_size": [3], "strides": [2], "dilation": [1], "padding": [0, 0], "ceil_mode": [0]}
    return _case(operator, (1, 1, size), layouts=("NCW",), **(defaults | attributes))


def test_pools_by_hand() -> None:
    x = np.arange(1.0, 7.0).reshape(1, 1, 6)
    assert _evaluate(_pool("nn.max_pool1d", 6), x).tolist() == [[[3, 5]]]
    assert _evaluate(_pool("nn.max_pool1d", 6, ceil_mode=[1]), x).tolist() == [[[3, 5, 6]]]
    assert _evaluate(_pool("nn.max_pool1d", 6, padding=[1, 0]), -x).tolist() == [[[-1, -2, -4]]]
    assert _evaluate(_pool("nn.max_pool1d", 6, dilation=[2], strides=[1]), x).tolist() == [[[5, 6]]]


def test_averages_count_what_they_should() -> None:
    x = np.arange(1.0, 7.0).reshape(1, 1, 6)
    padded = {"padding": [1, 1], "ceil_mode": [1]}
    # Windows over 0 1 2 3 4 5 6 0 and one more of ceil_mode's: (0 1 2), (2 3 4), (4 5 6), (6 0 .)
    without = _evaluate(_pool("nn.avg_pool1d", 6, **padded, count_include_pad=[0]), x)
    np.testing.assert_allclose(without, [[[1.5, 3, 5, 6]]])
    including = _evaluate(_pool("nn.avg_pool1d", 6, **padded, count_include_pad=[1]), x)
    np.testing.assert_allclose(including, [[[1, 3, 5, 3]]])


def test_adaptive_windows_overlap_where_sizes_do_not_divide() -> None:
    x = np.arange(5.0).reshape(1, 1, 5)
    case = _case("nn.adaptive_avg_pool1d", x.shape, layouts=("NCW",), output_size=[3])
    np.testing.assert_allclose(_evaluate(case, x), [[[0.5, 2, 3.5]]])  # elements 0-1, 1-3, 3-4


def test_normalisations_have_mean_0_and_variance_1(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4, 5, 6)) * 3 + 7
    ones, zeros = np.ones(4), np.zeros(4)
    group = _evaluate(_case("nn.group_norm", x.shape, (4,), (4,), num_groups=[2]), x, ones, zeros)
    instance = _evaluate(_case("nn.instance_norm", x.shape, (4,), (4,)), x, ones, zeros)
    layer = _evaluate(
        _case("nn.layer_norm", x.shape, (5, 6), (5, 6), axes=[2, 3]), x, np.ones((5, 6)), np.zeros((5, 6))
    )
    for value in (group.reshape(3, 2, -1), instance.reshape(3, 4, -1), layer.reshape(3, 4, -1)):
        np.testing.assert_allclose(value.mean(axis=-1), 0, atol=1e-12)
        np.testing.assert_allclose(value.var(axis=-1), 1, rtol=1e-4)
    rms = _evaluate(_case("nn.rms_norm", x.shape, (6,), axes=[3]), x, np.full(6, 2.0))
    np.testing.assert_allclose((rms**2).mean(axis=-1), 4, rtol=1e-4)


def test_softmax_sums_to_one_and_log_softmax_is_its_log(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 5)) * 50
    soft = _evaluate(_case("nn.softmax", x.shape, axis=[0]), x)
    np.testing.assert_allclose(soft.sum(axis=0), 1)
    np.testing.assert_allclose(np.exp(_evaluate(_case("nn.log_softmax", x.shape, axis=[0]), x)), soft)


def test_erf_based_gelu_at_known_points() -> None:
    x = np.array([0.0, 1.0, -1.0])
    expected = [0.0, 0.8413447460685429, -0.15865525393145707]  # x times the normal distribution function
    np.testing.assert_allclose(reference.gelu(x), expected, rtol=1e-12)


def test_slices_with_negative_steps_reach_element_0() -> None:
    case = _case("strided_slice", (5,), axes=[0], begin=[4], end=[-1], strides=[-2])
    assert _evaluate(case, np.arange(5.0)).tolist() == [4, 2, 0]


def test_requantisation_rounds_to_nearest_and_saturates() -> None:
    requantise = reference.EPILOGUES["requantise"]
    (result,) = requantise(np.array([-100000, -65, -63, 63, 65, 128, 100000]), [])
    assert result.tolist() == [-128, -1, 0, 0, 1, 1, 127]


def test_scaled_error_and_tolerance_by_hand() -> None:
    assert scaled_error(np.array([3.0, 4.5]), np.array([3.0, 4.0]), 0.0) == pytest.approx(0.1)
    # A sum that has cancelled to 1e-6 is compared with a tenth of the typical magnitude 1.
    assert scaled_error(np.array([2e-6]), np.array([1e-6]), 1.0) == pytest.approx(1e-5)
    assert scaled_error(np.array([0.0]), np.array([0.0]), 0.0) == 0
    assert scaled_error(np.array([1.0]), np.array([0.0]), 0.0) == math.inf
    assert scaled_error(np.array([np.nan]), np.array([1.0]), 1.0) == math.inf
    single, half = (_case("matmul", (1, 1)) for _ in range(2))
    assert tolerance(single, "float32") < 1e-5
    assert tolerance(half, "float16") > 1e-3
    assert tolerance(single, "int32") == 0
