"""Recognises sliding windows over whole planes: depthwise convolution and pooling, in NCHW and in NCHW[b]c.

A window slides along x and mostly along y, and no other axis is summed over. The contiguous axis of input and output is
x, or a block of channels, *lanes*, behind it:

    out[n, c, y, x] = combine over ry, rx of f(in[n, c, 2*y + ry, 2*x + rx], w[c, ry, rx])
    out[n, c, y, x, lane] = combine over ry, rx of f(in[n, c, 2*y + ry, 2*x + rx, lane], w[c, lane, ry, rx])

Such an operator reads each input element for a few outputs of the same plane only, so whole planes are its rTiles and
what remains to be arranged is where the vectors start; `cpu_windows/emit.py` says how, `cpu_windows/blocked.py` for
blocks of channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext._tvm import IF_THEN_ELSE, Call, Expr, TensorLoad, Var, structural_equal, tirx
from tvm_ext.analysis.computation_exprs import linear_index
from tvm_ext.analysis.computation_rewrites import split_divided_axes
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, replace_loads, static_shape, substitute
from tvm_ext.analysis.tensor_expr import LinearIndex
from tvm_ext.errors import IllegalRewrite
from tvm_ext.support.arithmetic import ceil_div

MAX_TAPS = 16
"""The longest window along one axis whose rows are written out one by one."""

MAX_STRIDE = 4
"""The longest step along x; a register is filled from as many vectors, mostly for nothing where the step is longer."""

BLOCKS = (4, 8, 16)
"""Channels of a block: those of one register, as `layout/blocked.py` makes them."""

BLOCKED_TYPES = ("float32", "int32", "uint8", "int8")
"""Types of the elements and of the sums of a window over blocks, which need no scratch memory of one type."""

Interval = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowAxis:
    """One axis of the window: source position = ``stride * output + dilation * tap - before``, padding outside.

    ``variable`` and ``tap`` are the anchor's (None where it has none: one output, or one tap). The ``size`` source
    positions that exist are ``first`` ... ``first + size - 1`` in the index of the source's own dimension.
    """

    variable: Var | None
    tap: Var | None
    extent: int
    taps: int
    stride: int
    dilation: int
    before: int
    first: int
    size: int

    @property
    def span(self) -> int:
        """Positions from the first tap of the first output to the last tap of the last one."""
        return self.stride * (self.extent - 1) + self.dilation * (self.taps - 1) + 1

    def outputs_of(self, tap: int) -> range:
        """The outputs for which ``tap`` meets an element."""
        before = self.before - self.dilation * tap
        first, end = ceil_div(before, self.stride), ceil_div(before + self.size, self.stride)
        return range(max(0, first), min(self.extent, end))

    @property
    def phases(self) -> tuple[int, ...]:
        """The remainders of ``dilation * tap`` by ``stride`` that occur, ascending."""
        return tuple(sorted({self.dilation * tap % self.stride for tap in range(self.taps)}))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """A window operator. ``read`` is the anchor's load of the tensor that the window slides over.

    ``pad`` is the computation that fills that tensor, taken into the kernel, and ``pad_value`` its value outside;
    without one the windows stay inside the tensor.
    """

    anchor: Computation
    pad: Computation | None
    read: TensorLoad
    y: WindowAxis
    x: WindowAxis
    outer: tuple[Var, ...]  # the other spatial variables: which plane
    pad_value: Expr
    lane: Var | None = None  # the channel of a block, where planes lie in blocks

    @property
    def dtype(self) -> str:
        return dtype_of(self.anchor.target)

    def row_taps(self, rows: int) -> list[tuple[int, int]]:
        """(row, tap along y) of all that a tile of ``rows`` output rows combines.

        Of a tile of the whole plane those are left out that meet padding alone, where padding changes nothing. Worked
        example, 7 taps on 7 rows padded by 3: 37 of 49.
        """
        y, is_trimmed = self.y, rows == self.y.extent and self.ignores_padding()
        return [(row, tap) for tap in range(y.taps) for row in (y.outputs_of(tap) if is_trimmed else range(rows))]

    def ignores_padding(self) -> bool:
        """Whether the anchor adds the padding's zeros, alone or as a factor, or compares with what it begins with."""
        value = self.anchor.value
        is_product = isinstance(value, tirx.Mul) and self.anchor.combiner == "sum"
        items = [
            own.value if isinstance(own, tirx.Cast) else own for own in ([value.a, value.b] if is_product else [value])
        ]
        is_read = any(structural_equal(item, self.read) for item in items)
        return is_read and getattr(self.pad_value, "value", None) == getattr(self.anchor.init, "value", 0)


def find_window(anchor: Computation, pads: Sequence[Computation]) -> Window | None:
    """The window operator that ``anchor`` is, fed by one of the padding computations ``pads`` or none; None where it is
    none.

    Raises IllegalRewrite, with the reason, for a window of a form that has no kernel here.
    """
    anchor = _drop_unit_reductions(split_divided_axes(anchor))
    return _find(anchor, pads, 0) or _find(anchor, pads, 1)


