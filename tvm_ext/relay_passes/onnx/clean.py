"""Small rewritings of an ONNX graph that the stock importer, or the kernels made from its result, need."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from tvm_ext.errors import ModelError
from tvm_ext.support.arrays import Array

from .check import sort_nodes
from .graph import (
    GraphEdit,
    OnnxGraph,
    attribute,
    count_uses,
    defined_names,
    fresh_name,
    graph_from_model,
    is_empty,
    is_standard,
    model_from_graph,
    read_names,
    rename_tensors,
    with_operands,
)
from .limit import check_node_count


def inline_functions(graph: OnnxGraph, model: onnx.ModelProto, operators: frozenset[tuple[str, str]]) -> OnnxGraph:
    """Expands the model's own functions, and the standard `operators` (domain, name) by ONNX's definition of them.

    The weights stay behind: the expansion sees them as inputs.
    """
    if not model.functions and not operators:
        return graph
    graph = _with_default_attributes(graph, operators)
    skeleton = model_from_graph(graph, lambda name: graph.constants[name].size <= 1)
    skeleton.functions.extend(model.functions)
    skeleton.ir_version = max(skeleton.ir_version, model.ir_version)
    try:
        if model.functions:
            skeleton = inliner.inline_local_functions(skeleton)
        if operators:
            skeleton = inliner.inline_selected_functions(skeleton, sorted(operators), inline_schema_functions=True)
    except (onnx.checker.ValidationError, MemoryError, RuntimeError, ValueError) as error:
        names = ", ".join(sorted({name for _, name in operators} | {function.name for function in model.functions}))
        raise ModelError(
            f"the definitions of {names} cannot be expanded: {(str(error).splitlines() or [''])[-1].strip()}",
            "export the model with simpler operators (a lower opset) and without functions",
        ) from error
    inlined = graph_from_model(skeleton)
    check_node_count(inlined.nodes, graph.limits)
    return replace(
        inlined,
        inputs=graph.inputs,
        constants={**inlined.constants, **graph.constants},
        opsets={**graph.opsets, **inlined.opsets},
        limits=graph.limits,
    )


def _with_default_attributes(graph: OnnxGraph, operators: frozenset[tuple[str, str]]) -> OnnxGraph:
    """ONNX's inliner drops what a definition says by an attribute that a node leaves at its default (Celu's alpha)."""
    names = {name for _, name in operators}
    if not names:
        return graph
    return graph.with_nodes(
        _with_defaults(node, graph.opset) if is_standard(node, *names) else node for node in graph.nodes
    )


def _with_defaults(node: onnx.NodeProto, opset: int) -> onnx.NodeProto:
    given = {item.name for item in node.attribute}
    attributes = onnx.defs.get_schema(node.op_type, opset).attributes
    missing = [
        item.default_value
        for name, item in attributes.items()
        if name not in given and item.default_value.type != onnx.AttributeProto.UNDEFINED
    ]
    if not missing:
        return node
    complete = with_operands(node, node.input)
    complete.attribute.extend(missing)
    return complete


def drop_identities(graph: OnnxGraph) -> OnnxGraph:
    """Readers of Identity and of Dropout (in inference: the identity) read its input instead.

    One that makes a graph output stays, as an Identity; so does a Dropout whose mask is read or which trains.
    """
    uses = count_uses(graph)
    outputs = set(graph.output_names)
    new_names: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        if not _is_identity(node, graph, uses):
            kept.append(node)
        elif node.output[0] in outputs:
            kept.append(helper.make_node("Identity", [node.input[0]], [node.output[0]], node.name))
        else:
            new_names[node.output[0]] = new_names.get(node.input[0], node.input[0])
    return rename_tensors(graph.with_nodes(kept), new_names)


def _is_identity(node: onnx.NodeProto, graph: OnnxGraph, uses: dict[str, int]) -> bool:
    if not is_standard(node, "Identity", "Dropout"):
        return False
    mask_is_read = any(uses[name] for name in node.output[1:])
    training = node.input[2] if len(node.input) > 2 else ""
    is_inference = not training or (training in graph.constants and not graph.constants[training].any())
    return not mask_is_read and is_inference


def drop_dead_nodes(graph: OnnxGraph) -> OnnxGraph:
    """`graph` without the nodes and constants from which no output follows. Inputs stay: they are the signature."""
    live = set(graph.output_names)
    kept = []
    for node in reversed(graph.nodes):
        if live.intersection(node.output):
            kept.append(node)
            live |= read_names(node)
    constants = {name: value for name, value in graph.constants.items() if name in live}
    return replace(graph, nodes=tuple(reversed(kept)), constants=constants)


def rename_for_code(graph: OnnxGraph) -> tuple[OnnxGraph, dict[str, str]]:
    """Inputs and constants get names that are identifiers in C; the second result maps each new name to the original.

    `gpu_0/data_0` becomes `gpu_0_data_0`; where that exists already, `gpu_0_data_0_1`. Names that are identifiers
    keep theirs.
    """
    names = [*graph.input_names, *graph.constants]
    taken = defined_names(graph)
    # A constant that is itself an output keeps its name, which is the output's.
    fixed = set(graph.output_names)
    new_names = {
        name: fresh_name(as_identifier(name), taken)
        for name in names
        if as_identifier(name) != name and name not in fixed
    }
    return rename_tensors(graph, new_names), {new: old for old, new in new_names.items()}


def as_identifier(name: str) -> str:
    """`name` with everything replaced that C does not allow in an identifier; `onnx::MatMul_12` loses its prefix."""
    text = re.sub(r"[^A-Za-z0-9_]", "_", name.removeprefix("onnx::"))
    return text if re.match(r"[A-Za-z_]", text) else f"tensor_{text}"


def fold_gemm_attributes(graph: OnnxGraph) -> OnnxGraph:
    """Gemm(alpha, beta, transB) with constant B and C carries no attributes any more: they go into the constants.

    Y = alpha * A @ B^T + beta * C  =  A @ (alpha * B^T) + (beta * C)
    """
    edit = GraphEdit(graph)
    for node in graph.nodes:
        edit.append(_plain_gemm(node, edit))
    return edit.result()


def _plain_gemm(node: onnx.NodeProto, edit: GraphEdit) -> onnx.NodeProto:
    constants = edit.graph.constants
    if not is_standard(node, "Gemm") or node.input[1] not in constants:
        return node
    weight = constants[node.input[1]]
    alpha, beta = attribute(node, "alpha", 1.0), attribute(node, "beta", 1.0)
    transposed = bool(attribute(node, "transB", 0))
    has_bias = len(node.input) > 2 and node.input[2] != ""
    bias_is_known = not has_bias or beta == 1.0 or node.input[2] in constants
    if weight.dtype.kind != "f" or not bias_is_known or (alpha == beta == 1.0 and not transposed):
        return node
    scaled = weight.T if transposed else weight
    scaled = scaled if alpha == 1.0 else (scaled * alpha).astype(weight.dtype)
    inputs = [node.input[0], edit.constant(f"{node.input[1]}_scaled", scaled), *node.input[2:]]
    if has_bias and beta != 1.0:
        bias = constants[node.input[2]]
        inputs[2] = edit.constant(f"{node.input[2]}_scaled", (bias * beta).astype(bias.dtype))
    return helper.make_node("Gemm", inputs, node.output, node.name, transA=attribute(node, "transA", 0))


def settle_empty_tensors(graph: OnnxGraph) -> OnnxGraph:
    """Tensors without elements leave Concat, and as graph outputs are made by a node.

    TVM's executables cannot store a constant without elements ("Invalid DLTensor file format" when loaded).
    """
    empty = {name for name, value in graph.constants.items() if value.size == 0}
    if not empty:
        return graph
    taken = defined_names(graph)
    nodes = [_without_operands(node, empty) if node.op_type == "Concat" else node for node in graph.nodes]
    constants = dict(graph.constants)
    source = next((value for value in graph.inputs if is_empty(value.type)), None)
    for name in sorted(empty.intersection(graph.output_names)):
        value = constants.pop(name)
        shape = fresh_name(f"{name}_shape", taken)
        constants[shape] = np.asarray(value.shape, np.int64)
        nodes.extend(_nodes_making_nothing(name, value, shape, source))
    return sort_nodes(replace(graph, nodes=tuple(nodes), constants=constants))


def _nodes_making_nothing(
    name: str, value: Array, shape: str, source: onnx.ValueInfoProto | None
) -> list[onnx.NodeProto]:
    """A view of an input without elements if there is one: what depends on no input would be folded again."""
    if source is None:
        zero = numpy_helper.from_array(np.zeros(1, value.dtype))
        return [helper.make_node("ConstantOfShape", [shape], [name], value=zero)]
    code = helper.np_dtype_to_tensor_dtype(value.dtype)
    if code == source.type.tensor_type.elem_type:
        return [helper.make_node("Reshape", [source.name, shape], [name], allowzero=1)]
    converted = f"{shape}_source"
    return [
        helper.make_node("Cast", [source.name], [converted], to=code),
        helper.make_node("Reshape", [converted, shape], [name], allowzero=1),
    ]


def _without_operands(node: onnx.NodeProto, dropped: set[str]) -> onnx.NodeProto:
    kept = [name for name in node.input if name not in dropped]
    return node if len(kept) == len(node.input) or not kept else with_operands(node, kept)
