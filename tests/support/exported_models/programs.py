"""Imports one network's program of torch.export, builds it for this CPU and compares it with torch's own run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm

from tvm_ext import relay
from tvm_ext.bench.compare import relative_error
from tvm_ext.records.serialise import to_json
from tvm_ext.support.files import write_atomically

from .check import compare
from .export import INPUT_SETS
from .networks import draw_inputs, make
from .record import CPU, LEAST_VARIATION, PROGRAM, ExportResult

Array = npt.NDArray[Any]


def check(network: str, seed: int) -> ExportResult:
    """Raises what importing, building and running raise: the caller's process says so."""
    import torch

    module = make(network, seed)
    sets = [tuple(draw_inputs(network, seed + index).values()) for index in range(INPUT_SETS)]
    with torch.no_grad():
        wanted = [_arrays(module(*values)) for values in sets]
    start = time.perf_counter()
    mod, params = relay.frontend.from_torch(torch.export.export(module, sets[0]))
    imported = time.perf_counter()
    library = relay.build(mod, CPU, params=params)
    built = time.perf_counter()
    got = [run_program(library, mod, values) for values in sets]
    variation = relative_error(*wanted)
    problem = next((found for mine, theirs in zip(got, wanted, strict=True) if (found := compare(mine, theirs))), "")
    if variation < LEAST_VARIATION:
        problem = problem or f"the outputs for two inputs differ by {variation:.1e} alone: they compare little"
    return ExportResult(
        network=network, exporter=PROGRAM, device=CPU, outcome="wrong" if problem else "passed", problem=problem,
        error=max(relative_error(mine, theirs) for mine, theirs in zip(got, wanted, strict=True)), variation=variation,
        import_s=imported - start, build_s=built - imported, paths=tuple(sorted(library.report.path_counts().items())),
    )  # fmt: skip


def run_program(library: relay.Library, mod: tvm.IRModule, values: Sequence[Any]) -> list[Array]:
    """The outputs for torch tensors, in the order of the module's inputs."""
    module = relay.GraphModule(library["default"](tvm.cpu()))
    for parameter, value in zip(mod["main"].params, values, strict=False):
        module.set_input(parameter.name, np.ascontiguousarray(value.detach().numpy()))
    module.run()
    return [module.get_output(index).numpy() for index in range(module.get_num_outputs())]


def _arrays(answer: Any) -> list[Array]:
    import torch

    return [item.detach().numpy() for item in torch.utils._pytree.tree_leaves(answer)]


if __name__ == "__main__":
    write_atomically(sys.argv[3], to_json(check(sys.argv[1], int(sys.argv[2]))).encode())
