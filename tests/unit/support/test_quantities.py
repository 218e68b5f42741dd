"""One equation for a number and for thousands of them: the same bits either way."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tvm_ext.support.quantities import most_that

LIMITS = st.lists(st.tuples(st.integers(1, 400), st.floats(0, 500)), min_size=1, max_size=20)


@given(LIMITS)
def test_halving_finds_the_same_for_a_number_and_an_array(limits: list[tuple[int, float]]) -> None:
    """What holds up to a limit, holds up to the largest number below both limits; 1 is taken to in any case."""
    behind, most = (np.array(column) for column in zip(*limits, strict=True))
    together = most_that(lambda count: count <= most, behind)
    alone = [most_that(lambda count, limit=limit: count <= limit, end) for end, limit in limits]
    assert (
        np.broadcast_to(together, behind.shape).tolist()
        == alone
        == [max(1, min(end - 1, int(limit))) for end, limit in limits]
    )
