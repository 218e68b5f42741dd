"""Models of one node, and those whose reads or order depend on values: gather, scatter, sort, scan, resize, boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnx.helper import (
    make_graph,
    make_model,
    make_node,
    make_opsetid,
    make_tensor_value_info,
    np_dtype_to_tensor_dtype,
)
from onnx.numpy_helper import from_array

from tvm_ext.support.arrays import Array


@dataclass(frozen=True, kw_only=True)
class DrawnOperator:
    """One operator: its operands, those of them that are constants by number, how many results it has."""

    operator: str
    operands: Sequence[Array]
    constants: Sequence[int] = ()
    results: int = 1
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        known = [number in self.constants and item.size <= 4 for number, item in enumerate(self.operands)]
        shapes = [item.tolist() if said else list(item.shape) for said, item in zip(known, self.operands, strict=True)]
        given = [f"{name}={value}" for name, value in self.attributes.items()]
        return " ".join([*map(str, shapes), *given])

    def model(self) -> tuple[onnx.ModelProto, dict[str, Array]]:
        """The model, and values of its inputs."""
        values = {f"x{number}": item for number, item in enumerate(self.operands)}
        fixed = {f"x{number}" for number in self.constants}
        outputs = [f"y{number}" for number in range(self.results)]
        graph = make_graph(
            [make_node(self.operator, list(values), outputs, **self.attributes)],
            self.operator,
            [
                make_tensor_value_info(name, np_dtype_to_tensor_dtype(item.dtype), item.shape)
                for name, item in values.items()
                if name not in fixed
            ],
            [make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
            [from_array(item, name) for name, item in values.items() if name in fixed],
        )
        model = make_model(graph, opset_imports=[make_opsetid("", 20)], ir_version=10)
        inferred = onnx.shape_inference.infer_shapes(model)
        return inferred, {name: item for name, item in values.items() if name not in fixed}


def _floats(draw: np.random.Generator, *shape: int) -> Array:
    return draw.standard_normal(shape).astype("float32")


def _size(draw: np.random.Generator, least: int, most: int) -> int:
    """Drawn evenly by its logarithm."""
    return round(float(np.exp(draw.uniform(np.log(least), np.log(most)))))


def _image(draw: np.random.Generator) -> Array:
    side = _size(draw, 8, 64)
    return _floats(draw, 1, _size(draw, 3, 256), side, side)


def _resize(draw: np.random.Generator) -> DrawnOperator:
    x, factor = _image(draw), float(draw.choice([0.5, 1.5, 2.0, 2.0, 4.0]))
    mode = str(draw.choice(["nearest", "linear", "linear", "cubic"]))
    way = str(draw.choice(["half_pixel", "align_corners", "asymmetric"]))
    sizes = np.array([*x.shape[:2], *(int(side * factor) for side in x.shape[2:])], np.int64)
    nothing = np.zeros(0, np.float32)
    attributes = {"mode": mode, "coordinate_transformation_mode": way}
    return DrawnOperator(
        operator="Resize", operands=(x, nothing, nothing, sizes), constants=(1, 2, 3), attributes=attributes
    )


def _grid_sample(draw: np.random.Generator) -> DrawnOperator:
    x, side = _image(draw), _size(draw, 8, 64)
    grid = draw.uniform(-1.1, 1.1, (1, side, side, 2)).astype("float32")
    return DrawnOperator(operator="GridSample", operands=(x, grid))


def _roi_align(draw: np.random.Generator) -> DrawnOperator:
    x, count = _image(draw), _size(draw, 4, 200)
    corners = draw.uniform(0, x.shape[2], (count, 4))
    corners[:, 2:] = np.minimum(corners[:, :2] + corners[:, 2:] / 2 + 1, x.shape[2])
    side = int(draw.choice([7, 14]))
    return DrawnOperator(
        operator="RoiAlign",
        operands=(x, corners.astype("float32"), np.zeros(count, np.int64)),
        attributes={"output_height": side, "output_width": side, "sampling_ratio": 2},
    )


def _rows(draw: np.random.Generator) -> Array:
    length = _size(draw, 16, 50_000)
    return _floats(draw, _size(draw, 1, max(1, 400_000 // length)), length)


def _top_k(draw: np.random.Generator) -> DrawnOperator:
    x = _rows(draw)
    k = np.array([min(x.shape[1], _size(draw, 1, 1000))], np.int64)
    return DrawnOperator(operator="TopK", operands=(x, k), constants=(1,), results=2)


def _cum_sum(draw: np.random.Generator) -> DrawnOperator:
    x = _rows(draw)
    axis = int(draw.integers(0, 2))
    return DrawnOperator(operator="CumSum", operands=(x, np.array(axis, np.int64)), constants=(1,))


def _gather_elements(draw: np.random.Generator) -> DrawnOperator:
    x, axis = _rows(draw), int(draw.integers(0, 2))
    shape = [*x.shape]
    shape[axis] = _size(draw, 1, shape[axis])
    places = draw.integers(0, x.shape[axis], shape)
    return DrawnOperator(operator="GatherElements", operands=(x, places), attributes={"axis": axis})


def _gather(draw: np.random.Generator) -> DrawnOperator:
    x = _rows(draw)
    axis = int(draw.integers(0, 2))
    places = draw.integers(0, x.shape[axis], _size(draw, 1, 400))
    return DrawnOperator(operator="Gather", operands=(x, places), attributes={"axis": axis})


def _gather_nd(draw: np.random.Generator) -> DrawnOperator:
    x, count = _floats(draw, _size(draw, 4, 64), _size(draw, 4, 64), _size(draw, 1, 256)), _size(draw, 8, 4096)
    places = np.stack([draw.integers(0, extent, count) for extent in x.shape[:2]], axis=1)
    return DrawnOperator(operator="GatherND", operands=(x, places))


def _scatter_elements(draw: np.random.Generator) -> DrawnOperator:
    x, axis = _rows(draw), int(draw.integers(0, 2))
    shape = [*x.shape]
    shape[axis] = _size(draw, 1, shape[axis])
    places = draw.integers(0, x.shape[axis], shape)
    return DrawnOperator(
        operator="ScatterElements", operands=(x, places, _floats(draw, *shape)),
        attributes={"axis": axis, "reduction": str(draw.choice(["add", "max"]))},
    )  # fmt: skip


def _scatter_nd(draw: np.random.Generator) -> DrawnOperator:
    x, count = _floats(draw, _size(draw, 16, 4096), _size(draw, 1, 128)), _size(draw, 8, 4096)
    places = draw.integers(0, x.shape[0], (count, 1))
    return DrawnOperator(
        operator="ScatterND", operands=(x, places, _floats(draw, count, x.shape[1])), attributes={"reduction": "add"}
    )


def _suppression(draw: np.random.Generator) -> DrawnOperator:
    boxes, classes = _size(draw, 50, 4000), int(draw.choice([1, 1, 5, 20]))
    centres = draw.uniform(0, 500, (1, boxes, 2))
    sides = draw.uniform(10, 120, (1, boxes, 2))
    corners = np.concatenate([centres - sides / 2, centres + sides / 2], axis=2).astype("float32")
    scores = draw.uniform(0, 1, (1, classes, boxes)).astype("float32")
    limits = (np.array([100], np.int64), np.array([0.5], np.float32), np.array([0.3], np.float32))
    return DrawnOperator(operator="NonMaxSuppression", operands=(corners, scores, *limits), constants=(2, 3, 4))


def _non_zero(draw: np.random.Generator) -> DrawnOperator:
    x = _rows(draw)
    return DrawnOperator(operator="NonZero", operands=(np.where(draw.random(x.shape) < 0.3, x, np.float32(0)),))


def _unique(draw: np.random.Generator) -> DrawnOperator:
    x = draw.integers(0, _size(draw, 4, 10_000), _size(draw, 16, 100_000))
    return DrawnOperator(operator="Unique", operands=(x,), results=4)


def _arg_max(draw: np.random.Generator) -> DrawnOperator:
    x = _rows(draw)
    return DrawnOperator(operator="ArgMax", operands=(x,), attributes={"axis": int(draw.integers(0, 2))})


def _one_hot(draw: np.random.Generator) -> DrawnOperator:
    depth = _size(draw, 4, 2000)
    places = draw.integers(0, depth, _size(draw, 8, 400_000 // depth))
    return DrawnOperator(
        operator="OneHot", operands=(places, np.array(depth), np.array([0, 1], np.float32)), constants=(1, 2)
    )


Draw = Callable[[np.random.Generator], DrawnOperator]

IRREGULAR: dict[str, Draw] = {
    "Resize": _resize, "GridSample": _grid_sample, "RoiAlign": _roi_align, "TopK": _top_k, "CumSum": _cum_sum,
    "GatherElements": _gather_elements, "Gather": _gather, "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements, "ScatterND": _scatter_nd, "NonMaxSuppression": _suppression,
    "NonZero": _non_zero, "Unique": _unique, "ArgMax": _arg_max, "OneHot": _one_hot,
}  # fmt: skip
