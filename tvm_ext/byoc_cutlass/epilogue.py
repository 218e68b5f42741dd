"""What a kernel does with its sums before it stores them: one Python expression and the tensors that it names.

``Epilogue(expression="relu(accum + bias) + residual", ...)`` says it all; `evt` makes a visitor tree of it. ``accum``
is the matrix product, in the type that the template sums in. Arithmetic is float32 wherever no ``cast`` rounds.
``sum_rows(...)`` around all of it stores one float32 for each column (`reductions`).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tvm_ext.errors import InputError
from tvm_ext.records.partition import ACCUMULATOR, CutlassRegion, EpilogueOperand

from .elements import element
from .reductions import REDUCTIONS, Reduction

ARITY = {
    "relu": 1, "gelu": 1, "gelu_tanh": 1, "silu": 1, "hardswish": 1, "softplus": 1, "sigmoid": 1, "tanh": 1, "exp": 1,
    "maximum": 2, "minimum": 2,
}  # fmt: skip
"""The functions of an expression beside ``cast(x, "float16")``; ``gelu`` is the exact one, by erf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Epilogue:
    """``expression`` of ``accum`` and ``operands``, stored as ``out_dtype``.

    Raises InputError where the expression is none, names something unknown or leaves an operand unread.
    """

    expression: str = ACCUMULATOR
    operands: tuple[EpilogueOperand, ...] = ()
    out_dtype: str

    def __post_init__(self) -> None:
        element(self.out_dtype)
        for operand in self.operands:
            element(operand.dtype)
        names = [operand.name for operand in self.operands]
        if len({ACCUMULATOR, *names}) != len(names) + 1:
            raise self._wrong("two of its operands have one name", "name each once, and none of them accum")
        _EpilogueChecker(self, {ACCUMULATOR, *names}).check()

    @classmethod
    def of(cls, region: CutlassRegion) -> Epilogue:
        """The epilogue of ``region``, which has an expression."""
        return cls(expression=region.expression, operands=region.operands, out_dtype=region.out_dtype)

    @property
    def reduction(self) -> Reduction | None:
        """What the values are reduced by before anything is stored; None where the matrix itself is."""
        return self._parsed()[1]

    def tree(self) -> ast.expr:
        """The expression of one value, parsed, without the reduction around it; raises as the constructor."""
        return self._parsed()[0]

    def _parsed(self) -> tuple[ast.expr, Reduction | None]:
        try:
            match ast.parse(self.expression, mode="eval").body:
                case ast.Call(func=ast.Name(id=name), args=[value], keywords=[]) if name in REDUCTIONS:
                    return value, REDUCTIONS[name]
                case value:
                    return value, None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._wrong(f"it is no Python expression ({error})", "write e.g. relu(accum + bias)") from error

    def _wrong(self, problem: str, remedy: str) -> InputError:
        return InputError(f"the epilogue {self.expression!r} cannot be fused: {problem}.", remedy)


class _EpilogueChecker:
    """Refuses what `evt` has no visitor for."""

    def __init__(self, epilogue: Epilogue, names: set[str]) -> None:
        self.epilogue, self.names = epilogue, names
        self.read: set[str] = set()

    def check(self) -> None:
        self._value(self.epilogue.tree())
        if self.epilogue.reduction is not None and self.epilogue.out_dtype != "float32":
            stored = f"its values are reduced to {self.epilogue.out_dtype}"
            raise self.epilogue._wrong(stored, "store float32, which is what they are added up in")
        unread = sorted(self.names - self.read)
        if unread:
            raise self.epilogue._wrong(f"it does not read {', '.join(unread)}", "leave that operand out, or use it")

    def _value(self, node: ast.expr) -> None:
        match node:
            case ast.Name(id=name) if name in self.names:
                self.read.add(name)
            case ast.Name(id=name):
                known = f"its operands are {', '.join(sorted(self.names))}"
                raise self.epilogue._wrong(f"{name} is no operand of it", known)
            case ast.Constant(value=value) if _is_number(value):
                pass
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if _is_number(value):
                pass
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), left=left, right=right):
                self._value(left)
                self._value(right)
            case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
                self._call(function, arguments)
            case _:
                remedy = f"use + - * /, numbers, cast and {', '.join(ARITY)}"
                raise self.epilogue._wrong(f"there is no visitor for {ast.unparse(node)}", remedy)

    def _call(self, function: str, arguments: list[ast.expr]) -> None:
        if function == "cast":
            match arguments:
                case [value, ast.Constant(value=str(dtype))]:
                    element(dtype)
                    self._value(value)
                    return
            raise self.epilogue._wrong("a cast lacks its type", 'write cast(value, "float16")')
        if function not in ARITY:
            raise self.epilogue._wrong(f"there is no function {function}", f"known are cast, {', '.join(ARITY)}")
        if len(arguments) != ARITY[function]:
            counts = f"{function} takes {ARITY[function]}, not {len(arguments)} values"
            raise self.epilogue._wrong(counts, "correct the call")
        for argument in arguments:
            self._value(argument)


def _is_number(value: object) -> bool:
    """Whether it is a finite number that float32 holds: a visitor's constants are float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 3.4028234663852886e38
