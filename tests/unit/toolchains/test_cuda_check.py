"""What the CUDA compiler says of a kernel decides whether it is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tvm import relax
from tvm.target import Target

from tests.support.small_modules import module_of
from tests.unit.verify.small_gpu_kernels import shared_matmul, two_launches
from tvm_ext import pass_pipeline
from tvm_ext.errors import CompileError, IllegalRewrite, UnsupportedEnvironmentError
from tvm_ext.options import BuildOptions
from tvm_ext.toolchains.cuda_check import refuse_bad_machine_code
from tvm_ext.toolchains.cuda_toolchain import find_nvcc
from tvm_ext.toolchains.ptxas_report import KernelUse

A100 = Target({"kind": "cuda", "arch": "sm_80"})


def use(spilled: int) -> KernelUse:
    return KernelUse(
        name="main_kernel",
        architecture="sm_80",
        register_count=96,
        shared_bytes=0,
        stack_bytes=0,
        spill_store_bytes=spilled,
        spill_load_bytes=0,
        barrier_count=1,
        constant_bytes=0,
    )


def test_every_kernel_is_compiled_for_the_targets_architecture() -> None:
    asked: list[Any] = []

    def compiler(source: str, architectures: Any) -> Any:
        asked.append((source, architectures))
        return SimpleNamespace(uses=(use(0),))

    refuse_bad_machine_code(two_launches(4, 32), A100, compiler)
    ((source, architectures),) = asked
    assert architectures == ["sm_80"]
    assert source.count('extern "C" __global__') >= 2


def test_a_kernel_that_spills_is_refused() -> None:
    with pytest.raises(IllegalRewrite, match="main_kernel spills 24 bytes of its 96 registers"):
        refuse_bad_machine_code(two_launches(4, 32), A100, lambda *_: SimpleNamespace(uses=(use(24),)))


def test_a_compiler_that_fails_refuses_the_kernel_with_its_words() -> None:
    def failing(*_: Any) -> Any:
        raise CompileError("nvcc -cubin k.cu ran longer than 60 s", "raise the limit")

    with pytest.raises(IllegalRewrite, match=r"the CUDA compiler fails: nvcc -cubin k\.cu ran longer than 60 s"):
        refuse_bad_machine_code(two_launches(4, 32), A100, failing)


def test_the_real_compiler_accepts_a_good_kernel() -> None:
    try:
        find_nvcc()
    except UnsupportedEnvironmentError as error:
        pytest.skip(str(error))
    refuse_bad_machine_code(shared_matmul(32, 32, 24), A100)


@pytest.mark.parametrize(("target", "checked"), [("nvidia-a100", True), ("opencl", False)])
def test_the_option_has_every_kernel_for_cuda_checked(
    target: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(pass_pipeline, "refuse_bad_machine_code", lambda func, target: seen.append(func))
    x, y = (relax.Var(name, relax.TensorType((32, 32), "float32")) for name in "xy")
    plan = pass_pipeline.plan_build(target, BuildOptions(check_machine_code=True))
    with plan.target:
        plan.construct(module_of([x, y], relax.op.matmul(x, y)))
    assert len(seen) == int(checked)
