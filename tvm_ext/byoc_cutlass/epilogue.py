"""What a kernel does with its sums before it stores them: one Python expression and the tensors that it names.

``Epilogue(expression="relu(accum + bias) + residual", ...)`` says it all; `evt` makes a visitor tree of it. ``accum``
is the matrix product, in the type that the template sums in. Arithmetic is float32 wherever no ``cast`` rounds.

``sum_rows(relu(accum + bias))`` ends in a sum over all rows: one vector of float32 is stored in place of the matrix, an
element for each column. Templates of 2.x add what a threadblock has to the result by atomic operations
(visitor_store.hpp, VisitorRowReduction and VisitorColReduction), so that the result is set to what changes nothing
before the kernel starts, and sums of floats may differ in their last bits from run to run. So do collectives
(sm90_visitor_store_tma_warpspecialized.hpp, Sm90RowReduction and Sm90ColReduction), which then have no matrix D.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from math import prod
from typing import Literal

from tvm_ext.cost.epilogue_traffic import instructions_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError
from tvm_ext.records.partition import ACCUMULATOR, REDUCTION_STEPS, CutlassRegion, EpilogueOperand

from .elements import element

ARITY = {
    "relu": 1, "gelu": 1, "gelu_tanh": 1, "silu": 1, "hardswish": 1, "softplus": 1, "sigmoid": 1, "tanh": 1, "exp": 1,
    "maximum": 2, "minimum": 2,
}  # fmt: skip
"""The functions of an expression beside ``cast(x, "float16")``; ``gelu`` is the exact one, by erf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """``function`` of all values along "rows" (one for each column is left) or "columns" (one for each row)."""

    function: Literal["sum", "max"]
    over: Literal["rows", "columns"]

    @property
    def identity(self) -> str:
        """C++ of what changes no value."""
        return "0.f" if self.function == "sum" else "-std::numeric_limits<float>::infinity()"

    @property
    def unchanged_byte(self) -> int:
        """What the result is filled with: 0, or a NaN of all ones, which `ATOMIC_MAXIMUM` takes for less than all."""
        return 0x00 if self.function == "sum" else 0xFF


REDUCTIONS: dict[str, Reduction] = {
    "sum_rows": Reduction(function="sum", over="rows"),
    "sum_columns": Reduction(function="sum", over="columns"),
    "max_rows": Reduction(function="max", over="rows"),
    "max_columns": Reduction(function="max", over="columns"),
}
"""By their names in expressions."""

assert REDUCTIONS.keys() == REDUCTION_STEPS


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
        return self._parse()[1]

    def stored_elements(self, rows: int, columns: int, batch: int = 1) -> int:
        """Elements of the result of ``batch`` products of ``rows`` by ``columns``."""
        if self.reduction is None:
            return rows * columns * batch
        return columns if self.reduction.over == "rows" else rows * batch

    def read_bytes(self, rows: int, columns: int, batch: int = 1) -> float:
        """What is read for ``batch`` results of ``rows`` by ``columns``."""
        bits = 0
        for operand in self.operands:
            each = prod(operand.shape(rows, columns)) * element(operand.dtype).bits
            bits += each * (batch if operand.batch_stride else 1)
        return bits / 8

    def instructions(self, device: DeviceSpec) -> float:
        """Of one value on the vector units, in multiply-adds, without the conversion of sums that all kernels have.

        Two neighbours of a row or matrix are read at once.
        """
        count = len(self.operands) / 2.0
        for node in ast.walk(self.tree()):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            count += instructions_of(name, device) if name else isinstance(node, ast.BinOp)
        return count

    def tree(self) -> ast.expr:
        """The expression of one value, parsed, without the reduction around it; raises as the constructor."""
        return self._parse()[0]

    def _parse(self) -> tuple[ast.expr, Reduction | None]:
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


# --- what reductions ask of a kernel ---------------------------------------------------------------------------------
ATOMIC_MAXIMUM = """
namespace tvm_ext {

// The maximum of floats in memory that starts as all ones: of positive numbers by their bits as int, of negative ones,
// whose bits fall, by the minimum as unsigned. NaN is the largest int, so that it stays; CUTLASS's may lose it.
template <class Number> struct AtomicMaximum {
  CUTLASS_DEVICE void operator()(float* to, float value) const {
    int const bits = value != value ? 0x7fffffff : __float_as_int(value);
    if (0 <= bits) {
      atomicMax(reinterpret_cast<int*>(to), bits);
    } else {
      atomicMin(reinterpret_cast<unsigned*>(to), static_cast<unsigned>(bits));
    }
  }
};

}  // namespace tvm_ext
"""
"""In place of CUTLASS's, which tells NaNs with a sign from numbers by nothing."""

COLLECTIVE_REDUCTION = """
namespace tvm_ext {

template <class Number> struct AtomicMaximum;

// A reduction that is all that a collective stores: tiles are of its type where there is no matrix D.
template <class Visitor> struct StoredAlone : Visitor {
  using Visitor::Visitor;
  using ElementAux = float;
};

}  // namespace tvm_ext

namespace cutlass {

template <class Number> struct is_atomic<tvm_ext::AtomicMaximum<Number>> : platform::true_type {};

// The entry point has filled the result. CUTLASS would ask the driver's library, without which nothing could be linked.
template <> inline Status fill_workspace<float>(void*, float, size_t, cudaStream_t, CudaHostAdapter*) {
  return Status::kSuccess;
}

}  // namespace cutlass
"""
"""What collectives lack to store a vector alone."""


def fill_result(reduction: Reduction | None, rows: str, columns: str) -> str:
    """C++ of an entry point that fills the result before the kernel starts; ``rows`` and ``columns`` are C++, too."""
    if reduction is None:
        return ""
    count = columns if reduction.over == "rows" else rows
    return f"""  if (cudaMemsetAsync(call->d, {reduction.unchanged_byte:#04x}, sizeof(float) * ({count}),
                      static_cast<cudaStream_t>(stream)) != cudaSuccess)
    return static_cast<int32_t>(cutlass::Status::kErrorInternal);
"""


def exchange_bytes(reduction: Reduction | None, columns: int, threads: int, access: int) -> int:
    """Shared memory in which the threads of a 2.x template's block add up rows; each has ``access`` columns at a time.

    Worked example: 128 columns, 256 threads, 4 at a time: 32 threads side by side, so 8 rows of 128 sums.
    """
    if reduction is None or reduction.over == "columns":
        return 0
    across = min(32, columns // access)
    return threads // across * columns * 4
