"""What was given to CUTLASS of a module's graph, with which epilogues, and what was not, with the reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from .attention import Attention

PARTITION = "tvm_ext.partition"
"""Module attribute: what was taken and refused, a `CutlassPartition` as JSON."""

CUTLASS = "tvm_ext.cutlass"
"""Module attribute: which kernels were compiled, a `CutlassBuild` as JSON."""

_OPERAND = "operand"

LINK = -1
"""Among the places of parameters: what the product before makes."""

REGION = "tvm_ext.region"
"""Attribute of a composite function: its `CutlassRegion` as JSON."""

CODEGEN = "tvm_ext.cutlass"
"""Attribute ``Codegen`` of every composite function, and how the names in attribute ``Composite`` begin."""

REDUCTION_STEPS = frozenset({"sum_rows", "sum_columns", "max_rows", "max_columns"})
"""Last steps of epilogues that leave one value for each column, or for each row."""

ACCUMULATOR = "accum"
"""What an epilogue's expression calls the product."""

AnchorKind = Literal["matmul", "batched_matmul", "conv2d", "conv2d_grouped", "conv2d_depthwise"]

OperandRole = Literal["scalar", "row", "column", "matrix"]
"""How an epilogue's operand lies over the product: one number, one per column, one per row, one per element.

"row" is a row vector repeated for every row (a bias).
"""

Broadcast = Literal["scalar", "row", "column", "matrix", "self"]
"""`OperandRole`, or "self": a value of the region itself (`x * f(x)`)."""

Order = Literal["row", "column"]
"""Of a matrix: its rows or its columns are contiguous."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixLayout:
    """Where the elements of a matrix lie: rows ("row") or columns ("column") are contiguous.

    Distances are in elements; ``batch_stride`` is 0 where all products of a batch read the same matrix.
    ``alignment`` is the largest power of two up to 16 bytes of elements that may be read at once.
    """

    order: Order
    leading_dimension: int
    batch_stride: int
    alignment: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ImplicitWindow:
    """A two-dimensional NHWC convolution with OHWI filters; pads are those at the top and on the left.

    What is padded at the bottom and on the right follows from the output's extents. With ``planes_of`` the kernel reads
    NCHW activations of that type, and filters that lie (filter, channel, row, column); ``stores_planes``: its result is
    NCHW (Bolt §3.2.3).
    """

    input_extents: tuple[int, int, int, int]  # n, h, w, c
    filter_extents: tuple[int, int]  # r, s
    output_extents: tuple[int, int]  # p, q
    padding: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    planes_of: str = ""
    stores_planes: bool = False

    @property
    def changes_layout(self) -> bool:
        return bool(self.planes_of) or self.stores_planes

    @property
    def numbers(self) -> tuple[int, ...]:
        """How it moves, as launches are told: padding, strides, dilation."""
        return *self.padding, *self.strides, *self.dilation

    @property
    def is_pointwise(self) -> bool:
        """Whether filters have one position, and every pixel is read once, as it is."""
        return self.filter_extents == self.strides == (1, 1) and self.padding == (0, 0)

    @property
    def is_plain(self) -> bool:
        """Whether the rows of a matrix product are its pixels as they lie: one position, every pixel, one group."""
        return self.is_pointwise and self.groups == 1 and self.output_extents == self.input_extents[1:3]

    @property
    def channels(self) -> int:
        """Of one group."""
        return self.input_extents[3] // self.groups

    @property
    def positions(self) -> int:
        """Of a filter."""
        return prod(self.filter_extents)

    @property
    def padding_behind(self) -> tuple[int, int]:
        """What is padded below and on the right: as much as the result's extents ask for, and never cropped."""
        read = self.read_extents(self.output_extents)
        below, right = (max(0, read[i] - self.input_extents[1 + i] - self.padding[i]) for i in (0, 1))
        return below, right

    def read_extents(self, pixels: tuple[int, int]) -> tuple[int, int]:
        """Of the input, with its padding: what a tile of ``pixels`` of the output reads."""
        tiles = zip(pixels, self.strides, self.filter_extents, self.dilation, strict=True)
        down, across = ((tile - 1) * stride + (extent - 1) * step + 1 for tile, stride, extent, step in tiles)
        return down, across


