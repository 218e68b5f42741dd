"""The products of a model that may run in bfloat16, so that its outputs stay within a bound of those in float32.

Everything is measured here, on the same inputs: all products at once; where that is beyond the bound, parts of the
model, one at a time. Roundings are independent, so that errors add up by their squares: as many parts, those of the
smallest errors first, as the bound leaves room for. What is returned has been measured itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from tvm_ext._tvm import IRModule
from tvm_ext.options import BuildOptions
from tvm_ext.records.precision import KEPT
from tvm_ext.runtime.graph_module import GraphModule
from tvm_ext.runtime.library import Library, random_inputs
from tvm_ext.support.arrays import Array
from tvm_ext.support.roundoff import relative_error

PARTS = 8
"""Of a model whose error is beyond the bound: neighbours in program order, a build for each."""

BuildKept = Callable[[Collection[int] | None], Library]
"""A library whose products of these numbers stay float32; None: all of them."""


def within_bound(
    mod: IRModule, options: BuildOptions, again: Callable[..., Library], inputs: Mapping[str, Any] | None = None
) -> Library:
    """The library of ``mod`` whose outputs are off by at most ``options.precision_bound``, relative by norm.

    ``again(mod, options=...)`` builds one. ``inputs`` by name; left out: seeded random ones. The report says the error,
    and which products stayed float32.
    """

    def build(kept: Collection[int] | None) -> Library:
        own = options.updated(precision="float32") if kept is None else options
        return again(mod.with_attr(KEPT, list(kept or ())), options=own)

    bound = options.precision_bound or 0.0
    measure = _Measure(build, inputs)
    library = build(())
    narrowed = _narrowed(library)
    error = measure.error_of(library) if narrowed else 0.0
    if error <= bound:
        return _reported(library, error, bound)
    size = math.ceil(len(narrowed) / PARTS)
    parts = [narrowed[first : first + size] for first in range(0, len(narrowed), size)]
    errors = [measure.error_of(build(_others(narrowed, part))) for part in parts]
    order = sorted(range(len(parts)), key=errors.__getitem__)
    chosen: list[int] = []
    for place in order:
        if math.hypot(*(errors[own] for own in (*chosen, place))) <= bound:
            chosen.append(place)
    while True:
        library = build(_others(narrowed, [number for place in chosen for number in parts[place]]))
        error = measure.error_of(library) if chosen else 0.0
        if error <= bound:
            return _reported(library, error, bound)
        chosen.pop()  # the one with the largest error


class _Measure:
    """Errors against the float32 library, which is built and run once."""

    def __init__(self, build: BuildKept, inputs: Mapping[str, Any] | None) -> None:
        library = build(None)
        self.inputs = random_inputs(library.inputs) if inputs is None else inputs
        self.expected = self._outputs(library)

    def error_of(self, library: Library) -> float:
        """The largest error of an output; infinite where one is not finite and should be."""
        found = self._outputs(library)
        errors = (relative_error(own, right) for own, right in zip(found, self.expected, strict=True))
        return max(errors, default=0.0)

    def _outputs(self, library: Library) -> list[Array]:
        module = GraphModule(library)
        module.run(**self.inputs)
        return [module.get_output(place).numpy().copy() for place in range(module.get_num_outputs())]


def _narrowed(library: Library) -> list[int]:
    """The numbers of the products that run in bfloat16."""
    record = library.report.precision
    return [] if record is None else [n for n, product in enumerate(record.products) if product.is_rounded]


def _others(narrowed: Collection[int], part: Collection[int]) -> list[int]:
    return [number for number in narrowed if number not in part]


def _reported(library: Library, error: float, bound: float) -> Library:
    record = library.report.precision
    if record is not None:
        library.report = replace(library.report, precision=replace(record, error=error, bound=bound))
    return library
