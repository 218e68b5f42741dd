"""What the model of fused epilogues counts: launches, bytes and the arithmetic that is no longer hidden."""

from __future__ import annotations

import pytest

from tvm_ext.cost.epilogue_traffic import EpilogueStage, best_prefix, instructions_of
from tvm_ext.devices.device_db import lookup

A100 = lookup("nvidia-a100")
ELEMENTS = 3136 * 64
PRODUCT = EpilogueStage(value_bytes=2 * ELEMENTS)


def stage(name: str, *, itemsize: int = 2, operand_bytes: float = 0.0, elements: int = ELEMENTS) -> EpilogueStage:
    instructions = elements * instructions_of(name, A100)
    return EpilogueStage(value_bytes=itemsize * elements, read_bytes=operand_bytes, instructions=instructions)


def test_the_worked_example() -> None:
    traffic_us, arithmetic_us = 2 * 2 * ELEMENTS / 5375e3, 2 * 2 * ELEMENTS / 19500e3
    best, saved_us = best_prefix([PRODUCT, stage("add"), stage("relu")], A100, absorbed=False)
    assert best == 2
    assert saved_us == pytest.approx(2.0 + traffic_us - arithmetic_us)


def test_a_product_alone_saves_nothing() -> None:
    assert best_prefix([PRODUCT], A100, absorbed=False) == (0, 0.0)


@pytest.mark.parametrize("name", ["relu", "gelu", "softplus"])
def test_steps_of_their_own_kernel_are_fused(name: str) -> None:
    assert best_prefix([PRODUCT, stage(name)], A100, absorbed=False)[0] == 1


def test_what_the_reader_computes_as_it_reads_is_left_to_it() -> None:
    assert best_prefix([PRODUCT, stage("divide")], A100, absorbed=True) == (0, 0.0)


def test_a_cast_to_a_wider_type_would_be_written_in_full() -> None:
    wide = [PRODUCT, stage("relu"), stage("cast", itemsize=4)]
    assert best_prefix(wide, A100, absorbed=True)[0] < 2
    assert best_prefix(wide, A100, absorbed=False)[0] == 2


def test_a_reduction_before_the_reader_is_fused_for_what_is_not_written() -> None:
    elements = 4096 * 4096
    total = EpilogueStage(value_bytes=4 * 4096, read_bytes=64 * 4 * 4096, instructions=elements)
    best, saved_us = best_prefix([EpilogueStage(value_bytes=4.0 * elements), total], A100, absorbed=True)
    assert best == 1
    assert saved_us > 2 * 4e6 * elements / 1555e9 * 0.9


def test_bytes_beyond_the_cache_cost_those_of_memory() -> None:
    small, large = (
        best_prefix([stage("", elements=n), stage("relu", elements=n)], A100, absorbed=False)[1] - 2.0
        for n in (2**20, 2**26)
    )
    assert large / small > 2.5 * 2**6
