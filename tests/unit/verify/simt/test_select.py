"""`Select` between registers: what nobody wrote travels through it, and is found where it matters."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script import tirx as T  # noqa: N812

from tvm_ext.verify import verify


def larger_of_neighbours(last: int) -> Any:
    """Each of 4 threads compares its value with the next one's; the fourth has no neighbour. ``last`` store theirs."""

    @T.prim_func(s_tir=True)
    def main(a: T.handle, b: T.handle) -> None:
        A = T.match_buffer(a, (4,), "float32")
        B = T.match_buffer(b, (4,), "float32")
        T.launch_thread("blockIdx.x", 1)
        tx = T.launch_thread("threadIdx.x", 4)
        mine = T.alloc_buffer((1,), "float32", scope="local")
        other = T.alloc_buffer((1,), "float32", scope="local")
        mine[0] = A[tx]
        if tx < 3:
            other[0] = A[tx + 1]
        mine[0] = T.Select(mine[0] > other[0], mine[0], other[0])
        if tx < last:
            B[tx] = mine[0]
        else:
            B[tx] = T.float32(0)

    return main


@pytest.mark.parametrize("last", [3, 4])
def test_uninitialised_values_travel_through_select(last: int) -> None:
    result = verify(larger_of_neighbours(last), "nvidia-a100")
    assert [finding.kind for finding in result.findings] == ([] if last == 3 else ["uninitialised read"])
