"""Which sizes of a model's open dimensions are built, and whether others are divided into them."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from tvm_ext.errors import InputError
from tvm_ext.records.batching import BatchAxes, OpenDimension, powers_of_two

from ..onnx.bind_inputs import declared_dims, evaluate_dimension
from .prove import MixedBatch, ModelAt, batch_axes

MOST_SIZES_BUILT = 8
"""A range of so many sizes is built size by size where it may not be divided. A choice: a build takes seconds."""
MOST_SIZES_PROVEN = 64
"""Each size of a range is imported for the proof, for all sizes of the other dimensions. A choice."""
MOST_VARIANTS = 32
"""Of a library. A choice."""

Sizes = Mapping[str, int]
"""A size for each open dimension, by name."""
Requested = tuple[int, int] | Sequence[int]
"""``(1, 32)``, a tuple: all sizes from 1 to 32; ``[16, 64, 128]``, a list: these sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """The open dimensions of a library, and the declared shape of each input by name."""

    dimensions: tuple[OpenDimension, ...]
    declared: Mapping[str, tuple[int | str, ...]]

    def variants(self) -> Iterator[dict[str, int]]:
        """The sizes of each variant, small ones first."""
        names = [own.name for own in self.dimensions]
        for sizes in itertools.product(*(own.sizes for own in self.dimensions)):
            yield dict(zip(names, sizes, strict=True))


def declared_shapes(
    model: onnx.ModelProto, given: Mapping[str, Sequence[int | str | None]]
) -> dict[str, tuple[int | str, ...]]:
    """The shape of each input, with the extents ``given``; an open dimension without a name is ``INPUT_dimAXIS``."""
    constants = {tensor.name for tensor in model.graph.initializer}
    values: dict[str, int] = {}
    shapes: dict[str, tuple[int | str, ...]] = {}
    for value in model.graph.input:
        dims = None if value.name in constants else declared_dims(value)
        if dims is not None:
            asked = [item if isinstance(item, int) and item >= 0 else None for item in given.get(value.name, ())]
            pairs = zip(dims, asked, strict=False)
            values.update({dim: size for dim, size in pairs if isinstance(dim, str) and size is not None})
            known = [*asked, *[None] * (len(dims) - len(asked))]
            shapes[value.name] = tuple(
                size if size is not None else f"{value.name}_dim{axis}" if dim is None else dim
                for axis, (dim, size) in enumerate(zip(dims, known, strict=False))
            )
    return {name: tuple(_extent(dim, values) for dim in dims) for name, dims in shapes.items()}


def shapes_at(declared: Mapping[str, Sequence[int | str]], sizes: Sizes) -> dict[str, list[int | str | None]]:
    """The shapes of inputs for ``sizes`` of named dimensions, in sums and products of names, too."""
    return {name: [_extent(dim, sizes) for dim in dims] for name, dims in declared.items()}


def _extent(dim: int | str, sizes: Sizes) -> int | str:
    extent = dim if isinstance(dim, int) else evaluate_dimension(dim, sizes)
    return dim if extent is None else extent


