"""Reductions in chunks: they are right to the last bit, for tails of every kind, and only where rows lie far apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.unit.kernels import constructed, legalised, relative_error, run
from tvm_ext.devices.device_db import lookup

op = relax.op
DEVICE = lookup("cpu-epyc-zen5")
NO_PAGES = replace(DEVICE, page_bytes=None)
"""Without pages nothing is far apart."""


def _convolution(x: Any, w: Any) -> Any:
    return op.nn.relu(op.nn.conv2d(x, w, padding=1))


def _grouped(x: Any, w: Any) -> Any:
    return op.nn.conv2d(x, w, padding=1, groups=2)


def _kernel(build: Any, device: Any, *shapes: tuple[int, ...]) -> tuple[Any, Any]:
    return constructed(legalised(build, *shapes), constants=(1,), device=device)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("build", "x", "w"),
    [
        pytest.param(
            _convolution, (1, 64, 23, 23), (48, 64, 3, 3), marks=pytest.mark.slow
        ),  # whole chunks; cut rows and columns
        (_convolution, (1, 61, 22, 23), (20, 61, 3, 3)),  # a shorter last chunk; filters that fill no register
        (_grouped, (2, 128, 23, 23), (64, 64, 3, 3)),
    ],
    ids=["even", "cut", "grouped"],
)
def test_sums_in_chunks_are_those_of_whole_reductions(
    build: Any, x: tuple[int, ...], w: tuple[int, ...], rng: np.random.Generator
) -> None:
    inputs = [rng.standard_normal(shape).astype("float32") for shape in (x, w)]
    shape = (x[0], w[0], *x[2:])
    chunked, choice = _kernel(build, DEVICE, x, w)
    whole, other = _kernel(build, NO_PAGES, x, w)
    assert "chunk" in chunked.script() and "chunk" not in whole.script()
    actual, expected = (run(*pair, inputs, shape, "float32") for pair in ((chunked, choice), (whole, other)))
    assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize(
    ("build", "x", "w"),
    [
        (_convolution, (1, 64, 7, 7), (48, 64, 3, 3)),  # planes of 324 bytes
        (_convolution, (1, 32, 23, 23), (48, 32, 3, 3)),  # so few planes are followed
        (op.matmul, (256, 2048), (2048, 64)),  # rows go along the reduction
    ],
    ids=["near", "few", "product"],
)
def test_what_memory_follows_stays_whole(build: Any, x: tuple[int, ...], w: tuple[int, ...]) -> None:
    assert "chunk" not in _kernel(build, DEVICE, x, w)[0].script()
