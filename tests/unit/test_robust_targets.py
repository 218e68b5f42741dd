"""Narrow instruction sets, one core, another architecture: what the code of a target uses, and that it is right."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tvm_ext import relay
from tvm_ext.devices import device_db
from tvm_ext.devices.cpu_info import TILES, CpuInfo, CpuNeeds, read_cpu_info
from tvm_ext.devices.rows.recorded_cpus import RECORDED_ROWS
from tvm_ext.devices.tile_permission import tile_request
from tvm_ext.errors import TargetError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.runtime import library
from tvm_ext.support.limited_process import run_limited
from tvm_ext.toolchains.host_compiler import compiler
from tvm_ext.toolchains.remedies import HOST

pytestmark = pytest.mark.optimised  # many of these read the machine code

IS_X86 = read_cpu_info().machine == "x86_64"
x86 = pytest.mark.skipif(not IS_X86, reason="runs x86-64 code")
Graph = Callable[..., Any]

AVX2 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
SSE2 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64", "num-cores": 2}
AVX512 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512", "num-cores": 2}
NEON = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1", "num-cores": 2}

OPERATORS: dict[str, tuple[Graph, tuple[tuple[int, ...], ...]]] = {
    "matmul": (lambda x, w: relax.op.matmul(x, w), ((96, 67), (67, 80))),
    "conv": (lambda x, w: relax.op.nn.relu(relax.op.nn.conv2d(x, w, padding=1)), ((1, 13, 17, 19), (29, 13, 3, 3))),
    "conv_1x1": (lambda x, w: relax.op.nn.conv2d(x, w), ((1, 32, 14, 14), (48, 32, 1, 1))),
    "depthwise": (lambda x, w: relax.op.nn.conv2d(x, w, padding=1, groups=37), ((1, 37, 23, 29), (37, 1, 3, 3))),
    "transposed": (lambda x, w: relax.op.nn.conv2d_transpose(x, w, strides=2), ((1, 8, 7, 9), (8, 5, 3, 3))),
    "softmax": (lambda x: relax.op.nn.softmax(x), ((31, 67),)),
    "gelu": (lambda x: relax.op.nn.gelu(x), ((31, 67),)),
    "pool": (lambda x: relax.op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)), ((1, 13, 23, 19),)),
    "mean": (lambda x: relax.op.mean(x, axis=[2, 3]), ((2, 13, 7, 7),)),
    "argmax": (lambda x: relax.op.argmax(x, axis=1), ((31, 67),)),
    "cumsum": (lambda x: relax.op.cumsum(x, axis=1), ((31, 67),)),
    "uneven_pool": (lambda x: relax.op.nn.adaptive_avg_pool2d(x, (5, 7)), ((2, 8, 23, 19),)),
}
NAMES = tuple(OPERATORS)


def operator_module(name: str) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """The operator's module, and values of its inputs."""
    graph, shapes = OPERATORS[name]
    rng = np.random.default_rng(len(name))
    inputs = inputs_of(*shapes)
    return module_of(inputs, graph(*inputs)), [rng.standard_normal(shape).astype("float32") for shape in shapes]


def build(name: str, target: Any, **settings: Any) -> tuple[relay.Library, np.ndarray, list[np.ndarray]]:
    """The operator with its last of several inputs constant; its library, its input, and all values."""
    mod, values = operator_module(name)
    params = {"x1": values[1]} if len(values) > 1 else {}
    return relay.build(mod, target, params=params, **settings), values[0], values


def modules_of(module: Any) -> Iterator[Any]:
    yield module
    for inner in module.imports:
        yield from modules_of(inner)


def llvm_module(mod: tvm.IRModule, params: dict[str, np.ndarray], target: Any, **settings: Any) -> Any:
    """All code of the model as one LLVM module, which can be looked at."""
    plan = plan_build(target, BuildOptions(**settings))
    with plan.target:
        kernels = plan.construct(relay.prepare(mod, params))
        executable = relax.build(kernels, plan.target, relax_pipeline=plan.lower, tir_pipeline="default")
    return next(module for module in modules_of(executable.mod) if module.kind == "llvm")


def code(name: str, target: Any, **settings: Any) -> Any:
    """`llvm_module` of an operator with its last of several inputs constant."""
    mod, values = operator_module(name)
    return llvm_module(mod, {"x1": values[1]} if len(values) > 1 else {}, target, **settings)


def assembly(name: str, target: Any, **settings: Any) -> str:
    return str(code(name, target, **settings).inspect_source("asm"))


def inner_loops(text: str) -> list[list[str]]:
    """The instructions of every loop without a jump target inside, i.e. from a label to the jump back to it."""
    loops, label, start = [], "", 0
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if target := re.match(r"(\.LBB\w+):", line):
            label, start = target[1], number
        elif label and re.match(rf"\s+j\w+\s+{re.escape(label)}$", line):
            loops.append(lines[start:number])
    return loops


def hottest_loop(text: str, arithmetic: str) -> list[str]:
    """The inner loop with the most ``arithmetic`` instructions."""
    return max(inner_loops(text), key=lambda loop: sum(arithmetic in line for line in loop))


