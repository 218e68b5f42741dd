"""ONNX Runtime's own quantisers as one function, its calibration data, and what quantisation costs in accuracy."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import helper, version_converter

from tvm_ext import relay
from tvm_ext._tvm import tvm
from tvm_ext.devices.device_db import TargetLike
from tvm_ext.errors import InputError, ModelError, UnsupportedEnvironmentError
from tvm_ext.support.arrays import Array

from . import timing
from .compare import relative_error
from .contenders import INSTALL_PEERS

QuantisationMode = Literal["static", "operators", "dynamic"]
"""Between QuantizeLinear and DequantizeLinear (QDQ); in QLinear operators; weights alone, data at each run."""

Activations = Literal["uint8", "int8"]
Sample = Mapping[str, Array]

LEAST_OPSET = 13
"""Scales for each channel are of this operator set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantisation:
    """What became of a model, compared with the float32 one over some samples.

    ``errors`` pairs each output with its largest relative error by norm. Times are medians of one run of the first
    sample, None where nobody asked for them.
    """

    mode: QuantisationMode
    samples: int
    bytes_before: int
    bytes_after: int
    errors: tuple[tuple[str, float], ...]
    float_s: float | None = None
    quantised_s: float | None = None


def quantised(
    model: onnx.ModelProto,
    mode: QuantisationMode,
    samples: Sequence[Sample] = (),
    *,
    per_channel: bool = True,
    activations: Activations = "uint8",
) -> onnx.ModelProto:
    """``model`` as ONNX Runtime quantises it: signed bytes for weights, ``activations`` for what is computed.

    ``samples`` are inputs by name, from which a static mode takes the ranges of activations; dynamic needs none.

    Raises UnsupportedEnvironmentError where ONNX Runtime is not installed; InputError where a static mode has no
    samples; ModelError where ONNX Runtime's quantiser does not take the model.
    """
    if mode != "dynamic" and not samples:
        raise InputError(f"mode {mode!r} needs calibration data.", "give --calibrate FILE.npz, or use --mode dynamic")
    quantization = _quantisers()
    kinds = {"uint8": quantization.QuantType.QUInt8, "int8": quantization.QuantType.QInt8}
    weights = {"per_channel": per_channel, "weight_type": kinds["int8"]}
    with tempfile.TemporaryDirectory() as folder:
        ready, result = (str(Path(folder, f"{name}.onnx")) for name in ("ready", "bytes"))
        try:
            _prepare(model, ready)
            if mode == "dynamic":
                quantization.quantize_dynamic(ready, result, **weights)
            else:
                forms = quantization.QuantFormat
                form = forms.QDQ if mode == "static" else forms.QOperator
                how = {"quant_format": form, "activation_type": kinds[activations], **weights}
                quantization.quantize_static(ready, result, _reader(samples), **how)
        except _refusals() as error:
            problem = f"ONNX Runtime's quantiser does not take the model: {type(error).__name__}: {error}"
            raise ModelError(problem, "check the model with onnx.checker, or export it again") from error
        return onnx.load(result)


def _quantisers() -> Any:
    try:
        from onnxruntime import quantization
    except ImportError as error:
        raise UnsupportedEnvironmentError("quantising a model needs ONNX Runtime.", INSTALL_PEERS) from error
    return quantization


def _refusals() -> tuple[type[Exception], ...]:
    """What ONNX Runtime's quantisers and sessions raise over a model."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    native = (
        onnx.checker.ValidationError,
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.NotImplemented,
        state.RuntimeException,
    )
    return (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, *native)


def _prepare(model: onnx.ModelProto, path: str) -> None:
    """Write ``model`` with its shapes inferred and its constants folded, as the quantisers want it."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    versions = {item.domain: item.version for item in model.opset_import}
    if versions.get("", LEAST_OPSET) < LEAST_OPSET:
        model = version_converter.convert_version(model, LEAST_OPSET)
    onnx.checker.check_model(model)  # ONNX Runtime's step below logs what it cannot take, and goes on
    source = f"{path}.source"
    onnx.save(model, source)
    quant_pre_process(source, path, skip_symbolic_shape=True)


