"""Hand-made hostile models: families of one fault each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..small_models import onnx_model
from . import made_graphs
from .record import HostileCase

HUGE = (-(2**63), -(2**31), -1, 0, 2**31, 2**40, 2**62)


def made_cases(wanted: Callable[[str], bool] = lambda _: True) -> Iterator[HostileCase]:
    """Those whose name is ``wanted``. Names are unique."""
    for name, model in (*_operand_models(), *_attribute_models(), *_window_models(), *_input_models()):
        if wanted(name):
            yield HostileCase(kind="made", name=name, data=model.SerializeToString())
    yield from made_graphs.graph_cases(wanted)


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int]],
    constants: Mapping[str, Any] | None = None,
    opset: int = 20,
    element_type: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    return onnx_model(
        nodes, inputs, constants=constants, opset=opset, element_type=element_type, domains={"com.microsoft": 1}
    )


# --- operands that say how large a result is --------------------------------------------------------------------------
# Operator: its operands, in which "h" stands for the hostile one, its attributes, and the operand's value for a number.
_OPERANDS: dict[str, tuple[list[str], dict[str, Any], Any]] = {
    "Tile": (["x", "h"], {}, lambda n: [n, 1]),
    "Expand": (["x", "h"], {}, lambda n: [n, 3, 4]),
    "Pad": (["x", "h"], {}, lambda n: [0, n, 0, 1]),
    "Reshape": (["x", "h"], {}, lambda n: [n, 2]),
    "ConstantOfShape": (["h"], {}, lambda n: [n, 2]),
    "Resize": (["x", "", "", "h"], {"mode": "nearest"}, lambda n: [3, n]),
    "OneHot": (["i", "h", "pair"], {}, lambda n: np.int64(n)),
    "Upsample": (["x", "s"], {}, lambda n: np.asarray([1, n], "float32")),
    "Slice": (["x", "low", "low", "low", "h"], {}, lambda n: [n]),
    "Gather": (["x", "h"], {"axis": 0}, lambda n: [n]),
    "Split": (["x", "h"], {"axis": 1}, lambda n: [n]),
    "TopK": (["x", "h"], {}, lambda n: [n]),
    "Unsqueeze": (["x", "h"], {}, lambda n: [n]),
    "CumSum": (["x", "h"], {}, lambda n: np.int64(n)),
    "HannWindow": (["h"], {}, lambda n: np.int64(n)),
    "MelWeightMatrix": (["h", "five", "five", "rate", "rate"], {}, lambda n: np.int64(n)),
    "DFT": (["signal", "h"], {}, lambda n: np.int64(n)),
    "STFT": (["signal", "h", "", "five"], {}, lambda n: np.int64(n)),
    "Trilu": (["x", "h"], {}, lambda n: np.int64(n)),
    "AffineGrid": (["theta", "h"], {}, lambda n: [1, 1, 2, n]),
    "Col2Im": (["columns", "h", "pairs"], {}, lambda n: [n, 5]),
}
_CONSTANTS: dict[str, Any] = {
    "i": np.asarray([0, 1]),
    "pair": np.asarray([0, 1], "float32"),
    "low": np.asarray([0]),
    "five": np.asarray(5),
    "rate": np.asarray(4.0, "float32"),
    "pairs": np.asarray([1, 5]),
}
_SHAPES = {"x": (3, 4), "signal": (1, 16, 1), "theta": (1, 2, 3), "columns": (1, 5, 5)}


def _operand_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    for operator, (inputs, attributes, value) in _OPERANDS.items():
        for number in HUGE:
            names = ["h" if name == "s" else name for name in inputs]
            constants = {name: item for name, item in _CONSTANTS.items() if name in names}
            node = helper.make_node(operator, names, ["y"], "hostile", **attributes)
            shapes = {name: shape for name, shape in _SHAPES.items() if name in names}
            opset = 9 if operator == "Upsample" else 20
            yield f"{operator} of {number}", _model([node], shapes, {**constants, "h": value(number)}, opset)
    for limit in (2**31, 2**62, -(2**62)):
        node = helper.make_node("Range", ["a", "b", "c"], ["y"], "hostile")
        yield f"Range to {limit}", _model([node], {}, {"a": np.int64(0), "b": np.int64(limit), "c": np.int64(1)})
    for scale in (0.0, -1.0, 1e9, 1e30, float("nan"), float("inf")):
        node = helper.make_node("Resize", ["x", "", "h"], ["y"], "hostile")
        yield f"Resize by {scale}", _model([node], {"x": (3, 4)}, {"h": np.asarray([1, scale], "float32")})


# --- attributes -------------------------------------------------------------------------------------------------------
_ATTRIBUTES: dict[str, tuple[list[str], str]] = {
    "SpaceToDepth": (["image"], "blocksize"),
    "DepthToSpace": (["image"], "blocksize"),
    "LRN": (["image"], "size"),
    "Softmax": (["x"], "axis"),
    "Flatten": (["x"], "axis"),
    "LayerNormalization": (["x", "scale"], "axis"),
    "EyeLike": (["x"], "k"),
    "GroupNormalization": (["image", "scale", "scale"], "num_groups"),
    "ArgMax": (["x"], "axis"),
    "Concat": (["x", "x"], "axis"),
    "Split": (["x"], "num_outputs"),
    "Cast": (["x"], "to"),
    "HannWindow": (["five"], "output_datatype"),
}


def _attribute_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    shapes = {"x": (3, 4), "image": (1, 4, 4, 4)}
    constants = {"scale": np.ones(4, "float32"), "five": np.asarray(5)}
    for operator, (inputs, attribute) in _ATTRIBUTES.items():
        for number in (-(2**63), -3, 0, 2**31, 2**62):
            node = helper.make_node(operator, inputs, ["y"], "hostile")
            node.attribute.append(helper.make_attribute(attribute, number))
            given = {name: shape for name, shape in shapes.items() if name in inputs}
            kept = {name: value for name, value in constants.items() if name in inputs}
            yield f"{operator} {attribute} {number}", _model([node], given, kept)


# --- windows ----------------------------------------------------------------------------------------------------------
_WINDOW_FAULTS: dict[str, dict[str, Any]] = {
    "negative pads": {"pads": [-1, -1, -1, -1]},
    "pads that eat the input": {"pads": [-4, -4, -4, -4]},
    "huge pads": {"pads": [2**40, 0, 2**40, 0]},
    "overflowing pads": {"pads": [2**62, 2**62, 2**62, 2**62]},
    "too few pads": {"pads": [1, 1]},
    "zero strides": {"strides": [0, 0]},
    "negative strides": {"strides": [-1, -2]},
    "huge strides": {"strides": [2**62, 2**62]},
    "zero dilations": {"dilations": [0, 0]},
    "negative dilations": {"dilations": [-1, -1]},
    "huge dilations": {"dilations": [2**40, 2**40]},
    "kernel larger than the input": {"kernel_shape": [9, 9]},
    "huge kernel": {"kernel_shape": [2**40, 2**40]},
    "kernel of nothing": {"kernel_shape": [0, 0]},
    "negative kernel": {"kernel_shape": [-3, -3]},
    "kernel of one dimension": {"kernel_shape": [3]},
    "no groups": {"group": 0},
    "negative groups": {"group": -1},
    "groups that do not divide": {"group": 3},
    "unknown auto_pad": {"auto_pad": "SIDEWAYS"},
    "huge output padding": {"output_padding": [2**40, 2**40]},
    "huge output shape": {"output_shape": [2**40, 2**40]},
    "negative output shape": {"output_shape": [-5, -5]},
}
_WINDOW_OPERATORS = {
    "Conv": ("group", "pads", "strides", "dilations", "kernel_shape", "auto_pad"),
    "ConvTranspose": (
        "group", "pads", "strides", "dilations", "kernel_shape", "auto_pad", "output_padding", "output_shape",
    ),
    "MaxPool": ("pads", "strides", "dilations", "kernel_shape", "auto_pad"),
    "AveragePool": ("pads", "strides", "kernel_shape", "auto_pad"),
}  # fmt: skip


def _window_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    for operator, known in _WINDOW_OPERATORS.items():
        for fault, attributes in _WINDOW_FAULTS.items():
            if not attributes.keys() <= set(known):
                continue
            weighted = operator.startswith("Conv")
            kernel = attributes.get("kernel_shape", [3, 3])
            extents = kernel if len(kernel) == 2 and all(0 <= extent < 100 for extent in kernel) else (3, 3)
            node = helper.make_node(
                operator, ["x", "w"] if weighted else ["x"], ["y"], "hostile", **{"kernel_shape": [3, 3], **attributes}
            )
            weights = {"w": np.ones((4, 4, *extents), "float32")} if weighted else {}
            yield f"{operator}, {fault}", _model([node], {"x": (1, 4, 6, 6)}, weights)
    for missing in (["x"], [], ["", "w"], ["x", ""], ["x", "w", "b", "x", "x"]):
        node = helper.make_node("Conv", missing, ["y"], "hostile", kernel_shape=[3, 3])
        weights = {"w": np.ones((4, 4, 3, 3), "float32"), "b": np.ones(4, "float32")}
        yield f"Conv of {missing}", _model([node], {"x": (1, 4, 6, 6)}, weights)


def _input_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Declared extents; growth that only inference finds is in `made_graphs`."""
    for shape in ([-1, 3], [0, 3], [2**31, 2], [2**40, 2**40], [2**62, 8], [-(2**63)], [1] * 70, [1] * 5000):
        shown = f"{len(shape)} ones" if len(shape) > 4 else shape
        yield f"input of {shown}", _model([helper.make_node("Relu", ["x"], ["y"])], {"x": shape})
    for dims in ([-1], [2**32, 2**32], [2**62, 4], [2**63 - 1], [0, 2**62], [3, -1]):
        model = _model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [3]}, {"w": np.ones(3, "float32")})
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(dims)
        yield f"constant of {dims}", model
