"""The pipeline: purity, the order's promises, the pass clock, targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.support.small_modules import module_of
from tvm_ext import pass_pipeline
from tvm_ext.analysis.predicates import is_thread_bound
from tvm_ext.errors import OptionError, TargetError
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.support.pass_clock import PassClock, timed_context


def small_module() -> tvm.IRModule:
    """relu(x @ transpose(w)) reshaped and added to itself; ``w`` is a constant."""
    x = relax.Var("x", relax.TensorType((6, 8), "float32"))
    weight = relax.const(np.arange(80, dtype="float32").reshape(10, 8) / 40 - 1)
    product = relax.op.matmul(x, relax.op.permute_dims(weight))
    flat = relax.op.reshape(relax.op.nn.relu(product), (60,))
    return module_of([x], relax.op.add(flat, flat))


def expected(x: np.ndarray) -> np.ndarray:
    weight = np.arange(80, dtype="float32").reshape(10, 8).astype("float64") / 40 - 1
    return 2 * np.maximum(x.astype("float64") @ weight.T, 0).reshape(60)


def run(executable: object, x: np.ndarray) -> np.ndarray:
    return np.asarray(relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy())


@pytest.fixture
def plan() -> pass_pipeline.BuildPlan:
    return pass_pipeline.plan_build("llvm", BuildOptions())


def test_every_pass_is_pure(plan: pass_pipeline.BuildPlan) -> None:
    mod = small_module()
    before = mod.clone()
    with tvm.transform.PassContext(config={"testing.immutable_module": True}), plan.target:
        kernels = plan.construct(mod)
        copy = kernels.clone()
        plan.lower(kernels)
    tvm.ir.assert_structural_equal(mod, before)
    tvm.ir.assert_structural_equal(kernels, copy)


def test_construction_is_deterministic(plan: pass_pipeline.BuildPlan) -> None:
    with plan.target:
        tvm.ir.assert_structural_equal(plan.construct(small_module()), plan.construct(small_module()))


def test_each_kernel_carries_its_choice_and_reshapes_are_views(plan: pass_pipeline.BuildPlan) -> None:
    with plan.target:
        kernels = plan.construct(small_module())
    functions = {gvar.name_hint: func for gvar, func in kernels.functions_items() if isinstance(func, tirx.PrimFunc)}
    assert functions, "there are kernels"
    assert all(CHOICE in func.attrs for func in functions.values())
    assert not any("reshape" in name or "transpose" in name for name in functions)
    assert "R.reshape" in kernels["main"].script()


def test_the_result_is_right(plan: pass_pipeline.BuildPlan) -> None:
    x = np.random.default_rng(0).standard_normal((6, 8)).astype("float32")
    with plan.target:
        executable = relax.build(plan.construct(small_module()), plan.target, relax_pipeline=plan.lower)
    np.testing.assert_allclose(run(executable, x), expected(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("roller", [True, False, "auto"])
def test_registered_pipeline_and_stock_passes_mix(roller: bool | str) -> None:
    x = np.random.default_rng(1).standard_normal((6, 8)).astype("float32")
    mixed = tvm.transform.Sequential(
        [relax.transform.EliminateCommonSubexpr(), pass_pipeline.relax_pipeline(enable_roller=roller)]
    )
    executable = tvm.compile(small_module(), tvm.target.Target("llvm"), relax_pipeline=mixed)
    np.testing.assert_allclose(run(executable, x), expected(x), rtol=1e-5, atol=1e-5)


def test_options_of_the_registered_pipeline_are_checked() -> None:
    with pytest.raises(OptionError, match="candidates"):
        relax.get_pipeline("tvm_ext", candidate=3)


@pytest.mark.sampled
@pytest.mark.parametrize("target", ["nvidia-v100", "cuda", "rocm", "opencl"])
@pytest.mark.parametrize("roller", [True, "auto", False])
def test_every_kernel_for_a_gpu_is_bound_to_threads_and_has_a_choice(target: str, roller: Any) -> None:
    plan = pass_pipeline.plan_build(target, BuildOptions(enable_roller=roller))
    with plan.target:
        kernels = plan.construct(small_module())
    functions = [func for _, func in kernels.functions_items() if isinstance(func, tirx.PrimFunc)]
    assert functions
    choices = [from_json(KernelChoice, str(func.attrs[CHOICE])) for func in functions]
    assert {choice.path for choice in choices} == ({"stock"} if roller is False else {"rtile", "rows"})
    assert {choice.device for choice in choices} == {plan.device.name}
    assert all(is_thread_bound(func) for func in functions)


def test_an_option_names_the_device_of_a_bare_target() -> None:
    plan = pass_pipeline.plan_build("cuda", BuildOptions(device="nvidia-t4"))
    assert (plan.device.name, str(plan.target.attrs["arch"])) == ("nvidia-t4", "sm_75")
    plan = pass_pipeline.plan_build("opencl", BuildOptions(device="amd-mi50"))
    assert (plan.device.name, plan.device.kind, plan.target.kind.name) == ("amd-mi50", "opencl", "opencl")


def test_num_threads_limits_the_units() -> None:
    assert pass_pipeline.plan_build("llvm", BuildOptions(num_threads=1)).device.unit_count == 1


def test_clock_charges_a_pass_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """outer runs 0..10, inner 1..4 and again 5..6 within it: 6 seconds are outer's own."""
    times = iter([0.0, 1.0, 4.0, 5.0, 6.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    started: list[str] = []
    clock = PassClock(on_start=started.append)
    clock.before("outer")
    for _ in range(2):
        clock.before("inner")
        clock.after("inner")
    clock.after("outer")
    assert clock.seconds == {"outer": 6.0, "inner": 4.0}
    assert started == ["outer", "inner", "inner"]


def test_timed_context_keeps_the_users_settings() -> None:
    with tvm.transform.PassContext(opt_level=3, disabled_pass=["FuseOps"], config={"tirx.disable_vectorize": True}):
        clock = PassClock()
        with timed_context(clock):
            current = tvm.transform.PassContext.current()
            assert current.opt_level == 3
            assert list(current.disabled_pass) == ["FuseOps"]
            assert bool(current.config["tirx.disable_vectorize"])
            relax.transform.CanonicalizeBindings()(small_module())
    assert "CanonicalizeBindings" in clock.seconds


def test_the_device_option_chooses_the_row_to_construct_for() -> None:
    assert pass_pipeline.plan_build("llvm", BuildOptions(device="cpu-avx2")).device.name == "cpu-avx2"


def test_a_device_of_another_kind_is_refused() -> None:
    with pytest.raises(TargetError, match=r"nvidia-v100.*cuda device"):
        pass_pipeline.plan_build("llvm", BuildOptions(device="nvidia-v100"))