def _find(anchor: Computation, pads: Sequence[Computation], inner: int) -> Window | None:
    """`find_window` with ``inner`` axes of lanes behind those that the window slides along."""
    lane = anchor.spatial[-1] if inner else None
    if lane is not None and (anchor.extent(lane) not in BLOCKS or not anchor.indices[-1].same_as(lane)):
        return None
    found = [(load, axes) for load in anchor.loads() if (axes := _axes_of(load, anchor, lane)) is not None]
    if len(found) != 1:
        return None
    read, (y, x) = found[0]
    if x.extent == 1 or (y.taps * x.taps == 1 and y.stride * x.stride == 1):
        return None
    nothing = tirx.const(0, dtype_of(read))
    if _uses(replace_loads(anchor.value, lambda load: nothing if structural_equal(load, read) else load), y, x):
        return None
    if not anchor.indices[-1 - inner].same_as(x.variable):
        return None
    if any(not v.same_as(y.tap) and not v.same_as(x.tap) for v in anchor.reduction):
        return None
    pad_value = anchor.init
    pad = next(
        (computation for computation in pads if computation.target.same_as(read.source)), None
    )  # others pad the weights
    if pad is not None:
        inside = padding_of(pad)
        if inside is None:
            return None
        _, pad_value, bounds = inside
        moved = _padded(y, x, bounds, inner)
        if moved is None:
            return None
        y, x = moved
    own = (y.variable, x.variable, lane)
    outer = tuple(v for v in anchor.spatial if not any(v.same_as(o) for o in own))
    window = Window(anchor=anchor, pad=pad, read=read, y=y, x=x, outer=outer, pad_value=pad_value, lane=lane)
    _check(window)
    return window


def _check(window: Window) -> None:
    anchor, read, y, x = window.anchor, window.read, window.y, window.x
    known = ("float32",) if window.lane is None else BLOCKED_TYPES
    for dtype in (dtype_of(anchor.target), dtype_of(read)):
        if dtype not in known:
            raise IllegalRewrite(f"{anchor.name}: window kernels are made for {' and '.join(known)}, not {dtype}")
    if max(y.taps, x.taps) > MAX_TAPS:
        raise IllegalRewrite(f"{anchor.name}: a window of {y.taps} x {x.taps} is more than {MAX_TAPS} taps long")
    if x.stride > MAX_STRIDE and window.lane is None:
        raise IllegalRewrite(f"{anchor.name}: a window that moves by {x.stride} along x, more than {MAX_STRIDE}")
    if min(x.size, x.span - x.before) < x.stride or min(y.size, y.span - y.before) < 1:
        raise IllegalRewrite(f"{anchor.name}: planes of {y.size} x {x.size} are shorter than the window's step")


def _drop_unit_reductions(computation: Computation) -> Computation:
    gone = [p for p, kind in enumerate(computation.kinds) if kind == "reduce" and computation.extents[p] == 1]
    keep = [p for p in range(len(computation.kinds)) if p not in gone]
    table = [(computation.variables[p], tirx.IntImm(dtype_of(computation.variables[p]), 0)) for p in gone]
    return dataclasses.replace(
        computation,
        variables=tuple(computation.variables[p] for p in keep),
        extents=tuple(computation.extents[p] for p in keep),
        kinds=tuple(computation.kinds[p] for p in keep),
        value=substitute(computation.value, table),
    )


def _uses(expression: Expr, *axes: WindowAxis) -> bool:
    """Whether ``expression`` depends on where along ``axes`` the output is."""
    return any(axis.variable is not None and mentions(expression, axis.variable) for axis in axes)


def _axes_of(load: TensorLoad, anchor: Computation, lane: Var | None) -> tuple[WindowAxis, WindowAxis] | None:
    """The window's axes, if ``load`` is of planes with contiguous rows: one spatial axis per dimension.

    With a ``lane``, of planes of blocks that it runs over.
    """
    names = [str(p) for p in range(len(anchor.variables))]
    indices, shape = list(load.indices), list(static_shape(load.source))
    if lane is not None:
        if not indices or not indices.pop().same_as(lane) or shape.pop() != anchor.extent(lane):
            return None
        if any(mentions(i, lane) for i in indices):
            return None
    forms = [linear_index(i, anchor.variables, names) for i in indices]
    if not forms or any(form is None for form in forms):
        return None
    axes = [_axis(form, size, anchor) for form, size in zip(forms, shape, strict=True)]
    if any(axis is None for axis in axes):
        return None
    x = axes[-1]
    assert x is not None
    if x.variable is None:
        return None
    y = axes[-2] if len(axes) > 1 else None
    others = [other for other in anchor.loads() if not structural_equal(other, load)]
    if y is None or y.variable is None or any(_uses(other, y) for other in others):
        y = None
    lead = axes[: -1 if y is None else -2]
    if any(axis is None or axis.tap is not None for axis in lead):
        return None
    used = [axis.variable for axis in (*lead, y, x) if axis is not None and axis.variable is not None]
    if any(a.same_as(b) for i, a in enumerate(used) for b in used[:i]):
        return None
    return y or _no_axis(), x


