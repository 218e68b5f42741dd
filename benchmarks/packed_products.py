"""Products by weights of four bits (MatMulNBits): this plugin beside ONNX Runtime and its own float32, interleaved.

    python benchmarks/packed_products.py
    python benchmarks/packed_products.py --rows 1 --rows 32 --rounds 20 --level 4

Both run each in floats, and with `accuracy_level=4`, which rounds the left operand
to 8 bits. Writes ``benchmarks/results/<date>-packed-products.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import typer
from _common import current_environment, result_path, show, write_results
from onnx import TensorProto, helper, numpy_helper

from tvm_ext.bench.compare import BenchResult, bench, result_table
from tvm_ext.bench.contenders import ONNX_RUNTIME, Contender, prepare_ours
from tvm_ext.bench.environment import Placement
from tvm_ext.support.arrays import Array

SIZES = ((4096, 4096), (2048, 5632), (4096, 11008))
"""Depth and columns: layers of language models of 7 and 1 billion weights."""

FLOATS = "our float32"


def packed(rows: int, depth: int, columns: int, block: int, level: int) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (columns, depth // block, block // 2)).astype(np.uint8)
    scales = random.uniform(0.01, 0.02, columns * (depth // block)).astype(np.float32)
    sizes: dict[str, Any] = {"K": depth, "N": columns, "bits": 4, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", "codes", "scales"], ["y"], domain="com.microsoft", **sizes)
    return _model(node, rows, depth, columns, {"codes": codes, "scales": scales})


def floats(rows: int, depth: int, columns: int) -> onnx.ModelProto:
    weights = np.random.default_rng(0).standard_normal((depth, columns), np.float32)
    return _model(helper.make_node("MatMul", ["x", "w"], ["y"]), rows, depth, columns, {"w": weights})


def _model(node: onnx.NodeProto, rows: int, depth: int, columns: int, values: Mapping[str, Array]) -> onnx.ModelProto:
    shapes = {"x": (rows, depth), "y": (rows, columns)}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    constants = [numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = helper.make_graph([node], f"{rows}x{depth}x{columns}", [x], [y], constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _ours(model: onnx.ModelProto, inputs: Mapping[str, Array], _threads: int, _place: Placement | None) -> Contender:
    return replace(prepare_ours(model, inputs, None, "llvm", None), name=FLOATS)


def main(
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows of the left operand; 1, 4, 8, 32 and 128.")
    ] = None,
    block: Annotated[list[int] | None, typer.Option(help="Weights that share a scale; 32.")] = None,
    level: Annotated[list[int] | None, typer.Option(help="Accuracy levels; 0 and 4.")] = None,
    columns: Annotated[list[int] | None, typer.Option(help="Only sizes of so many columns.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 10,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time products and write the results."""
    environment = current_environment()
    path = result_path("packed-products", environment, output)
    results: list[BenchResult] = []
    records: list[dict[str, Any]] = []
    sizes = [size for size in SIZES if not columns or size[1] in columns]
    for count, own, asked, (depth, width) in product(rows or [1, 4, 8, 32, 128], block or [32], level or [0, 4], sizes):
        others = [partial(_ours, floats(count, depth, width))]
        result = bench(packed(count, depth, width, own, asked), peers=[ONNX_RUNTIME], others=others, rounds=rounds)
        results.append(result)
        speedup = {item.name: result.speedup(item.name) for item in result.timings[1:]}
        records.append({**asdict(result), "block": own, "accuracy_level": asked, "speedup": speedup})
        write_results(path, "packed-products", environment, records)
    show(result_table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
