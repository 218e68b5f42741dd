"""Bounds what the nodes of a graph make, one after another, as far as constants and shapes have become known.

ONNX's inference computes extents in 64 bits that wrap: Tile of 4 rows by 2^62 has no rows. The numbers that it starts
from are bounded here before a result of the node is believed, in Python's integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import onnx

from tvm_ext.errors import ModelError
from tvm_ext.support.arrays import Array

from .graph import STANDARD_DOMAINS, describe_node
from .import_limits import ImportLimits, beyond, raise_limit
from .limit import check_extents

# Operands that say extents, axes or counts.
_SIZE_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1, 2),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
# Of these, the operators whose numbers may be negative: axes, diagonals, an extent to be found, what is cut off.
_MAY_BE_NEGATIVE = frozenset({"CumProd", "CumSum", "DFT", "Pad", "Reshape", "Resize", "Squeeze", "Trilu", "Unsqueeze"})


def check_operands(node: onnx.NodeProto, known: Mapping[str, Array], limits: ImportLimits) -> None:
    """The operands of ``node`` that say how large its result is, where they are known.

    Raises
    ------
    ModelError
        A number that is negative or beyond the largest extent, a range of too many steps.
    """
    if node.domain not in STANDARD_DOMAINS:
        return
    for index in _SIZE_OPERANDS.get(node.op_type, ()):
        if index < len(node.input) and node.input[index] in known:
            _check_numbers(node, known[node.input[index]], limits)
    if node.op_type == "Range" and all(name in known for name in node.input):
        _check_range(node, [known[name] for name in node.input], limits)


def _check_numbers(node: onnx.NodeProto, value: Array, limits: ImportLimits) -> None:
    if value.dtype.kind not in "iuf" or value.size > limits.operands:
        return
    for number in value.reshape(-1).tolist():
        if number < 0 and node.op_type not in _MAY_BE_NEGATIVE:
            raise ModelError(f"{describe_node(node)} is given the extent or count {number}", "export a positive one")
        if not -limits.tensor_elements < number < limits.tensor_elements:  # NaN is not either
            raise ModelError(
                f"{describe_node(node)} is given the extent or count {number} (limit {limits.tensor_elements})",
                raise_limit("tensor_elements", abs(number)) if isinstance(number, int) else "export the model again",
            )


def _check_range(node: onnx.NodeProto, bounds: list[Array], limits: ImportLimits) -> None:
    start, stop, step = (value.reshape(-1).tolist()[0] if value.size else 0 for value in bounds)
    finite = all(isinstance(number, int) or isfinite(number) for number in (start, stop, step))
    if not finite or step == 0:
        raise ModelError(f"{describe_node(node)} counts from {start} to {stop} by {step}", "export a range that ends")
    count = (stop - start) / step
    if count > limits.constant_elements:
        raise beyond(f"{describe_node(node)} makes {count:.0f} numbers", "constant_elements", int(count) + 1, limits)


def check_results(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], limits: ImportLimits) -> None:
    """The shapes of what ``node`` makes, as far as they are known. Raises ModelError."""
    for name in node.output:
        kind = types.get(name)
        if kind is not None and kind.HasField("tensor_type"):
            dims = kind.tensor_type.shape.dim
            shape = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in dims]
            if min(shape, default=0) < 0:
                raise ModelError(
                    f"{describe_node(node)} would make '{name}' of shape {tuple(shape[:8])}: a window, scale, pad or "
                    "slice is larger than what it is applied to",
                    "compare the node with the definition of its operator",
                )
            check_extents(shape, f"the result '{name}' of {describe_node(node)}", limits)
