"""Builders that share a kernel cache are killed at random moments: what is left is whole, and is used."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests.attack.children import LIMIT_S, wait
from tests.support.small_models import onnx_model
from tvm_ext import relay
from tvm_ext.support import kernel_cache
from tvm_ext.support.kernel_cache import decode

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

WIDTHS = (48, 40, 56, 24, 72, 32, 16)


def build_many_kernels(cache: Path | str) -> relay.Library:
    """A library of a matrix product for each of `WIDTHS`, all different."""
    rng = np.random.default_rng(0)
    shapes = itertools.pairwise(WIDTHS)
    constants = {f"w{i}": rng.standard_normal(shape).astype("float32") for i, shape in enumerate(shapes)}
    names = ["x", *(f"h{i}" for i in range(len(constants) - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(len(constants))]
    mod, params = relay.frontend.from_onnx(onnx_model(nodes, {"x": (32, WIDTHS[0])}, constants=constants))
    return relay.build(mod, params=params, kernel_cache=str(cache), enable_persistent_fusion=False)


def outputs(library: relay.Library) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((32, WIDTHS[0])).astype("float32")
    return np.asarray(library.vm()["main"](x).numpy())


def _builder(cache: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            build_many_kernels(cache)
        finally:
            os._exit(0)
    return child


def _kill_two_builders(cache: Path, delay_s: float, after_first_file: bool) -> None:
    """Kill two builders ``delay_s`` seconds after their start, or after the first of them has written something."""
    children = [_builder(cache), _builder(cache)]
    end = time.monotonic() + LIMIT_S
    while after_first_file and not any(path.is_file() for path in cache.rglob("*")) and time.monotonic() < end:
        time.sleep(0.0002)
    time.sleep(delay_s)
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        assert wait(child) is not None


def _entries(cache: Path) -> int:
    """How many entries a cache has; every one of them is whole."""
    paths = [path for path, _, _ in kernel_cache.entries(cache)] if cache.is_dir() else []
    for path in paths:
        decode(path.read_bytes())
    return len(paths)


@pytest.mark.parametrize(
    "rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=lambda n: f"{n} rounds"
)
def test_builders_that_are_killed_leave_whole_entries(rounds: int, tmp_path: Path) -> None:
    """Every second time in the milliseconds in which entries are written, else at any moment."""
    moment = random.Random(rounds)
    wanted = outputs(build_many_kernels("off"))
    kept = set()
    for number in range(rounds):
        cache = tmp_path / str(number)
        in_writing = number % 2 == 1
        _kill_two_builders(cache, moment.uniform(0, 0.005 if in_writing else 0.8), in_writing)
        kept.add(_entries(cache))
        if in_writing:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                np.testing.assert_array_equal(outputs(build_many_kernels(cache)), wanted)
            assert _entries(cache) == len(WIDTHS) - 1
    if rounds > 10:
        assert kept - {0, len(WIDTHS) - 1}, "no builder was killed while it wrote"
