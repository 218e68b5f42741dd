"""Products on AMD's matrix cores: the instruction's layout, values in the interpreter, machine code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper

from tests.support.pipelining.schedules import stock_intrinsics
from tests.unit.kernels import relative_error
from tests.unit.tir_passes.emit.tensor_core_operators import (
    Conv,
    cast_matmul,
    conv2d,
    emitted,
    fused_matmul,
    interpret,
    matmul,
    parts_of,
    random_inputs,
)
from tvm_ext import relay
from tvm_ext._tvm import tirx, tvm_ffi
from tvm_ext.devices import device_db
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import index, load, sequence, store
from tvm_ext.ir.matrix_units.mfma import MFMA
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.tir_passes.emit.mma_tiles.emit import supports_mma
from tvm_ext.toolchains import rocm_toolchain

MI210, MI300X = "amd-mi210", "amd-mi300x"
ROUNDING = {"float16": 2e-3, "bfloat16": 8e-3, "float32": 1e-5}


def test_the_interpreter_multiplies_by_the_layout_of_stock_tvm() -> None:
    """Stock TVM's maps say which lane holds which element; the interpreter's instruction must agree with all three."""
    generator = np.random.default_rng(0)
    a, b, c = (generator.integers(-8, 8, (16, 16)).astype(dtype) for dtype in ("float16", "float16", "float32"))
    with stock_intrinsics("rocm") as stock:
        maps = [getattr(stock, f"shared_16x16_to_local_64x4_layout_{name}") for name in "ABC"]
    held = {name: _in_lanes(x, where) for name, x, where in zip("ABC", (a, b, c), maps, strict=True)}
    params = [tirx.decl_buffer([index(256)], str(x.dtype), name) for name, x in held.items()]
    out = tirx.decl_buffer([index(256)], "float32", "D")
    registers = [gpu_buffer([4], str(x.dtype), f"{name}_lane", "local") for name, x in held.items()]

    def body(_: Any, thread: Any) -> Any:
        at = tirx.Ramp(thread * index(4), index(1), 4)
        own = tirx.Ramp(index(0), index(1), 4)
        zero = tirx.const(0, "int32")
        factors = [load(buffer, [own]) for buffer in registers]
        product = tirx.call_llvm_pure_intrin("float32x4", MFMA["float16"], *factors, zero, zero, zero)
        return sequence(
            *(tirx.AllocBuffer(buffer, {}) for buffer in registers),
            *(store(to, load(given, [at]), [own]) for to, given in zip(registers, params, strict=True)),
            store(out, product, [at]),
        )

    made = tirx.PrimFunc([*params, out], launch(1, 64, body))
    made = made.with_attrs({"global_symbol": "main", "s_tir": True, "tirx.noalias": True})
    report = interpret(made, held, MI210)
    wanted = a.astype("float64") @ b.astype("float64") + c
    np.testing.assert_array_equal(report.outputs["D"], _in_lanes(wanted.astype("float32"), maps[2]))
    assert (report.counters.mma_count, report.counters.flops) == (1, 2 * 16**3)


def _in_lanes(matrix: np.ndarray[Any, Any], where: Any) -> np.ndarray[Any, Any]:
    lanes = np.zeros((64, 4), matrix.dtype)
    for i, j in np.ndindex(16, 16):
        lane, element = where(i, j)
        lanes[lane, int(element)] = matrix[i, j]
    return lanes.reshape(-1)


@pytest.mark.parametrize(
    ("operator", "device"),
    [
        (matmul(64, 48, 96, tb=True), MI300X),
        (matmul(70, 50, 90, ta=True, out="float32"), MI210),
        (matmul(33, 47, 65, dtype="bfloat16"), MI210),
        (matmul(40, 24, 64, batch=3, tb=True, dtype="bfloat16"), MI300X),
        (fused_matmul(48, 80, 64), MI300X),
        (cast_matmul(32, 32, 48), MI210),
        (conv2d(Conv()), MI210),
        (conv2d(Conv(c=24, f=40, stride=2, layout="NCHW OIHW"), "bfloat16"), MI300X),
    ],
)  # fmt: skip
def test_values(operator: tuple[Any, Any], device: str) -> None:
    func, reference = operator
    made, kernel = emitted(func, device)
    assert kernel.threads % 64 == 0 and kernel.threads <= 256 and "mfma" in kernel.notes[0]
    inputs = random_inputs(func)
    report = interpret(made, inputs, device)
    output = list(func.params)[-1]
    wanted = reference(*(array.astype("float64") for array in inputs.values()))
    assert report.written[output.name].all()
    assert relative_error(report.outputs[output.name], wanted) <= ROUNDING[str(output.ty.dtype)]
    assert report.counters.mma_count > 0


def test_fragments_contiguous_along_the_reduction_meet_no_bank_twice() -> None:
    func, _ = matmul(64, 64, 64, tb=True)
    report = interpret(emitted(func, MI300X)[0], random_inputs(func), MI300X)
    shared = [item for item in report.counters.accesses if item.scope == "shared"]
    assert shared and all(item.wavefronts == item.least_wavefronts for item in shared)


def test_what_has_no_matrix_core_or_no_instruction_here_is_left_to_vector_units() -> None:
    expr = parts_of(matmul(64, 64, 64)[0]).expr
    assert "no tensor cores" in str(supports_mma(expr, device_db.lookup("amd-mi50")))
    int8 = parts_of(matmul(64, 64, 64, dtype="int8", out="int32")[0]).expr
    assert "no tensor cores for int8" in str(supports_mma(int8, device_db.lookup(MI210)))


def test_factors_in_bfloat16_that_are_computed_are_refused() -> None:
    a, b = (tvm.te.placeholder((32, 32), "bfloat16", name) for name in "AB")
    doubled = tvm.te.compute((32, 32), lambda i, j: a[i, j] + a[i, j], "doubled")
    k = tvm.te.reduce_axis((0, 32), "k")
    product = tvm.te.compute((32, 32), lambda i, j: tvm.te.sum(doubled[i, k] * b[k, j], axis=k), "C")
    with pytest.raises(IllegalRewrite, match="in bfloat16 is computed while it is copied"):
        emitted(tvm.te.create_prim_func([a, b, product]), MI210)


@pytest.fixture
def unlinked() -> Iterator[None]:
    """Code stays an object file: what is looked at here needs no linker."""
    rocm_toolchain.enable_rocm()
    name = "tvm_callback_rocm_link"
    tvm_ffi.register_global_func(name, lambda content: bytearray(bytes(content)), override=True)
    yield
    tvm_ffi.register_global_func(name, rocm_toolchain.link, override=True)


@pytest.mark.usefixtures("unlinked")
@pytest.mark.parametrize(
    ("device", "dtype", "instruction"),
    [
        (MI210, "float16", "v_mfma_f32_16x16x16f16"),
        (MI210, "bfloat16", "v_mfma_f32_16x16x16bf16_1k"),
        (MI300X, "float16", "v_mfma_f32_16x16x16_f16"),
        (MI300X, "bfloat16", "v_mfma_f32_16x16x16_bf16"),
    ],
)
def test_machine_code(device: str, dtype: str, instruction: str) -> None:
    """The instruction of the device, once for each fragment of a step, fed by reads of 16 bytes; nothing spills."""
    made, _ = emitted(matmul(256, 256, 256, dtype=dtype, tb=True)[0], device)
    target = tvm.target.Target(dict(device_db.lookup(device).target))
    library = tvm.compile(tvm.IRModule({"main": made}), target=target)
    text = str(library.mod.imports[0].inspect_source("asm"))
    assert set(re.findall(r"\bv_mfma\w+", text)) == {instruction}
    assert "ds_read_b128" in text and "ds_read_u16" not in text
    assert re.search(r"vgpr_spill_count: +0\b", text)


@pytest.mark.usefixtures("unlinked")
def test_a_build_loads_ahead_and_its_kernels_pass_the_interpreter() -> None:
    """Loads ahead send a kernel through stock TVM's passes twice, which took no vectors of several widths."""
    sizes, half = {"x": [8, 32, 14, 14], "y": [8, 64, 14, 14]}, TensorProto.FLOAT16
    weights = helper.make_tensor("w", half, [64, 32, 3, 3], np.ones((64, 32, 3, 3), "float16").tobytes(), raw=True)
    x, y = (helper.make_tensor_value_info(name, half, size) for name, size in sizes.items())
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    graph = helper.make_graph([node], "g", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    module, params = relay.frontend.from_onnx(model)
    text = str(relay.build(module, MI300X, params=params, verify=True).report)
    assert "mfma in 4 warps" in " ".join(text.split()) and "gfx942" in text
    assert re.search(r"loaded\s+ahead", text)
