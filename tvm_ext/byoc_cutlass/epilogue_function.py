"""Epilogues as one function of C++: for templates that run no visitor tree, because threads store pixels, not rows.

An `Epilogue` becomes a structure of C++ that makes one element of the result of its sum, its row (pixel) and its column
(channel). It calls the functions that visitor trees call (`evt`), on arrays of one element.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from tvm_ext.records.partition import ACCUMULATOR, EpilogueOperand

from . import _cutlass
from .elements import ELEMENTS
from .epilogue import Epilogue
from .evt import function_template

_INFIX: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_INDEX = {"row": "column", "column": "row", "matrix": "row * columns + column", "scalar": "0"}


def epilogue_function(epilogue: Epilogue, accumulator: str) -> str:
    """C++ of ``epilogue``: a structure of that name, whose members are where D is and each operand.

    Raises UnsupportedEnvironmentError where the package is absent or of another version.
    """
    _cutlass.tracer()
    lines = _Statements(epilogue, lambda number, operand: f"operand_{number}[{_INDEX[operand.role]}]")
    result = lines.value(epilogue.tree())
    out = ELEMENTS[epilogue.out_dtype].cpp
    members = "".join(f"  {_pointer(operand)} operand_{i};\n" for i, operand in enumerate(epilogue.operands))
    body = "\n".join(f"    {line}" for line in lines.lines)
    return f"""struct EpilogueFunction {{
  using Sum = {ELEMENTS[accumulator].cpp};
  using Output = {out};
  Output* d;
{members}
{APPLY}
  CUTLASS_HOST_DEVICE Output operator()(Sum sum, int64_t row, int column, int columns) const {{
    float const {ACCUMULATOR} = float(sum);
{body}
    return cutlass::NumericConverter<Output, float>()({result});
  }}
}};
"""


def _pointer(operand: EpilogueOperand) -> str:
    return f"{ELEMENTS[operand.dtype].cpp} const*"


APPLY = """  using One = cutlass::Array<float, 1>;
  template <class Function, class... Values> CUTLASS_HOST_DEVICE static float apply(Values... values) {
    return Function()(One{values}...)[0];
  }
"""
"""What a structure has that computes an expression: a function of arrays, of one element."""

ReadOperand = Callable[[int, EpilogueOperand], str]
"""C++ of the element of an operand, the number of which is given too."""


def epilogue_value(epilogue: Epilogue, read: ReadOperand, indent: str) -> str:
    """Statements that make ``float value`` of ``float accum``, inside a structure that has `APPLY`.

    Raises UnsupportedEnvironmentError where the package is absent or of another version.
    """
    _cutlass.tracer()
    lines = _Statements(epilogue, read)
    result = lines.value(epilogue.tree())
    return "\n".join(f"{indent}{line}" for line in [*lines.lines, f"float const value = {result};"])


class _Statements:
    """One line for each value; what an expression says twice is one value."""

    def __init__(self, epilogue: Epilogue, read: ReadOperand) -> None:
        self.read = read
        self.operands = {operand.name: (i, operand) for i, operand in enumerate(epilogue.operands)}
        self.out_dtype = epilogue.out_dtype
        self.known: dict[str, str] = {}
        self.lines: list[str] = []

    def value(self, tree: ast.expr) -> str:
        """The name of the float that ``tree`` is."""
        key = ast.dump(tree)
        if key not in self.known:
            text = self._text(tree)
            if text != ACCUMULATOR:
                name = f"v{len(self.lines)}"
                self.lines.append(f"float const {name} = {text};")
                text = name
            self.known[key] = text
        return self.known[key]

    def _text(self, tree: ast.expr) -> str:
        match tree:
            case ast.Name(id=name) if name == ACCUMULATOR:
                return ACCUMULATOR
            case ast.Name(id=name):
                number, operand = self.operands[name]
                return f"float({self.read(number, operand)})"
            case ast.Constant(value=int() | float() as number):
                return f"{float(number)!r}f"
            case ast.UnaryOp(operand=ast.Constant(value=int() | float() as number)):
                return f"{-float(number)!r}f"
            case ast.BinOp(left=left, op=operator, right=right):
                return f"{self.value(left)} {_INFIX[type(operator)]} {self.value(right)}"
            case ast.Call(func=ast.Name(id="cast"), args=[inner, ast.Constant(value=str(dtype))]):
                return f"float(cutlass::NumericConverter<{ELEMENTS[dtype].cpp}, float>()({self.value(inner)}))"
            case ast.Call(func=ast.Name(id=function), args=arguments):
                values = ", ".join(self.value(argument) for argument in arguments)
                return f"apply<{function_template(function, self.out_dtype)}<One>>({values})"
        raise AssertionError(f"{ast.unparse(tree)} has passed the epilogue's own check")
