"""ONNX in, Relax out: the cleaning steps in order, then the stock importer.

Everything user-facing about a model file is decided here; later passes see a Relax function whose arguments are the
model's inputs followed by its parameters.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt
import onnx

from tvm_ext import _tvm
from tvm_ext._tvm import Expr, IRModule, RelaxFunction, Tensor, Var
from tvm_ext.errors import InputError, ModelError
from tvm_ext.exclusive import EXCLUSIVE
from tvm_ext.records import serialise
from tvm_ext.records.nodes import NODES
from tvm_ext.support.arrays import Array, DType, is_aligned
from tvm_ext.support.tensors import tensor_of, tensor_over

from ..node_names import label
from ..recurrent.loop import open_steps
from .bind_inputs import RequestedDim, bind_inputs, declared_dims
from .check import check_names, check_structure, find_unsupported, sort_nodes, unsupported_error, warn_non_finite
from .clean import (
    as_identifier,
    drop_dead_nodes,
    drop_identities,
    fold_gemm_attributes,
    inline_functions,
    rename_for_code,
    settle_empty_tensors,
)
from .control_flow import OPERATORS, ControlFlow, ControlFlowFailed
from .decompose import decompose_operators, expand_contributed, refuse_training
from .fold_batch_norm import fold_channel_scales, lower_batch_norm, merge_scales, split_biases
from .fold_constants import fold_constants
from .graph import (
    STANDARD_DOMAINS,
    OnnxGraph,
    count_uses,
    describe_node,
    graph_from_model,
    model_from_graph,
    with_some_shape,
)
from .import_limits import ImportLimits
from .integer_products import use_integers
from .limit import check_limits
from .load import load_onnx
from .node_table import imported_graph
from .operators.tables import CONVERTERS, REPLACED
from .settle_reshapes import settle_reshapes
from .stock_importer import import_onnx_with

ORIGINAL_NAMES = "tvm_ext.original_names"
"""Function attribute: argument name -> the ONNX name, for the arguments whose name had to change."""
OUTPUT_NAMES = "tvm_ext.output_names"
"""Function attribute: the ONNX names of the outputs, in order."""

# Operators whose tensor operands are data wherever they come from. A constant with another reader (Resize's scales,
# Clip's bounds) configures that operator, and the stock importer must see its value.
_WEIGHT_READER_NAMES = (
    "Add BatchNormalization BiasGelu Conv ConvTranspose Div Einsum GRU Gather Gemm GroupNormalization "
    "InstanceNormalization LSTM LayerNormalization MatMul MatMulInteger MatMulInteger16 Mul PRelu "
    "RMSNormalization RNN SkipLayerNormalization Sub"
)
_WEIGHT_READERS = frozenset(_WEIGHT_READER_NAMES.split())

# ONNX nests definitions two or three deep.
_MAX_EXPANSIONS = 8


def import_model(
    model: onnx.ModelProto | str | os.PathLike[str] | bytes,
    shape: Mapping[str, Sequence[RequestedDim]] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    limits: ImportLimits | None = None,
) -> tuple[IRModule, dict[str, Tensor]]:
    """Imports an ONNX model as a Relax module, with its parameters: name -> tensor on the CPU. See `from_onnx`.

    External data must lie in the model's folder. None, -1 or a name in ``shape`` keeps a dimension open; the first one
    may differ from a static one of the file, the others may not. One name as ``dtype`` speaks of all floating-point
    inputs. ``mod["main"]`` takes the inputs in the file's order, then the parameters in the order of the dict. Names
    that are no C identifiers are replaced (`gpu_0/data` by `gpu_0_data`). The module's attributes: ``num_input``,
    ``tvm_ext.original_names`` (new name -> name in the file) and ``tvm_ext.output_names``.

    Raises ModelError where the model is damaged, unsafe, contradictory, cyclic, too large, or uses unsupported
    operators (all listed); InputError where `shape`, `dtype` or `constants` do not fit it.
    """
    proto = load_onnx(model)
    del model
    graph = checked_graph(proto, limits or ImportLimits.current())
    graph = bind_inputs(graph, shape, dtype, constants)
    graph = expand_unsupported(graph, proto)
    del proto
    graph = clean_graph(graph)
    graph, original_names = rename_for_code(graph)
    warn_non_finite((original_names.get(name, name), value) for name, value in graph.constants.items())
    mod, parameters = _convert(graph, original_names)
    values = dict(graph.constants)
    del graph
    return mod, _tensors(values, parameters)


def checked_graph(proto: onnx.ModelProto, limits: ImportLimits | None = None) -> OnnxGraph:
    """The main graph of `proto`, sorted, its size, names and structure checked."""
    limits = limits or ImportLimits()
    check_limits(proto, limits)
    graph = graph_from_model(proto, limits)
    check_names(graph)
    graph = sort_nodes(graph)
    # ONNX's checker does not know the functions that a model brings; their calls are checked after expansion.
    if not proto.functions:
        check_structure(graph)
    return graph


def expand_unsupported(graph: OnnxGraph, proto: onnx.ModelProto) -> OnnxGraph:
    """`expanded`, where no operator stays unsupported.

    Raises ModelError listing every operator that does.
    """
    graph, unsupported = expanded(graph, proto)
    if unsupported:
        raise unsupported_error(graph, unsupported)
    return graph


def expanded(graph: OnnxGraph, proto: onnx.ModelProto) -> tuple[OnnxGraph, list[onnx.NodeProto]]:
    """Expands functions, and operators which the importer lacks but ONNX defines by simpler ones.

    Also the nodes, those of nested graphs included, whose operator stays unsupported.
    """
    supported = frozenset({*_tvm.onnx_operators(), "Constant", *OPERATORS, *CONVERTERS, *REPLACED})
    if proto.functions:
        graph = inline_functions(graph, proto, frozenset())
        check_names(graph)
        graph = sort_nodes(graph)
        check_structure(graph)
    graph = expand_contributed(sort_nodes(drop_dead_nodes(graph)))
    # One definition may use another: SoftmaxCrossEntropyLoss -> NegativeLogLikelihoodLoss -> GatherElements.
    for _ in range(_MAX_EXPANSIONS):
        expandable = frozenset(
            ("", node.op_type) for node in graph.nodes if _is_defined_by_others(node, graph, supported)
        )
        if not expandable:
            break
        graph = sort_nodes(inline_functions(graph, onnx.ModelProto(), expandable))
    unsupported = find_unsupported(graph, supported)
    if unsupported:
        # Some of them may be known at import, or lead to no output.
        unsupported = find_unsupported(drop_dead_nodes(fold_constants(graph)), supported)
    return graph, unsupported


def _is_defined_by_others(node: onnx.NodeProto, graph: OnnxGraph, supported: frozenset[str]) -> bool:
    """Whether `node` has no (right) converter, but a definition in ONNX's own standard."""
    if node.domain not in STANDARD_DOMAINS or not (node.op_type not in supported or _is_converted_wrongly(node)):
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, graph.opset)
    except onnx.defs.SchemaError:
        return False
    # (These two are missing in the type stubs of onnx.)
    return any(bool(getattr(schema, kind)) for kind in ("has_function", "has_context_dependent_function"))


