"""Kernels of builds in the interpreter: what `relay.build(verify=True)` accepts and refuses, and a sample of models.

Whole models and the lists of operators are for `benchmarks/gpu/interpret.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tvm import relax, te, tirx
from tvm.ir import IRModule

from benchmarks.networks.models import build_model
from tests.support.small_modules import module_of
from tests.unit.kernels import legalised
from tvm_ext import pass_pipeline, relay
from tvm_ext.cli.app import main
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import InputError, VerificationError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import operator_pipeline, plan_build
from tvm_ext.tir_passes.construct_kernels import ConstructKernels, construct_kernel
from tvm_ext.tir_passes.emit.schedule_stock_gpu import schedule_gpu_fallback
from tvm_ext.verify import build_check
from tvm_ext.verify.build_check import KernelCheck, check_kernel, check_module, refuse_wrong
from tvm_ext.verify.verification import OutputError

A100, H200, V100 = "nvidia-a100", "nvidia-h200", "nvidia-v100"


def model(rows: int = 48, inner: int = 64, columns: int = 40) -> Any:
    """softmax(relu(x w)): two kernels."""
    x = relax.Var("x", relax.TensorType((rows, inner), "float32"))
    weights = relax.const(np.random.default_rng(0).standard_normal((inner, columns)).astype("float32"))
    y = relax.op.nn.relu(relax.op.matmul(x, weights))
    return module_of([x], relax.op.nn.softmax(y))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("device", [V100, A100, H200])
def test_a_right_build_is_accepted(device: str) -> None:
    said: list[str] = []
    library = relay.build(model(), device, verify=True, progress=said.append)
    assert {"interpreting fused_matmul_relu", "interpreting softmax"} <= set(said)
    assert "interpreting the kernels" in [phase.name for phase in library.report.phases]


def constructing(change: Callable[[str, Any], Any]) -> Any:
    """The pass that constructs kernels, and changes each."""

    class Changed:
        def __init__(self, *settings: Any, **more: Any) -> None:
            self.inner = ConstructKernels(*settings, **more)

        def __call__(self, mod: Any) -> Any:
            result = self.inner(mod)
            for variable, function in list(result.functions_items()):
                if "tvm_ext.choice" in (getattr(function, "attrs", None) or {}):
                    result[variable] = change(str(variable.name_hint), function)
            return result

    def make(*settings: Any, **more: Any) -> Any:
        from tvm_ext._tvm import module_pass

        changed = Changed(*settings, **more)
        return module_pass(lambda mod, _context: changed(mod), opt_level=0, name="Changed")

    return make


def without_wait(name: str, function: Any) -> Any:
    """The kernel of the product without the first of its waits for copies."""
    from tvm_ext._tvm import structural_map, tirx

    dropped = []

    def visit(statement: Any) -> Any:
        if not dropped and "wait_group" in str(statement.value):
            dropped.append(statement)
            return tirx.Evaluate(tirx.IntImm("int32", 0))
        return statement

    return (
        function if "matmul" not in name else function.with_body(structural_map(function.body, (tirx.Evaluate, visit)))
    )


def with_other_values(name: str, function: Any) -> Any:
    """The kernel of the softmax, which stores 1.01 times its values."""
    from tvm_ext._tvm import BufferStore, structural_map, tirx

    def visit(store: Any) -> Any:
        return BufferStore(store.buffer, store.value * tirx.const(1.01, "float32"), list(store.indices))

    if name != "softmax":
        return function
    output = function.params[-1]
    last = [v for v in _stores(function.body) if str(v.buffer.name).startswith(str(output.name))]
    assert last
    return function.with_body(
        structural_map(function.body, (BufferStore, lambda s: visit(s) if any(s.same_as(x) for x in last) else s))
    )


def _stores(body: Any) -> list[Any]:
    from tvm_ext._tvm import BufferStore, structural_walk

    found: list[Any] = []
    structural_walk(body, [(BufferStore, found.append)], order="pre")
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without_wait,
            r"(?s)fused_matmul_relu\(x: float32\[48, 64\].*for nvidia-a100 is wrong: main_kernel: .*unlanded",
        ),
        (with_other_values, r"(?s)softmax\(.*float32\[48, 40\].*its values are off by 0\.01.*enable_pipelining=False"),
    ],
)
def test_a_wrong_build_is_refused(change: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_pipeline, "ConstructKernels", constructing(change))
    with pytest.raises(VerificationError, match=message):
        relay.build(model(), A100, verify=True, enable_pipelining=True)


def test_a_cpu_is_not_interpreted() -> None:
    with pytest.raises(InputError, match="interprets GPU kernels"):
        relay.build(model(), "llvm", verify=True)


def test_what_cannot_be_interpreted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_arguments: Any, **_options: Any) -> KernelCheck:
        raise InputError("a call that is not known")

    monkeypatch.setattr(build_check, "check_kernel", unknown)
    with pytest.raises(VerificationError, match=r"(?s)fused_matmul_relu: .*a call that is not known.*verify=True"):
        relay.build(model(), A100, verify=True)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``tvm-ext compile --verify`` is `relay.build(verify=True)`, and writes nothing where that refuses."""
    monkeypatch.setattr(pass_pipeline, "ConstructKernels", constructing(with_other_values))
    path = tmp_path / "model.so"
    with pytest.raises(SystemExit) as stop:
        main(["compile", str(_onnx(tmp_path)), "--target", A100, "--verify", "-o", str(path)])
    assert stop.value.code == 2 and not path.exists()
    assert "softmax" in capsys.readouterr().err


def _onnx(folder: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 40]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"])], "softmax", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), folder / "softmax.onnx")
    return folder / "softmax.onnx"