def vectors_on_stack(text: str, loop: list[str]) -> list[str]:
    """The instructions of ``loop`` that hold a vector register in memory of the stack.

    %rbp addresses the stack only in a function that sets it to %rsp; elsewhere it is a register like any other.
    """
    function = text[: text.index("\n".join(loop))].rpartition("@function")[2]
    frame = "|%rbp" if re.search(r"movq\s+%rsp, %rbp", function) else ""
    return [line for line in loop if "mm" in line and re.search(rf"\((%rsp{frame})\b", line)]


# --- numbers ----------------------------------------------------------------------------------------------------------
def expected(name: str) -> np.ndarray:
    """Stock TVM's result, whose loops are unscheduled."""
    mod, values = operator_module(name)
    output = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](*values)
    return np.asarray(output.numpy(), "float64")


@x86
@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("target", [AVX2, SSE2, {"kind": "llvm", "num-cores": 1}], ids=["avx2", "sse2", "one core"])
@pytest.mark.parametrize("name", NAMES)
def test_results_are_right(name: str, target: dict[str, Any]) -> None:
    lib, data, _ = build(name, target)
    if lib.cpu.unmet_by(read_cpu_info()):
        pytest.skip("this CPU has no AVX2")
    actual, wanted = lib.vm()["main"](data).numpy(), expected(name)
    assert np.linalg.norm(actual - wanted) <= 1e-5 * np.linalg.norm(wanted)


