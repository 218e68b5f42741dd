"""`_tvm.py`: every name is there and still means what the rest of the package takes it to mean."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from tvm_ext import _tvm
from tvm_ext._tvm import te, tirx, tvm


def _matmul(size: int = 8) -> object:
    a, b = (te.placeholder((size, size), "float32", name) for name in "AB")
    k = te.reduce_axis((0, size), "k")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "C")
    return te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")


def test_all_lists_every_public_name_and_no_other() -> None:
    tree = ast.parse(Path(_tvm.__file__).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") not in (
            "typing",
            "collections.abc",
            "__future__",
            "tvm_ext",
        ):
            defined |= {alias.asname or alias.name for alias in node.names}
    assert {name for name in defined if not name.startswith("_")} == set(_tvm.__all__)
    assert len(_tvm.__all__) == len(set(_tvm.__all__))


def test_functors_walk_and_rewrite_tensor_ir() -> None:
    function = _matmul()
    loads: list[str] = []
    _tvm.structural_walk(function.body, (_tvm.TensorLoad, lambda load: loads.append(load.source.name) or None))
    assert {"A", "B", "C"} <= set(loads)
    blocks: list[str] = []
    _tvm.structural_walk(function.body, (_tvm.SBlock, lambda block: blocks.append(block.name_hint) or None))
    assert "C" in blocks
    variable, other = tirx.Var("x", "int32"), tirx.Var("y", "int32")
    renamed = _tvm.structural_map(variable + 1, (_tvm.Var, lambda var: other if var.same_as(variable) else var))
    assert _tvm.structural_equal(renamed, other + 1, map_free_vars=True)


def test_a_schedule_is_built_and_runs(rng: np.random.Generator) -> None:
    schedule = _tvm.Schedule(_matmul())
    block = schedule.get_sblock("C")
    i, _, _ = schedule.get_loops(block)
    schedule.parallel(schedule.split(i, [None, 4])[0])
    with pytest.raises(_tvm.ScheduleError):
        schedule.get_sblock("absent")
    a, b = (rng.standard_normal((8, 8), dtype=np.float32) for _ in range(2))
    out = _tvm.tensor(np.full((8, 8), np.nan, np.float32))
    tvm.compile(schedule.mod, target=_tvm.Target("llvm"))(_tvm.tensor(a), _tvm.tensor(b), out)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.linalg.norm(out.numpy() - expected) <= 1e-6 * np.linalg.norm(expected)


def test_an_attribute_keeps_stock_schedulers_away() -> None:
    mod = tvm.IRModule({"main": _matmul().with_attr(_tvm.ALREADY_SCHEDULED, True)})
    with _tvm.Target("llvm"):
        after = tvm.s_tir.dlight.ApplyDefaultSchedule(tvm.s_tir.dlight.cpu.Reduction())(mod)
    _tvm.assert_structural_equal(mod, after)


def test_copy_module_protects_the_callers_module() -> None:
    mod = tvm.IRModule({"main": _matmul()}).with_attr("kept", 1)
    copy = _tvm.copy_module(mod)
    _tvm.assert_structural_equal(mod, copy)
    assert int(copy.attrs["kept"]) == 1
    copy["other"] = _matmul(4)
    assert [var.name_hint for var in mod.get_global_vars()] == ["main"]


def test_cpu_pipeline_parts_are_passes() -> None:
    target = _tvm.Target("llvm")
    parts = (_tvm.cpu_library_dispatch_passes, _tvm.cpu_dataflow_lower_passes)
    for part in (*parts, _tvm.cpu_finalize_passes):
        assert all(isinstance(item, tvm.transform.Pass) for item in part(target))


def test_pass_decorators_work_in_one_sequence() -> None:
    seen: list[str] = []

    @_tvm.module_pass(opt_level=0, name="test.module")
    def on_module(mod: object, _context: object) -> object:
        seen.append("module")
        return mod

    @_tvm.prim_func_pass(opt_level=0, name="test.function")
    def on_function(function: object, _mod: object, _context: object) -> object:
        seen.append("function")
        return function

    _tvm.Sequential([on_module, on_function])(tvm.IRModule({"main": _matmul()}))
    assert seen == ["module", "function"]


def test_a_taken_pipeline_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for pipelines, register in [
        (_tvm.relax_pipelines(), _tvm.register_relax_pipeline),
        (_tvm.tir_pipelines(), _tvm.register_tir_pipeline),
    ]:
        monkeypatch.delitem(pipelines, "test_pipeline", raising=False)
        register("test_pipeline", max)
        register("test_pipeline", min)
        assert pipelines.pop("test_pipeline") is max


def test_the_machine_is_known_to_llvm() -> None:
    target = _tvm.Target({"kind": "llvm", "mcpu": "haswell", "mtriple": "x86_64-unknown-linux-gnu"})
    assert _tvm.target_has_feature("avx2", target)
    assert not _tvm.target_has_feature("avx512f", target)
    assert str(_tvm.llvm_get_system_cpu())


def test_onnx_converters_are_listed() -> None:
    assert {"Conv", "MatMul", "Relu"} <= set(_tvm.onnx_operators())
