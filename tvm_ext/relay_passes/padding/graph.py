"""Which values of a dataflow block can have padding behind their last axis, and what would be in it.

A *product* reads a padded operand against rows of zeros of its weights, and writes padding by columns of zeros. A
*carrier* lies between products and computes the padding as it computes the rest: element by element, over windows or
rows, joining channels. What it makes of the padding is known: a number. Worked example: a convolution of 46 filters
writes 48 channels, two of zeros; bias (padded by zeros), sigmoid: the padding is 0.5; the next convolution has zeros
for it. Where the number would not be finite (log), the operator carries no padding: zero times infinity is NaN.

Where padding lies is a `Runs`: (20, 4), (12, 4) is 20 channels, 4 of padding, 12 channels, 4 of padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, prod
from typing import Literal

from tvm_ext._tvm import Call, DataflowBlock, Expr, Var, VarBinding, relax
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.relax_values import dtype_of, is_tensor, operator_name, static_shape
from tvm_ext.byoc_cutlass.activations import is_spelling, number_of
from tvm_ext.byoc_cutlass.convolution_problems import LAYOUTS
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.byoc_cutlass.support import CONV2D, MATMUL
from tvm_ext.devices.gpu import VECTOR_BYTES

Runs = tuple[tuple[int, int], ...]
Contents = frozenset[float]

MOST_CONTENTS = 4
"""Different numbers in the padding of one value: the parts of a concatenation may each have their own."""

MOST_PADDING_VALUE = 1e4
"""Numbers in the padding stay below it, so that a half holds them after rounding as well."""

ZERO_KEEPING = frozenset({"nn.leakyrelu", "mean", "sum", "max", "min"})
"""Of zeros these make zeros; of another number they may round it."""

POOLS = frozenset({"nn.max_pool2d", "nn.avg_pool2d", "nn.adaptive_avg_pool2d"})
REDUCTIONS = frozenset({"mean", "sum", "max", "min"})
ZEROS: Contents = frozenset({0.0})  # by definition: padding that holds no other number
VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "flatten", "permute_dims"})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PaddingNode:
    """An operator that can read or write padding. ``data`` are the operands that are padded as the result is; of a
    product the first operand alone, whose padding is its own."""

    variable: Var
    operator: str  # without "relax."
    role: Literal["product", "carrier"]
    data: tuple[Expr, ...]


class PaddableBlock:
    """The nodes of one block, and of every value the form and content that its padding would have.

    ``granule``: elements of a copy of 16 bytes, of the smallest type that is multiplied.
    """

    def __init__(self, block: DataflowBlock, values: GraphValues) -> None:
        self.values = values
        self.bindings = [binding for binding in block.bindings if isinstance(binding, VarBinding)]
        self.inside = {binding.var for binding in self.bindings}
        self.granule = self._granule()
        self.nodes: dict[Var, PaddingNode] = {}
        self.runs: dict[Var, Runs] = {}
        self.content: dict[Var, Contents] = {}
        for binding in self.bindings:
            self._add(binding.var)

    def _granule(self) -> int:
        products = [binding.value for binding in self.bindings if operator_name(binding.value) in (CONV2D, MATMUL)]
        sizes = [itemsize_bytes(dtype_of(call.args[0])) for call in products if static_shape(call.args[0])]
        return int(VECTOR_BYTES // min(sizes, default=2))

    def _add(self, variable: Var) -> None:
        node = self._product(variable) or self._carrier(variable)
        if node is not None:
            self.nodes[variable] = node

    # ---- values ------------------------------------------------------------------------------------------------------

    def runs_of(self, value: Expr) -> Runs:
        """Where the padding of ``value`` lies, if it gets any: behind its channels unless carriers say otherwise."""
        if value in self.runs:
            return self.runs[value]
        extent = last_extent(value)
        return ((extent, -extent % self.granule),)

    def extent_of(self, value: Expr, *, padded: bool) -> int:
        """Elements along the last axis: channels, filters, K or N."""
        return sum(extent + (padding if padded else 0) for extent, padding in self.runs_of(value))

    def is_odd(self, value: Expr) -> bool:
        """Whether aligned copies do not divide the last axis, or that of a part joined to it."""
        return any(padding for _, padding in self.runs_of(value))

    def contents_of(self, value: Expr) -> Contents:
        """The numbers that are in the padding, if it gets any."""
        return self.content.get(value, ZEROS)

    # ---- products ----------------------------------------------------------------------------------------------------

    def _product(self, variable: Var) -> PaddingNode | None:
        call = self.values.bindings[variable]
        name = operator_name(call)
        if name not in (CONV2D, MATMUL) or not _has_static_shapes(call, variable):
            return None
        if dtype_of(call.args[0]) != dtype_of(call.args[1]) or self.values.constant_of(call.args[0]) is not None:
            return None
        if name == CONV2D and (_layouts(call) != LAYOUTS or int(call.attrs.groups) != 1):
            return None
        if name == MATMUL and min(len(static_shape(operand) or ()) for operand in call.args) < 2:
            return None
        return PaddingNode(
            variable=variable, operator=name.removeprefix("relax."), role="product", data=(call.args[0],)
        )

    # ---- carriers ----------------------------------------------------------------------------------------------------

    def _carrier(self, variable: Var) -> PaddingNode | None:
        operator = self.values.operator_of(self.values.bindings[variable])
        call = self.values.bindings[variable]
        if operator is None or not is_tensor(variable) or not _has_static_shapes(call, variable):
            return None
        name, operands = operator
        data = self._data(name, call, operands, variable)
        if not data or not any(self.is_odd(operand) for operand in data):
            return None
        runs = self._join(name, data)
        content = None if runs is None else self._content(name, operands, data)
        if runs is None or content is None:
            return None
        self.runs[variable], self.content[variable] = runs, content
        return PaddingNode(variable=variable, operator=name, role="carrier", data=tuple(data))

    def _data(self, name: str, call: Call, operands: Sequence[Expr], result: Var) -> list[Expr]:
        """The operands that would be padded; none where the operator does not keep channels apart."""
        shape = static_shape(result) or ()
        if not shape or (shape[-1] == 1 and name != "concat"):
            return []
        if name == "concat":
            return _concat_fields(call, len(shape), self.values)
        if is_spelling(name) or name == "nn.leakyrelu":
            return [operand for operand in operands if is_tensor(operand) and self._is_data(operand, shape[-1])]
        keeps = (
            (name in POOLS and str(call.attrs.layout) == str(call.attrs.out_layout) == "NHWC")
            or (name in REDUCTIONS and _keeps_last(call))
            or (name in VIEWS and _keeps_channels(name, call, shape))
            or (name == "nn.conv2d" and _is_depthwise(call) and self.values.constant_of(call.args[1]) is not None)
        )
        return [operands[0]] if keeps and last_extent(operands[0]) == shape[-1] else []

    def _is_data(self, operand: Expr, channels: int) -> bool:
        return last_extent(operand) == channels and self.values.constant_of(operand) is None

    def _join(self, name: str, data: Sequence[Expr]) -> Runs | None:
        """Where the result's padding lies; None where the operands' lies at different places."""
        if name == "concat":
            return tuple(run for operand in data for run in self.runs_of(operand))
        runs = {self.runs_of(operand) for operand in data}
        return runs.pop() if len(runs) == 1 else None

    def _content(self, name: str, operands: Sequence[Expr], data: Sequence[Expr]) -> Contents | None:
        """The numbers in the result's padding; None where one is not known or not finite."""
        contents = frozenset(number for operand in data if self.is_odd(operand) for number in self.contents_of(operand))
        if name in VIEWS or name in ("nn.max_pool2d", "concat"):
            return contents if len(contents) <= MOST_CONTENTS else None
        if name == "nn.conv2d":
            return ZEROS
        if name in POOLS or name in ZERO_KEEPING:
            return ZEROS if contents == ZEROS else None
        return self._compute(name, operands, set(data))

    def _compute(self, name: str, operands: Sequence[Expr], data: set[Expr]) -> Contents | None:
        if name == "multiply" and any(operand in data and self.contents_of(operand) == ZEROS for operand in operands):
            return ZEROS
        numbers = [self._numbers(name, position, operand, data) for position, operand in enumerate(operands)]
        if any(choices is None for choices in numbers) or prod(len(own or ()) for own in numbers) > MOST_CONTENTS:
            return None
        results = frozenset(number_of(name, chosen) for chosen in product(*(own or () for own in numbers)))
        return results if all(isfinite(number) and abs(number) <= MOST_PADDING_VALUE for number in results) else None

    def _numbers(self, name: str, position: int, operand: Expr, data: set[Expr]) -> Contents | None:
        if operand in data:
            return self.contents_of(operand)
        if not is_tensor(operand):
            plain = getattr(operand, "value", None)
            return frozenset({float(plain)}) if isinstance(plain, int | float) else None
        scalar = self.values.scalar_of(operand)
        if scalar is not None:
            return frozenset({scalar})
        is_row = self.values.constant_of(operand) is not None and last_extent(operand) > 1
        return frozenset({constant_content(name, position)}) if is_row else None