def _is_converted_wrongly(node: onnx.NodeProto) -> bool:
    # The second and third output of LayerNormalization (mean, inverse deviation) come out as dummies.
    return node.op_type == "LayerNormalization" and len(node.output) > 1


def clean_graph(graph: OnnxGraph) -> OnnxGraph:
    """The cleaning, top to bottom; each step is pure and keeps what the graph computes."""
    # First, so that every later step sees weights and axes as constants, however the exporter wrote them.
    graph = settle_reshapes(fold_constants(graph))
    refuse_training(graph)
    # Before anything makes floats of quantised weights.
    graph = use_integers(graph)
    graph = decompose_operators(graph)
    # Before the batch-norm steps: a Dropout or Identity between two operators hides that one feeds the other.
    graph = drop_identities(graph)
    graph = merge_scales(lower_batch_norm(graph))
    # Before scales are folded: a Gemm without attributes takes a scale like a convolution.
    graph = fold_gemm_attributes(graph)
    graph = fold_channel_scales(graph)
    # After the folding, which needs the bias as an operand of the convolution.
    graph = split_biases(graph)
    graph = settle_empty_tensors(graph)
    return drop_dead_nodes(graph)


def _parameter_names(graph: OnnxGraph) -> list[str]:
    """The constants that become arguments: weights, in contrast to the values that configure an operator."""
    uses = count_uses(graph)
    weight_uses = dict.fromkeys(graph.constants, 0)
    for node in graph.nodes:
        for name in node.input:
            if name in weight_uses and node.op_type in _WEIGHT_READERS:
                weight_uses[name] += 1
    return [
        name
        for name, value in graph.constants.items()
        if value.ndim >= 1 and value.size > 1 and _is_weight_type(value.dtype) and weight_uses[name] == uses[name]
    ]


