"""What the SIMT interpreter counts in the first threadblocks of a kernel, however large its tensors are.

The kernel is that of the full shape, the one which is compiled. Its first blocks touch the first images or rows only,
so that the interpreter is given so many of them: addresses are the same, and whatever lies beyond would be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from cases import Case

from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.devices.gpu import SECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.verify import simt
from tvm_ext.verify.verification import random_array

COUNTED_BLOCKS = (0, 1)
PART_ELEMENTS = (2_000_000, 8_000_000, 32_000_000, 96_000_000)
"""Elements of the largest tensor that the interpreter is given, more where a block reaches beyond: it keeps the state
of each."""

RANDOM_ELEMENTS = 65_536
"""Random values, repeated: counts do not depend on them."""


def is_aligned(case: Case) -> bool:
    """Whether the rows of every input are whole sectors, so that no tile need load a sector for a part of it.

    A row is a run along the last dimension; of weights [f, c, r, s] all that belongs to a filter. 56 floats are 7
    sectors; of 83 every second row and more starts within a sector that the row before ends in.
    """
    return all(_row_bytes(case, position) % SECTOR_BYTES == 0 for position in range(len(case.inputs)))


def _row_bytes(case: Case, position: int) -> int:
    tensor = case.inputs[position]
    weights = position == 1 and len(tensor.shape) == 4 and case.attributes.get("layout") != "NHWC"
    row = tensor.shape[1:] if weights else tensor.shape[-1:]
    return int(prod(row) * itemsize_bytes(tensor.dtype))


def count_blocks(case: Case, kernel: Any, device: DeviceSpec) -> Any:
    """The run of the first launch's first blocks on random inputs, see `run_blocks`."""
    return run_blocks(case, kernel, device)[0]


def run_blocks(case: Case, kernel: Any, device: DeviceSpec) -> tuple[Any, dict[str, Any], int]:
    """(the run of the first launch's first blocks on random inputs, these inputs, launches).

    Of several launches the first alone: the later ones read what all blocks of the first have written.
    """
    launches = simt.lower(kernel.with_attr("global_symbol", "main"), device.name)
    launch = launches[0]
    plans = from_json(KernelChoice, str(kernel.attrs[CHOICE])).gpu
    blocks = [b for b in COUNTED_BLOCKS if b < max((plan.blocks for plan in plans), default=1)]
    result, arrays = None, {}
    for elements in PART_ELEMENTS:
        rows = _rows_of(launch.tensors, case, elements)
        part = replace(launch, tensors=tuple(_part(tensor, case, rows) for tensor in launch.tensors))
        arrays = _arrays(case, part.tensors)
        result = simt.run([part], arrays, device=device.name, blocks=blocks)
        whole = all(a.shape == b.shape for a, b in zip(part.tensors, launch.tensors, strict=True))
        if whole or all(finding.kind != "out of bounds" for finding in result.findings):
            break
    return result, arrays, len(launches)


def _rows_of(tensors: Sequence[Any], case: Case, elements: int) -> int:
    """Rows of the output, and of what has as many, such that the largest tensor holds so many elements."""
    row = max(prod(tensor.shape[1:]) for tensor in tensors if tensor.shape[0] == case.output.shape[0])
    return max(1, ceil_div(elements, row))


def _part(tensor: Any, case: Case, rows: int) -> Any:
    """The first rows of a large tensor that has as many as the output: weights may have so many filters by chance."""
    if tensor.shape[0] != case.output.shape[0] or prod(tensor.shape) <= PART_ELEMENTS[0]:
        return tensor
    return replace(tensor, shape=(min(tensor.shape[0], rows), *tensor.shape[1:]))


def _arrays(case: Case, tensors: Sequence[Any]) -> dict[str, Any]:
    generator = np.random.default_rng(case.seed)
    names = {item.name for item in case.inputs}
    return {
        tensor.name: np.resize(random_array((RANDOM_ELEMENTS,), tensor.dtype, generator), tensor.shape)
        for tensor in tensors
        if tensor.name in names
    }
