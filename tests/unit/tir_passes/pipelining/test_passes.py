"""AutoPipeline and InjectPipelines: what they decide, what they make of it, where they leave a function alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tvm_ext import _native
from tvm_ext._native import OPTIONS_LIBRARY
from tvm_ext._tvm import (
    For,
    ForKind,
    IRModule,
    PassContext,
    structural_equal,
    structural_map,
    structural_walk,
    te,
    tirx,
    tvm,
)
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import InputError
from tvm_ext.options import BuildOptions
from tvm_ext.records.pipelines import PIPELINE_PLAN, PipelinePlan
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.pipelining.detect import STAGES_HINT
from tvm_ext.tir_passes.pipelining.injection import with_primitives
from tvm_ext.tir_passes.pipelining.loops import allocations_of, op_name, to_loops
from tvm_ext.tir_passes.pipelining.passes import AutoPipeline, InjectPipelines
from tvm_ext.tir_passes.pipelining.plan import MODES, Wishes
from tvm_ext.tir_passes.pipelining.primitives import read_primitive
from tvm_ext.tir_passes.pipelining.route import PIPELINED, inject_pipelines, plan_pipelines

A100, T4 = "nvidia-a100", "nvidia-t4"


def operator(m: int = 128, n: int = 128, k: int = 320, dtype: str = "float16") -> Any:
    a, b = te.placeholder((m, k), dtype, "A"), te.placeholder((k, n), dtype, "B")
    r = te.reduce_axis((0, k), "k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r].astype("float32") * b[r, j].astype("float32"), axis=r), "C")
    return te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")


@pytest.fixture(scope="module")
def tensor_core_kernel() -> Any:
    return construct_kernel(operator(), "matmul", lookup(A100), BuildOptions(enable_pipelining=False))


def through(func: Any, device: str = A100, **settings: Any) -> tuple[Any, PipelinePlan]:
    module = IRModule({"main": func.with_attr("global_symbol", "main")})
    with PassContext(config={"testing.immutable_module": True}):
        made = InjectPipelines(device)(AutoPipeline(device, **settings)(module))["main"]
    return made, from_json(PipelinePlan, str(made.attrs[PIPELINED]))


def calls(func: Any) -> list[str]:
    found: list[str] = []
    structural_walk(func.body, [(tvm.ir.Call, lambda call: found.append(op_name(call)))], order="pre")
    return found


def loops(func: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(loop: Any) -> None:
        found.setdefault(str(loop.loop_var.name), loop)

    structural_walk(func.body, [(For, visit)], order="pre")
    return found


def primitives(func: Any) -> list[tuple[str, int, int]]:
    found: list[Any] = []
    structural_walk(func.body, [(tirx.Evaluate, lambda node: found.append(read_primitive(node)))], order="pre")
    return [item for item in found if item is not None]


# --- the plan -----------------------------------------------------------------------------------------------------
def test_both_levels_are_found(tensor_core_kernel: Any) -> None:
    plan = plan_pipelines(tensor_core_kernel, lookup(A100), Wishes(shared_stages=3, register_stages=2))
    assert [(b.name, b.level, b.stages, b.loop, b.copy_bytes) for b in plan.buffers] == [
        ("A_shared", 0, 3, "k_outer", 16),
        ("B_shared", 0, 3, "k_outer", 16),
        ("A_fragment", 1, 2, "k_inner", None),
        ("B_fragment", 1, 2, "k_inner", None),
    ]
    assert from_json(PipelinePlan, to_json(plan)) == plan


@pytest.mark.parametrize(
    ("mode", "versions"), [("none", {}), ("double", {0: 2}), ("multistage", {0: 4}), ("full", {0: 4, 1: 2})]
)
def test_modes_are_the_ablations_of_the_paper(tensor_core_kernel: Any, mode: Any, versions: dict[int, int]) -> None:
    wishes = Wishes(mode=mode, shared_stages=None if mode == "double" else 4, register_stages=2)
    plan = plan_pipelines(tensor_core_kernel, lookup(A100), wishes)
    assert {item.level: item.stages for item in plan.buffers} == versions
    assert set(MODES) >= {mode}


def test_auto_pipeline_keeps_the_body(tensor_core_kernel: Any) -> None:
    module = IRModule({"main": tensor_core_kernel.with_attr("global_symbol", "main")})
    planned = AutoPipeline(A100, shared_stages=3)(module)["main"]
    assert structural_equal(planned.body, tensor_core_kernel.body)
    assert from_json(PipelinePlan, str(planned.attrs[PIPELINE_PLAN])).buffers


def test_a_second_round_changes_nothing(tensor_core_kernel: Any) -> None:
    once, _ = through(tensor_core_kernel, shared_stages=3)
    module = IRModule({"main": once})
    twice = InjectPipelines(A100)(AutoPipeline(A100, shared_stages=4)(module))["main"]
    assert structural_equal(once, twice)


def test_too_many_versions_are_reduced_and_said() -> None:
    kernel = construct_kernel(operator(1024, 1024, 4096), "matmul", lookup(A100), BuildOptions(enable_pipelining=False))
    plan = plan_pipelines(kernel, lookup(A100), Wishes(shared_stages=8))
    shared = [item for item in plan.buffers if item.level == 0]
    total = sum(item.tile_bytes * item.stages for item in shared)
    assert shared
    assert total <= 163 * 1024
    if shared[0].stages < 8:
        assert any("8" in note and "fit" in note for note in plan.notes), plan.notes


def test_hints_of_allocations_decide(tensor_core_kernel: Any) -> None:
    def visit(node: Any) -> Any:
        wanted = {"A_shared": 4, "B_shared": 4}.get(str(node.buffer.name))
        return (
            node if wanted is None else tirx.AllocBuffer(node.buffer, {**dict(node.annotations), STAGES_HINT: wanted})
        )

    body = structural_map(tensor_core_kernel.body, (tirx.AllocBuffer, visit))
    plan = plan_pipelines(tensor_core_kernel.with_body(body), lookup(A100), Wishes(mode="multistage"))
    assert {item.name: item.stages for item in plan.buffers} == {"A_shared": 4, "B_shared": 4}


def test_an_unknown_mode_and_a_wrong_number_are_refused() -> None:
    with pytest.raises(InputError, match="no pipelining mode 'triple'"):
        AutoPipeline(A100, mode="triple")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="shared_stages is 9"):
        AutoPipeline(A100, shared_stages=9)


def test_a_missing_target_is_an_error(tensor_core_kernel: Any) -> None:
    module = IRModule({"main": tensor_core_kernel.without_attr("target").with_attr("global_symbol", "main")})
    with pytest.raises(Exception, match="not known which device"):
        AutoPipeline()(module)


def test_cpu_functions_are_left_alone() -> None:
    module = IRModule({"main": operator()})
    assert structural_equal(AutoPipeline(A100)(module), module)


# --- the transformed function -------------------------------------------------------------------------------------
def test_the_primitives_stand_where_figure_7_has_them(tensor_core_kernel: Any) -> None:
    device = lookup(A100)
    plan = plan_pipelines(tensor_core_kernel, device, Wishes(shared_stages=3, register_stages=2))
    staged, _ = with_primitives(tensor_core_kernel, plan, device)
    assert primitives(staged) == [
        ("producer_acquire", 0, 0),
        ("producer_commit", 0, 0),  # the prologue, a loop
        ("consumer_wait", 0, 1),  # tile 0, for the inner prologue
        ("producer_acquire", 0, 0),
        ("producer_commit", 0, 0),
        ("consumer_wait", 0, 1),  # in the inner loop, where it wraps
        ("consumer_release", 0, 0),
    ]
    inner = loops(staged)["k_inner"]
    (condition,) = [s for s in inner.body.seq if isinstance(s, tirx.IfThenElse)]
    assert read_primitive(condition.then_case) == ("consumer_wait", 0, 1)


def test_without_registers_the_wait_comes_first(tensor_core_kernel: Any) -> None:
    device = lookup(A100)
    plan = plan_pipelines(tensor_core_kernel, device, Wishes(mode="multistage", shared_stages=4))
    staged, _ = with_primitives(tensor_core_kernel, plan, device)
    first = loops(staged)["k_outer"].body.seq[0]
    assert read_primitive(first) == ("consumer_wait", 0, 2)


def test_loops_stay_rolled(tensor_core_kernel: Any) -> None:
    made, _ = through(tensor_core_kernel, shared_stages=4, register_stages=2)
    found = loops(made)
    assert int(found["k_outer"].extent) == int(loops(to_loops(tensor_core_kernel))["k_outer"].extent)
    assert found["k_outer"].kind == ForKind.SERIAL
    assert int(found["k_outer_prologue"].extent) == 3


def test_copies_become_asynchronous(tensor_core_kernel: Any) -> None:
    made, _ = through(tensor_core_kernel, shared_stages=3, register_stages=2)
    found = calls(made)
    assert found.count("tirx.ptx.cp_async_wait_group") == 2
    assert found.count("tirx.ptx.cp_async_commit_group") == 2
    assert found.count("tirx.tvm_storage_sync") == 2
    assert "tirx.s_tir.cp_async_raw" in found


def test_older_devices_load_through_registers() -> None:
    kernel = construct_kernel(operator(), "matmul", lookup(T4), BuildOptions(enable_pipelining=False))
    made, plan = through(kernel, T4, shared_stages=4)
    found = calls(made)
    assert not any("cp_async" in name for name in found)
    assert {item.stages for item in plan.buffers if item.level == 0} == {2}
    assert all(item.copy_bytes is None for item in plan.buffers)


def test_a_plan_for_another_function_is_refused(tensor_core_kernel: Any) -> None:
    device = lookup(A100)
    plan = plan_pipelines(tensor_core_kernel, device, Wishes(shared_stages=3))
    renamed = replace(plan, buffers=(replace(plan.buffers[0], name="X_shared"),))
    with pytest.raises(InputError, match="X_shared, which the function does not allocate"):
        inject_pipelines(tensor_core_kernel, renamed, device)
    elsewhere = replace(plan, buffers=(replace(plan.buffers[0], name="C_fragment"),))
    with pytest.raises(InputError, match="C_fragment, but"):
        inject_pipelines(tensor_core_kernel, elsewhere, device)


def test_stock_compilation_takes_the_result(tensor_core_kernel: Any) -> None:
    made, _ = through(tensor_core_kernel, shared_stages=3, register_stages=2)
    library = tvm.compile(IRModule({"main": made}), target=tvm.target.Target(dict(lookup(A100).target)))
    source = str(library.mod.imports[0].inspect_source())
    kernel = source[source.index('extern "C"') :]
    assert len(re.findall(r"__syncthreads", kernel)) == 2
    assert len(re.findall(r"for \(int k_outer = 0", kernel)) == 1


@pytest.mark.skipif(not _native.is_loaded(OPTIONS_LIBRARY), reason="typed PassContext options need the native part")
def test_the_registered_pipeline_does_both(tensor_core_kernel: Any) -> None:
    module = IRModule({"main": tensor_core_kernel.without_attr(PIPELINED).with_attr("global_symbol", "main")})
    target = tvm.target.Target(dict(lookup(A100).target))
    with PassContext(config={"tvm_ext.enable_pipelining": True}):
        source = str(tvm.compile(module, target=target, tir_pipeline="tvm_ext").mod.imports[0].inspect_source())
    with PassContext(config={"tvm_ext.enable_pipelining": False}):
        plain = str(tvm.compile(module, target=target, tir_pipeline="tvm_ext").mod.imports[0].inspect_source())
    assert "cp_async_wait_group" in source
    assert "cp_async_wait_group" not in plain


# --- what passes through stock TVM's passes twice ------------------------------------------------------------------
def allocated(func: Any) -> list[tuple[str, str, int]]:
    buffers = [statement.buffer for statement in allocations_of(func.body)]
    return [(str(b.name), str(b.ty.storage_scope), int(b.ty.shape[0])) for b in buffers]


def test_the_first_half_of_the_pipeline_changes_nothing_the_second_time(tensor_core_kernel: Any) -> None:
    loops_once = to_loops(tensor_core_kernel)
    assert structural_equal(to_loops(loops_once), loops_once)
    made, _ = through(tensor_core_kernel, shared_stages=3, register_stages=2)
    again = to_loops(made)  # indices are simplified
    assert allocated(again) == allocated(made)
    assert structural_equal(to_loops(again), again)


def test_tiles_that_are_turned_are_loaded_by_vectors() -> None:
    kernel = construct_kernel(
        operator(dtype="float32"), "matmul", lookup("nvidia-v100"), BuildOptions(enable_pipelining=False)
    )
    made, plan = through(kernel, "nvidia-v100", shared_stages=2, always=True)
    assert {item.level for item in plan.buffers} >= {0}
    widths: dict[str, int] = {}

    def visit(loop: Any) -> None:
        if loop.kind == ForKind.VECTORIZED and isinstance(loop.body, tirx.BufferStore):
            widths[str(loop.body.buffer.name)] = int(loop.extent)

    structural_walk(made.body, [(For, visit)], order="pre")
    turned = [item.name for item in plan.buffers if item.level == 0]
    assert all(widths.get(f"{name}_ahead", 0) >= 2 for name in turned), widths


def test_stock_annotations_can_be_replaced() -> None:
    kernel = construct_kernel(operator(), "matmul", lookup(A100), BuildOptions(enable_pipelining=False))

    def annotate(loop: Any) -> Any:
        if str(loop.loop_var.name) != "k_outer":
            return loop
        wishes = {"software_pipeline_stage": [0, 0, 1], "software_pipeline_order": [0, 1, 2]}
        return For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, wishes)

    annotated = kernel.with_body(structural_map(kernel.body, (For, annotate)))
    left = plan_pipelines(annotated, lookup(A100), Wishes(shared_stages=3))
    assert [item.rule for item in left.refusals] == ["already pipelined"]
    assert not left.buffers
    made, plan = through(annotated, shared_stages=3, register_stages=2, replace_stock=True)
    expected, _ = through(kernel, shared_stages=3, register_stages=2)
    assert plan.replaces_stock
    assert structural_equal(made.body, expected.body, map_free_vars=True)


# --- static and dynamic shared memory ---------------------------------------------------------------------------------
def with_static_bytes(device: Any, size: int) -> Any:
    layers = tuple(replace(layer, capacity_bytes=size) if layer.name == "L1" else layer for layer in device.layers)
    return replace(device, layers=layers)


def scopes(func: Any) -> dict[str, str]:
    buffers = [statement.buffer for statement in allocations_of(func.body)]
    return {str(b.name): str(b.ty.storage_scope) for b in buffers}


def test_versions_beyond_static_memory_are_dynamic(tensor_core_kernel: Any) -> None:
    small = with_static_bytes(lookup(A100), 8 * 1024)
    for device, scope in ((lookup(A100), "shared"), (small, "shared.dyn")):
        plan = plan_pipelines(tensor_core_kernel, device, Wishes(shared_stages=3))
        assert scopes(inject_pipelines(tensor_core_kernel, plan, device))["A_shared"] == scope


def test_tiles_beside_a_dynamic_buffer_of_another_type_stay_static() -> None:
    v100 = lookup("nvidia-v100")
    kernel = construct_kernel(operator(), "matmul", v100, BuildOptions(enable_pipelining=False))
    assert scopes(kernel)["C_shared"] == "shared.dyn"  # floats, by which wmma's results are stored
    plan = plan_pipelines(kernel, v100, Wishes(shared_stages=2))
    made = inject_pipelines(kernel, plan, v100)
    assert scopes(made)["A_shared"] == "shared"
    tile = sum(item.tile_bytes for item in plan.buffers if item.level == 0)
    refused = plan_pipelines(kernel, with_static_bytes(v100, 2 * tile - 1), Wishes(shared_stages=2))
    assert not refused.buffers
    assert any("do not fit static memory" in note for note in refused.notes)
    tvm.compile(IRModule({"main": made}), target=tvm.target.Target(dict(v100.target)))