def settle(
    declared: Mapping[str, tuple[int | str, ...]],
    requested: Mapping[str, Requested],
    model_at: Callable[[Sizes, str], ModelAt],
) -> Dimensions:
    """The sizes to build for the ``requested`` dimensions of a model with inputs of ``declared`` shapes.

    ``model_at(sizes, name)`` imports the model, as one of dimension ``name``. One dimension of a range may be divided:
    it is built in powers of two if `batch_axes` proves, for each size of the range, that elements do not meet.

    Raises InputError for an unknown dimension or sizes that are none, for a range that can be neither divided nor built
    size by size, naming the operator that mixes elements, and for too many variants.
    """
    _check(declared, requested)
    lists = {name: tuple(sorted(set(own))) for name, own in requested.items() if not _is_range(own)}
    found = {name: OpenDimension(name=name, sizes=own, largest=own[-1], reason=_LISTED) for name, own in lists.items()}
    divided = False
    for name, own in requested.items():
        if not _is_range(own):
            continue
        low, high = own
        others = {
            other: lists.get(other, (asked[0],)) for other, asked in requested.items() if other != name
        }  # a range is proven at its least size first: ranges are divided one at most
        try:
            if divided or any(_is_range(asked) for other, asked in requested.items() if other != name):
                raise MixedBatch("one dimension at most is divided, and the library has several ranges")
            axes = _proven(name, (low, high), others, model_at)
            found[name] = OpenDimension(name=name, sizes=powers_of_two(high), largest=high, axes=axes)
            divided = True
        except MixedBatch as reason:
            found[name] = _built_whole(name, low, high, str(reason))
    dimensions = tuple(found[name] for name in requested)
    count = 1
    for dimension in dimensions:
        count *= len(dimension.sizes)
    if count > MOST_VARIANTS:
        raise InputError(
            f"the open dimensions have {count} combinations of sizes, more than {MOST_VARIANTS}.",
            "give fewer sizes, or use tvm_ext.InferenceSession, which compiles shapes as they come",
        )
    return Dimensions(dimensions=dimensions, declared=declared)


_LISTED = "its sizes are listed"


def _is_range(own: Requested) -> bool:
    return isinstance(own, tuple)


def _check(declared: Mapping[str, Sequence[int | str]], requested: Mapping[str, Requested]) -> None:
    names = [dim for dims in declared.values() for dim in dims if isinstance(dim, str)]
    for name, own in requested.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            known = ", ".join(dict.fromkeys(names)) or "none"
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"the model has no open dimension {name!r}.", f"{hint}Its open dimensions are: {known}")
        fits = all(isinstance(size, int) and size >= 1 for size in own) and len(own) >= 1
        if not fits or (_is_range(own) and (len(own) != 2 or own[0] > own[1])):
            raise InputError(
                f"{own!r} are no sizes of dimension {name!r}.",
                "a tuple of two is a range, (1, 32), and a list has the sizes, [16, 64, 128]",
            )


def _proven(
    name: str, span: tuple[int, int], others: Mapping[str, Sequence[int]], model_at: Callable[[Sizes, str], ModelAt]
) -> BatchAxes:
    """Where the batch lies if dimension ``name`` is one, for all its sizes and those of ``others``."""
    sizes = sorted({*range(span[0], span[1] + 1), *powers_of_two(span[1])})
    combinations = list(itertools.product(*others.values()))
    if len(sizes) * len(combinations) > MOST_SIZES_PROVEN:
        raise MixedBatch(
            f"a proof looks at each of its {len(sizes) * len(combinations)} sizes, and at {MOST_SIZES_PROVEN} at most"
        )
    found: BatchAxes | None = None
    for combination in combinations:
        fixed = dict(zip(others, combination, strict=True))
        first = model_at({name: sizes[-1], **fixed}, name)
        if len(sizes) == 1:
            raise MixedBatch("it has one size")
        for size in sizes[:-1]:
            axes = batch_axes(first, model_at({name: size, **fixed}, name))
            if found is not None and axes != found:
                raise MixedBatch("the batch lies on other axes at other sizes")
            found = axes
    assert found is not None
    return found


def _built_whole(name: str, low: int, high: int, reason: str) -> OpenDimension:
    if high - low >= MOST_SIZES_BUILT:
        raise InputError(
            f"dimension {name!r} cannot be divided into sizes that are built: {reason}.",
            f"list the sizes that you need ({name}=[{low}, ..., {high}]; ranges of up to {MOST_SIZES_BUILT} sizes are "
            "built one by one), or use tvm_ext.InferenceSession, which compiles shapes as they come",
        )
    return OpenDimension(name=name, sizes=tuple(range(low, high + 1)), largest=high, reason=reason)
