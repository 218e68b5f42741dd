"""Attention and norms, of which the package has kernels, are no regions: each of them has its reason in the report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import decided, op, partition
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.partition import CUTLASS, CutlassBuild, CutlassPartition
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.compile_cutlass import CompileCutlass
from tvm_ext.relay_passes.expand_attention import ExpandAttention
from tvm_ext.reports.record import BuildRecord
from tvm_ext.reports.text import cutlass_lines


def norm(name: str, **more: Any) -> CutlassPartition:
    x, scale, shift = inputs_of((4, 24, 16), (16,), (16,), dtype="float16")
    if name == "layer":
        return decided(module_of([x, scale, shift], op.nn.layer_norm(x, scale, shift, **more)))
    return decided(module_of([x, scale], op.nn.rms_norm(x, scale, **more)))


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("layer", {"axes": [-1], "epsilon": 1e-12}, "with epsilon 1e-12: device_layernorm.h has one of 1e-05"),
        ("layer", {"axes": [-1], "epsilon": 1e-5}, "device_layernorm.h has a kernel of it alone"),
        ("layer", {"axes": [2]}, "device_layernorm.h has a kernel of it alone"),
        ("rms", {"axes": [-1], "epsilon": 1e-6}, "device_rmsnorm.h has a kernel of it alone"),
    ],
)
def test_a_norm_has_its_reason(name: str, more: dict[str, Any], reason: str) -> None:
    found = norm(name, **more)
    assert (found.taken, found.refused) == ((), ())
    (left,) = found.others
    assert reason in left.reason
    assert "(4, 24, 16) float16" in left.reason
    assert left.value in str(found)


def test_a_norm_of_several_axes_has_another() -> None:
    x, scale, shift = inputs_of((4, 24, 16), (24, 16), (24, 16), dtype="float16")
    (left,) = decided(module_of([x, scale, shift], op.nn.layer_norm(x, scale, shift, axes=[1, 2]))).others
    assert "along axes [1, 2]" in left.reason


def test_attention_in_float32_keeps_its_products_as_regions_and_has_one_reason() -> None:
    given = inputs_of(*[(2, 64, 4, 32)] * 3)
    found = decided(ExpandAttention()(module_of(given, op.nn.attention(*given))))
    assert [region.problem.anchor for region in found.taken] == ["batched_matmul"] * 2
    (left,) = found.others
    assert left.operator == "attention"
    assert "8 x (64 queries, 64 keys, 32 features)" in left.reason
    assert "each of its products may have a template" in left.reason


def test_the_report_has_them_and_counts_products_without_them() -> None:
    x, scale = inputs_of((4, 16), (16,), dtype="float16")
    cut, _ = partition(module_of([x, scale], op.nn.rms_norm(x, scale, axes=[-1])))
    backend: Any = SimpleNamespace(profile=None)  # nothing is compiled where there is no region
    made = CompileCutlass(lookup("nvidia-a100"), backend)(cut)
    report: Any = SimpleNamespace(cutlass=from_json(CutlassBuild, str(made.attrs[CUTLASS])))
    (line,) = cutlass_lines(report)
    assert line.startswith("not ")
    assert "device_rmsnorm.h" in line
    assert BuildRecord.cutlass_summary(report) == ""