@dataclass(frozen=True, kw_only=True, slots=True)
class CutlassProblem:
    """A product that templates serve: D[rows, columns] = A[rows, depth] B[depth, columns], ``batch`` times.

    Of a convolution: ``rows`` = n * p * q, ``columns`` the filters, ``depth`` = r * s * channels of a group.
    ``dtypes`` are those of A, B and D before its epilogue. ``simt`` says that no matrix unit is used.
    """

    anchor: AnchorKind
    batch: int
    rows: int
    columns: int
    depth: int
    dtypes: tuple[str, str, str]
    operands: tuple[MatrixLayout, MatrixLayout]
    simt: bool
    window: ImplicitWindow | None = None

    def __post_init__(self) -> None:
        assert min(self.batch, self.rows, self.columns, self.depth) > 0

    @property
    def arithmetic(self) -> str:
        """What multiplies it, as templates call that: matrix units round float32 to tfloat32."""
        return "tfloat32" if self.dtypes[0] == "float32" and not self.simt else self.dtypes[0]

    @property
    def orders(self) -> tuple[Order, Order]:
        """Of A and B: a convolution's filters lie one behind the other, each along the depth."""
        a, b = self.operands
        return a.order, "column" if self.window else b.order

    @property
    def factor_elements(self) -> tuple[int, int]:
        """Elements of A and B in memory, each once."""
        if self.window is not None:
            filters = self.columns * self.window.positions * self.window.channels
            return prod(self.window.input_extents), filters
        each = (self.rows * self.depth, self.depth * self.columns)
        a, b = (size * (self.batch if m.batch_stride else 1) for size, m in zip(each, self.operands, strict=True))
        return a, b


@dataclass(frozen=True, kw_only=True, slots=True)
class EpilogueStep:
    """One function of an epilogue; ``operators`` counts the graph's operators that it was spelt in."""

    function: str  # "add", "gelu", "cast", "sum_rows", ...
    dtype: str  # of the result
    operand: Broadcast | None = None
    operators: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EpilogueOperand:
    """A tensor that an epilogue reads, under its ``name`` in the expression. A matrix has contiguous rows, no gaps.

    ``batch_stride`` is the distance of what neighbouring products of a batch read, in elements; 0: all the same.
    """

    name: str
    role: OperandRole
    dtype: str
    batch_stride: int = 0

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of what one result of ``rows`` by ``columns`` reads."""
        return (rows if self.role in ("column", "matrix") else 1, columns if self.role in ("row", "matrix") else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutlassRegion:
    """One product with its epilogue, as a composite function.

    ``factors`` are the function's parameters that are A and B. ``expression`` is the epilogue of ``accum`` and
    ``operands``, whose names are those of the parameters (`operand_name`), stored as ``out_dtype``. ``ended`` says why
    the epilogue has no further step, ``saved_us`` what the model expects of fusing it. ``then`` is the product that
    follows in the same kernel: its first factor, `LINK` in place of a parameter, is what this one makes. Of an
    ``attention`` the product is that of queries and keys, and the parameter ``values`` has the values.
    """

    value: str  # the graph's name of the result
    pattern: str  # "matmul_add_gelu"
    problem: CutlassProblem
    epilogue: tuple[EpilogueStep, ...]
    factors: tuple[int, int]
    expression: str
    operands: tuple[EpilogueOperand, ...]
    out_dtype: str
    ended: str
    saved_us: float
    then: CutlassRegion | None = None
    attention: Attention | None = None
    values: int = LINK

    @property
    def parts(self) -> tuple[CutlassRegion, ...]:
        """Its products, those in one kernel in order."""
        return (self,) if self.then is None else (self, *self.then.parts)

    @property
    def kind(self) -> CutlassRegion:
        """What regions have in common that have the same kernels: all but their place in the graph."""
        return replace(self, value="", ended="", saved_us=0.0, then=self.then.kind if self.then else None)

    def left(self, reason: str) -> CutlassRefusal:
        """Why the product has no template."""
        return CutlassRefusal(value=self.value, operator=self.pattern, reason=reason, remedy="")

    def renumbered(self, places: Sequence[int]) -> CutlassRegion:
        """The region whose parameters are at other ``places``: the first at places[0], and so on."""

        def renamed(name: str) -> str:
            return operand_name(places[parameter_of(name)])

        operands = tuple(replace(operand, name=renamed(operand.name)) for operand in self.operands)
        first, second = self.factors
        return replace(
            self,
            factors=(places[first], places[second]),
            expression=re.sub(rf"\b{_OPERAND}\d+\b", lambda match: renamed(match[0]), self.expression),
            operands=operands,
        )


def operand_name(index: int) -> str:
    """The name of a composite function's parameter."""
    return f"{_OPERAND}{index}"