def constant_content(operator: str, position: int) -> float:
    """What a constant operand is padded by: zeros, and ones where it divides."""
    return 1.0 if operator == "divide" and position == 1 else 0.0


def last_extent(value: Expr) -> int:
    """Elements along the last axis of a tensor; 1 of a number, and 0 where it is not known."""
    shape = static_shape(value)
    return 0 if shape is None else (shape[-1] if shape else 1)


def tensors_of(call: Expr) -> Iterator[Expr]:
    """The tensors among a call's operands, those of a tuple too."""
    for operand in call.args:
        yield from (operand.fields if isinstance(operand, relax.Tuple) else [operand] if is_tensor(operand) else [])


def _has_static_shapes(call: Expr, result: Var) -> bool:
    shapes = [static_shape(tensor) for tensor in (*tensors_of(call), result)]
    return all(shape is not None and 0 not in shape for shape in shapes)


def _layouts(call: Call) -> tuple[str, str, str]:
    return str(call.attrs.data_layout), str(call.attrs.kernel_layout), str(call.attrs.out_layout)


def _concat_fields(call: Call, rank: int, values: GraphValues) -> list[Expr]:
    fields = call.args[0].fields if isinstance(call.args[0], relax.Tuple) else ()
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    known = all(isinstance(field, Var) and values.constant_of(field) is None for field in fields)
    return list(fields) if known and axis % rank == rank - 1 else []


def _keeps_last(call: Call) -> bool:
    rank = len(static_shape(call.args[0]) or ())
    axes = call.attrs.axis
    return axes is not None and rank - 1 not in {int(axis) % rank for axis in axes}


def _keeps_channels(name: str, call: Call, shape: tuple[int, ...]) -> bool:
    """Whether a view leaves the last axis where and what it is."""
    source = static_shape(call.args[0]) or ()
    if not source or source[-1] != shape[-1]:
        return False
    if name == "permute_dims":
        return call.attrs.axes is not None and int(call.attrs.axes[-1]) % len(source) == len(source) - 1
    return True


def _is_depthwise(call: Call) -> bool:
    channels = last_extent(call.args[0])
    filters = (static_shape(call.args[1]) or (0,))[0]
    return _layouts(call) == LAYOUTS and int(call.attrs.groups) == channels == filters
