"""Kernels with ``flush_denormals`` take subnormal numbers for 0, in each thread, and restore the caller's mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tests.unit.kernels import legalised
from tvm_ext import relay
from tvm_ext._tvm import CPU_PIPELINE, Target
from tvm_ext.errors import IndexRangeError, OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.records.choice import FLUSHES_DENORMALS

op = relax.op
ROWS, COLUMNS = 64, 4096  # enough that a kernel divides them among cores
TINY = np.float32(1e-40)


def _keeps_subnormals() -> bool:
    """Whether this thread computes with subnormal numbers."""
    return bool(np.multiply(np.full(1, TINY), np.float32(0.5))[0] != 0)


def _halves(**options: Any) -> Any:
    (x,) = inputs_of((ROWS, COLUMNS))
    return relay.build(module_of([x], op.multiply(x, relax.const(np.float32(0.5)))), "llvm", **options)


def _run(library: Any, *values: Any) -> Any:
    return library.vm()["main"](*map(tvm.runtime.tensor, values)).numpy()


@pytest.mark.parametrize(
    "options", [{}, {"enable_roller": False}, {"enable_rammer": True}, {"num_threads": 1}], ids=str
)
def test_subnormal_numbers_become_0_in_every_thread(options: dict[str, Any]) -> None:
    """Operands (1e-40) and results (the half of the smallest normal number), in all rows; normal values are equal."""
    values = np.random.default_rng(5).standard_normal((ROWS, COLUMNS)).astype("f4")
    values[:, ::2], values[:, 1::4] = TINY, np.finfo("f4").tiny
    plain, flushing = _halves(**options), _halves(**options, flush_denormals=True)
    expected = values * np.float32(0.5)
    np.testing.assert_array_equal(_run(plain, values), expected)
    is_normal = np.abs(expected) >= np.finfo("f4").tiny
    np.testing.assert_array_equal(_run(flushing, values), np.where(is_normal, expected, 0))
    assert _keeps_subnormals()
    np.testing.assert_array_equal(_run(plain, values), expected, "workers keep the mode of their last caller")


def test_an_error_restores_the_mode() -> None:
    (x,) = inputs_of((4,), dtype="int64")
    rows = relax.const(np.arange(10, dtype="f4"))
    taken = op.take(rows, x, axis=0, mode="fast")
    library = relay.build(module_of([x], taken), "llvm", flush_denormals=True)
    with pytest.raises(IndexRangeError, match="outside"):
        _run(library, np.full(4, 99))
    assert _keeps_subnormals()


def test_exported_libraries_flush_without_this_package(tmp_path: Path) -> None:
    path = tmp_path / "halves.so"
    _halves(flush_denormals=True).export_library(path)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    result = machine["main"](tvm.runtime.tensor(np.full((ROWS, COLUMNS), TINY))).numpy()
    assert not result.any()
    assert _keeps_subnormals()


@pytest.mark.parametrize(
    ("target", "instructions"),
    [
        ({"kind": "llvm", "mcpu": "znver4", "mtriple": "x86_64-linux-gnu"}, ("ldmxcsr", "stmxcsr")),
        ({"kind": "llvm", "mcpu": "neoverse-n1", "mtriple": "aarch64-linux-gnu"}, ("msr\tFPCR", "mrs\t")),
    ],
    ids=["x86-64", "aarch64"],
)
def test_the_mode_is_set_around_the_kernel_and_in_its_tasks(
    target: dict[str, str], instructions: tuple[str, str]
) -> None:
    """Two functions set and restore it: the kernel's own, and the one that a worker runs."""
    kernel = legalised(lambda x: op.nn.softmax(x), (64, 640)).with_attr("global_symbol", "main")
    parallel = _with_parallel_loop(kernel)
    module = tvm.IRModule({"main": parallel.with_attr(FLUSHES_DENORMALS, True)})
    with Target(target):
        text = tvm.tirx.build(module, target=Target(target), pipeline=CPU_PIPELINE).inspect_source("asm")
    sets, reads = (str(text).lower().count(word.lower()) for word in instructions)
    assert sets == 4, text
    assert reads >= 2


def _with_parallel_loop(kernel: Any) -> Any:
    schedule = tvm.s_tir.Schedule(kernel)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        schedule.parallel(schedule.get_loops(block)[0])
        break
    return schedule.mod["main"]


def test_gpus_refuse_the_option() -> None:
    with pytest.raises(OptionError, match="flush_denormals"):
        plan_build("nvidia-a100", BuildOptions(flush_denormals=True))
