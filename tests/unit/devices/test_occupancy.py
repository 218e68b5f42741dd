"""Blocks of a unit against NVIDIA's occupancy calculator, and that nobody else answers such questions."""

from __future__ import annotations

import ast
import functools
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import tvm_ext
from tests.support.source_trees import parsed
from tvm_ext.devices import device_db, gpu
from tvm_ext.devices.device_facts import LayerText, fact, spec_from_facts
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import (
    BlockUse,
    blocks_per_unit,
    max_block_threads,
    occupancy,
    registers_left,
    shared_limit_bytes,
    static_shared_bytes,
    taken_shared_bytes,
)
from tvm_ext.devices.rows.cuda_limits import CUDA_LIMITS, limit_facts

KIB = 1024
SCOPES = ("teu", "unit", "device")


def device_of(capability: tuple[int, int]) -> DeviceSpec:
    """A device that has what its capability says, and nothing else that would matter here."""
    facts = [
        fact("unit_count", 1, "SMs", "test"),
        fact("teu_lanes", gpu.WARP, "threads", "test"),
        fact("register_limit", 96, "registers", "test"),
        fact("register_bytes", 4, "bytes", "test"),
        *(fact(f"layers.L{number}.transaction_bytes", 32, "bytes", "test") for number in range(len(SCOPES))),
    ]
    return spec_from_facts(
        name=f"sm_{capability[0]}{capability[1]}",
        kind="cuda",
        description="",
        layers=tuple(LayerText(description="", scope=scope) for scope in SCOPES),
        facts=[*limit_facts(capability), *facts],
    )


DEVICES = {capability: device_of(capability) for capability in CUDA_LIMITS}
ANSWERED = ((6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0))

# threads, registers of each, shared memory asked for: blocks of a unit of sm_60, 70, 75, 80, 86, 89, 90, as
# cudaOccMaxActiveBlocksPerMultiprocessor of CUDA 13.0 (cuda_occupancy.h) answers.
KNOWN_ANSWERS: dict[tuple[int, int, int], tuple[int, ...]] = {
    (256, 32, 0): (8, 8, 4, 8, 6, 6, 8),
    (256, 32, 32 * KIB): (2, 3, 2, 4, 3, 3, 6),
    (256, 88, 32 * KIB): (2, 2, 2, 2, 2, 2, 2),
    (128, 104, 16 * KIB + 1): (3, 4, 3, 4, 4, 4, 4),
    (288, 72, 0): (3, 3, 3, 3, 3, 3, 3),
    (1024, 64, 48 * KIB): (1, 1, 1, 1, 1, 1, 1),
    (96, 168, 20_000): (3, 4, 3, 4, 4, 4, 4),
    (64, 16, 100): (32, 32, 16, 32, 16, 24, 32),
    (512, 127, 0): (1, 1, 1, 1, 1, 1, 1),
    (672, 96, 0): (0, 0, 0, 0, 0, 0, 0),  # 21 warps of 3072 registers, counted as 24
    (256, 255, 48 * KIB): (1, 1, 1, 1, 1, 1, 1),
    (256, 32, 48 * KIB + 1): (0, 1, 1, 3, 2, 2, 4),
    (256, 32, 64 * KIB): (0, 1, 1, 2, 1, 1, 3),
    (256, 32, 96 * KIB): (0, 1, 0, 1, 1, 1, 2),
    (256, 32, 99 * KIB): (0, 0, 0, 1, 1, 1, 2),
    (256, 32, 113 * KIB): (0, 0, 0, 1, 0, 0, 2),
    (256, 32, 163 * KIB): (0, 0, 0, 1, 0, 0, 1),
    (256, 32, 227 * KIB): (0, 0, 0, 0, 0, 0, 1),
    (544, 104, 0): (0, 0, 0, 0, 0, 0, 0),
}
"""Beside the ordinary: all limits, both sides of each, and what rounds up to more than it is."""


def use_of(threads: int, registers: int, shared_bytes: int) -> BlockUse:
    return BlockUse(threads=threads, registers=registers, shared_bytes=shared_bytes)


@pytest.mark.parametrize("case", KNOWN_ANSWERS, ids=str)
def test_known_answers(case: tuple[int, int, int]) -> None:
    found = tuple(blocks_per_unit(use_of(*case), DEVICES[capability]) for capability in ANSWERED)
    assert found == KNOWN_ANSWERS[case]


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        ((256, 32, 40 * KIB), "shared memory"),
        ((256, 88, 0), "registers"),
        ((1024, 16, 0), "threads"),
        ((32, 16, 0), "blocks"),
    ],
)
def test_what_sets_the_limit_is_named(case: tuple[int, int, int], limit: str) -> None:
    limits = occupancy(use_of(*case), DEVICES[8, 0]).limits
    assert min(limits, key=lambda item: item[1])[0] == limit


