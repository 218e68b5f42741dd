"""Networks as ONNX Runtime's quantisers write them, from the float32 ones of `benchmarks.networks`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import onnx
from onnx import version_converter

from tvm_ext.bench import models
from tvm_ext.support.arrays import Array

How = Literal["static", "operators", "dynamic"]
"""Between QuantizeLinear and DequantizeLinear (QDQ); in QLinear operators; weights alone, data at each run."""

LEAST_OPSET = 13
"""Scales for each channel are of this operator set."""

CALIBRATIONS = 2
"""Random inputs from which the ranges of activations are taken."""


def quantised(model: onnx.ModelProto, how: How) -> onnx.ModelProto:
    """``model`` of bytes: unsigned activations, signed weights with a scale for each channel."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            inputs = (models.random_inputs(model, seed) for seed in range(CALIBRATIONS))
            self.inputs: Iterator[Mapping[str, Array]] = iter([dict(item) for item in inputs])

        def get_next(self) -> Mapping[str, Array] | None:
            return next(self.inputs, None)

    if model.opset_import[0].version < LEAST_OPSET:
        model = version_converter.convert_version(model, LEAST_OPSET)
    with tempfile.TemporaryDirectory() as folder:
        source, ready, result = (str(Path(folder, f"{name}.onnx")) for name in ("float", "ready", "bytes"))
        onnx.save(model, source)
        quant_pre_process(source, ready, skip_symbolic_shape=True)
        if how == "dynamic":
            quantization.quantize_dynamic(ready, result, weight_type=quantization.QuantType.QInt8)
        else:
            forms = quantization.QuantFormat
            quantization.quantize_static(
                ready,
                result,
                Reader(),
                quant_format=forms.QDQ if how == "static" else forms.QOperator,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
            )
        return onnx.load(result)
