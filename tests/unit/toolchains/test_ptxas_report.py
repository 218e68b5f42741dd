"""Reading ptxas' messages, and comparing them with a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu.planned_use import PlannedUse, compare
from tvm_ext.devices import device_db
from tvm_ext.toolchains.ptxas_report import KernelUse, parse_report, table

REPORT = """\
ptxas info    : 0 bytes gmem, 32 bytes cmem[4]
ptxas info    : Compiling entry function 'matmul_kernel' for 'sm_80'
ptxas info    : Function properties for matmul_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 49152 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 6.513 ms
ptxas info    : Compiling entry function 'softmax_kernel' for 'sm_80'
ptxas info    : Function properties for softmax_kernel
    184 bytes stack frame, 212 bytes spill stores, 308 bytes spill loads
ptxas info    : Used 255 registers, 352 bytes cmem[0]
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'matmul_kernel' for 'sm_90a'
ptxas info    : Function properties for matmul_kernel
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 150 registers, used 1 barriers, 16 bytes cumulative stack size, 49152 bytes smem
"""

USE = KernelUse(
    name="k", architecture="sm_80", register_count=100, shared_bytes=4096, stack_bytes=0, spill_store_bytes=0,
    spill_load_bytes=0, barrier_count=1, constant_bytes=0,
)  # fmt: skip
PLAN = PlannedUse(threads=256, shared_bytes=4096, register_count=96, device=device_db.lookup("a100"))


def test_every_kernel_on_every_architecture_is_read() -> None:
    matmul, softmax, hopper = parse_report(REPORT)
    assert (matmul.name, matmul.architecture, matmul.register_count) == ("matmul_kernel", "sm_80", 168)
    assert (matmul.shared_bytes, matmul.barrier_count, matmul.constant_bytes, matmul.spills) == (49152, 1, 376, False)
    assert (softmax.stack_bytes, softmax.spill_store_bytes, softmax.spill_load_bytes) == (184, 212, 308)
    assert softmax.spills and softmax.shared_bytes == 0
    assert (hopper.architecture, hopper.stack_bytes, hopper.shared_bytes) == ("sm_90a", 16, 49152)


WITH_FUNCTIONS = """\
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 192 bytes cumulative stack size, 22912 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 353.176 ms
ptxas info    : Function properties for k_body0
    184 bytes stack frame, 72 bytes spill stores, 56 bytes spill loads
ptxas info    : Function properties for k_body1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_a_kernels_functions_spill_for_it() -> None:
    (use,) = parse_report(WITH_FUNCTIONS)
    assert (use.register_count, use.stack_bytes) == (80, 192)
    assert (use.spill_store_bytes, use.spill_load_bytes) == (76, 68)


def test_text_without_kernels_has_none() -> None:
    assert parse_report("warning: unused variable\nptxas info    : 0 bytes gmem\n") == ()


def test_the_table_has_a_line_for_each() -> None:
    lines = table(parse_report(REPORT)).splitlines()
    assert len(lines) == 3 and "168 registers" in lines[0] and "520 B spilled" in lines[1]
    assert table(()) == ""


def test_a_kernel_that_does_as_planned_gives_nothing() -> None:
    assert compare(USE, PLAN) == ()
    assert compare(replace(USE, shared_bytes=2048), PLAN) == ()  # less than planned


@pytest.mark.parametrize(
    ("use", "plan", "state", "text"),
    [
        (replace(USE, spill_store_bytes=8), PLAN, "problem", "spills registers: 8 bytes stored"),
        (replace(USE, stack_bytes=64), PLAN, "problem", "64 bytes per thread in local memory"),
        (replace(USE, shared_bytes=8192), PLAN, "problem", "8192 bytes of shared memory, planned were 4096"),
        (USE, replace(PLAN, register_count=64), "note", "100 registers, planned were 64"),
        (
            replace(USE, register_count=168),
            replace(PLAN, threads=512, register_count=168),
            "problem",
            "168 registers x 512 threads take 86016 of 65536",
        ),
        (
            replace(USE, register_count=96),
            replace(PLAN, threads=672),  # 64512 registers, but by warps of 21 that are counted as 24
            "problem",
            "96 registers x 672 threads take 73728 of 65536",
        ),
    ],
)
def test_differences_are_named(use: KernelUse, plan: PlannedUse, state: str, text: str) -> None:
    (found,) = compare(use, plan)
    assert found.state == state and text in found.text and "k on sm_80" in found.text


def test_memory_asked_for_at_launch_is_not_in_the_report() -> None:
    assert compare(replace(USE, shared_bytes=0), replace(PLAN, dynamic_shared=True)) == ()
