"""Runs of a session's piece in parts, where a proof finds that elements of its batch do not meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm_ext.errors import TvmExtError
from tvm_ext.records.batching import BatchAxes, cheapest, powers_of_two
from tvm_ext.relay_passes.batching.dimensions import declared_shapes, shapes_at
from tvm_ext.relay_passes.batching.prove import MixedBatch, ModelAt, batch_axes

from .partition import Piece

PART_COST = 0.35
"""What running one part more costs, in elements of a batch: 15 run as 16, and 7 as 4 + 2 + 1. A choice, by timings
of ResNet-50 alone; only what is built has predicted times."""

InputSizes = tuple[tuple[int, ...], ...]
ModelOf = Callable[[int, Mapping[str, Sequence[int]]], ModelAt]
"""Imports the piece at a size of its batch and the shapes that its inputs then have."""

MOST_KEPT = 256
"""Combinations of shapes whose division is remembered. A choice: each is a few hundred bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedRun:
    """The sizes of the parts of a batch of ``size``, and the shapes of all inputs of each; the last may be padded."""

    size: int
    axes: BatchAxes
    sizes: tuple[int, ...]
    shapes: tuple[InputSizes, ...]


class Divisions:
    """How combinations of shapes are divided, each looked at when it first comes; for one thread at a time.

    The batch is the one open dimension that inputs begin with. It runs in powers of two, the last one padded where that
    is quicker. For each of them the proof compares the piece at that size with the piece at the whole size.
    """

    def __init__(self, piece: Piece, model_of: ModelOf) -> None:
        self._model_of = model_of
        self._declared = declared_shapes(piece.model, {})
        names = {dims[0] for dims in self._declared.values() if dims and isinstance(dims[0], str)}
        whole = set(self._declared) == set(piece.inputs)
        self._inputs = piece.inputs
        self._batch = str(names.pop()) if whole and len(names) == 1 else None
        self.reasons: dict[str, None] = {}  # why batches were not divided, each once, in the order in which they came
        if self._batch is None and any(isinstance(dim, str) for dims in self._declared.values() for dim in dims):
            self._refused("its inputs do not begin with one open dimension")
        self._known: dict[InputSizes, DividedRun | None] = {}
        self._models: dict[InputSizes, ModelAt] = {}

    def of(self, shapes: InputSizes) -> DividedRun | None:
        """How ``shapes`` are divided; None where they run as a whole."""
        if self._batch is None:
            return None
        if shapes not in self._known:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
                self._models.clear()
            self._known[shapes] = self._divided(shapes)
        return self._known[shapes]

    def _divided(self, shapes: InputSizes) -> DividedRun | None:
        size = next(
            shape[0]
            for name, shape in zip(self._inputs, shapes, strict=True)
            if self._declared[name][:1] == (self._batch,) and shape
        )
        sizes = cheapest(size, {own: own + PART_COST for own in powers_of_two(2 * size - 1)}) if size > 0 else ()
        if sizes in ((), (size,)) or self._at(shapes, size) != shapes:
            return None
        parts = {part: self._at(shapes, part) for part in sizes}
        try:
            whole = self._model(size, shapes)
            found = {batch_axes(whole, self._model(part, own)) for part, own in parts.items()}
        except MixedBatch as reason:
            self._refused(str(reason))
            return None
        except TvmExtError as error:  # what cannot be imported says so when it is built
            self._refused(error.problem)
            return None
        if len(found) != 1:
            self._refused("the batch does not lie alike in all parts")
            return None
        return DividedRun(size=size, axes=found.pop(), sizes=sizes, shapes=tuple(parts[part] for part in sizes))

    def _refused(self, reason: str) -> None:
        if len(self.reasons) < MOST_KEPT:
            self.reasons[reason] = None

    def _at(self, shapes: InputSizes, size: int) -> InputSizes:
        """``shapes`` for another size of the batch."""
        assert self._batch is not None
        named = shapes_at(self._declared, {self._batch: size})
        return tuple(
            tuple(dim if isinstance(dim, int) else extent for dim, extent in zip(named[name], shape, strict=True))
            if len(named[name]) == len(shape)
            else shape
            for name, shape in zip(self._inputs, shapes, strict=True)
        )

    def _model(self, size: int, shapes: InputSizes) -> ModelAt:
        if shapes not in self._models:
            self._models[shapes] = self._model_of(size, dict(zip(self._inputs, shapes, strict=True)))
        return self._models[shapes]