# --- the calculator itself, where a toolkit is installed -------------------------------------------------------------
CALCULATOR = r"""
#include <climits>
#include <cstdio>
#include <cstring>
#include "cuda_occupancy.h"
int main() {
  int major, minor;
  long threads_sm, registers_sm, registers_block, fixed, shared_sm, opt_in, reserved, threads, registers, shared;
  while (scanf("%d %d %ld %ld %ld %ld %ld %ld %ld %ld %ld %ld", &major, &minor, &threads_sm, &registers_sm,
               &registers_block, &fixed, &shared_sm, &opt_in, &reserved, &threads, &registers, &shared) == 12) {
    cudaOccDeviceProp device;
    device.computeMajor = major; device.computeMinor = minor; device.warpSize = 32; device.numSms = 1;
    device.maxThreadsPerBlock = 1024; device.maxThreadsPerMultiprocessor = threads_sm;
    device.regsPerBlock = registers_block; device.regsPerMultiprocessor = registers_sm;
    device.sharedMemPerBlock = fixed; device.sharedMemPerMultiprocessor = shared_sm;
    device.sharedMemPerBlockOptin = opt_in; device.reservedSharedMemPerBlock = reserved;
    cudaOccFuncAttributes kernel;
    memset(&kernel, 0, sizeof kernel);
    kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers; kernel.maxDynamicSharedSizeBytes = shared;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF; kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    cudaOccDeviceState state;
    state.cacheConfig = CACHE_PREFER_NONE; state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
    cudaOccResult result;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    printf("%d\n", error ? -1 : result.activeBlocksPerMultiprocessor);
  }
}
"""


