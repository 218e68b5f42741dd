"""Thread axes as loops on LLVM: right kernels compute, wrong ones are seen, what has no such meaning is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import ir, tirx

from tests.unit.verify.small_gpu_kernels import reversed_rows, row_sums, shared_matmul, two_launches
from tvm_ext._tvm import Call
from tvm_ext.analysis.predicates import is_thread_bound
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.verify.threads_as_loops import run_threads_as_loops, threads_as_loops


def test_a_tile_of_shared_memory_is_filled_before_any_thread_reads_it(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((32, 24), dtype="float32"), rng.standard_normal((24, 32), dtype="float32")
    (result,) = run_threads_as_loops(shared_matmul(32, 32, 24), [a, b])
    np.testing.assert_allclose(result, a.astype("float64") @ b, rtol=1e-5, atol=1e-5)


def test_threads_read_what_others_copied(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 64), dtype="float32")
    (result,) = run_threads_as_loops(reversed_rows(5, 64), [x])
    np.testing.assert_array_equal(result, x[:, ::-1])


def test_a_copy_that_misses_an_element_is_seen(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 64), dtype="float32")
    (result,) = run_threads_as_loops(reversed_rows(2, 64, copied=63), [x])
    assert np.isnan(result[:, 0]).any() or not np.array_equal(result, x[:, ::-1])


def test_an_element_that_is_not_stored_is_nan(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 64), dtype="float32")
    (result,) = run_threads_as_loops(reversed_rows(2, 64, stored=60), [x])
    assert np.isnan(result[:, 60:]).all()
    assert not np.isnan(result[:, :60]).any()


def test_launches_follow_one_another(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 32), dtype="float32")
    (result,) = run_threads_as_loops(two_launches(4, 32), [x])
    np.testing.assert_allclose(result, 2 * x + 1, rtol=1e-6)


def test_values_that_threads_compute_for_each_other_are_refused() -> None:
    with pytest.raises(IllegalRewrite, match=r"sums.*computed from one another's"):
        threads_as_loops(row_sums(4, 32))


def test_intrinsics_by_which_threads_meet_are_refused() -> None:
    func = two_launches(4, 32)
    sync = tirx.Evaluate(Call(ir.Op.get("tirx.tvm_thread_allreduce"), [], ret_ty=func.ret_type))
    with pytest.raises(IllegalRewrite, match="tvm_thread_allreduce"):
        threads_as_loops(func.with_body(tirx.stmt_seq(sync, func.body)))


def test_the_function_itself_is_left_alone() -> None:
    func = shared_matmul(32, 32, 24)
    loops: Any = threads_as_loops(func)
    assert is_thread_bound(func)
    assert not is_thread_bound(loops)


def test_inputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(InputError, match=r"input 0 .* float32 of shape \[4, 32\].* float64"):
        run_threads_as_loops(two_launches(4, 32), [np.zeros((4, 32))])
