"""Builds one exported network and compares it with ONNX Runtime; for a GPU, builds it as far as its source code."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import tvm

from tvm_ext import relay
from tvm_ext.bench import contenders
from tvm_ext.bench.compare import relative_error
from tvm_ext.records.serialise import to_json
from tvm_ext.runtime.library import Library
from tvm_ext.support.files import write_atomically

from .export import INPUT_SETS, inputs_file
from .record import CPU, LEAST_VARIATION, TOLERANCE, ExportResult

Array = npt.NDArray[Any]
THREADS = 2
SHAKE = 2.0**-22


def check(network: str, exporter: str, device: str, path: Path) -> ExportResult:
    """Raises what importing, building and running raise: the caller's process says so."""
    model = onnx.load(str(path))
    start = time.perf_counter()
    module, params = relay.frontend.from_onnx(model)
    imported = time.perf_counter()
    library = relay.build(module, device, params=params)
    built = time.perf_counter()
    problem, error, variation = _values(library, model, path) if device == CPU else (_source(library), None, None)
    return ExportResult(
        network=network, exporter=exporter, device=device, outcome="wrong" if problem else "passed", problem=problem,
        error=error, variation=variation, import_s=imported - start, build_s=built - imported,
        paths=tuple(sorted(library.report.path_counts().items())),
    )  # fmt: skip


def _source(library: Library) -> str:
    """ "" where the build came as far as the kernels' source code."""
    return "" if library.source().strip() else "there is no source code"


def _values(library: Library, model: onnx.ModelProto, path: Path) -> tuple[str, float, float]:
    """(what is wrong with the outputs or "", their largest error, how much they differ between the inputs)."""
    module = relay.GraphModule(library["default"](tvm.cpu()))
    problem, errors, references = "", [], []
    for index in range(INPUT_SETS):
        with np.load(inputs_file(path, index)) as stored:
            values = dict(stored)
        wanted = _reference(model, values)
        problem = problem or _conditioning(wanted, _reference(model, _shaken(values)))
        got = _run(module, values)
        problem = problem or compare(got, wanted)
        errors.append(relative_error(got, wanted) if len(got) == len(wanted) else float("inf"))
        references.append(wanted)
    variation = relative_error(*references)
    if variation < LEAST_VARIATION:
        problem = problem or f"the outputs for two inputs differ by {variation:.1e} alone: they compare little"
    return problem, max(errors), variation


def _shaken(values: Mapping[str, Array]) -> dict[str, Array]:
    """Single-precision floats moved by up to two units in the last place."""
    generator = np.random.default_rng(0)
    return {
        name: value * (1 + generator.uniform(-SHAKE, SHAKE, value.shape)).astype(value.dtype)
        if value.dtype.kind == "f"
        else value
        for name, value in values.items()
    }


def _conditioning(wanted: Sequence[Array], shaken: Sequence[Array]) -> str:
    """Why these outputs would compare rounding errors, or ""."""
    difference = relative_error(shaken, wanted)
    return f"rounding the inputs makes a difference of {difference:.1e}" if difference > TOLERANCE / 4 else ""


def _reference(model: onnx.ModelProto, values: Mapping[str, Array]) -> list[Array]:
    wanted = [item.name for item in model.graph.input]
    peer = contenders.prepare_onnx_runtime(model, {name: values[name] for name in wanted}, threads=THREADS)
    peer.run()
    return peer.outputs()


def _run(module: Any, values: Mapping[str, Array]) -> list[Array]:
    for name, value in values.items():
        module.set_input(name, value)
    module.run()
    return [module.get_output(index).numpy() for index in range(module.get_num_outputs())]


def compare(got: Sequence[Array], wanted: Sequence[Array]) -> str:
    """What is wrong with the outputs, or "". Floats may err by `TOLERANCE` by norm, integers not at all."""
    if len(got) != len(wanted):
        return f"{len(got)} outputs instead of {len(wanted)}"
    for index, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"output {index} is {mine.dtype} {mine.shape} instead of {theirs.dtype} {theirs.shape}"
        if not np.isfinite(theirs).all():
            return f"output {index} of ONNX Runtime is not finite: it compares nothing"
        error = relative_error([mine], [theirs])
        if error > (TOLERANCE if theirs.dtype.kind == "f" else 0.0):
            return f"output {index} errs by {error:.2e}"
    return ""


if __name__ == "__main__":
    result = check(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    write_atomically(sys.argv[5], to_json(result).encode())