def _include_folder() -> Path | None:
    """The folder with the calculator, of the toolkit whose nvcc is on the path."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    command = [nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    folders = re.findall(r'"-I([^"]+)"', listed.stderr)
    return next((Path(folder) for folder in folders if (Path(folder) / "cuda_occupancy.h").is_file()), None)


def _question(capability: tuple[int, int], case: tuple[int, int, int]) -> str:
    device, layer = DEVICES[capability], DEVICES[capability].layer("L1")
    limits = (
        device.max_threads_per_unit, device.registers_per_unit, device.registers_per_block, layer.capacity_bytes,
        layer.unit_capacity_bytes, shared_limit_bytes(device), layer.block_reserved_bytes or 0,
    )  # fmt: skip
    return " ".join(map(str, (*capability, *limits, *case)))


def test_the_calculator_says_the_same(tmp_path: Path) -> None:
    """Of 20,000 random blocks, those of the table among them."""
    include, compiler = _include_folder(), shutil.which("g++")
    if include is None or compiler is None:
        pytest.skip("NVIDIA's occupancy calculator needs the headers of a CUDA toolkit and g++")
    (tmp_path / "ask.cpp").write_text(CALCULATOR)
    subprocess.run([compiler, f"-I{include}", "ask.cpp", "-o", "ask"], cwd=tmp_path, check=True, timeout=120)
    generator = random.Random(0)
    cases = [(capability, case) for capability in ANSWERED for case in KNOWN_ANSWERS]
    while len(cases) < 20_000:
        threads = generator.choice([generator.randint(1, 1024), 32 * generator.randint(1, 32)])
        shared = generator.choice([0, generator.randint(0, 240 * KIB), KIB * generator.randint(0, 64)])
        cases.append((generator.choice(list(DEVICES)), (threads, generator.randint(1, 255), shared)))
    asked = "\n".join(_question(*case) for case in cases)
    answers = subprocess.run([tmp_path / "ask"], input=asked, capture_output=True, text=True, check=True, timeout=120)
    own = [blocks_per_unit(use_of(*case), DEVICES[capability]) for capability, case in cases]
    answered = map(int, answers.stdout.split())
    assert [case for case in zip(cases, answered, own, strict=True) if case[1] != case[2]] == []


# --- the other way round ---------------------------------------------------------------------------------------------
GPU_ROWS = [row for row in device_db.ROWS if row.kind in ("cuda", "rocm")]


def by_registers(use: BlockUse, device: DeviceSpec) -> int:
    return dict(occupancy(use, device).limits)["registers"]


@pytest.mark.parametrize("device", [*GPU_ROWS, *DEVICES.values()], ids=lambda device: device.name)
def test_the_most_that_fits_is_the_most(device: DeviceSpec) -> None:
    """`registers_left` and `max_block_threads` are the largest for which so many blocks fit."""
    most = device.max_registers_per_thread or 0
    for blocks in (1, 2, 3, 5):
        for threads in (32, 64, 96, 224, 256):
            left = registers_left(threads, device, blocks=blocks)
            assert by_registers(use_of(threads, left, 0), device) >= blocks
            assert left == most or by_registers(use_of(threads, left + 1, 0), device) < blocks
        for registers in (16, 33, 96, 120):
            threads = max_block_threads(device, registers=registers, blocks=blocks) or 0
            assert blocks_per_unit(use_of(threads, registers, 0), device) >= blocks
            more = use_of(threads + device.teu_lanes, registers, 0)
            assert more.threads > (device.max_threads_per_block or 0) or blocks_per_unit(more, device) < blocks


def test_a_tile_of_32_kib_takes_33_of_an_a100() -> None:
    """What had two answers: 163 / 32 is 5, 164 / 33 is 4."""
    device = device_db.lookup("a100")
    assert taken_shared_bytes(32 * KIB, device) == 33 * KIB
    assert blocks_per_unit(use_of(64, 32, 32 * KIB), device) == 4


def test_opencl_has_no_memory_on_request() -> None:
    device = device_db.as_opencl(device_db.lookup("v100"))
    assert shared_limit_bytes(device) == static_shared_bytes(device) == 48 * KIB


def test_a_wavefront_shares_a_simd_unit() -> None:
    """MI50, 84 of 256 registers: 3 wavefronts on each of 4 SIMD units; a block of 256 threads is one on each."""
    device = device_db.lookup("mi50")
    assert occupancy(use_of(256, 84, 0), device).limits == (("registers", 3), ("threads", 10))


def test_what_is_not_known_sets_no_limit() -> None:
    device = device_db.lookup("graphcore-ipu")
    assert max_block_threads(device) is None
    assert dict(occupancy(use_of(2, 8, 64 * KIB), device).limits) == {"shared memory": 4, "threads": 3}
    assert registers_left(2, device) == device.register_limit


# --- one place -------------------------------------------------------------------------------------------------------
PACKAGE = Path(tvm_ext.__file__).parent
ANSWERED_HERE = {
    "block_reserved_bytes", "compute_capability", "granule_bytes", "max_blocks_per_unit", "max_registers_per_thread",
    "max_threads_per_block", "max_threads_per_unit", "opt_in_capacity_bytes", "register_granule", "registers_per_block",
    "registers_per_unit", "unit_capacity_bytes", "warp_granule",
}  # fmt: skip
NAMED_ONCE = {"ALL_BANKS_BYTES", "REGISTER_BYTES", "SECTOR_BYTES", "VECTOR_BYTES", "WARP"}


@functools.cache
def _nodes() -> tuple[tuple[str, ast.Attribute | ast.Assign | ast.AnnAssign], ...]:
    """Attributes and assignments of modules outside `devices` that have a name in question, each with its path."""
    names = re.compile(rf"\b({'|'.join(ANSWERED_HERE | NAMED_ONCE)})\b")
    others = [path for path in sorted(PACKAGE.rglob("*.py")) if "devices" not in path.relative_to(PACKAGE).parts[:1]]
    paths = [path for path in others if names.search(path.read_text(encoding="utf-8"))]
    assert paths
    return tuple(
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in paths
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute | ast.Assign | ast.AnnAssign)
    )


def test_limits_of_units_are_read_in_one_place() -> None:
    """Whoever asks how much fits asks `occupancy`; whoever asks what a capability brings asks `capabilities`."""
    read = [
        (name, node.attr) for name, node in _nodes() if isinstance(node, ast.Attribute) and node.attr in ANSWERED_HERE
    ]
    assert read == []


def test_constants_of_gpus_are_named_once() -> None:
    named = [
        (name, target.id)
        for name, node in _nodes()
        if not isinstance(node, ast.Attribute)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id in NAMED_ONCE
    ]
    assert named == []


@pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row.name)
def test_rows_agree_with_what_all_gpus_have(row: DeviceSpec) -> None:
    assert row.register_bytes == gpu.REGISTER_BYTES
    if row.kind == "cuda":
        assert row.teu_lanes == gpu.WARP
        assert row.lowest_layer.transaction_bytes == gpu.SECTOR_BYTES
        assert row.layer("L1").transaction_bytes == gpu.ALL_BANKS_BYTES * (2 if row.name == "nvidia-k80" else 1)


def test_a_row_without_any_limit_is_a_mistake_of_the_table() -> None:
    row = device_db.lookup("a100")
    layers = (row.layers[0], replace(row.layers[1], block_reserved_bytes=None), row.layers[2])
    bare = replace(row, layers=layers, registers_per_unit=None, max_threads_per_unit=None, max_blocks_per_unit=None)
    with pytest.raises(AssertionError, match="nvidia-a100: the table says nothing"):
        occupancy(use_of(32, 8, 0), bare)
