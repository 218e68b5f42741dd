"""Element-wise computations of a row as one, and conditions of its outer axes that are asked once."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.unit.kernels import constructed, legalised, relative_error, run
from tvm_ext._tvm import For, structural_walk

op = relax.op


def silu(x):
    return x / (1 + np.exp(-x))


def gated(*parts, axis=1):
    joined = op.concat(parts, axis=axis)
    scaled = op.add(op.multiply(joined, relax.const(2.0)), relax.const(0.5))
    return op.multiply(scaled, op.sigmoid(scaled))


def loop_extents(kernel):
    found = set()
    structural_walk(kernel.body, (For, lambda loop: found.add(int(loop.extent))))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(12, 20), (5, 16, 7, 9)])
def test_what_follows_a_concatenation_is_one_computation(axis, sizes, rng):
    shapes = [tuple(size if place == axis else 14 for place in range(4)) for size in sizes]
    parts = [rng.standard_normal(shape).astype("f4") for shape in shapes]
    kernel, choice = constructed(legalised(lambda *x: gated(*x, axis=axis), *shapes))
    expected = silu(2 * np.concatenate(parts, axis).astype("f8") + 0.5)
    assert relative_error(run(kernel, choice, parts, expected.shape, "float32"), expected) < 1e-6
    assert " + " not in choice.notes[0]  # computations of a row


def test_a_point_is_no_row():
    """All axes of the two computations are the same: as a row of theirs, each of 14 x 14 points was a task."""
    kernel, _ = constructed(legalised(gated, (1, 60, 14, 14), (1, 60, 14, 14)))
    assert loop_extents(kernel) == {120, 196}


def test_half_precision_is_computed_twice(rng):
    parts = [rng.standard_normal((1, 8, 5, 5)).astype("f2") for _ in range(2)]

    def build(*x):
        joined = op.add(op.concat(x, axis=1), relax.const(0.5, "float16"))
        return op.multiply(joined, op.sigmoid(joined))

    kernel, choice = constructed(legalised(build, *(part.shape for part in parts), dtype="float16"))
    expected = silu(np.concatenate(parts, 1).astype("f8") + 0.5)
    assert relative_error(run(kernel, choice, parts, expected.shape, "float16"), expected) < 2e-3


def test_slices_of_what_is_written_are_loops_of_their_own(rng):
    """Fewer axes are shared by both than each has: batch 1 would be the only one."""
    x, y = (rng.standard_normal((1, 24, 7, 7)).astype("f4") for _ in range(2))

    def build(x, y):
        return op.strided_slice(gated(x, y), axes=[1], begin=[10], end=[40])

    kernel, choice = constructed(legalised(build, x.shape, y.shape))
    expected = silu(2 * np.concatenate([x, y], 1).astype("f8") + 0.5)[:, 10:40]
    assert relative_error(run(kernel, choice, [x, y], expected.shape, "float32"), expected) < 1e-6