def _is_weight_type(dtype: DType) -> bool:
    return dtype.kind == "f" or dtype.name in ("bfloat16", "int8", "uint8")


def _convert(graph: OnnxGraph, original_names: Mapping[str, str]) -> tuple[IRModule, list[str]]:
    """The module, and the names of the constants that are its parameters."""
    parameters = _parameter_names(graph)
    control = ControlFlow(graph, lambda body: _import_body(body, control))
    try:
        with EXCLUSIVE:
            mod = _module_of(graph, parameters, label, control)
    except ControlFlowFailed as failed:
        raise failed.error from None
    control.add_to(mod)
    renamed = {name: original for name, original in original_names.items() if name in (*graph.input_names, *parameters)}
    attributes = {"num_input": len(graph.inputs), ORIGINAL_NAMES: renamed, OUTPUT_NAMES: list(graph.output_names)}
    mod["main"] = mod["main"].with_attrs(attributes)
    return mod.with_attr(NODES, serialise.to_json(imported_graph(graph, mod, original_names))), parameters


def _module_of(
    graph: OnnxGraph, parameters: Sequence[str], name_of: Callable[[int], str], control: ControlFlow
) -> IRModule:
    as_arguments = frozenset(parameters)
    proto = with_some_shape(model_from_graph(graph, lambda name: name not in as_arguments), also_inputs=False)
    shapes = _relax_shapes(graph) | {name: list(graph.constants[name].shape) for name in parameters}
    try:
        return import_onnx_with(proto, shapes, CONVERTERS, name_of, control)
    except (*_tvm.IMPORT_ERRORS, MemoryError) as error:
        raise _conversion_error(graph, error) from error


def _import_body(body: OnnxGraph, control: ControlFlow) -> tuple[OnnxGraph, RelaxFunction]:
    """A branch or body, cleaned, and its function."""
    cleaned, _ = rename_for_code(clean_graph(expand_unsupported(body, onnx.ModelProto())))
    func = _module_of(cleaned, (), lambda _place: "", control)["main"]
    return cleaned, func.without_attr("global_symbol").without_attr("num_input")


def _tensors(constants: dict[str, Array], parameters: Sequence[str]) -> dict[str, Tensor]:
    """The parameters as tensors, each in memory of its own: where an array has that, in its memory.

    Takes them out of ``constants``, so that no more than one is there twice.
    """
    owners = Counter(id(_owner(value)) for value in constants.values())
    tensors = {}
    for name in parameters:
        value = constants.pop(name)
        is_own = value.flags.writeable and value.flags.c_contiguous and owners[id(_owner(value))] == 1
        tensors[name] = tensor_over(value) if is_own and is_aligned(value) else tensor_of(value)
    return tensors