def test_an_operator_of_empty_tensors_launches_nothing() -> None:
    device, target = device_for_target("nvidia-a100")
    func = legalised(relax.op.nn.relu, (0, 4))
    with target:
        check = check_kernel("relu", schedule_gpu_fallback(func)[0], func, device, target)
    assert (check.launches, check.blocks_run, check.problem) == (0, 0, "")


def masked_scores(divisor: float) -> Any:
    """``q k / divisor + (1 - mask) * -65504`` in halves, as BERT's attention has it."""

    def build(q: Any, k: Any, mask: Any) -> Any:
        one, lowest, by = (relax.const(np.float16(value)) for value in (1, -65504, divisor))
        hidden = relax.op.multiply(relax.op.subtract(one, mask), lowest)
        return relax.op.add(relax.op.divide(relax.op.matmul(q, k), by), hidden)

    return legalised(build, (2, 32, 32), (2, 32, 64), (1, 64), dtype="float16")


@pytest.mark.parametrize("name", ["nvidia-a100", "amd-mi300x"])
def test_masks_in_halves_neither_overflow_nor_hide_a_wrong_product(name: str) -> None:
    """Of a random mask, 3 becomes 131008: infinite for the kernel, and no scale for scores of about 4."""
    device, target = device_for_target(name)
    with target:
        kernel = construct_kernel(masked_scores(8.0), "main", device, BuildOptions())
        right = check_kernel("scores", kernel, masked_scores(8.0), device, target)
        wrong = check_kernel("scores", kernel, masked_scores(8.5), device, target)
    assert right.problem == "" and right.error is not None and right.error < 1e-3
    assert "its values are off by 0.06" in wrong.problem


def test_parts_are_named() -> None:
    """Of a large kernel some blocks are run, and the record says so."""
    plan = plan_build(A100, BuildOptions())
    checks = _checks(plan, model(4096, 64, 512), {"fused_matmul_relu"})
    assert checks[0].blocks_run == 4 < checks[0].block_count
    assert checks[0].error is not None and not checks[0].problem


def _checks(plan: Any, module: Any, chosen: set[str]) -> tuple[KernelCheck, ...]:
    bound = relay.prepare(module, {})
    with plan.target:
        lowered = plan.lower(plan.construct(bound))
        operators = operator_pipeline(plan.target, plan.device, plan.options)(bound)
        some = IRModule({v: f for v, f in lowered.functions_items() if str(v.name_hint) in chosen})
        assert len(some.functions) == len(chosen), [str(v.name_hint) for v, _ in lowered.functions_items()]
        return check_module(some, operators, plan.device, plan.target)


SAMPLE = [
    (A100, "mobilenet_block", {"fused_conv2d2_add1_add2"}),
    (H200, "bert_base_layer", {"fused_matmul3_add3_divide1_erf_add4_multiply1_multiply2", "fused_matmul_add"}),
    (V100, "bert_base_layer", {"fused_matmul_add", "softmax"}),
    (A100, "bert_base_layer", {"fused_matmul3_add3_divide1_erf_add4_multiply1_multiply2", "matmul2", "layer_norm"}),
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("device", "name", "chosen"), SAMPLE)
def test_default_builds_of_models(device: str, name: str, chosen: set[str]) -> None:
    module, params = relay.frontend.from_onnx(build_model(name))
    checks = _checks(plan_build(device, BuildOptions()), relay.bind_params(module, params), chosen)
    refuse_wrong(checks)
    assert all(check.error is not None for check in checks)


@pytest.mark.parametrize(
    ("first", "second", "right", "looks"),
    [
        (2e-4, 7e-6, True, 2),
        (2e-4, 2e-4, False, 2),
        (0.3, 7e-6, False, 1),
        (5e-5, 1.0, True, 1),
        (math.nan, 0.0, False, 1),
    ],
)
def test_what_a_clip_leaves_of_large_sums_is_looked_at_twice(
    first: float, second: float, right: bool, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by little: again on inputs an eighth as large, bounds as they were. Off by more: wrong at once."""
    given, errors = [], [first, second]
    arrays = {"x": np.ones((2, 3), "f4"), "bound": np.float32(0.5).reshape(()), "index": np.ones(4, "i4")}
    arrays["mask"] = np.ones(4, "f4")

    class Reference:
        def __call__(self, arrays: Any) -> None:
            given.append(arrays)

        def masks(self) -> dict[str, Any]:
            return {"mask": arrays["mask"]}

    def found(_expected: Any, _result: Any, *, reference: Any) -> list[OutputError]:
        assert isinstance(reference, Reference)
        return [OutputError(name="y", error=errors.pop(0), tolerance=1e-4)]

    monkeypatch.setattr(build_check, "errors_of", found)
    monkeypatch.setattr(build_check.simt, "run", lambda *_given, **_more: None)
    anything: Any = None
    done = build_check._errors(cast(Any, Reference()), anything, anything, arrays, anything, anything)
    assert (all(item.ok for item in done), len(given)) == (right, looks)
    assert [item["x"].max() for item in given] == [1.0, 0.125][:looks]
    assert all(item["bound"] == 0.5 and item["index"].max() == item["mask"].max() == 1 for item in given)


def test_integers_that_divide_are_not_zero() -> None:
    """A random 0 would end this process: the reference divides on its CPU."""
    vector = te.placeholder((64,), "int32", name="x"), te.placeholder((64,), "int32", name="by")
    quotient = te.compute((64,), lambda i: tirx.floordiv(vector[0][i], vector[1][i]), name="quotient")
    operator = te.create_prim_func([*vector, quotient])
    spec, target = device_for_target(V100)
    with target:
        kernel, _ = schedule_gpu_fallback(operator)
        assert check_kernel("quotient", kernel, operator, spec, target).problem == ""
