"""What an import says of its nodes, for reports that name them."""

from __future__ import annotations

from collections.abc import Mapping

from tvm_ext._tvm import IRModule
from tvm_ext.records.nodes import ImportedGraph, ImportedNode, ModelNode

from ..node_names import label, shape_text
from .graph import OnnxGraph


def imported_graph(graph: OnnxGraph, mod: IRModule, original_names: Mapping[str, str]) -> ImportedGraph:
    """The nodes of ``graph`` as the file calls them, with the shapes that they have in ``mod``."""
    bindings = (binding for block in mod["main"].body.blocks for binding in block.bindings)
    shapes = {str(binding.var.name): shape_text(binding.var.ty) for binding in bindings}
    makers = _makers(graph)
    nodes = (
        ImportedNode(
            node=ModelNode(
                name=node.name or original_names.get(node.output[0], node.output[0]),
                kind=node.op_type,
                shape=shapes.get(label(place), ""),
            ),
            reads=tuple(sorted({makers[name] for name in node.input if name in makers})),
        )
        for place, node in enumerate(graph.nodes)
    )
    return ImportedGraph(nodes=tuple(nodes))


def _makers(graph: OnnxGraph) -> dict[str, int]:
    """The node that makes each value, by its place: the first of equal ones, which alone will be computed."""
    makers: dict[str, int] = {}
    firsts: dict[tuple[object, ...], int] = {}
    for place, node in enumerate(graph.nodes):
        inputs = (makers.get(name, name) for name in node.input)
        attributes = (item.SerializeToString(deterministic=True) for item in node.attribute)
        first = firsts.setdefault((node.domain, node.op_type, *inputs, *attributes), place)
        makers |= {name: first for name in node.output if name}
    return makers