def _reader(samples: Sequence[Sample]) -> Any:
    class Reader(_quantisers().CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: Iterator[Sample] = iter(samples)

        def get_next(self) -> dict[str, Array] | None:
            sample = next(self.left, None)
            return None if sample is None else dict(sample)

    return Reader()


def calibration_samples(model: onnx.ModelProto, arrays: Mapping[str, Array]) -> list[Sample]:
    """``arrays``, one for each input by name, cut into the model's inputs along their first axis.

    Worked example, an input of 1x3x224x224: an array of 64x3x224x224 or of 64x1x3x224x224 is 64 samples. An open first
    dimension is taken as 1. An array of one sample serves all of them.

    Raises InputError for names, element types, shapes or numbers of samples that do not fit.
    """
    constants = {item.name for item in model.graph.initializer}
    inputs = {item.name: item for item in model.graph.input if item.name not in constants}
    if missing := sorted(inputs.keys() - arrays.keys()):
        raise InputError(f"there is no calibration data for {', '.join(missing)}.", f"the inputs are {list(inputs)}")
    if unknown := sorted(arrays.keys() - inputs.keys()):
        raise InputError(f"the model has no input {', '.join(unknown)}.", f"the inputs are {list(inputs)}")
    cut = {name: _cut(value, arrays[name]) for name, value in inputs.items()}
    counts = {name: len(values) for name, values in cut.items() if len(values) != 1}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise InputError(f"inputs have different numbers of samples, or none: {counts}.", "give as many of each")
    count = max(counts.values(), default=1)
    return [{name: values[index if len(values) > 1 else 0] for name, values in cut.items()} for index in range(count)]


def _cut(value: onnx.ValueInfoProto, array: Array) -> Array:
    """The samples of one input along a new first axis."""
    tensor = value.type.tensor_type
    shape = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise InputError(f"calibration data of {value.name} are {array.dtype}, the input is {dtype}.", "convert them")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InputError(f"calibration data of {value.name} have NaN or infinity.", "give samples of finite numbers")
    batch = (shape[0] or 1) if shape else 1
    if _fits(array.shape[1:], shape) and array.ndim == len(shape) + 1:
        return array.astype(dtype)
    if shape and array.ndim == len(shape) and _fits(array.shape[1:], shape[1:]) and array.shape[0] % batch == 0:
        return array.astype(dtype).reshape(-1, batch, *array.shape[1:])
    wanted = "x".join("?" if extent is None else str(extent) for extent in shape)
    raise InputError(
        f"calibration data of {value.name} have shape {'x'.join(map(str, array.shape))}, the input {wanted or '()'}.",
        "give samples along the first axis, each in the input's shape",
    )


def _fits(extents: Sequence[int], shape: Sequence[int | None]) -> bool:
    return len(extents) == len(shape) and all(own in (None, extent) for own, extent in zip(shape, extents, strict=True))


def compare(
    model: onnx.ModelProto,
    smaller: onnx.ModelProto,
    mode: QuantisationMode,
    samples: Sequence[Sample],
    *,
    target: TargetLike = "llvm",
    rounds: int = 0,
    progress: Callable[[str], None] = lambda _step: None,
) -> Quantisation:
    """Compile ``smaller`` for the first sample's shapes and run all samples of those; ONNX Runtime runs ``model``.

    With ``rounds``, both models are compiled and timed in turns. ``progress`` is told the three steps.
    Raises what importing, building and running raise.
    """
    shapes = {name: value.shape for name, value in samples[0].items()}
    alike = [sample for sample in samples if all(sample[name].shape == shape for name, shape in shapes.items())]
    progress("compiling the quantised model")
    module = _built(smaller, shapes, target)
    progress("comparing it with the float32 model")
    errors = _errors(model, module, alike)
    progress("timing both" if rounds else "done")
    times: dict[str, float] = {}
    if rounds:
        runners = []
        for label, own in (("quantised", module), ("float", _built(model, shapes, target))):
            for name, value in samples[0].items():
                own.set_input(name, value)
            runners.append(timing.Runner(name=label, run=own.run))
        times = {name: timing.median(values) for name, values in timing.interleave(runners, rounds=rounds).items()}
    return Quantisation(
        mode=mode,
        samples=len(alike),
        bytes_before=model.ByteSize(),
        bytes_after=smaller.ByteSize(),
        errors=tuple(zip([output.name for output in model.graph.output], errors, strict=True)),
        float_s=times.get("float"),
        quantised_s=times.get("quantised"),
    )


def _built(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], target: TargetLike) -> relay.GraphModule:
    mod, params = relay.frontend.from_onnx(model, shape=shapes)
    return relay.GraphModule(relay.build(mod, target, params=params)["default"](tvm.cpu()))


def _errors(model: onnx.ModelProto, module: relay.GraphModule, samples: Sequence[Sample]) -> list[float]:
    """The largest relative error of each output."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    errors = [-math.inf] * len(model.graph.output)
    for sample in samples:
        wanted = session.run(None, dict(sample))
        module.run(**sample)
        for index, value in enumerate(wanted):
            errors[index] = max(errors[index], relative_error([module.get_output(index).numpy()], [value]))
    return errors
