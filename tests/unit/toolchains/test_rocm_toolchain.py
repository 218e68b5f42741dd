"""Code objects for AMD GPUs: with the real linker where there is one, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from tests.support.quick_target import UNOPTIMISED
from tvm_ext._tvm import pack_imports, tirx
from tvm_ext.errors import CompileError
from tvm_ext.ir.build_ir import index, load, store
from tvm_ext.ir.simt_ir import launch
from tvm_ext.toolchains import rocm_math, rocm_toolchain
from tvm_ext.toolchains.device_modules import OWN_CODE, read_cuda, read_library


def _has_linker() -> bool:
    try:
        rocm_toolchain.find_linker()
    except CompileError:
        return False
    return True


needs_linker = pytest.mark.skipif(not _has_linker(), reason="no ld.lld is installed (extra rocm)")


def _compile(value: Callable[[Any], Any]) -> Any:
    x, y = (tirx.decl_buffer([index(256)], "float32", name) for name in "xy")
    body = launch(2, 128, lambda b, t: store(y, value(load(x, [b * index(128) + t])), [b * index(128) + t]))
    func = tirx.PrimFunc([x, y], body)
    for name, attribute in (("global_symbol", "double"), ("s_tir", True), ("tirx.noalias", True)):
        func = func.with_attr(name, attribute)
    rocm_toolchain.enable_rocm()
    return tvm.compile(tvm.IRModule({"double": func}), target=tvm.target.Target({"kind": "rocm", "mcpu": "gfx906"}))


@needs_linker
def test_a_kernel_becomes_a_linked_code_object() -> None:
    own, hip = read_library(pack_imports(_compile(lambda x: x * tirx.const(2, "float32")).mod)).modules
    code = read_cuda(hip.content)  # the HIP module's bytes have the same form
    assert (own.kind, hip.kind, code.format) == (OWN_CODE, "hip", "hsaco")
    assert [kernel.name for kernel in code.kernels] == ["double_kernel"]
    assert code.code[:4] == b"\x7fELF"
    assert code.code[16] == 3  # ELF: a shared object, which the HIP runtime loads
    assert b"double_kernel.kd" in code.code and b"gfx906" in code.code


@needs_linker
def test_what_is_no_object_file_is_refused() -> None:
    with pytest.raises(CompileError, match=r"ld\.lld"):
        rocm_toolchain.link(b"no object file")


def test_a_missing_linker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocm_toolchain.shutil, "which", lambda name: None)
    monkeypatch.setattr(rocm_toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r"ld\.lld(.|\n)*tvm-ext\[rocm\]"):
        rocm_toolchain.link(b"")


def test_a_missing_function_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linker = tmp_path / "ld.lld"
    linker.write_text('#!/bin/sh\necho "ld.lld: error: undefined symbol: __ocml_erf_f32"; exit 1\n')
    linker.chmod(0o755)
    monkeypatch.setattr(rocm_toolchain, "find_linker", lambda: [str(linker)])
    with pytest.raises(CompileError, match=r"calls __ocml_erf_f32 of ROCm's device library(.|\n)*ROCM_PATH"):
        rocm_toolchain.link(b"")


SAMPLES = {
    "tan": (-1.5, 1.5), "log1p": (-0.999, 50.0), "sinh": (-89.0, 89.0), "cosh": (-89.0, 89.0), "atan": (-40.0, 40.0),
    "asin": (-1.0, 1.0), "acos": (-1.0, 1.0), "asinh": (-1e3, 1e3), "acosh": (1.0, 1e3), "atanh": (-0.999, 0.999),
}  # fmt: skip


def test_functions_without_a_library_are_those_of_float64_rounded() -> None:
    """Near zero, over their range and at what has no finite result, as the CPU computes the same arithmetic."""
    assert SAMPLES.keys() == rocm_math.FUNCTIONS.keys()
    count = 2048
    names = list(SAMPLES)
    buffers = [tirx.decl_buffer([index(count)], "float32", name) for name in ("x", *names)]
    func = {}
    for name, result in zip(names, buffers[1:], strict=True):
        i = tirx.Var("i", "int64")
        value = rocm_math.FUNCTIONS[name](load(buffers[0], [i]))
        loop = tirx.For(i, index(0), index(count), tirx.ForKind.SERIAL, store(result, value, [i]))
        made = tirx.PrimFunc([buffers[0], result], loop)
        func[name] = made.with_attr("global_symbol", name).with_attr("s_tir", True)
    module = tvm.compile(tvm.IRModule(func), target=UNOPTIMISED)
    with np.errstate(all="ignore"):
        for name, (low, high) in SAMPLES.items():
            plain = np.linspace(low, high, count - 512)
            near = np.geomspace(1e-6, 0.9, 250)
            x = np.concatenate([plain, near, -near, [0.0, -0.0, np.nan, np.inf, -np.inf, 3e38, -3e38, 1e12, -1e12]])
            x = np.resize(x if name != "tan" else x[:-6], count).astype("float32")
            y = tvm.runtime.tensor(np.zeros(count, "float32"))
            module[name](tvm.runtime.tensor(x), y)
            expected = getattr(np, NUMPY.get(name, name))(x.astype("float64")).astype("float32")
            np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6, atol=1e-37, err_msg=name)
            assert (np.signbit(y.numpy())[x == 0] == np.signbit(expected)[x == 0]).all(), name


NUMPY = {name: f"arc{name[1:]}" for name in ("atan", "asin", "acos", "asinh", "acosh", "atanh")}


@needs_linker
@pytest.mark.parametrize("name", SAMPLES)
def test_kernels_with_these_functions_are_linked(name: str) -> None:
    assert _compile(lambda x: getattr(tirx, name)(x)) is not None
