"""How much work a stage of a build may take before it gives up on an operator, and why each limit is where it is.

A build that never ends is worse than a slow kernel. So every stage counts what it is about to do (loads, stages,
candidates, elements: the same number on every machine), and where that passes its limit the operator goes the next
simpler way, which its entry in the report names.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one build; the defaults are meant for everyone, other values for tests.

    Folding constants (`relay_passes/fold_calls.py`); what is not folded is computed by each run:

    folded_elements
        A result may have as many elements as this or as its operands together. Weights that are transposed or cast
        pass; a scalar that is expanded to a mask of 100 MB stays what it is until it is used.
    folded_filling
        The same for a result all of whose operands have one element: storing it whole is a waste from the start.
    folded_points
        Points of a stage that NumPy evaluates one by one, about 10 ns each for each operation: a second or two.
    folded_products
        Multiplications of a product of constants that BLAS computes, about 0.1 ns each: two matrices of 4000^2.
    folded_calls_of_python
        Elements of functions that NumPy lacks (erf), about 0.2 us each.
    """

    folded_elements: int = 1 << 18
    folded_filling: int = 1024
    folded_points: int = 1 << 25
    folded_products: int = 1 << 36
    folded_calls_of_python: int = 1 << 20


_current: contextvars.ContextVar[Limits] = contextvars.ContextVar("tvm_ext.limits", default=Limits())  # noqa: B039 - frozen


def limits() -> Limits:
    """The limits that hold now."""
    return _current.get()


@contextlib.contextmanager
def limited(**values: float) -> Iterator[Limits]:
    """Other limits inside the ``with``, in this thread: for tests of what happens at a limit."""
    token = _current.set(replace(_current.get(), **values))  # type: ignore[arg-type]
    try:
        yield _current.get()
    finally:
        _current.reset(token)
