"""Applies what `onnx/operators/` says of single operators: checks them, and rewrites those that do not convert."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import TensorProto

from tvm_ext.errors import ModelError

from .check import CONTRIBUTED_DOMAIN, LEARNED_DOMAIN, sort_nodes
from .fold_constants import fold_constants
from .graph import STANDARD_DOMAINS, OnnxGraph, attribute, count_uses, defined_names, describe_node, is_standard
from .import_limits import beyond
from .infer import infer_types
from .operators.context import FLOAT, HALF, INTEGERS, Context, Pen, Rule
from .operators.quantized import check_scales
from .operators.recurrent_attributes import unrolled_calls
from .operators.tables import CONTRIBUTED, LEARNED, RULES

_ELEMENT_TYPES = frozenset(TensorProto.DataType.keys())
# What arithmetic raises over operands of other ranks, types and extents than ONNX allows; the checker sees few of them.
_RULE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_MISFIT = "compare the node with the definition of its operator; bind dynamic dimensions with shape={...}"
# Rules write operators that have rules: Attention -> Softmax -> ... Deeper is a rule that writes its own operator.
_MAX_ROUNDS = 8
_SUB_BYTE_NAMES = "FLOAT4E2M1 INT4 UINT4 INT2 UINT2"
_NARROW_NAMES = (
    f"FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ FLOAT8E8M0 {_SUB_BYTE_NAMES} COMPLEX64 COMPLEX128"
)
# (Older releases of ONNX have fewer of them.)
_NARROW_TYPES = frozenset(TensorProto.DataType.Value(name) for name in _NARROW_NAMES.split() if name in _ELEMENT_TYPES)


def expand_contributed(graph: OnnxGraph) -> OnnxGraph:
    """`graph` with operators of com.microsoft and ai.onnx.ml that have a rule written in ONNX's own.

    Raises ModelError where a node is refused by its rule.
    """
    names = {node.op_type for node in graph.nodes if _is_contributed(node)}
    for now in (names - {"MatMulNBits"}, names & {"MatMulNBits"}):  # whose rule asks how many rows there are
        if not now:
            continue
        context = context_of(graph)
        nodes: list[onnx.NodeProto] = []
        for node in graph.nodes:
            is_due = _is_contributed(node) and node.op_type in now
            nodes.extend(_written(context.at(node), [CONTRIBUTED[node.op_type]]) if is_due else [node])
        graph = graph.with_nodes(nodes)
    for node in [node for node in graph.nodes if node.domain == LEARNED_DOMAIN and node.op_type in LEARNED]:
        written = _written(context_of(graph).at(node), [LEARNED[node.op_type]])  # one may read what another makes
        graph = graph.with_nodes([new for old in graph.nodes for new in (written if old is node else [old])])
    return graph


def _is_contributed(node: onnx.NodeProto) -> bool:
    return node.domain == CONTRIBUTED_DOMAIN and node.op_type in CONTRIBUTED


def decompose_operators(graph: OnnxGraph) -> OnnxGraph:
    """`graph`, checked, with every node replaced for which a rule has something to say, and constants folded.

    Raises ModelError where a node is refused by a check or a rule.
    """
    for _ in range(_MAX_ROUNDS):
        rewritten = _apply_rules(graph)
        if rewritten is graph:
            _check_ends(graph)
            _check_steps(graph)
            return graph
        graph = fold_constants(sort_nodes(rewritten))
    raise AssertionError("the rules of onnx/operators/ do not come to an end")


def _check_ends(graph: OnnxGraph) -> None:
    """Types narrower than a byte, even of what only a Shape reads, lie otherwise in NumPy's memory than in TVM's."""
    context = context_of(graph)
    ends = [("input", name) for name in graph.input_names] + [("output", name) for name in graph.output_names]
    for end, tensor in ends:
        name = TensorProto.DataType.Name(context.element_type(tensor))
        if name in _SUB_BYTE_NAMES.split():
            raise ModelError(
                f"{end} '{tensor}' has the element type {name}, which is less than a byte",
                "export the model with types of 8 bits or more",
            )


def _check_steps(graph: OnnxGraph) -> None:
    """A recurrent layer is as many nodes as it has steps."""
    context = context_of(graph)
    calls = [unrolled_calls(context.at(node)) for node in graph.nodes]
    if sum(calls) > graph.limits.nodes:
        longest = describe_node(graph.nodes[calls.index(max(calls))])
        problem = f"the recurrent layers of the model have {sum(calls)} steps together, {longest} {max(calls)} of them"
        raise beyond(problem, "nodes", sum(calls), graph.limits)


def _apply_rules(graph: OnnxGraph) -> OnnxGraph:
    """One round; `graph` itself where no rule applies."""
    context = context_of(graph)
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in graph.nodes:
        replaced = _rewrite(node, context)
        if replaced is None:
            _check_types(node, context)
        changed |= replaced is not None
        nodes.extend([node] if replaced is None else replaced)
    return graph.with_nodes(nodes) if changed else graph


def _rewrite(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    if node.domain not in STANDARD_DOMAINS:
        return None
    pen = context.at(node)
    return _written(pen, [in_float32] if is_widened(pen) else RULES.get(node.op_type, ())) or None


def _written(pen: Pen, rules: Iterable[Rule]) -> list[onnx.NodeProto]:
    """What the first rule that answers writes; [] where none does."""
    check_scales(pen)
    try:
        for rule in rules:
            rule(pen)
            if pen.nodes:
                break
    except ModelError:
        raise
    except (*_RULE_ERRORS, MemoryError) as error:
        raise pen.refusal(f"has operands that do not fit: {type(error).__name__}: {error}", _MISFIT) from error
    return pen.nodes


def _check_types(node: onnx.NodeProto, context: Context) -> None:
    """TVM computes with some narrow types wrongly (8-bit floats), and fails on others long after the import.

    8-bit exponents can be read, no more: their Cast to a wider type is right.
    """
    is_read = node.op_type == "Cast" and context.element_type(node.input[0]) == TensorProto.FLOAT8E8M0
    for name in (*(node.input if not is_read else ()), *node.output):
        code = context.element_type(name) if name else 0
        if code in _NARROW_TYPES:
            raise ModelError(
                f"{describe_node(node)}: tensor '{name}' has the element type {TensorProto.DataType.Name(code)}, which "
                "kernels cannot compute with",
                "export the model with types of 8 bits or more, floating-point ones of 16 bits or more",
            )


def context_of(graph: OnnxGraph) -> Context:
    """What rules and checks may know of `graph`."""
    return Context(types=infer_types(graph), constants=graph.constants, opset=graph.opset, taken=defined_names(graph))


def refuse_training(graph: OnnxGraph) -> None:
    """The stock importer would normalize with the running statistics, silently.

    Raises ModelError where a BatchNormalization runs in training mode, or its updated statistics are read.
    """
    uses = count_uses(graph)
    for node in graph.nodes:
        if not is_standard(node, "BatchNormalization"):
            continue
        if attribute(node, "training_mode", 0) or any(uses[name] for name in node.output[1:]):
            raise ModelError(
                f"{describe_node(node)} is in training mode", "export the model for inference (model.eval() in PyTorch)"
            )


# Where a step of the operator, or a constant, would be rounded or pass the largest float16.
_WIDENED_NAMES = (
    "Acos Acosh Asin Asinh Atan Atanh Celu Cosh CumSum DFT DeformConv Det Elu Gelu GlobalLpPool HardSigmoid HardSwish "
    "InstanceNormalization LRN LpNormalization LpPool MeanVarianceNormalization Mish PRelu ReduceL2 ReduceLogSum STFT "
    "Selu Sinh Softplus Softsign Swish Tan"
)
WIDENED = frozenset(_WIDENED_NAMES.split())
# What stock TVM computes in bfloat16 wrongly or not at all.
_WIDENED_BFLOAT16 = frozenset(["Clip", "IsInf", "IsNaN", "LayerNormalization", "Mod", "Pow", "RoiAlign"])


def is_widened(pen: Pen) -> bool:
    """Whether the node has an operand in half precision, and is computed in float32 and rounded once."""
    codes = set(map(pen.element_type, pen.input))
    if pen.op_type in WIDENED:
        return not codes.isdisjoint(HALF)
    to_integer = pen.op_type == "Cast" and pen.element_type(pen.output[0]) in INTEGERS
    return (pen.op_type in _WIDENED_BFLOAT16 or to_integer) and TensorProto.BFLOAT16 in codes


def in_float32(pen: Pen) -> None:
    """The node with its halves of either kind read as float32, and what is of their type rounded once."""
    inputs = [pen.cast(name, FLOAT) if name and pen.element_type(name) in HALF else name for name in pen.input]
    code = next(found for name in pen.input if (found := pen.element_type(name)) in HALF)
    kept = [out for out in pen.output if not out or pen.element_type(out) not in (code, 0)]
    outputs = [out if out in kept else pen.name("wide") for out in pen.output]
    pen.again(inputs, outputs)
    for wide, out in zip(outputs, pen.output, strict=True):
        if out != wide:
            pen.cast(wide, code, out=out)