def _owner(value: Array) -> object:
    """What has allocated the array's memory."""
    owner: object = value
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _relax_shapes(graph: OnnxGraph) -> dict[str, list[Expr | int]]:
    """The shape of each input of known rank, one symbolic variable per dimension name."""
    variables: dict[str, Var] = {}
    shapes: dict[str, list[Expr | int]] = {}
    for value in graph.inputs:
        dims = declared_dims(value)
        if dims is not None:
            shapes[value.name] = [dim if isinstance(dim, int) else _variable(str(dim), variables) for dim in dims]
    return shapes


def _variable(name: str, variables: dict[str, Var]) -> Var:
    if name not in variables:
        variables[name] = _tvm.tirx.Var(as_identifier(name), "int64")
    return variables[name]


def _conversion_error(graph: OnnxGraph, error: BaseException) -> ModelError:
    node = _node_under_conversion(error.__traceback__)
    where = describe_node(node) if node is not None else "the model"
    reason = next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), type(error).__name__)
    dynamic = [name for name in node.input if name in graph.input_names] if node is not None else []
    names = " or ".join(map(repr, dynamic))
    hint = f"if {names} is known at build time, pass it in constants={{...}}; " if dynamic else ""
    return ModelError(
        f"TVM's ONNX importer cannot convert {where}: {reason.strip()}",
        f"{hint}bind dynamic dimensions with shape={{...}}, or export the operator differently",
    )


def _node_under_conversion(traceback: TracebackType | None) -> onnx.NodeProto | None:
    """The stock importer's own errors name no node, but the loop over the nodes is on the stack."""
    found = None
    while traceback is not None:
        node = traceback.tb_frame.f_locals.get("node")
        found = node if isinstance(node, onnx.NodeProto) else found
        traceback = traceback.tb_next
    return found


def unbound_dimensions(mod: IRModule) -> dict[str, tuple[str, ...]]:
    """The symbolic dimensions of the arguments of ``mod["main"]``: name -> the arguments whose shape it is in.

    An argument of unknown rank counts under the name ``rank of <argument>``.
    """
    found: dict[str, list[str]] = {}
    for parameter in mod["main"].params:
        for name in sorted(_symbols(parameter)):
            found.setdefault(name, []).append(parameter.name)
    return {name: tuple(arguments) for name, arguments in found.items()}


def _symbols(parameter: Var) -> set[str]:
    if not isinstance(parameter.ty, _tvm.relax.TensorType):
        return set()
    if parameter.ty.shape is None:
        return {f"rank of {parameter.name}"}
    names: list[str] = []
    for dim in parameter.ty.shape:
        _tvm.structural_walk(dim, (_tvm.Var, lambda variable: names.append(str(variable.name))))
    return set(names)


def require_bound_dimensions(mod: IRModule, *, may_loop: bool = False) -> None:
    """Raises an error that names every dimension without a value, and the inputs it belongs to.

    With ``may_loop`` those that count the steps of recurrent layers may stay open.

    Raises InputError where kernels are constructed for static shapes, and an extent is not known.
    """
    steps = open_steps(mod) if may_loop else frozenset()
    unbound = {name: arguments for name, arguments in unbound_dimensions(mod).items() if name not in steps}
    if not unbound:
        return
    attributes = mod["main"].attrs
    original = dict(attributes[ORIGINAL_NAMES]) if attributes and ORIGINAL_NAMES in attributes else {}
    listed = "; ".join(
        f"'{dim}' of input {', '.join(repr(str(original.get(name, name))) for name in names)}"
        for dim, names in unbound.items()
    )
    argument = next(iter(unbound.values()))[0]
    first = original.get(argument, argument)
    raise InputError(
        f"{len(unbound)} dimension(s) have no value: {listed}",
        f"bind them when importing: shape={{'{first}': [...]}}, or --shape {first}=... on the command line",
    )
