"""What the CUDA of a pipelined kernel looks like, and what the assembler says of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest

from tests.support.pipelining.check import Wanted, check, cuda_source, kernel_text, line_count, pipelined
from tests.support.pipelining.kernels import A100, T4, PipeliningKernel, product_reference
from tests.support.pipelining.schedules import (
    metaschedule_matmul,
    schedule_kernels,
    stock_three_by_two,
    tensor_core_matmul,
)
from tests.support.pipelining.simt import simt_kernels
from tests.unit.compilers import needs_nvcc
from tvm_ext.toolchains.cuda_toolchain import compile_cuda
from tvm_ext.toolchains.ptxas_report import KernelUse

LARGE = PipeliningKernel(
    name="matmul_1024", make=partial(tensor_core_matmul, 1024, 1024, 1024), reference=product_reference, devices=(A100,)
)
"""128 x 128 x 32 tiles, four warps."""
THREE_BY_TWO = Wanted(shared_stages=3, register_stages=2)
ROOT = Path(__file__).resolve().parents[4]
SIMT = {kernel.name: kernel for kernel in simt_kernels()}


@cache
def _source(architecture: str = "sm_80") -> str:
    return cuda_source(pipelined(LARGE, A100, THREE_BY_TWO).function, architecture)


@cache
def _stock_source(architecture: str = "sm_80") -> str:
    return cuda_source(tensor_core_matmul(1024, 1024, 1024, annotate=stock_three_by_two), architecture)


@cache
def _use(source: str, architecture: str) -> KernelUse:
    (use,) = compile_cuda(source, [architecture]).uses
    return use


def _block_behind(text: str, opening: str) -> str:
    """The text between the brace that ends ``opening`` and the one that closes it."""
    start = text.index(opening) + len(opening)
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[start : end - 1]


def _main_loop() -> str:
    """The body of the loop over the 32 tiles of the reduction."""
    text = kernel_text(_source())
    (opening,) = re.findall(r"for \(int k_0_0 = 0; k_0_0 < 32; \+\+k_0_0\) \{", text)
    return _block_behind(text, opening)


def test_the_main_loop_is_rolled() -> None:
    text = kernel_text(_source())
    assert text.count("mma.sync") == 2, "m16n8k16 twice for a fragment of 16 x 16, in loops"
    body = _main_loop()
    assert body.count("mma.sync") == 2
    assert body.count("ldmatrix") == 2
    assert body.count("ptx_cp_async_legacy") == 2


def test_one_barrier_and_one_wait_an_iteration_at_the_wrap_point() -> None:
    body = _main_loop()
    assert body.count("__syncthreads()") == 1
    assert len(re.findall(r"wait_group_\w*1\(\)", body)) == 1
    wrap = re.search(r"if \(\(+k_0_1 \+ 1\) [%&] (\d)\) == 0\) \{", body)
    assert wrap is not None, body
    guarded = _block_behind(body, wrap.group(0))
    assert "wait_group" in guarded
    assert "__syncthreads" in guarded
    # the tile that the iteration loads is asked for before the wait, its products come behind
    assert body.index("commit_group") < body.index("wait_group") < body.index("ldmatrix") < body.index("mma.sync")


def test_only_the_loads_are_guarded_and_commits_are_not() -> None:
    body = _main_loop()
    guarded = _block_behind(body, "if (k_0_0 < 30) {")
    assert guarded.count("ptx_cp_async_legacy") == 2
    assert "commit_group" not in guarded
    assert body.count("commit_group()") == 1


def test_the_prologue_loads_two_tiles_in_a_loop_and_one_fragment() -> None:
    text = kernel_text(_source())
    before = text[: text.index("for (int k_0_0 = 0;")]
    loop = re.search(r"for \(int k_0_0_\w+ = 0; k_0_0_\w+ < 2; \+\+k_0_0_\w+\) \{", before)
    assert loop is not None, before
    assert _block_behind(before, loop.group(0)).count("ptx_cp_async_legacy") == 2
    assert before.count("ldmatrix") == 2
    assert before.index("commit_group") < before.index("wait_group") < before.index("ldmatrix")


def test_fewer_lines_than_stock_pipelining() -> None:
    """508 lines for stock TVM's three by two stages, whose prologue and epilogue are copies of the loop."""
    ours, stock = line_count(_source()), line_count(_stock_source())
    assert stock >= 500
    assert ours <= 0.65 * stock, (ours, stock)


