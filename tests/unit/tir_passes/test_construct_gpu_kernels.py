"""GPU kernels of whole operators: what is planned, which emitter takes it, what is refused and why."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, topi

from tests.support import opencl_cpu
from tests.unit.kernels import from_te, legalised, relative_error
from tvm_ext._tvm import structural_equal, te, tirx
from tvm_ext.analysis.computations import read_operator
from tvm_ext.analysis.predicates import is_thread_bound
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.ir.build_ir import index, load, sequence, store
from tvm_ext.ir.simt_ir import launch
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes import construct_kernels as gpu
from tvm_ext.tir_passes.pipelining.route import refuse_too_much_memory
from tvm_ext.tir_passes.plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from tvm_ext.tir_passes.plan.plan_kernels import RowGroup, TileGroup
from tvm_ext.verify.threads_as_loops import run_threads_as_loops
from tvm_ext.verify.verification import verify

A100 = device_db.lookup("nvidia-a100")


def kernel_of(func: Any, device: DeviceSpec = A100, **options: Any) -> tuple[Any, KernelChoice]:
    kernel = gpu.construct_kernel(func, "operator", device, BuildOptions(**options))
    return kernel, from_json(KernelChoice, str(kernel.attrs[CHOICE]))


def convolution(dtype: str = "float32") -> Any:
    def graph(x: Any, w: Any, b: Any) -> Any:
        return relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(x, w, padding=1), b))

    return legalised(graph, (1, 8, 12, 12), (16, 8, 3, 3), (1, 16, 1, 1), dtype=dtype)


def matmul(m: int, n: int, k: int, dtype: str = "float32") -> Any:
    return legalised(relax.op.matmul, (m, k), (k, n), dtype=dtype)


def planned(func: Any) -> list[Any]:
    return plan_for_gpu(simplify_for_gpu(read_operator(func, "operator")))


# --- the plan -----------------------------------------------------------------------------------------------------
def test_padding_is_the_prologue_and_relu_the_epilogue_of_a_convolution() -> None:
    (group,) = planned(convolution())
    assert isinstance(group, TileGroup)
    assert [computation.name for computation in group.prologue] == ["pad_temp"]
    assert [computation.name for computation in group.epilogue] == ["compute"]


def test_a_pooling_reads_through_its_padding() -> None:
    func = legalised(lambda x: relax.op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)), (1, 4, 9, 9))
    (group,) = planned(func)
    assert isinstance(group, RowGroup)
    assert [computation.name for computation in group.computations] == ["pool_max"]


def test_a_softmax_is_one_group_of_rows() -> None:
    (group,) = planned(legalised(relax.op.nn.softmax, (6, 40)))
    assert isinstance(group, RowGroup)
    assert len(group.computations) >= 3


def product_of_an_exponential() -> Any:
    a, b = te.placeholder((32, 48), name="a"), te.placeholder((48, 16), name="b")
    grown = te.compute((32, 48), lambda i, j: te.exp(a[i, j]), "grown")
    k = te.reduce_axis((0, 48), "k")
    product = te.compute((32, 16), lambda i, j: te.sum(grown[i, k] * b[k, j], axis=k), "product")
    return from_te(a, b, product)


def test_an_expensive_producer_is_a_kernel_of_its_own() -> None:
    rows, tile = planned(product_of_an_exponential())
    assert isinstance(rows, RowGroup)
    assert isinstance(tile, TileGroup)
    assert tile.prologue == ()


# --- what is made ---------------------------------------------------------------------------------------------------
def test_a_convolution_is_one_launch_and_computes_the_convolution(rng: np.random.Generator) -> None:
    func = convolution()
    kernel, choice = kernel_of(func)
    assert choice.path == "rtile"
    assert "vector units" in choice.reason
    assert "pad_temp computed on the way to shared memory" in choice.reason
    assert [plan.launches for plan in choice.gpu] == [1]
    assert choice.program is not None
    x, w, b = (rng.standard_normal(s, dtype="float32") for s in ((1, 8, 12, 12), (16, 8, 3, 3), (1, 16, 1, 1)))
    (result,) = run_threads_as_loops(kernel, [x, w, b])
    padded = np.pad(x.astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    expected = np.maximum(np.einsum("nchwrs,fcrs->nfhw", windows, w.astype("float64")) + b, 0)
    assert relative_error(result, expected) < 1e-6


@pytest.mark.parametrize("build", [relax.op.nn.softmax, relax.op.nn.relu, lambda x: relax.op.nn.avg_pool2d(x, (3, 3))])
def test_what_runs_row_by_row_says_so(build: Any) -> None:
    _, choice = kernel_of(legalised(build, (1, 8, 12, 12)))
    assert choice.path == "rows"
    assert "row by row" in choice.reason and "tiles" not in choice.reason


def test_an_operator_of_tiles_and_rows_has_the_path_of_tiles() -> None:
    _, choice = kernel_of(product_of_an_exponential())
    assert choice.path == "rtile"
    assert "grown row by row" in choice.reason and "in tiles" in choice.reason


@pytest.mark.parametrize("device", ["nvidia-v100", "nvidia-a100", "nvidia-h200"])
def test_half_precision_products_use_the_matrix_units(device: str) -> None:
    _, choice = kernel_of(matmul(256, 256, 128, "float16"), device_db.lookup(device))
    assert choice.path == "rtile"
    assert "matrix units" in choice.reason
    assert "not taken" not in choice.reason


def test_what_keeps_the_matrix_units_out_is_said() -> None:
    _, choice = kernel_of(matmul(1, 256, 128, "float16"))
    assert "vector units" in choice.reason
    assert "not taken: matrix units: " in choice.reason


def test_an_operator_of_two_groups_runs_as_several_launches(rng: np.random.Generator) -> None:
    a, b = te.placeholder((32, 48), name="a"), te.placeholder((48, 16), name="b")
    grown = te.compute((32, 48), lambda i, j: te.exp(a[i, j]), "grown")
    k = te.reduce_axis((0, 48), "k")
    product = te.compute((32, 16), lambda i, j: te.sum(grown[i, k] * b[k, j], axis=k), "product")
    kernel, choice = kernel_of(from_te(a, b, product), device_db.lookup("opencl"))
    assert [plan.launches for plan in choice.gpu] == [1, 1]
    x, y = rng.standard_normal((32, 48), dtype="float32"), rng.standard_normal((48, 16), dtype="float32")
    expected = np.exp(x.astype("float64")) @ y
    assert relative_error(run_threads_as_loops(kernel, [x, y])[0], expected) < 1e-6
    if opencl_cpu.why_not() is None:
        assert relative_error(opencl_cpu.run_opencl(kernel, [x, y])[0], expected) < 1e-6


def test_candidates_differ_and_compute_the_same(rng: np.random.Generator) -> None:
    func = matmul(64, 96, 32)
    found = gpu.candidates(func, A100, 4)
    assert 2 <= len(found) <= 4
    assert len({program.tiles for program, _ in found}) == len(found)
    times = [program.prediction.time_s for program, _ in found]
    assert times == sorted(times)
    a, b = rng.standard_normal((64, 32), dtype="float32"), rng.standard_normal((32, 96), dtype="float32")
    for _, kernel in found:
        assert relative_error(run_threads_as_loops(kernel, [a, b])[0], a.astype("float64") @ b) < 1e-6


def test_what_has_no_computations_is_left_to_stock_tvm_with_the_reason() -> None:
    func = legalised(lambda x: relax.op.argmax(x, axis=1), (4, 50))
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        kernel, choice = kernel_of(func)
    assert choice.path == "stock"
    assert "no kernel constructed: " in choice.reason
    assert "dlight.gpu." in choice.reason
    assert is_thread_bound(kernel)
    assert gpu.candidates(func, A100, 4) == ()


def test_equal_functions_are_constructed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = gpu.construct_kernel
    monkeypatch.setattr(gpu, "construct_kernel", lambda *args, **more: made.append(args[1]) or real(*args, **more))
    module = tvm.IRModule({name: matmul(16, 16, 16) for name in ("first", "second")})
    result = gpu.ConstructKernels(A100, BuildOptions())(module)
    assert len(made) == 1
    operators = {from_json(KernelChoice, str(func.attrs[CHOICE])).operator for _, func in result.functions_items()}
    assert operators == {"first", "second"}


def test_the_input_module_is_left_alone() -> None:
    module = tvm.IRModule({"f": matmul(16, 16, 16)})
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        result = gpu.ConstructKernels(A100, BuildOptions())(module)
    assert not is_thread_bound(module["f"])
    assert is_thread_bound(result["f"])


# --- what is refused ------------------------------------------------------------------------------------------------
def huge() -> Any:
    x = te.placeholder([index(65536)] * 2, name="x")  # of 64 bits, as a model's are
    return from_te(x, topi.nn.relu(x))


def test_shapes_beyond_32_bit_indices_are_refused_by_name_and_shape() -> None:
    with pytest.raises(
        TargetError, match=r"operator operator: tensor x of shape \[65536, 65536\].*2147483648"
    ) as caught:
        kernel_of(huge())
    assert "enable_roller='auto'" in caught.value.remedy


def test_auto_leaves_them_to_stock_tvm() -> None:
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        _, choice = kernel_of(huge(), enable_roller="auto")
    assert choice.path == "stock"
    assert "32-bit indices" in choice.reason


def test_half_precision_on_a_device_without_it() -> None:
    with pytest.raises(TargetError, match=r"is float16, which nvidia-k80 has no arithmetic for"):
        kernel_of(matmul(64, 64, 64, "float16"), device_db.lookup("nvidia-k80"))


def test_a_device_too_small_for_any_tile() -> None:
    layers = tuple(
        dataclasses.replace(layer, capacity_bytes=8, opt_in_capacity_bytes=None) if layer.name == "L1" else layer
        for layer in A100.layers
    )
    tiny = dataclasses.replace(A100, name="tiny", layers=layers)
    with pytest.raises(TargetError, match=r"no tile of its \[64, 64, 64\] loop nest fits tiny .*shared memory 8 bytes"):
        kernel_of(matmul(64, 64, 64), tiny)


# --- what a compiler refuses ------------------------------------------------------------------------------------------
def test_the_next_candidate_is_taken_where_the_compiler_refuses_one() -> None:
    func, seen = matmul(64, 96, 32), []

    def refuse_first(kernel: Any) -> None:
        seen.append(kernel)
        if len(seen) == 1:
            raise IllegalRewrite("kernel k spills 16 bytes")

    options = BuildOptions(enable_pipelining=False)
    kernel = gpu.construct_kernel(func, "operator", A100, options, accept=refuse_first)
    choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
    (_, first), (second_program, _) = gpu.candidates(func, A100, 2, options=options)
    assert len(seen) == 2
    assert choice.program == second_program
    assert "not taken: kernel k spills 16 bytes" in choice.reason
    assert not structural_equal(kernel.body, first.body)


def test_the_same_tile_without_pipelines_is_taken_where_the_compiler_refuses_them() -> None:
    func, options, seen = matmul(64, 96, 512), BuildOptions(enable_pipelining=True), []

    def refuse_first(kernel: Any) -> None:
        seen.append(kernel)
        if len(seen) == 1:
            raise IllegalRewrite("kernel k spills 16 bytes")

    kernel = gpu.construct_kernel(func, "operator", A100, options, accept=refuse_first)
    choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
    ((program, pipelined),) = gpu.candidates(func, A100, 1, options=options)
    assert from_json(KernelChoice, str(pipelined.attrs[CHOICE])).pipeline is not None
    assert choice.program == program
    assert choice.pipeline is None
    assert "not taken: kernel k spills 16 bytes" in choice.reason


def test_a_smaller_step_in_a_loop_shares_memory_where_its_own_would_not_fit() -> None:
    """Steps of 3 rows of 5 in a loop over channels: tiles of 35 KiB were there twice, and LLVM ended the process."""
    device = device_db.lookup("amd-mi210")
    func = legalised(lambda x, w: relax.op.nn.conv2d(x, w, padding=2), (1, 64, 27, 27), (192, 64, 5, 5))
    kernel, choice = kernel_of(func, device)
    assert choice.program is not None and choice.program.tile("L1").sizes["ry"] == 3
    (launch,) = choice.gpu
    assert launch.shared_bytes <= 65536
    result = verify(kernel, device, blocks=(0, 95))
    assert result.ok, str(result)


@pytest.mark.parametrize("at_once", [True, False])
def test_kernels_with_more_shared_memory_than_a_block_may_have_are_refused(at_once: bool) -> None:
    """Three buffers of 24,000 bytes; those that are used one after another share a place, and 48 KiB do."""
    y = tirx.decl_buffer([index(128)], "float32", "y")
    barrier = tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))

    def body(_block: Any, thread: Any) -> Any:
        tiles = [tirx.decl_buffer([index(6000)], "float32", f"tile{i}", scope="shared") for i in range(3)]
        filled = [store(tile, tirx.const(1.0, "float32"), [thread * 47]) for tile in tiles]
        added = [store(y, load(y, [thread]) + load(tile, [(127 - thread) * 47]), [thread]) for tile in tiles]
        steps = [filled, [barrier], added] if at_once else zip(filled, [barrier] * 3, added, strict=True)
        return sequence(*(tirx.AllocBuffer(tile, {}) for tile in tiles), *itertools.chain(*steps))

    func = tirx.PrimFunc([y], launch(1, 128, body)).with_attrs({"global_symbol": "main", "s_tir": True})
    with pytest.raises(IllegalRewrite, match="shared memory") if at_once else nullcontext():
        refuse_too_much_memory(func, A100)


def test_stock_tvm_follows_where_the_compiler_refuses_all() -> None:
    def refuse(_kernel: Any) -> None:
        raise IllegalRewrite("the CUDA compiler ran longer than 60 s")

    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        options = BuildOptions(enable_pipelining=False)
        kernel = gpu.construct_kernel(matmul(64, 96, 32), "operator", A100, options, accept=refuse)
    choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
    assert choice.path == "stock"
    assert "none of 4 candidates is accepted: the CUDA compiler ran longer than 60 s" in choice.reason
