"""Runs one case through one system; any exception means that the case fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import tvm
from onnx.backend.test.runner import Runner
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

from tests.onnx_backend.cases import Case
from tvm_ext import relay
from tvm_ext.errors import InputError
from tvm_ext.relay_passes.onnx.import_model import require_bound_dimensions


class WrongAnswerError(AssertionError):
    """A system gave an answer, and it is not ONNX's."""


class NothingToBindError(LookupError):
    """A case has no input that configures an operator."""


# Operands that say what to compute rather than being computed with: (operator, operand) whose value shapes the result.
CONFIGURING_OPERANDS = {
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Clip": (1, 2),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Expand": (1,),
    "AffineGrid": (1,),
    "Dropout": (1, 2),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "Loop": (0, 1),
    "If": (0,),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "Range": (0, 1, 2),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (1, 2, 3),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "SequenceAt": (1,),
    "SequenceErase": (1,),
    "SequenceInsert": (2,),
    "Slice": (1, 2, 3, 4),
    "STFT": (1, 3),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    **{
        f"Reduce{what}": (1,)
        for what in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
}


def run_stock(case: Case) -> None:
    """Stock importer on the model as it is, stock compilation for plain LLVM."""
    executable = tvm.compile(from_onnx(case.model, keep_params_in_input=False), "llvm")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    for given, wanted in case.data_sets:
        result = machine["main"](*[_to_tvm(value) for value in given])
        _compare(case, result, wanted)


def run_ours(case: Case) -> None:
    """Our front door, given nothing but the shapes of inputs whose declaration leaves them open."""
    _run_through_relay(case, (), _our_build)


def run_ours_bound(case: Case) -> None:
    """Our front door with the values of configuring inputs (a Reshape's target) given as constants."""
    _run_through_relay(case, _some_configuring_inputs(case.model), _our_build)


def run_import(case: Case) -> None:
    """Our importer, stock compilation: tells failures of the import from failures of our kernels."""
    _run_through_relay(case, (), _stock_build)


def run_import_bound(case: Case) -> None:
    """Our importer with configuring inputs given, stock compilation."""
    _run_through_relay(case, _some_configuring_inputs(case.model), _stock_build)


def _our_build(mod: Any, params: Any) -> Any:
    return relay.build(mod, target="llvm", params=params, enable_roller=True).vm(tvm.cpu())


def _stock_build(mod: Any, params: Any) -> Any:
    require_bound_dimensions(mod)
    return relax.VirtualMachine(tvm.compile(relay.bind_params(mod, params), "llvm"), tvm.cpu())


def _some_configuring_inputs(model: onnx.ModelProto) -> tuple[str, ...]:
    names = configuring_inputs(model)
    if not names:
        raise NothingToBindError("no input configures an operator")
    return names


def configuring_inputs(model: onnx.ModelProto) -> tuple[str, ...]:
    """The graph inputs that some operator needs to know at build time."""
    inputs = {value.name for value in model.graph.input}
    needed = {
        node.input[index]
        for node in model.graph.node
        for index in CONFIGURING_OPERANDS.get(node.op_type, ())
        if index < len(node.input)
    }
    return tuple(sorted(inputs & needed))


def _run_through_relay(case: Case, bound: tuple[str, ...], build: Callable[[Any, Any], Any]) -> None:
    for given, wanted in case.data_sets:
        initializers = {tensor.name for tensor in case.model.graph.initializer}
        names = [value.name for value in case.model.graph.input if value.name not in initializers]
        feeds = dict(zip(names, given, strict=True))
        shape = {name: feeds[name].shape for name in _open_inputs(case.model) if name in feeds and name not in bound}
        mod, params = relay.frontend.from_onnx(case.model, shape, constants={name: feeds[name] for name in bound})
        machine = build(mod, params)
        result = machine["main"](*[_to_tvm(value) for name, value in feeds.items() if name not in bound])
        _compare(case, result, wanted)


def _open_inputs(model: onnx.ModelProto) -> list[str]:
    """Tensor inputs with a dimension that is no number, or without a shape."""
    return [
        value.name
        for value in model.graph.input
        if value.type.HasField("tensor_type")
        and (
            not value.type.tensor_type.HasField("shape")
            or any(dim.WhichOneof("value") != "dim_value" for dim in value.type.tensor_type.shape.dim)
        )
    ]


def _to_tvm(value: Any) -> Any:
    if value is None:
        raise InputError("an empty optional is neither a tensor nor a list of them", "leave the input out of the model")
    return [_to_tvm(item) for item in value] if isinstance(value, list) else tvm.runtime.tensor(np.asarray(value))


def _compare(case: Case, result: Any, wanted: list[Any]) -> None:
    outputs = [result] if isinstance(result, tvm.runtime.Tensor) or len(wanted) == 1 else list(result)
    try:
        Runner.assert_similar_outputs(wanted, [_to_numpy(item) for item in outputs], case.rtol, case.atol)
    except AssertionError as error:
        raise WrongAnswerError(str(error)) from error


def _to_numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, tvm.runtime.Tensor) else [_to_numpy(item) for item in value]


SYSTEMS: dict[str, tuple[Callable[[Case], None], ...]] = {
    # Each system with its ways, tried in turn until one passes.
    "stock": (run_stock,),
    "import": (run_import, run_import_bound),
    "ours": (run_ours, run_ours_bound),
}
