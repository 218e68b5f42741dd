"""How an operator is tried (`Recipe`), one operator with one choice of types (`TypeCase`), and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..random_operators.record import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One operand of the tried node; its type is the schema's.

    Attributes
    ----------
    shape
        Extents; () for a scalar.
    low, high
        Bounds of what is drawn: floats between them, whole numbers from `low` to `high`. Unsigned types start at 0.
    whole_range
        Integers are drawn from all that their type holds: sums wrap, and the highest bit is not always a sign.
    values
        Given instead of drawn.
    is_known
        A constant of the model, not an input.
    has_zero
        False: nothing drawn is 0.
    """

    shape: tuple[int, ...] = (3, 4)
    low: float = -3.0
    high: float = 3.0
    whole_range: bool = False
    values: tuple[float, ...] | None = None
    is_known: bool = False
    has_zero: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One node of an operator that is right for all its types.

    Attributes
    ----------
    operands
        In the schema's order; None for an absent one. More than the schema names repeat its last, variadic one.
    attributes
        Those of the node; a type parameter's are in `type_attributes`.
    outputs
        How many outputs are asked for.
    fixed
        Type parameter to the type that it has while another's are tried; float32 unless said, or the schema's first.
    type_attributes
        Type parameter to the attribute that chooses it, where no operand does.
    is_crossed
        Besides one parameter's types after another's, all pairs of the usual types are tried.
    followers
        Unary operators that each read the first output; what they make are outputs too.
    definition
        Operands, None for absent ones, to outputs, by ONNX's text: asked instead of what is wrong about the operator.
    """

    operands: tuple[Operand | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    fixed: Mapping[str, str] = field(default_factory=dict)
    type_attributes: Mapping[str, str] = field(default_factory=dict)
    is_crossed: bool = False
    followers: tuple[str, ...] = ()
    definition: Callable[[Sequence[Array | None]], list[Array]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeCase:
    """An operator and a type ("float16") for each of its type parameters, those in `tried` first.

    ``empty``: the extent in whose place all operands have 0, say every axis of 4 elements.
    ``drawn``: a recipe of its own, drawn at random, with its number.
    """

    operator: str
    types: tuple[tuple[str, str], ...]
    tried: tuple[str, ...]
    empty: int | None = None
    drawn: tuple[int, Recipe] | None = None

    @property
    def name(self) -> str:
        """``Gather Tind=int32``."""
        chosen = dict(self.types)
        empty = [] if self.empty is None else [f"{self.empty}->0"]
        number = [] if self.drawn is None else [f"#{self.drawn[0]}"]
        types = [f"{parameter}={chosen[parameter]}" for parameter in self.tried]
        return " ".join([self.operator, *types, *empty, *number])


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeResult:
    """What came of a case; `problem` is empty where its values are right."""

    name: str
    outcome: str  # "right", "refused", "wrong", "raised", "crashed", "timed out"
    problem: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """A refusal by an error of ours, with its reason, is no failure: nobody gets a wrong answer."""
        return self.outcome not in ("right", "refused")