def _no_axis() -> WindowAxis:
    return WindowAxis(variable=None, tap=None, extent=1, taps=1, stride=1, dilation=1, before=0, first=0, size=1)


def _axis(form: LinearIndex | None, size: int, anchor: Computation) -> WindowAxis | None:
    """``form`` as the index of one dimension: at most one spatial axis and one tap, both ascending."""
    assert form is not None
    terms = [(int(name), c) for name, c in form.terms]
    spatial = [(p, c) for p, c in terms if anchor.kinds[p] == "spatial"]
    taps = [(p, c) for p, c in terms if anchor.kinds[p] == "reduce"]
    if len(spatial) > 1 or len(taps) > 1 or any(c < 0 for _, c in terms) or form.constant < 0:
        return None
    at, step = spatial[0] if spatial else (None, 1)
    tap, dilation = taps[0] if taps else (None, 1)
    if at is None and tap is not None:
        return None
    return WindowAxis(
        variable=None if at is None else anchor.variables[at],
        tap=None if tap is None else anchor.variables[tap],
        extent=1 if at is None else anchor.extents[at],
        taps=1 if tap is None else anchor.extents[tap],
        stride=step,
        dilation=dilation,
        before=0,
        first=form.constant,
        size=size - form.constant,
    )


def _padded(
    y: WindowAxis, x: WindowAxis, bounds: Sequence[Interval | None], inner: int
) -> tuple[WindowAxis, WindowAxis] | None:
    """The axes over what the padding computation reads; None where it pads a dimension that no window slides along."""
    has_y = y.variable is not None
    bounds, behind = bounds[: len(bounds) - inner], bounds[len(bounds) - inner :]
    if any(bound is not None for bound in behind):
        return None
    lead = bounds[: -2 if has_y else -1]
    if any(bound is not None for bound in lead):
        return None
    return (_within(y, bounds[-2]) if has_y else y), _within(x, bounds[-1])


def _within(axis: WindowAxis, bounds: Interval | None) -> WindowAxis:
    """Worked example: a tensor of 23 with the source at 1 ... 21, read from index 0: before = 1, first = 1, size = 21.

    Read from index 3 on (a slice), the source's first two elements are never touched: before = 0, first = 3, size = 19.
    """
    low, high = bounds or (0, axis.first + axis.size)
    first = max(axis.first, low)
    return dataclasses.replace(axis, before=first - axis.first, first=first, size=high - first)


def is_padding(computation: Computation) -> bool:
    """Whether ``computation`` places a tensor inside a larger one that is constant elsewhere."""
    return not computation.is_reduction and computation.writes_at_its_own_axes() and padding_of(computation) is not None


def padding_of(pad: Computation) -> tuple[Expr, Expr, list[Interval | None]] | None:
    """(value inside, value outside, per dimension the half-open range that is inside or None for all of it).

    What padding of a negative size cuts off is in no range: of 12 channels of which 6 are left, all are inside.
    """
    value = pad.value
    if isinstance(value, Call) and value.op.same_as(IF_THEN_ELSE):
        condition, inside, outside = value.args
    elif type(value).__name__ == "Select":
        condition, inside, outside = value.condition, value.true_value, value.false_value
    else:
        return None
    if not hasattr(outside, "value"):
        return None
    low: list[int | None] = [None] * len(pad.spatial)
    high: list[int | None] = [None] * len(pad.spatial)
    for term in _conjunction(condition):
        if not _bound(term, pad, low, high):
            return None
    bounds: list[Interval | None] = []
    for variable, first, end in zip(pad.spatial, low, high, strict=True):
        whole, extent = first is None and end is None, pad.extent(variable)
        bounds.append(None if whole else (max(0, first or 0), extent if end is None else min(end, extent)))
    return inside, outside, bounds


def _conjunction(condition: Expr) -> list[Expr]:
    if type(condition).__name__ == "And":
        return [*_conjunction(condition.a), *_conjunction(condition.b)]
    return [condition]


def _bound(term: Expr, pad: Computation, low: list[int | None], high: list[int | None]) -> bool:
    """Note ``term``, one of ``c <= v``, ``v < c`` and their like, as a bound of a dimension; False where it is none."""
    kind = type(term).__name__
    if kind not in ("LE", "LT", "GE", "GT"):
        return False
    swapped = hasattr(term.a, "value")
    variable, constant = (term.b, term.a) if swapped else (term.a, term.b)
    position = next((p for p, v in enumerate(pad.spatial) if v.same_as(variable)), None)
    if position is None or not hasattr(constant, "value"):
        return False
    number, is_upper = int(constant.value), (kind in ("LE", "LT")) != swapped
    if is_upper:
        end = number + (1 if kind in ("LE", "GE") else 0)
        high[position] = end if high[position] is None else min(end, high[position] or end)
    else:
        first = number + (0 if kind in ("LE", "GE") else 1)
        low[position] = first if low[position] is None else max(first, low[position] or first)
    return True
