"""Rammer's networks, made small, and random cells: built, run and compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.networks import convolutional, models, nasnet, random_cells, recurrent
from benchmarks.networks.random_cells import CELLS, MOST_EDGES, MOST_VERTICES, OPERATIONS, random_cell
from benchmarks.networks.recurrent import Stack
from tvm_ext.errors import InputError

TRIED = 500  # of the random cells

TOLERANCE = 1e-4

SMALL_SEQ2SEQ: dict[str, Any] = {
    "batch": 2,
    "seed": 0,
    "encoder": Stack(steps=5, layers=3, hidden=8),
    "decoder": Stack(steps=4, layers=2, hidden=8),
}
SMALL: dict[str, Callable[[], onnx.ModelProto]] = {
    "lstm_tc": lambda: recurrent.build_lstm_tc(batch=2, seed=0, stack=Stack(steps=6, layers=3, hidden=16)),
    "seq2seq_nmt": lambda: recurrent.build_seq2seq(**SMALL_SEQ2SEQ, words=16),
    "seq2seq_artifact": lambda: recurrent.build_seq2seq(**SMALL_SEQ2SEQ, words=None),
    "deepspeech2": lambda: recurrent.build_deepspeech2(
        batch=1, seed=0, frames=12, stack=Stack(steps=6, layers=2, hidden=8)
    ),
    "resnext29": lambda: convolutional.build_resnext29(batch=1, seed=0, width=2, extent=8),
    "nasnet": lambda: nasnet.build_nasnet(batch=1, seed=0, cells=1, filters=4, extent=8),
}
SLOW = ("nasnet", "resnext29")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SMALL])
def test_small_networks_agree_with_onnx_runtime(name: str, compiled: Any, reference: Any) -> None:
    model = SMALL[name]()
    onnx.checker.check_model(model)
    inputs = models.random_inputs(model, 1)
    assert _relative_error(compiled(model)(inputs), reference(model, inputs)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("index", range(0, TRIED, 25))
def test_random_cells_agree_with_onnx_runtime(index: int, compiled: Any, reference: Any) -> None:
    model = random_cells.build_random_cell(index, channels=12, extent=6)
    inputs = models.random_inputs(model, 1)
    assert _relative_error(compiled(model)(inputs), reference(model, inputs)) < TOLERANCE


def _relative_error(actual: list[Any], expected: list[Any]) -> float:
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(actual, expected, strict=True))


def test_every_random_cell_is_a_cell() -> None:
    """Each vertex lies on a way from the input to the output; most of the cells differ."""
    cells = [random_cell(index) for index in range(TRIED)]
    for cell in cells:
        assert 3 <= len(cell.operations) <= MOST_VERTICES - 2 and set(cell.operations) <= set(OPERATIONS)
        assert len(cell.edges) <= MOST_EDGES and all(0 <= a < b <= cell.output for a, b in cell.edges)
        assert all(cell.sources(vertex) for vertex in range(1, cell.output + 1))
        assert all(cell.readers(vertex) for vertex in range(cell.output))
    assert len(set(cells)) > 0.8 * TRIED
    assert cells[7] == random_cell(7)


def test_random_cells_are_valid_models() -> None:
    for index in range(0, TRIED, 9):
        model = models.build_model(f"nasbench_{index}")
        onnx.checker.check_model(model, full_check=True)
        shape = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
        assert shape == [1, random_cells.CHANNELS, random_cells.EXTENT, random_cells.EXTENT]


def test_nasnet_for_imagenet_ends_with_1056_filters() -> None:
    model = onnx.shape_inference.infer_shapes(models.build_model("nasnet_imagenet"))
    shapes = {item.name: [dim.dim_value for dim in item.type.tensor_type.shape.dim] for item in model.graph.value_info}
    pooled = next(node.input[0] for node in model.graph.node if node.op_type == "GlobalAveragePool")
    assert shapes[pooled] == [1, 1056, 7, 7]
    weights = sum(int(np.prod(item.dims)) for item in model.graph.initializer)
    assert 5.2e6 < weights < 5.4e6  # 5.3 million, as published


def test_what_is_no_cell() -> None:
    assert models.is_name("nasbench_4999") and models.is_name("lstm_tc")
    assert not any(models.is_name(name) for name in ("nasbench_5000", "nasbench_-1", "nasbench_", "nasbench_07"))
    with pytest.raises(InputError, match="the cells are 0 to 4999"):
        random_cell(CELLS)
