"""What a library with open dimensions says of itself: its variants, its report, and which variants run a size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tvm_ext.errors import InputError
from tvm_ext.records.batching import OpenDimension, cheapest
from tvm_ext.reports.report import BuildReport
from tvm_ext.reports.text import format_time

from .graph_module import Dimension, TensorSpec
from .library import Signature


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One variant of a library: the name of its function, a size for each open dimension, and what a build says."""

    name: str
    sizes: tuple[int, ...]
    signature: Signature

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a run, as far as its operators have predictions."""
        return sum(operator.total_s or 0.0 for operator in self.signature.report.operators)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSignature:
    """What travels inside an exported library with open dimensions beside the code."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: tuple[OpenDimension, ...]
    variants: tuple[Variant, ...]

    @classmethod
    def of(cls, dimensions: Sequence[OpenDimension], variants: Sequence[Variant]) -> OpenSignature:
        """Of ``variants``, whose inputs and outputs differ in the extents of ``dimensions`` alone."""
        inputs, outputs = (
            tuple(_open_spec(specs, dimensions, variants) for specs in zip(*every, strict=True))
            for every in ([own.signature.inputs for own in variants], [own.signature.outputs for own in variants])
        )
        return cls(inputs=inputs, outputs=outputs, dimensions=tuple(dimensions), variants=tuple(variants))


def _open_spec(
    specs: Sequence[TensorSpec], dimensions: Sequence[OpenDimension], variants: Sequence[Variant]
) -> TensorSpec:
    """One tensor's spec of those that variants have, with ``batch`` or ``2*batch`` where its extent differs."""
    if any(spec.shape is None for spec in specs):
        return specs[0]
    extents = zip(*(spec.shape or () for spec in specs), strict=True)
    return replace(specs[0], shape=tuple(_open_extent(own, dimensions, variants) for own in extents))


def _open_extent(
    extents: Sequence[Dimension], dimensions: Sequence[OpenDimension], variants: Sequence[Variant]
) -> Dimension:
    if len(set(extents)) == 1:
        return extents[0]
    for place, dimension in enumerate(dimensions):
        sizes = [own.sizes[place] for own in variants]
        factor = int(extents[0]) // sizes[0]
        if all(extent == factor * size for extent, size in zip(extents, sizes, strict=True)):
            return dimension.name if factor == 1 else f"{factor}*{dimension.name}"
    return "?"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenReport:
    """The open dimensions, the variants with the report of each one's build, and which a size runs."""

    dimensions: tuple[OpenDimension, ...]
    variants: tuple[Variant, ...]

    def of(self, *sizes: int) -> BuildReport:
        """The build report of the variant for ``sizes``; raises InputError where there is none."""
        return variant_of(self.variants, self.dimensions, sizes).signature.report

    def to_json(self) -> str:
        """As `Library.export_library` keeps it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def save(self, path: str | Path) -> None:
        """Write the reports of all variants atomically, as JSON."""
        from tvm_ext.support.files import write_atomically

        write_atomically(path, (self.to_json() + "\n").encode())

    def __str__(self) -> str:
        own = self.variants[0].signature.report
        lines = [f"{own.model} for {own.device}: {len(self.variants)} variants in one library"]
        for place, dimension in enumerate(self.dimensions):
            sizes = ", ".join(map(str, dimension.sizes))
            if dimension.axes is None:
                lines.append(f"{dimension.name}: {sizes}; no other size: {dimension.reason}")
            else:
                ways = ", ".join(self._divided(place))
                lines.append(f"{dimension.name}: {sizes}; up to {dimension.largest} divided or padded: {ways}")
        lines += [f"{variant.name}: predicted {format_time(variant.predicted_s)}" for variant in self.variants]
        lines.append("build: " + ", ".join(f"{phase.name} {format_time(phase.seconds)}" for phase in own.phases))
        return "\n".join(lines)

    def _divided(self, place: int) -> list[str]:
        """Examples of sizes that no variant has: the one of most parts, and the largest that is padded."""
        dimension, others = self.dimensions[place], [own.sizes[0] for own in self.dimensions]
        ways = {
            size: parts_of(self.dimensions, self.variants, (*others[:place], size, *others[place + 1 :]))
            for size in range(1, dimension.largest + 1)
            if size not in dimension.sizes
        }
        found = sorted(ways, key=lambda size: (len(ways[size]), size))[-1:]
        found += [size for size in ways if sum(part[place] for part in ways[size]) > size and size not in found][-1:]
        return [f"{size} by {' + '.join(str(part[place]) for part in ways[size])}" for size in found]


def parts_of(
    dimensions: Sequence[OpenDimension], variants: Sequence[Variant], sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """The sizes of the variants that run ``sizes``, in order: of a batch the parts that are predicted to cost least.

    The last part may be larger than what is left, which is then padded. Raises InputError for sizes that cannot run.
    """
    divided = None
    for place, (dimension, size) in enumerate(zip(dimensions, sizes, strict=True)):
        if size not in dimension.sizes:
            if dimension.axes is None or not 1 <= size <= dimension.largest:
                raise InputError(*_no_size(dimension, size))
            divided = place
    if divided is None:
        return [tuple(sizes)]
    before, after = tuple(sizes[:divided]), tuple(sizes[divided + 1 :])
    alike = [own for own in variants if (own.sizes[:divided], own.sizes[divided + 1 :]) == (before, after)]
    known = all(operator.total_s is not None for own in alike for operator in own.signature.report.operators)
    costs = {own.sizes[divided]: own.predicted_s if known else float(own.sizes[divided]) for own in alike}
    return [(*before, part, *after) for part in cheapest(sizes[divided], costs)]


def _no_size(dimension: OpenDimension, size: int) -> tuple[str, str]:
    sizes = ", ".join(map(str, dimension.sizes))
    if dimension.axes is not None:
        return (
            f"dimension {dimension.name!r} is {size}, and the library runs 1 to {dimension.largest}.",
            "divide the batch, or build the library for a larger range",
        )
    larger = next((own for own in dimension.sizes if own > size), None)
    padding = f"pad a sequence of tokens to {larger}, with zeros in its attention mask, " if larger else ""
    return (
        f"dimension {dimension.name!r} is {size}, and the library has variants for {sizes} ({dimension.reason}).",
        f"{padding}build it for this size, too, or use tvm_ext.InferenceSession, which compiles shapes as they come",
    )


def variant_of(variants: Sequence[Variant], dimensions: Sequence[OpenDimension], sizes: Sequence[int]) -> Variant:
    found = next((own for own in variants if own.sizes == tuple(sizes)), None)
    if found is None:
        names = ", ".join(own.name for own in dimensions)
        known = "; ".join(", ".join(map(str, own.sizes)) for own in variants)
        raise InputError(f"there is no variant for ({names}) = {tuple(sizes)}.", f"the variants are: {known}")
    return found
