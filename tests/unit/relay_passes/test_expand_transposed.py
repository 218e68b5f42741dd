"""Strided transposed convolutions become convolutions by output phase, with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext._tvm import structural_walk
from tvm_ext.analysis.relax_values import operator_name
from tvm_ext.relay_passes.expand_transposed import ExpandTransposedConvolutions

Array = np.ndarray[Any, Any]


def _module(shape: tuple[int, ...], weight: Array | None, dtype: str = "float32", **attrs: Any) -> tvm.IRModule:
    """The operator alone, of type ``dtype``; ``weight`` None leaves the kernel a parameter of shape (C, 4, 3, 3)."""
    x = relax.Var("x", relax.TensorType(shape, dtype))
    given = [] if weight is not None else [relax.Var("w", relax.TensorType((shape[1], 4, 3, 3), dtype))]
    kernel = given[0] if given else relax.const(weight, dtype)
    return module_of([x, *given], relax.op.nn.conv2d_transpose(x, kernel, **attrs))


def _expected(
    x: Array, w: Array, strides: tuple[int, int], pads: tuple[int, ...], extra: tuple[int, int], groups: int
) -> Array:
    """Every input element times the whole kernel, added into the output; in float64."""
    (n, channels, *size), (_, filters, *kernel) = x.shape, w.shape
    full = [(size[i] - 1) * strides[i] + kernel[i] + extra[i] for i in range(2)]
    out = np.zeros((n, filters * groups, *full))
    per = channels // groups
    for c in range(channels):
        own = slice(c // per * filters, (c // per + 1) * filters)
        for y in range(size[0]):
            for z in range(size[1]):
                at = np.s_[
                    :, own, y * strides[0] : y * strides[0] + kernel[0], z * strides[1] : z * strides[1] + kernel[1]
                ]
                out[at] += x[:, c, y, z].astype(float)[:, None, None, None] * w[c]
    return out[:, :, pads[0] : full[0] - pads[2], pads[1] : full[1] - pads[3]]


CASES = [
    # shape, kernel, strides, padding, output padding, groups
    ((1, 3, 5, 6), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), 1),
    ((2, 4, 5, 5), (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), 1),
    ((1, 3, 7, 4), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
    ((1, 4, 5, 5), (3, 5), (2, 3), (0, 1, 1, 2), (0, 1), 2),
    ((1, 6, 4, 4), (3, 3), (3, 2), (0, 0, 0, 0), (0, 0), 6),
    ((1, 2, 5, 5), (1, 1), (2, 2), (0, 0, 0, 0), (0, 0), 1),
    ((1, 2, 1, 1), (7, 7), (4, 4), (3, 2, 1, 0), (0, 0), 1),
    ((1, 16, 9, 9), (5, 5), (1, 2), (2, 2, 2, 2), (0, 0), 1),
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("shape", "kernel", "strides", "pads", "extra", "groups"), CASES)
def test_gives_the_same_sums(shape: Any, kernel: Any, strides: Any, pads: Any, extra: Any, groups: int) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal(shape).astype("float32")
    w = rng.standard_normal((shape[1], 4, *kernel)).astype("float32")
    module = _module(shape, w, strides=strides, padding=pads, output_padding=extra, groups=groups)
    rewritten = ExpandTransposedConvolutions()(module)
    assert "conv2d_transpose" not in rewritten.script()
    assert tuple(rewritten["main"].ret_ty.shape) == tuple(module["main"].ret_ty.shape)
    library = relay.build(module, "llvm")
    expected = _expected(x, w, strides, pads, extra, groups)
    actual = library.vm(tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("kernel", "stride", "size", "taps"),
    [(3, 2, 40, [(2, 2), (2, 1), (1, 2), (1, 1)]), (4, 2, 40, [(2, 2)]), (3, 2, 4, [(2, 2)]), (2, 3, 40, [(1, 1)])],
)
def test_phases_of_as_many_taps_are_one_convolution(kernel: int, stride: int, size: int, taps: Any) -> None:
    """Where the zeros that this saves are worth it; the sums are right either way."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((1, 64, size, size)).astype("float32")
    w = rng.standard_normal((64, 20, kernel, kernel)).astype("float32")
    module = _module(x.shape, w, strides=stride, padding=1)
    found: list[tuple[int, ...]] = []
    structural_walk(
        ExpandTransposedConvolutions()(module)["main"],
        (relax.Call, lambda call: found.append(tuple(call.args[1].value.shape[2:])) if _is_convolution(call) else None),
    )
    assert found == taps
    actual = relay.build(module, "llvm").vm(tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(actual, _expected(x, w, (stride,) * 2, (1,) * 4, (0, 0), 1), rtol=1e-3, atol=1e-3)


def _is_convolution(call: relax.Call) -> bool:
    return operator_name(call) == "relax.nn.conv2d"


def test_double_precision_stays_double() -> None:
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((1, 3, 5, 6)), rng.standard_normal((3, 4, 4, 4))
    module = _module(x.shape, w, "float64", strides=(2, 2), padding=(1, 1, 1, 1))
    assert "conv2d_transpose" not in ExpandTransposedConvolutions()(module).script()
    actual = relay.build(module, "llvm").vm(tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(actual, _expected(x, w, (2, 2), (1, 1, 1, 1), (0, 0), 1), rtol=1e-12, atol=1e-12)


def test_a_crop_off_by_one_would_show() -> None:
    """The reference tells neighbouring crops apart."""
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((1, 3, 5, 6)), rng.standard_normal((3, 4, 4, 4))
    one = _expected(x, w, (2, 2), (1, 1, 1, 1), (0, 0), 1)
    other = _expected(x, w, (2, 2), (0, 1, 2, 1), (0, 0), 1)
    assert one.shape == other.shape
    assert np.abs(one - other).max() > 0.1


@pytest.mark.parametrize("attrs", [{"strides": 1}, {"strides": 2, "dilation": 2}])
def test_leaves_others_alone(attrs: dict[str, int]) -> None:
    module = _module((1, 3, 8, 8), np.ones((3, 4, 3, 3), "float32"), **attrs)
    tvm.ir.assert_structural_equal(ExpandTransposedConvolutions()(module), module)


def test_leaves_a_variable_kernel_alone() -> None:
    module = _module((1, 3, 8, 8), None, strides=2)
    tvm.ir.assert_structural_equal(ExpandTransposedConvolutions()(module), module)
