"""OpenCL on the CPU: the launches of a function are read right, and run."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import opencl_cpu
from tests.unit.verify.small_gpu_kernels import reversed_rows, shared_matmul, two_launches
from tvm_ext.errors import InputError, UnsupportedEnvironmentError
from tvm_ext.verify.threads_as_loops import poison

needs_opencl = pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=str(opencl_cpu.why_not()))


def test_the_launches_of_a_function_are_read_from_its_host_code() -> None:
    program = opencl_cpu.compile_opencl(two_launches(4, 32))
    function = program.functions["main"]
    assert function.parameter_count == 2
    assert function.dtypes == ("float32",) * 3
    assert [launch.blocks for launch in function.launches] == [(4, 1, 1)] * 2
    assert [launch.threads for launch in function.launches] == [(32, 1, 1)] * 2
    workspace = 2
    assert all(workspace in launch.buffers for launch in function.launches)
    assert all(f"__kernel void {launch.kernel}(" in program.source for launch in function.launches)


@needs_opencl
def test_launches_run_in_order_with_their_workspace(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 32), dtype="float32")
    (result,) = opencl_cpu.run_opencl(two_launches(4, 32), [x])
    np.testing.assert_allclose(result, 2 * x + 1, rtol=1e-6)


@needs_opencl
def test_shared_memory_and_barriers_work(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((32, 24), dtype="float32"), rng.standard_normal((24, 32), dtype="float32")
    (result,) = opencl_cpu.run_opencl(shared_matmul(32, 32, 24), [a, b])
    np.testing.assert_allclose(result, a.astype("float64") @ b, rtol=1e-5, atol=1e-5)


@needs_opencl
def test_an_element_that_is_not_stored_is_nan(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 64), dtype="float32")
    (result,) = opencl_cpu.run_opencl(reversed_rows(2, 64, stored=60), [x])
    assert np.isnan(result[:, 60:]).all()
    np.testing.assert_array_equal(result[:, :60], x[:, ::-1][:, :60])


def test_inputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(InputError, match=r"input 0 .* float32 of shape \[4, 32\].* \[5, 32\]"):
        opencl_cpu.run_opencl(two_launches(4, 32), [np.zeros((5, 32), "float32")])


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opencl_cpu.importlib.util, "find_spec", lambda name: None)
    opencl_cpu.find_device.cache_clear()
    try:
        with pytest.raises(UnsupportedEnvironmentError, match="pyopencl is missing") as caught:
            opencl_cpu.find_device()
        assert "tvm-ext[opencl]" in caught.value.remedy
    finally:
        opencl_cpu.find_device.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool"])
def test_poison_is_what_no_kernel_would_leave(dtype: str) -> None:
    array = poison((3,), dtype)
    assert str(array.dtype) == dtype
    assert np.isnan(array).all() if dtype == "float32" else (array != 0).all()
