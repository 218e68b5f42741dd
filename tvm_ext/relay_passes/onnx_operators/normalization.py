"""Normalisations."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from tvm_ext.relay_passes.onnx_graph import attribute
from tvm_ext.relay_passes.onnx_operators.context import Context, Pen, Rule


def _lp_normalization(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x / |x|_p along one axis, 0 where the norm is 0: the norm becomes 1 there, and 0 / 1 = 0."""
    pen, x = Pen(node=node, context=context), node.input[0]
    power = "L1" if attribute(node, "p", 2) == 1 else "L2"
    norm = pen.reduce(f"Reduce{power}", x, int(attribute(node, "axis", -1)), keepdims=True)
    is_zero = pen.add("Equal", norm, pen.add("Sub", norm, norm))
    pen.add("Div", x, pen.add("Add", norm, pen.add("CastLike", is_zero, x)), out=node.output[0])
    return pen.nodes


RULES: Mapping[str, Rule] = {"LpNormalization": _lp_normalization}
REPLACED = frozenset({"LpNormalization"})
