"""Networks exported from torch and quantised by ONNX Runtime: every tensor of bytes right to one step.

    python -m tests.support.exported_models.quantised resnet18 bert gpt2 --mode static --mode dynamic

Rounding differences of one layer multiply through the next ones, so that results are compared piece by piece. A piece
ends in one tensor of bytes and begins at those before it; ONNX Runtime computes it, node by node, over our own bytes.
Exits with 1 where one failed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import onnx
import typer
from onnx import TensorProto, helper

from tvm_ext import options, relay
from tvm_ext.bench.compare import relative_error
from tvm_ext.bench.quantise import QuantisationMode, quantised

from ..commands import console
from ..onnx_evaluator import by_onnx_runtime
from .export import INPUT_SETS, inputs_file
from .record import TOLERANCE
from .runs import PACKAGE, Run, attempt

Array = npt.NDArray[Any]
IR_VERSION = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """How far ``values`` bytes are off: ``one_off`` by a step, ``wrong`` by more; ``error`` is of float results."""

    tensors: int
    values: int
    one_off: int
    wrong: int
    error: float

    @property
    def passed(self) -> bool:
        return self.wrong == 0 and self.error < TOLERANCE


def check(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> Steps:
    """Build the quantised ``model`` with its bytes as outputs, run it and compare every one of them."""
    bytes_ = {name: code for node in model.graph.node for name, code in _bytes_of(node, model)}
    ends = [item.name for item in model.graph.output]
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    exposed.graph.output.extend(
        helper.make_tensor_value_info(name, code, None) for name, code in bytes_.items() if name not in ends
    )
    mod, params = relay.frontend.from_onnx(exposed)
    module = relay.GraphModule(relay.build(mod, "llvm", params=params)["default"]())
    module.run(**inputs)
    made = {item.name: module.get_output(index).numpy() for index, item in enumerate(exposed.graph.output)}
    given, off, error = {**inputs, **made}, [], 0.0
    for name in (*bytes_, *(end for end in ends if end not in bytes_)):
        wanted = _piece(model, frozenset(bytes_), name, given)
        if name in bytes_:
            off.append(np.abs(wanted.astype(int) - made[name].astype(int)).reshape(-1))
        else:
            error = max(error, relative_error([made[name]], [wanted]))
    steps = np.concatenate(off)
    return Steps(
        tensors=len(off), values=steps.size, one_off=int((steps == 1).sum()), wrong=int((steps > 1).sum()), error=error
    )


def _bytes_of(node: onnx.NodeProto, model: onnx.ModelProto) -> list[tuple[str, int]]:
    """The tensors of bytes that a node makes from floats or by rounding, with their element types."""
    if node.op_type == "DynamicQuantizeLinear":
        return [(node.output[0], TensorProto.UINT8)]
    place = {"QLinearConv": 7, "QLinearMatMul": 7, "QLinearConcat": 1, "QuantizeLinear": 2}.get(node.op_type)
    if place is None and not node.op_type.startswith(("QLinear", "QGemm")):
        return []
    zero = node.input[-1 if place is None else place]
    types = {item.name: item.data_type for item in model.graph.initializer}
    return [(node.output[0], types[zero])] if zero in types else []


def _piece(model: onnx.ModelProto, ends: frozenset[str], name: str, given: Mapping[str, Array]) -> Array:
    """``name`` by ONNX Runtime over our own bytes before it, and the model's inputs."""
    makers = {output: place for place, node in enumerate(model.graph.node) for output in node.output}
    constants = {item.name: item for item in model.graph.initializer}
    wanted, places, begins, seen = [name], set[int](), list[str](), set[str]()
    while wanted:
        tensor = wanted.pop()
        if tensor in seen or not tensor:
            continue
        seen.add(tensor)
        if tensor in constants:
            continue
        if tensor not in makers or (tensor != name and tensor in ends):
            begins.append(tensor)
            continue
        places.add(makers[tensor])
        wanted.extend(model.graph.node[makers[tensor]].input)
    nodes = [_beside(model.graph.node[place], begins) for place in sorted(places)]
    inputs = {tensor: given[tensor] for tensor in begins}
    values = [
        helper.make_tensor_value_info(tensor, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for tensor, value in inputs.items()
    ]
    kept = [constants[tensor] for tensor in seen & constants.keys()]
    graph = helper.make_graph(nodes, "piece", values, [onnx.ValueInfoProto(name=name)], kept)
    piece = helper.make_model(graph, opset_imports=model.opset_import, ir_version=IR_VERSION)
    return by_onnx_runtime(piece.SerializeToString(), inputs)[0]


def _beside(node: onnx.NodeProto, given: Sequence[str]) -> onnx.NodeProto:
    """``node`` with its outputs that are ``given`` under other names: DynamicQuantizeLinear also makes the scale."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.output[:] = [f"{output}_again" if output in given else output for output in node.output]
    return made


def quantised_network(name: str, mode: QuantisationMode) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The network as TorchScript's exporter writes it, quantised over its inputs; exported where it is not yet."""
    folder = options.cache_directory() / "exported"
    run = Run(network=name, exporter="torchscript", devices=(), folder=folder)
    if not run.model.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _, problem = attempt([f"{PACKAGE}.export", name, run.exporter, str(run.model), "0"], run.limit_s)
        if problem:
            raise SystemExit(f"error: {name} is not exported: {problem}")
    model = onnx.load(str(run.model))
    names, sets = {item.name for item in model.graph.input}, list[dict[str, Array]]()
    for index in range(INPUT_SETS):
        with np.load(inputs_file(run.model, index)) as stored:
            sets.append({key: stored[key] for key in names})
    return quantised(model, mode, sets), sets[0]


def main(
    names: Annotated[list[str], typer.Argument(metavar="NETWORK...")],
    mode: Annotated[list[str] | None, typer.Option(help="static, operators or dynamic; static.")] = None,
) -> None:
    """Quantise exported networks, build each and compare its bytes with ONNX Runtime's."""
    failed = False
    for name, how in _pairs(names, mode or ["static"]):
        steps = check(*quantised_network(name, how))
        failed |= not steps.passed
        console.print(f"{name}, {how}: {steps}", markup=False, highlight=False)
    sys.exit(int(failed))


def _pairs(names: Sequence[str], modes: Sequence[Any]) -> list[tuple[str, QuantisationMode]]:
    return [(name, mode) for name in names for mode in modes]


if __name__ == "__main__":
    typer.run(main)
