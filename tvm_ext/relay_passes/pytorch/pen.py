"""What a rule sees of the node that it converts, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_ext._tvm import BlockBuilder, Expr, relax
from tvm_ext.errors import ModelError

Scalar = bool | int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchPen:
    """One node: its ``operands``, one for each argument of its schema, tensors being expressions; what torch says of
    its results in ``shapes`` and ``dtypes``; ``parameter`` makes a parameter of a new torch tensor, and ``state`` gives
    the torch tensors that operands stand for, where they are parameters or known.
    """

    name: str
    where: str
    operands: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    builder: BlockBuilder
    state: Callable[[Any], Any]
    parameter: Callable[[str, Any], Expr]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    @property
    def dtype(self) -> str:
        return self.dtypes[0]

    def emit(self, value: Expr) -> Expr:
        return self.builder.emit(value)

    def cast(self, x: Expr | Scalar, dtype: str) -> Expr:
        """A tensor of ``dtype``: a scalar becomes a constant; anything but 0 is True."""
        if isinstance(x, bool | int | float):
            return relax.const(np.bool_(x) if dtype == "bool" else x, dtype)
        if dtype_of(x) == dtype:
            return x
        if dtype == "bool":
            return self.emit(relax.op.not_equal(x, relax.const(0, dtype_of(x))))
        return self.emit(relax.op.astype(x, dtype))

    def reshaped(self, x: Expr, shape: Sequence[int]) -> Expr:
        return x if extents(x) == tuple(shape) else self.emit(relax.op.reshape(x, list(shape)))

    def sliced(self, x: Expr, axis: int, begin: int, end: int, step: int = 1) -> Expr:
        if (begin, end, step) == (0, extents(x)[axis], 1):
            return x
        return self.emit(relax.op.strided_slice(x, [axis], [begin], [end], [step]))

    def joined(self, parts: Sequence[Expr], axis: int) -> Expr:
        return parts[0] if len(parts) == 1 else self.emit(relax.op.concat(list(parts), axis=axis))

    def refusal(self, problem: str, remedy: str = "export the model without it") -> ModelError:
        return ModelError(f"operator '{self.name}' at {self.where} {problem}", remedy)


TorchRule = Callable[
    [TorchPen], Any
]  # an expression, or a list of them where there are several results (None: not computed)
RULES: dict[str, TorchRule] = {}
"""Operator with overload, as ``add.Tensor`` -> what makes Relax of it."""


def rule(names: str) -> Callable[[TorchRule], TorchRule]:
    """Register a function for the operators ``names``, apart by spaces; the default overload where none is named.

    Python's own ``getitem`` has none.
    """

    def register(function: TorchRule) -> TorchRule:
        for name in names.split():
            RULES[name if "." in name or name == "getitem" else f"{name}.default"] = function
        return function

    return register


def dtype_of(x: Expr) -> str:
    return str(x.ty.dtype)


def extents(x: Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in x.ty.shape)


def is_float(dtype: str) -> bool:
    return "float" in dtype
