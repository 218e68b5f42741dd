"""Schedules of rTasks for AMD GPUs: interpreted by 64-lane waves, and compiled to code objects; none was run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext._tvm import IRModule, Target, tirx, tvm
from tvm_ext.ir.build_ir import index, load, sequence, store
from tvm_ext.ir.simt_ir import launch
from tvm_ext.toolchains import rocm_toolchain


@pytest.fixture(autouse=True)
def unlinked() -> Iterator[None]:
    """The object file in place of what a linker would make of it."""
    rocm_toolchain.enable_rocm()
    register = rocm_toolchain.tvm_ffi.register_global_func
    register("tvm_callback_rocm_link", lambda relocatable: bytearray(bytes(relocatable)), override=True)
    yield
    register("tvm_callback_rocm_link", rocm_toolchain.link, override=True)


def _products() -> IRModule:
    """Three products of one input, and two that wait for them."""
    x = relax.Var("x", relax.TensorType((32, 32), "float32"))
    draw = np.random.default_rng(1)
    weights = (relax.const(draw.standard_normal((32, 32)).astype("float32")) for _ in range(3))
    first, second, third = (relax.op.matmul(x, weight) for weight in weights)
    return module_of([x], relax.op.matmul(relax.op.nn.relu(relax.op.matmul(first, second)), third))


def _assembly(module: Any) -> str:
    """Of the module for the GPU, which lies below the host's."""
    found = list(module.imports)
    while found[0].kind != "hip":
        found = [*found[1:], *found[0].imports]
    return str(found[0].inspect_source("asm"))


def _kernels(assembly: str) -> str:
    """Without the sections of stock TVM's conversions of halves."""
    return assembly.partition(".section\t.text.tvm")[0]


@pytest.mark.parametrize(
    ("name", "acquired", "released"),
    [
        ("amd-mi50", r"global_load_dword.* glc\n(?:\s+\S.*\n)*?\s+buffer_wbinvl1_vol", r"s_waitcnt vmcnt\(0\)"),
        pytest.param("amd-mi300x", r"buffer_inv sc1", r"buffer_wbl2 sc1", marks=pytest.mark.slow),
    ],
)
def test_a_schedule_is_one_persistent_kernel(name: str, acquired: str, released: str) -> None:
    library = relay.build(_products(), name, enable_rammer=True, kernel_cache="off", verify=True)
    (region,) = library.report.rammer.regions
    (made,) = region.launches
    assert made.level == "static" and made.blocks > 1 and made.registers and made.registers <= 512
    assert region.predicted_us < region.sequential_us
    text = _kernels(_assembly(library.executable.mod))
    assert re.search(acquired, text) and re.search(released + r"(?:.*\n)*?.*global_atomic_add", text)
    assert "tvm_ext_" not in text.partition("rammer_main_0_kernel:")[2], "a function was not linked, or not inlined"


def test_a_barrier_waits_for_memory() -> None:
    """MI210 has no s_waitcnt of its own before s_barrier: stores to shared memory were not waited for."""
    x, y = (tirx.decl_buffer([index(128)], "float32", name) for name in "xy")
    shared = tirx.decl_buffer([index(128)], "float32", "shared", scope="shared")
    barrier = tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))

    def body(_block: Any, thread: Any) -> Any:
        given = store(shared, load(x, [thread]), [thread])
        return sequence(tirx.AllocBuffer(shared, {}), given, barrier, store(y, load(shared, [127 - thread]), [thread]))

    func = tirx.PrimFunc([x, y], launch(1, 128, body)).with_attrs({"global_symbol": "main", "s_tir": True})
    target = Target({"kind": "rocm", "mcpu": "gfx90a"})
    built = {
        name: tvm.tirx.build(IRModule({"main": func}), target, pipeline=name) for name in ("default", "tvm_ext.rocm")
    }
    texts = {name: _kernels(_assembly(module)) for name, module in built.items()}
    waited = r"ds_write_b32.*\n(?:\s+s_waitcnt.*lgkmcnt\(0\).*\n)\s+s_barrier"
    assert re.search(waited, texts["tvm_ext.rocm"]) and not re.search(waited, texts["default"])
