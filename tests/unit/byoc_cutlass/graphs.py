"""Relax graphs for the tests of partitioning, and what was decided about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tvm_ext._tvm import Sequential
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import graph_passes, layout_passes
from tvm_ext.records.partition import PARTITION, CutlassPartition
from tvm_ext.records.serialise import from_json
from tvm_ext.relay import frontend
from tvm_ext.relay_passes.partition_cutlass import PartitionCutlass

op = relax.op


def graph_of(model: onnx.ModelProto, device: str, **options: Any) -> tvm.IRModule:
    """An ONNX model as a build for ``device`` has it before partitioning, parameters as constants."""
    mod, params = frontend.from_onnx(model)
    mod = relax.transform.BindParams("main", params)(mod) if params else mod
    return Sequential([*graph_passes(), *layout_passes(lookup(device), BuildOptions.create(**options))])(mod)


def partition(mod: tvm.IRModule, device: str = "nvidia-a100") -> tuple[tvm.IRModule, CutlassPartition]:
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        cut = PartitionCutlass(lookup(device))(mod)
    relax.analysis.well_formed(cut)  # raises where it is not
    return cut, from_json(CutlassPartition, str(cut.attrs[PARTITION]))


def decided(mod: tvm.IRModule, device: str = "nvidia-a100") -> CutlassPartition:
    return partition(mod, device)[1]


def patterns(mod: tvm.IRModule, device: str = "nvidia-a100") -> list[str]:
    return [region.pattern for region in decided(mod, device).taken]


def number(value: float, dtype: str = "float16") -> Any:
    return relax.const(np.asarray(value, dtype), dtype)


def product(
    first: Sequence[Any] = (64, 32), second: Sequence[Any] = (32, 48), dtype: str = "float16", **options: Any
) -> tvm.IRModule:
    """A matrix product alone."""
    inputs = inputs_of(first, second, dtype=dtype)
    return module_of(inputs, op.matmul(*inputs, **options))


def convolution(
    data: Sequence[int] = (1, 14, 14, 32),
    weight: Sequence[int] = (64, 3, 3, 32),
    dtype: str = "float16",
    **options: Any,
) -> tvm.IRModule:
    """An NHWC convolution alone."""
    inputs = inputs_of(data, weight, dtype=dtype)
    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    return module_of(inputs, op.nn.conv2d(*inputs, **(layouts | options)))
