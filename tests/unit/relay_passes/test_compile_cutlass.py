"""Which regions become kernels of templates, which operators again, and what the report says of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.cutlass_on_cpu import put_on_cpu
from tests.support.inline_composites import InlineComposites
from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import op, partition
from tests.unit.compilers import needs_cc
from tvm_ext import relay
from tvm_ext._tvm import assert_structural_equal
from tvm_ext.autotune.choose import why_own_kernel
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import IllegalRewrite, OptionError, UnsupportedEnvironmentError
from tvm_ext.records.partition import CUTLASS, CutlassBuild, CutlassKernel, CutlassRegion
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.compile_cutlass import CompileCutlass
from tvm_ext.toolchains.cutlass_codegen import CutlassBackend

DEVICE = lookup("nvidia-a100")


class Backend:
    """Has a kernel for every region, or an error for all that it needs; nothing is compiled."""

    profile = None

    def __init__(self, missing: str = "", without: str = "") -> None:
        self.missing, self.without = missing, without

    def require(self) -> None:
        if self.missing:
            raise UnsupportedEnvironmentError(self.missing, "install it")

    def predict(self, region: CutlassRegion) -> float:
        if region.pattern == self.without:
            raise IllegalRewrite(f"{region.pattern} has no template", "")
        return 5.0

    def kernels(self, regions: Mapping[str, CutlassRegion]) -> tuple[dict[str, CutlassKernel], dict[str, str]]:
        made = {
            name: CutlassKernel(
                function=name, value=item.value, pattern=item.pattern, template="a template", predicted_us=5.0
            )
            for name, item in regions.items()
        }
        return made, {}

    def run(self, action: Callable[[], Any]) -> Any:
        return action()


def two_products() -> tvm.IRModule:
    x, w, v = inputs_of((64, 32), (32, 48), (48, 16), dtype="float16")
    return module_of([x, w, v], op.matmul(op.nn.relu(op.matmul(x, w)), v))


def compiled(mod: tvm.IRModule, backend: Any, own_time: Any = None) -> tuple[tvm.IRModule, CutlassBuild]:
    cut, _ = partition(mod)
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        done = CompileCutlass(DEVICE, backend, own_time, why_own_kernel)(cut)
    relax.analysis.well_formed(done)
    return done, from_json(CutlassBuild, str(done.attrs[CUTLASS]))


def as_operators(mod: tvm.IRModule) -> Any:
    return InlineComposites()(partition(mod)[0])["main"]


def test_nothing_pays_and_the_graph_is_what_it_was() -> None:
    mod = two_products()
    done, record = compiled(mod, Backend(), own_time=lambda _: 4.0)
    assert_structural_equal(done["main"], as_operators(mod))
    assert not record.kernels
    assert [item.reason for item in record.declined] == [
        "the model: a kernel of our own takes 4.0 us, a template 5.0 us"
    ] * 2


def test_own_kernels_are_asked_for_the_region_alone_and_once_for_each_kind() -> None:
    asked = []

    def own_time(twin: tvm.IRModule) -> float:
        asked.append([str(param.ty.shape) for param in twin["main"].params])
        return 4.0

    x, w = inputs_of((64, 64), (64, 64), dtype="float16")
    compiled(module_of([x, w], op.matmul(op.matmul(op.matmul(x, w), w), w)), Backend(), own_time)
    assert asked == [["R.shape([64, 64])"] * 2]


def test_what_has_no_template_is_declined_with_the_reason() -> None:
    done, record = compiled(two_products(), Backend(without="matmul"), own_time=lambda _: 4.0)
    assert {item.operator: item.reason for item in record.declined}["matmul"] == "matmul has no template"
    assert not any("Codegen" in (func.attrs or {}) for _, func in done.functions_items())


def test_without_the_package_true_is_an_error_and_auto_says_it() -> None:
    missing = Backend(missing="the Python package nvidia-cutlass is not installed.")
    with pytest.raises(UnsupportedEnvironmentError, match="nvidia-cutlass is not installed"):
        compiled(two_products(), missing)
    done, record = compiled(two_products(), missing, own_time=lambda _: 1e9)
    assert_structural_equal(done["main"], as_operators(two_products()))
    assert all("nvidia-cutlass is not installed. To use templates, install it" in i.reason for i in record.declined)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    put_on_cpu(monkeypatch, tmp_path)
    monkeypatch.setattr(CutlassBackend, "require", lambda _self: None)
    return tmp_path


@needs_cc
def test_a_build_is_exported_loaded_and_reported(on_cpu: Path) -> None:
    """Both products by templates; on a machine without a GPU the library is written, opened and asked."""
    options = {"enable_cutlass": True, "enable_persistent_fusion": False, "kernel_cache": "off"}
    library = relay.build(two_products(), "nvidia-a100", **options)
    made = library.report.cutlass
    assert made is not None
    assert [kernel.pattern for kernel in made.kernels] == ["matmul_relu", "matmul"]
    assert not library.report.operators and not made.declined
    assert "2 of 2 products by CUTLASS" in str(library.report)
    assert "matmul_relu by gemm_float16_sm80" in str(library.report)
    assert "matmul_relu by gemm_float16_sm80" in library.report.to_html()
    library.export_library(on_cpu / "model.so")
    again = relay.load(on_cpu / "model.so")
    assert again.report.cutlass == made
    assert all(again.executable.implements_function(kernel.function, True) for kernel in made.kernels)


@needs_cc
def test_two_products_are_one_templates_or_one_kernel_of_our_own(on_cpu: Path) -> None:
    """By the model: of linear layers a template has both; of factors that lie row by row, 48 wide, none has."""
    ours = relay.build(two_products(), "nvidia-a100", enable_cutlass=True, kernel_cache="off").report
    assert ours.cutlass is not None and not ours.cutlass.kernels
    assert "one kernel of our own" in ours.cutlass.declined[0].reason and len(ours.operators) == 1
    assert [region.fused for region in ours.persistent.regions] == [True]
    x, w, v = inputs_of((4096, 64), (64, 64), (16, 64), dtype="float16")
    mod = module_of([x, w, v], op.matmul(op.nn.relu(op.matmul(x, op.permute_dims(w))), op.permute_dims(v)))
    theirs = relay.build(mod, "nvidia-a100", enable_cutlass=True, kernel_cache="off").report
    assert theirs.cutlass is not None and not theirs.operators
    assert [kernel.pattern for kernel in theirs.cutlass.kernels] == ["matmul_relu_then_matmul"]
    assert "2 of 2 products by CUTLASS" in str(theirs)
    assert [region.kernel for region in theirs.persistent.regions] == ["cutlass_matmul_relu_then_matmul"]


@needs_cc
def test_the_rest_of_the_graph_keeps_our_kernels(on_cpu: Path) -> None:
    x, w = inputs_of((64, 64), (64, 64), dtype="float16")
    mod = module_of([x, w], op.nn.softmax(op.matmul(x, w)))
    report = relay.build(mod, "nvidia-a100", enable_cutlass=True, kernel_cache="off").report
    assert report.cutlass is not None and len(report.cutlass.kernels) == 1
    assert [operator.choice.path for operator in report.operators] == ["rows"]


@needs_cc
def test_odd_rows_are_padded_for_the_templates(on_cpu: Path) -> None:
    """Rows of 1001 halves are read one at a time, which no template does; padded to 1008 they have one."""
    (x,) = inputs_of((4096, 1001), dtype="float16")
    weight = relax.const(np.ones((1001, 512), "float16"))
    mod = module_of([x], op.matmul(x, weight))
    assert "is read 1 element(s) at a time" in partition(mod)[1].refused[0].reason
    report = relay.build(mod, "nvidia-a100", enable_cutlass=True, kernel_cache="off").report
    assert report.cutlass is not None and not report.cutlass.declined
    assert [kernel.pattern for kernel in report.cutlass.kernels] == ["matmul"]
    assert [operator.name for operator in report.operators] == ["pad"]


@needs_cc
def test_auto_compares_with_our_own_kernel(on_cpu: Path) -> None:
    x, w = inputs_of((4096, 4096), (4096, 4096), dtype="float16")
    report = relay.build(
        module_of([x, w], op.matmul(x, w)), "nvidia-a100", enable_cutlass="auto", kernel_cache="off"
    ).report
    assert report.cutlass is not None
    if report.cutlass.kernels:
        (kernel,) = report.cutlass.kernels
        assert kernel.own_us is not None and kernel.predicted_us < kernel.own_us
    else:
        assert "a kernel of our own takes" in report.cutlass.declined[0].reason


@pytest.mark.parametrize(("device", "reason"), [("nvidia-v100", "no templates below 7.5"), ("llvm", "is for CUDA")])
def test_devices_without_templates_keep_our_kernels_and_say_so(device: str, reason: str) -> None:
    report = relay.build(two_products(), device, enable_cutlass=True).report
    assert report.cutlass is not None and not report.cutlass.kernels
    assert all(reason in item.reason for item in report.cutlass.declined)
    assert reason in str(report)
    assert report.operators


def test_the_switch_is_one() -> None:
    with pytest.raises(OptionError, match="enable_cutlass"):
        relay.build(two_products(), "nvidia-a100", enable_cutlass="yes")
    assert relay.build(two_products(), "nvidia-a100").report.cutlass is None