# --- registers --------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("target", "absent"), [(AVX2, "%zmm"), (SSE2, "%ymm")], ids=["avx2", "sse2"])
def test_no_wider_register_than_the_target_has(name: str, target: dict[str, Any], absent: str) -> None:
    text = assembly(name, target)
    assert absent not in text
    assert "%zmm" not in text
    assert re.search(r"%[xy]mm1[6-9]|%[xy]mm[23]\d", text) is None  # those of AVX-512VL


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("target", "arithmetic", "registers", "lanes"),
    [(AVX512, "vfmadd", 32, 16), (AVX2, "vfmadd", 16, 8)],
    ids=["avx512", "avx2"],
)
@pytest.mark.parametrize("name", ["matmul", "conv_1x1"])
@pytest.mark.parametrize("cpu", [row.name for row in RECORDED_ROWS])
def test_accumulators_stay_in_registers(
    cpu: str,
    name: str,
    target: dict[str, Any],
    arithmetic: str,
    registers: int,
    lanes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of a vector register is stored to the stack or read from it in the hottest loop, on whichever CPU."""
    monkeypatch.setenv("TVM_EXT_CPU", cpu)
    lib, *_ = build(name, target)
    program = lib.report.operators[0].choice.program
    assert program is not None
    assert program.vector_axis is not None
    sizes = program.tile("L0").sizes
    accumulators = 1
    for axis, size in sizes.items():
        accumulators *= -(-size // lanes) if axis == program.vector_axis else size
    assert sizes[program.vector_axis] >= lanes
    assert registers // 4 <= accumulators < registers
    text = assembly(name, target)
    loop = hottest_loop(text, arithmetic)
    assert sum(arithmetic in line for line in loop) >= 4
    assert vectors_on_stack(text, loop) == []


@pytest.mark.parametrize(("prologue", "found"), [("movq %rsp, %rbp", 2), ("pushq %rbp", 1)])
def test_a_register_on_the_stack_is_seen(prologue: str, found: int) -> None:
    body = [".LBB0_1:", "\tvmovups %zmm3, -64(%rbp)", "\tvmovups 8(%rsp,%rax), %zmm4", "\taddq $4, %rax"]
    text = "\n".join(["\t.type kernel,@function", "kernel:", f"\t{prologue}", *body, "\tjne .LBB0_1"])
    assert len(vectors_on_stack(text, body)) == found


# --- one core ---------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_for_one_core_starts_no_threads(name: str) -> None:
    assert "ParallelLaunch" not in assembly(name, {**AVX2, "num-cores": 1})
    assert "ParallelLaunch" not in assembly(name, AVX2, num_threads=1)


def test_several_cores_do_start_threads() -> None:
    """What the test above looks for is there, in a kernel large enough to be divided."""
    graph, _ = OPERATORS["matmul"]
    inputs = inputs_of((512, 512), (512, 512))
    assert "ParallelLaunch" in str(llvm_module(module_of(inputs, graph(*inputs)), {}, AVX2).inspect_source("asm"))


# --- another architecture ---------------------------------------------------------------------------------------------
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", NAMES)
def test_an_arm_library_is_compiled(name: str, tmp_path: Path) -> None:
    compiled = code(name, NEON)
    compiled.write_to_file(str(tmp_path / "kernels.o"))
    header = (tmp_path / "kernels.o").read_bytes()[:20]
    assert header[:5] == b"\x7fELF\x02"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64
    if name in ("matmul", "conv", "conv_1x1", "depthwise"):
        assert re.search(r"fmla\s+v\d+\.4s", str(compiled.inspect_source("asm")))


def test_code_for_another_architecture_is_not_run() -> None:
    target = NEON if IS_X86 else SSE2
    lib, *_ = build("matmul", target)
    assert lib.cpu.machine == ("aarch64" if IS_X86 else "x86_64")
    with pytest.raises(TargetError, match=r"(?s)cannot run on this CPU.*is an .* and not an .*target 'llvm'"):
        lib.vm()


def test_code_for_another_architecture_is_not_linked(tmp_path: Path) -> None:
    lib, *_ = build("matmul", NEON if IS_X86 else SSE2)
    with pytest.raises(TargetError, match=r"(?s)cannot join it.*cross compiler"):
        lib.export_library(tmp_path / "foreign.so")
    assert list(tmp_path.iterdir()) == []


@x86
def test_code_with_features_that_the_cpu_lacks_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process (SIGILL). Told of the library that was built, and of the one loaded from a file."""
    lib, *_ = build("matmul", AVX2)
    lib.export_library(tmp_path / "avx2.so")
    host = read_cpu_info()
    old = CpuInfo(machine=host.machine, model="an old CPU", features=frozenset({"sse2", "sse4.1", "sse4.2"}), caches=())
    monkeypatch.setattr(library, "read_cpu_info", lambda: old)
    for source in (lib, relay.load(tmp_path / "avx2.so")):
        with pytest.raises(TargetError, match=r"an old CPU.*lacks avx, avx2, fma") as caught:
            relay.GraphModule(source)
        assert "x86-64-v3" in caught.value.remedy
    build("matmul", SSE2)[0].vm()


@x86
@pytest.mark.parametrize("refused", ["", "Operation not permitted"])
def test_code_for_tiles_that_the_process_may_not_use_is_not_run(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without AMX, and where Linux refuses it: the error says which."""
    lib, *_ = build("matmul", "cpu-xeon-amx-tiles")
    features = frozenset(lib.cpu.features) - TILES
    xeon = CpuInfo(machine=read_cpu_info().machine, model="a Xeon", features=features, caches=(), refused=refused)
    monkeypatch.setattr(library, "read_cpu_info", lambda: xeon)
    with pytest.raises(TargetError, match=r"(?s)a Xeon.*lacks amx-tile, amx-bf16, amx-int8") as caught:
        lib.vm()
    assert (f"Linux refuses tiles: {refused}" in str(caught.value)) == bool(refused)


@x86
@pytest.mark.parametrize("target", ["cpu-xeon-amx-tiles", "cpu-xeon-amx"])
def test_exported_code_for_tiles_asks_for_them(target: str, tmp_path: Path) -> None:
    build("matmul", target)[0].export_library(tmp_path / "lib.so")
    assert (b"tvm_ext_ask_for_tiles" in (tmp_path / "lib.so").read_bytes()) == (target == "cpu-xeon-amx-tiles")
    relay.load(tmp_path / "lib.so")


def test_a_library_whose_request_for_tiles_is_refused_says_so_when_it_is_loaded(tmp_path: Path) -> None:
    """To any program, before its first kernel ends that: here with a system call that always fails."""
    refusal = "#include <errno.h>\nlong refused(long number, ...) { errno = EPERM; return -1; }"
    (tmp_path / "lib.c").write_text(f"{tile_request()}{refusal}")
    command = [compiler(), "-Dsyscall=refused", "-shared", "-fPIC", "-x", "c", "lib.c", "-o", "lib.so"]
    run_limited(command, 60, tmp_path, remedies=HOST)
    code = f"import ctypes; ctypes.CDLL({str(tmp_path / 'lib.so')!r}); print('loaded')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "loaded\n"
    assert done.stderr.startswith("This library is built for Intel AMX")
    assert "not permitted" in done.stderr


@pytest.mark.parametrize(
    ("needs", "features", "unmet"),
    [
        (CpuNeeds(), {"sse2"}, ""),
        (CpuNeeds(machine="x86_64", features=("sse2",)), {"sse2", "avx"}, ""),
        (CpuNeeds(machine="x86_64", features=("sse2", "avx")), {"sse2"}, "lacks avx"),
        (CpuNeeds(machine="x86_64", features=("sse2", "avx")), None, ""),
        (CpuNeeds(machine="aarch64", features=("neon",)), {"sse2"}, "is an x86_64 and not an aarch64"),
    ],
)
def test_what_code_needs_is_compared_with_a_cpu(needs: CpuNeeds, features: set[str] | None, unmet: str) -> None:
    cpu = CpuInfo(
        machine="x86_64", model="a CPU", features=None if features is None else frozenset(features), caches=()
    )
    assert needs.unmet_by(cpu) == unmet


def test_needs_of_targets() -> None:
    needs = {name: device_db.cpu_needs(device_db.device_for_target(name)[1]) for name in ("cpu-sse2", "cpu-avx2")}
    assert needs["cpu-sse2"] == CpuNeeds(machine="x86_64" if IS_X86 else "aarch64", features=needs["cpu-sse2"].features)
    assert {"avx2", "fma"} <= set(needs["cpu-avx2"].features) or not IS_X86
    assert device_db.cpu_needs(device_db.device_for_target("nvidia-v100")[1]) == CpuNeeds()