def parameter_of(name: str) -> int:
    """The place of the parameter called ``name`` by `operand_name`."""
    return int(name.removeprefix(_OPERAND))


@dataclass(frozen=True, kw_only=True, slots=True)
class CutlassRefusal:
    """What no template serves, and why, in a sentence of operator, shape, type and limit."""

    value: str
    operator: str
    reason: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CutlassKernel:
    """The kernel of a region: the library's ``function``, and the ``template`` that it is made of.

    It computes so many ``products``; ``own_us`` is what a kernel of our own is predicted to take, None where that was
    not asked; ``refused`` are the templates before it, with what the compiler said; ``seconds`` it took, unless it was
    kept from another build; ``measured_us`` is the median of what a GPU took for it, None where it is the model's
    choice.
    """

    function: str
    value: str
    pattern: str
    template: str
    predicted_us: float
    products: int = 1
    own_us: float | None = None
    refused: tuple[str, ...] = ()
    seconds: float = 0.0
    cached: bool = False
    measured_us: float | None = None

    def __str__(self) -> str:
        own = "" if self.own_us is None else f", a kernel of our own {self.own_us:.1f} us"
        own += "" if self.measured_us is None else f", measured {self.measured_us:.1f} us"
        tried = "".join(f"; refused before it: {text}" for text in self.refused)
        return f"{self.value}: {self.pattern} by {self.template} ({self.predicted_us:.1f} us{own}){tried}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CutlassProfile:
    """What was measured before templates were chosen; ``note`` says why nothing was.

    ``regions`` are different products with their epilogues, ``programs`` the templates that were missing a time.
    """

    regions: int
    measured_regions: int = 0
    programs: int = 0
    failed_programs: tuple[str, ...] = ()
    launches: int = 0
    note: str = ""

    def __str__(self) -> str:
        failed = f", {len(self.failed_programs)} of them failed" if self.failed_programs else ""
        ran = f"{self.launches} launches of {self.programs} programs{failed}, for {self.measured_regions}"
        return self.note or f"{ran} of {self.regions} different products"


@dataclass(frozen=True, kw_only=True, slots=True)
class CutlassBuild:
    """What became of a module's products: kernels of templates, and why the others have none; as a partition has it,
    why ``others`` (attention, norms) are left to kernels of our own.
    """

    device: str
    kernels: tuple[CutlassKernel, ...]
    declined: tuple[CutlassRefusal, ...]
    profile: CutlassProfile | None = None
    others: tuple[CutlassRefusal, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CutlassPartition:
    """All products of a module, in the order of its functions and bindings.

    ``others`` are no products, but operators that the package has code for: attention, layer and RMS norm.
    """

    device: str
    taken: tuple[CutlassRegion, ...]
    refused: tuple[CutlassRefusal, ...]
    others: tuple[CutlassRefusal, ...] = ()

    def __str__(self) -> str:
        taken = [f"{item.value}: {item.pattern}, ended as {item.ended}" for item in self.taken]
        refused = [f"{other.value}: not taken: {other.reason}" for other in (*self.refused, *self.others)]
        return "\n".join([f"CUTLASS on {self.device}", *taken, *refused])
