"""A padded graph gives the values of the graph without padding, bit for bit, whatever lies between its products."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.inline_composites import InlineComposites
from tests.support.padding_graphs import padding_graph
from tests.support.quick_target import UNOPTIMISED
from tvm_ext._tvm import IRModule
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.padding import PADDING, PaddingRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.padding.pad_alignment import PadAlignment
from tvm_ext.relay_passes.partition_cutlass import PartitionCutlass

A100 = lookup("nvidia-a100")


def outputs(mod: IRModule, data: np.ndarray) -> list[np.ndarray]:
    machine = relax.VirtualMachine(tvm.compile(mod, target=UNOPTIMISED), tvm.cpu())
    return [item.numpy() for item in machine["main"](tvm.runtime.tensor(data))]


def forms(mod: IRModule) -> Iterator[IRModule]:
    """By the model; and padded throughout, through CUTLASS's partitions and back."""
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        yield PadAlignment(A100)(mod)
        yield InlineComposites()(PartitionCutlass(A100)(PadAlignment(A100, always=True)(mod)))


def check(seed: int) -> int:
    """How many products were padded."""
    mod, data = padding_graph(seed)
    wanted = outputs(mod, data)
    made = list(forms(mod))
    for form in made:
        relax.analysis.well_formed(form)
        for expected, got in zip(wanted, outputs(form, data), strict=True):
            np.testing.assert_array_equal(got, expected)
    record = from_json(PaddingRecord, str(made[1].attrs[PADDING]))
    return sum(item.padded for item in record.products)


def test_values_stay() -> None:
    assert sum(check(seed) for seed in (1, 7)) > 6


@pytest.mark.slow
def test_values_of_many_graphs_stay() -> None:
    assert sum(check(seed) for seed in range(8, 28)) > 40