@needs_nvcc
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_no_more_registers_than_stock_pipelining_and_no_spills(architecture: str) -> None:
    ours, stock = _use(_source(architecture), architecture), _use(_stock_source(architecture), architecture)
    assert not ours.spills
    assert ours.stack_bytes == 0
    assert ours.register_count <= stock.register_count <= 232


@pytest.mark.parametrize(
    ("name", "device", "shared", "registers", "expected"),
    [
        # without register level a barrier before each of the tiles; with it one more, before the first fragment
        ("matmul_odd_steps", A100, 3, 1, 2 * 5),
        ("matmul_odd_steps", A100, 3, 2, 2 * (5 + 1)),
        ("matmul_odd_steps", A100, 4, 1, 2 * 5),
        ("matmul_odd_steps", T4, 2, 1, 2 * 5),
        ("matmul_odd_steps", T4, 2, 2, 2 * (5 + 1)),
        ("sum_of_rows", A100, 2, 1, 7),
    ],
)
def test_barriers_of_two_blocks(name: str, device: str, shared: int, registers: int, expected: int) -> None:
    """One an iteration, counted by the interpreter; unpipelined there are two. ``matmul_odd_steps`` has two blocks."""
    item = pipelined(SIMT[name], device, Wanted(shared_stages=shared, register_stages=registers))
    assert check(item).counters.barriers == expected


def test_nothing_is_loaded_twice() -> None:
    """A condition instead of the paper's index modulo extent: global loads are those of the plain kernel."""
    kernel = SIMT["matmul_odd_steps"]

    def sectors(wanted: Wanted) -> int:
        return check(pipelined(kernel, A100, wanted)).counters.total("sectors", scope="global")

    assert sectors(THREE_BY_TWO) == sectors(Wanted(mode="none", always=False))


@pytest.mark.sampled(every=3)
@needs_nvcc
@pytest.mark.parametrize("name", ["matmul_odd_steps", "matmul_dynamic_2_steps", "matmul_zero_filled", "two_products"])
@pytest.mark.parametrize(("device", "architecture"), [(A100, "sm_80"), (T4, "sm_75")])
def test_other_kernels_compile_without_spills(name: str, device: str, architecture: str) -> None:
    use = _use(cuda_source(pipelined(SIMT[name], device, THREE_BY_TWO).function, architecture), architecture)
    assert not use.spills
    assert use.stack_bytes == 0


@needs_nvcc
def test_schedules_of_metaschedule_compile_without_spills() -> None:
    kernel = next(k for k in schedule_kernels() if k.name == "metaschedule_matmul")
    plain = _use(cuda_source(metaschedule_matmul("plain"), "sm_80"), "sm_80")
    use = _use(cuda_source(pipelined(kernel, A100, THREE_BY_TWO).function, "sm_80"), "sm_80")
    assert use.spill_store_bytes <= plain.spill_store_bytes
    assert use.stack_bytes <= plain.stack_bytes


@pytest.mark.slow  # four kernels by nvcc
@needs_nvcc
def test_the_benchmark_writes_a_record_for_each_mode(tmp_path: Path) -> None:
    path = tmp_path / "pipelining.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "pipelining.py"), "A15", "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert [record["mode"] for record in records] == ["none", "double", "multistage", "full"]
    assert [record["shared_stages"] for record in records][:2] == [1, 2]
    assert [sum(record["barriers"].values()) for record in records] == [2, 1, 1, 1]
    assert all(record["registers"] > 0 and record["spill_bytes"] == 0 for record in records)
    assert "1 of 1 operators pipelined" in done.stdout
